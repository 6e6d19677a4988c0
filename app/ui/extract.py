"""The extraction tab: a text on the left, a schema in the middle, the checked record on the right."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import gradio as gr

from app.extraction import ExtractionResult, Extractor, Limits, PartialExtraction
from app.extraction.json_spans import scan
from app.extraction.schema_check import SchemaChecker
from app.ui.examples import Examples, read_source
from app.ui.explain import EXPLAINED, Explanation, explain
from app.ui.pacing import UPDATE_INTERVAL_S, pace
from app.ui.record_view import (
    EMPTY,
    render_badge,
    render_error,
    render_fields,
    render_figures,
    render_verdict,
)
from app.ui.stops import Stops
from engine import Engine

IDLE_BUTTONS = (gr.update(interactive=True), gr.update(visible=False))
BUSY_BUTTONS = (gr.update(interactive=False), gr.update(visible=True))
STOPPED = render_badge("cut", "stopped", "the record is not complete")
DEFAULT_SCHEMA = "invoice"

Update = tuple[Any, ...]  # badge, fields, JSON, figures, run button, stop button


class ExtractTab:
    """One extraction form on one engine."""

    def __init__(self, engine: Engine, examples: Examples, interval_s: float = UPDATE_INTERVAL_S) -> None:
        self.engine = engine
        self.examples = examples
        self.interval_s = interval_s
        self.stops = Stops()
        self.checker = SchemaChecker()

    def build(self) -> None:
        """Put the tab's components on the page and connect them."""
        with gr.Row(elem_id="extract", equal_height=False):
            with gr.Column(scale=5, min_width=300):
                source, upload, sample = self._build_source()
            with gr.Column(scale=4, min_width=300):
                chooser, schema, verdict, with_limits, run, stop = self._build_schema()
            with gr.Column(scale=6, min_width=300):
                results = self._build_results()
        outputs = [*results, run, stop]
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        run.click(self.run, [source, schema, with_limits], outputs, **quiet)
        stop.click(self.stop, None, None, queue=False, **quiet)
        chooser.input(self.choose_schema, chooser, schema, queue=False, **quiet)
        schema.change(self.check_schema, schema, verdict, queue=False, trigger_mode="always_last", **quiet)
        upload.upload(self.open_file, upload, source, queue=False, **quiet)
        if sample is not None:
            sample.input(self.choose_sample, sample, [source, chooser, schema], queue=False, **quiet)

    def _build_source(self) -> tuple[gr.Textbox, gr.UploadButton, gr.Dropdown | None]:
        sample = None
        with gr.Row(elem_classes="bar"):
            if self.examples.samples:
                sample = gr.Dropdown(
                    list(self.examples.samples), value=None, label="Example text", scale=3, min_width=140
                )
            upload = gr.UploadButton(
                "Open file",
                file_types=["text", ".md", ".eml", ".csv", ".log"],
                size="sm",
                scale=1,
                min_width=100,
            )
        source = gr.Textbox(
            label="Text",
            lines=18,
            max_lines=24,
            elem_id="source",
            placeholder="Paste an invoice, a mail, a job posting …",
        )
        return source, upload, sample

    def _build_schema(
        self,
    ) -> tuple[gr.Dropdown, gr.Code, gr.HTML, gr.Checkbox, gr.Button, gr.Button]:
        names = list(self.examples.schemas)
        first = DEFAULT_SCHEMA if DEFAULT_SCHEMA in names else names[0] if names else None
        chooser = gr.Dropdown(names, value=first, label="Schema", visible=bool(names))
        schema = gr.Code(
            self.examples.schemas.get(first or "", '{\n  "type": "object",\n  "properties": {}\n}'),
            language="json", label="JSON Schema", lines=14, max_lines=19, elem_id="schema",
        )  # fmt: skip
        verdict = gr.HTML(self.check_schema(schema.value), elem_id="schema-verdict")
        with_limits = gr.Checkbox(
            True, label="Limit open texts and lists", container=False,
            info=f"Adds maxLength {Limits().max_length} and maxItems {Limits().max_items} where the schema has none.",
        )  # fmt: skip
        with gr.Row():
            run = gr.Button("Extract", variant="primary", elem_id="run", min_width=120)
            stop = gr.Button("Stop", variant="stop", visible=False, elem_id="stop", min_width=80)
        return chooser, schema, verdict, with_limits, run, stop

    def _build_results(self) -> list[gr.components.Component]:
        badge = gr.HTML("", elem_id="verdict")
        with gr.Tabs():
            with gr.Tab("Fields"):
                fields = gr.HTML(EMPTY, elem_id="fields")
            with gr.Tab("JSON"):
                record = gr.Code(
                    "", language="json", show_label=False, lines=18, max_lines=26, interactive=False
                )
        figures = gr.HTML("", elem_id="figures")
        return [badge, fields, record, figures]

    async def run(
        self, text: str, schema_text: str, with_limits: bool, request: gr.Request
    ) -> AsyncGenerator[Update, None]:
        """Extract one record and show it while it is written."""
        if not text.strip():
            problem = Explanation(
                "There is no text.", "The record is taken from it.", "Paste one or open a file."
            )
            yield (render_error(problem), EMPTY, "", "", *IDLE_BUTTONS)
            return
        yield (render_badge("busy", "reading"), EMPTY, "", "", *BUSY_BUTTONS)
        session = str(request.session_hash)
        try:
            checked = await asyncio.to_thread(self.checker.check, schema_text)
            extractor = Extractor(self.engine, Limits() if with_limits else None)
            # Its own salt: what one person pastes never shows in another's cache timings.
            stream = extractor.stream(checked.schema, text, cache_salt=f"session-{session}")
            with self.stops.running(session):
                # Leaving the block closes the stream, and that aborts the engine's request.
                async with aclosing(pace(stream, self.interval_s)) as parts:
                    async for part in parts:
                        yield _show(part, text)
                        if self.stops.asked(session) and not isinstance(part, ExtractionResult):
                            break
                    else:
                        return
            yield (STOPPED, *(gr.skip() for _ in range(3)), *IDLE_BUTTONS)
        except EXPLAINED as error:
            yield (render_error(explain(error, self.engine.state)), EMPTY, "", "", *IDLE_BUTTONS)

    def stop(self, request: gr.Request) -> None:
        """End the running extraction."""
        self.stops.ask(str(request.session_hash))

    def check_schema(self, text: str) -> str:
        """The line under the schema: what enforces it, or what is wrong with it and where."""
        try:
            checked = self.checker.check(text)
        except EXPLAINED as error:
            return render_error(explain(error))
        return (
            f'<div class="ok">Every keyword is enforced: {checked.num_enforced} by {checked.backend}, '
            "none loosened.</div>"
        )

    def choose_schema(self, name: str) -> str:
        """The example schema of that name."""
        return self.examples.schemas[name]

    def choose_sample(self, name: str) -> Update:
        """An example text, with the schema that fits it."""
        schema = self.examples.schema_for(name)
        text = read_source(self.examples.samples[name])
        return (text, schema, self.examples.schemas[schema]) if schema else (text, gr.skip(), gr.skip())

    def open_file(self, path: str) -> str:
        """The text of an uploaded file."""
        try:
            return read_source(path)
        except ValueError as error:
            raise gr.Error(str(error), title="This file cannot be opened", print_exception=False) from error


def _show(part: PartialExtraction | ExtractionResult | None, text: str) -> Update:
    if part is None:
        return tuple(gr.skip() for _ in range(6))
    if isinstance(part, PartialExtraction):
        fields = render_fields(scan(part.raw).leaves, None, text)
        return (render_badge("busy", "writing"), fields, part.raw, gr.skip(), gr.skip(), gr.skip())
    shown = json.dumps(part.record, indent=2, ensure_ascii=False) if part.valid else part.raw
    return (
        render_verdict(part),
        render_fields(part.leaves, part, text),
        shown,
        render_figures(part),
        *IDLE_BUTTONS,
    )
