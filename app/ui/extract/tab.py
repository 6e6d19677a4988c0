"""The extraction workbench: a text on the left, a schema in the middle, the checked record on the right."""

from __future__ import annotations

import html
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from app.extraction import Extractor, Limits
from app.extraction.calibration import FILE_NAME, Calibration, CalibrationError, read_calibration
from app.extraction.reading import read_apart
from app.extraction.sources import IMAGE_TYPES, UnreadableSource, read_text
from app.ui.examples import Examples, is_demo_model
from app.ui.explain import EXPLAINED, Explanation, explain
from app.ui.extract.pages import Opened, open_path, show_page
from app.ui.extract.record_view import EMPTY, NO_SOURCE
from app.ui.extract.run import NO_RESULT, ExtractRun, add_example
from app.ui.extract.schema_panel import SchemaPanel, SchemaParts, dump
from app.ui.pacing import UPDATE_INTERVAL_S
from app.ui.schema.suggest import TASK, propose_schema
from app.ui.scripts import read_kept, read_script
from engine import Engine

# No opened file: image and its tab, page and its tab, file.
NO_FILE = (None, gr.update(visible=False), "", gr.update(visible=False), None)
FILE_TYPES = ["text", ".md", ".eml", ".csv", ".log", ".html", ".xml", ".pdf"]


@dataclass(frozen=True, slots=True)
class _Source:
    """The left column's components."""

    tabs: gr.Tabs
    text: gr.Textbox
    marked: gr.HTML
    upload: gr.UploadButton
    image: gr.Image  # of an opened photo
    image_tab: gr.Tab
    page: gr.HTML  # of an opened PDF
    page_tab: gr.Tab
    opened: gr.State  # Opened, or None
    sample: gr.Dropdown | None

    @property
    def file(self) -> list[gr.components.Component | gr.Tab]:
        """Return the components that an opened file fills."""
        return [self.image, self.image_tab, self.page, self.page_tab, self.opened]


class ExtractTab(ExtractRun):
    """The layout of one workbench on one engine; ExtractRun has its handlers."""

    def __init__(self, engine: Engine, examples: Examples, interval_s: float = UPDATE_INTERVAL_S) -> None:
        super().__init__(engine, interval_s)
        self.examples = examples
        self.panel = SchemaPanel(examples)
        self.reviewed: list[Any] = []  # the components that a result fills, then text and schema

    def build(self, demo: gr.Blocks) -> SchemaParts:
        """Put the tab's components on the page and connect them; return those of the schema."""
        with gr.Row(elem_id="extract", equal_height=False):
            with gr.Column(scale=4, min_width=300):
                source = self._build_source()
            with gr.Column(scale=5, min_width=300):
                schema = self.panel.build(demo, can_suggest=not is_demo_model(self.engine))
                settings, add = self._build_settings()
            with gr.Column(scale=5, min_width=300):
                # On top, where it is visible whatever the length of the schema.
                with gr.Row():
                    run = gr.Button("Extract", variant="primary", elem_id="run", min_width=120)
                    stop = gr.Button("Stop", variant="stop", visible=False, elem_id="stop", min_width=80)
                badge, fields, record, table, figures = self._build_results()
        # The record of the fields, and the record with the edits since.
        state, typed = gr.State(None), gr.State(None)
        # As an input, everything stored in the browser; as an output, one more record.
        verified = gr.HTML(
            {}, html_template="", apply_default_css=False, elem_id="verified",
            js_on_load=read_script("kept") + read_script("verified"),
        )  # fmt: skip
        results = [badge, fields, record, table, figures, source.marked]
        outputs = [*results, source.tabs, run, stop, state, source.page]
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        inputs = [source.text, schema.code, schema.problem, *settings, source.opened, verified]
        demo.load(self.offer_files, None, source.upload, queue=False, **quiet)
        run.click(self.run, inputs, outputs, js=read_kept("readVerified"), **quiet)
        stop.click(self.stop, None, None, queue=False, **quiet)
        kept = [badge, fields, record, table, source.marked, state, verified]
        fields.keep(self.keep, state, kept, queue=False, **quiet)
        fields.edit(self.edit, state, [record, table, source.marked, typed], queue=False, **quiet)
        changed = [badge, fields, record, table, source.marked, state]
        fields.items(
            self.change_items, [state, verified], changed, js=read_kept("readVerified"), queue=False, **quiet
        )
        add.click(add_example, [state, typed, settings[-1]], settings[-1], queue=False, **quiet)
        self._connect_source(source, schema, [*results, state], quiet)
        suggested = [schema.chooser, *schema.views]
        schema.suggest.click(self.suggest, [source.text, source.opened], suggested, **quiet)
        located = {"queue": False, "trigger_mode": "always_last", **quiet}
        fields.locate(self.locate, [state, typed], source.page, **located)
        source.page.turn(self.turn, source.opened, source.page, **located)
        self.reviewed = [*outputs, *source.file, source.text, *schema.views]
        return schema

    def _build_source(self) -> _Source:
        sample = None
        with gr.Row(elem_classes="bar"):
            if self.examples.samples:
                sample = gr.Dropdown(
                    list(self.examples.samples),
                    value=None,
                    label="Example text",
                    scale=3,
                    min_width=140,
                    interactive=True,
                )
            upload = gr.UploadButton("Open file", file_types=FILE_TYPES, size="sm", scale=1, min_width=100)
        with gr.Tabs(selected="text", elem_id="source-tabs") as tabs:
            with gr.Tab("Text", id="text"):
                text = gr.Textbox(
                    label="Text", show_label=False, lines=20, max_lines=24, elem_id="source", container=False,
                    placeholder="Paste an invoice, a mail, a job posting …",
                )  # fmt: skip
            with gr.Tab("Evidence", id="evidence"):
                marked = gr.HTML(NO_SOURCE, elem_id="evidence", apply_default_css=False, js_on_load=None)
            with gr.Tab("Image", id="image", visible=False) as image_tab:
                image = gr.Image(
                    show_label=False,
                    interactive=False,
                    buttons=["fullscreen"],
                    elem_id="source-image",
                    height=420,
                )
            with gr.Tab("Page", id="page", visible=False) as page_tab:
                page = gr.HTML("", elem_id="page", apply_default_css=False, js_on_load=read_script("page"))
        return _Source(tabs, text, marked, upload, image, image_tab, page, page_tab, gr.State(None), sample)

    def _build_settings(self) -> tuple[list[gr.components.Component], gr.Button]:
        limits = Limits()
        with gr.Group(elem_classes="switches"):
            with_limits = gr.Checkbox(
                True, label="Limit texts and lists",
                info=f"To {limits.max_length} characters and {limits.max_items} items, where the schema has no limit.",
            )  # fmt: skip
            is_verbatim = gr.Checkbox(
                False,
                label="Verbatim texts",
                info="Texts are copied from the source; dates and numbers must appear in it.",
            )
            instructions = gr.Textbox(
                label="Instructions", lines=2, max_lines=4, placeholder="Optional: what the model should know"
            )
            with gr.Accordion("Examples", open=False):
                examples = gr.Textbox(
                    "", label='One per line: {"text": ..., "record": ...}', lines=3, max_lines=8, elem_classes="mono",
                    placeholder="Optional: texts with their correct records, which the model reads first",
                )  # fmt: skip
                add = gr.Button("Add the shown record", size="sm")
        return [with_limits, is_verbatim, instructions, examples], add

    def _build_results(self) -> tuple[gr.HTML, gr.HTML, gr.Code, gr.HTML, gr.HTML]:
        badge = gr.HTML("", elem_id="record-status")
        with gr.Tabs(elem_classes="result-tabs"):
            with gr.Tab("Fields"):
                fields = gr.HTML(
                    EMPTY, elem_id="fields", apply_default_css=False, js_on_load=read_script("review")
                )
            with gr.Tab("JSON"):
                record = gr.Code(
                    "", language="json", label="Record as JSON", show_label=False, lines=18, max_lines=26,
                    interactive=False, wrap_lines=True,
                )  # fmt: skip
            with gr.Tab("Table"):
                table = gr.HTML(EMPTY, elem_id="table", apply_default_css=False)
        figures = gr.HTML("", elem_id="figures")
        gr.HTML(render_calibration(self.engine), elem_id="calibration", apply_default_css=False)
        return badge, fields, record, table, figures

    def _connect_source(
        self,
        source: _Source,
        schema: SchemaParts,
        results: list[gr.components.Component],
        quiet: dict[str, Any],
    ) -> None:
        opened = [source.text, source.tabs, *results, *source.file]
        source.upload.upload(self.open_file, source.upload, opened, queue=False, **quiet)
        if source.sample is not None:
            source.sample.select(
                self.pick_sample, None, [*opened, schema.chooser, *schema.views], queue=False, **quiet
            )

    async def pick_sample(self, data: gr.SelectData, request: gr.Request) -> tuple[Any, ...]:
        """Show an example text with its schema, in place of text and record."""
        await self.stops.end(str(request.session_hash))
        schema = self.examples.schema_for(data.value)
        text, to_text = read_text(self.examples.samples[data.value]), gr.update(selected="text")
        views = (
            self.panel.show(self.examples.schemas[schema]) if schema else tuple(gr.skip() for _ in range(4))
        )
        return text, to_text, *NO_RESULT, *NO_FILE, schema or gr.skip(), *views

    async def suggest(self, text: str, opened: Opened | None, request: gr.Request) -> tuple[Any, ...]:
        """Show the model's proposal of a schema for the text."""
        images = () if opened is None else opened.source.images
        problem = Explanation("There is no text yet.", "", "Paste a text, open a file or pick an example.")
        schema = None
        if text.strip() or images:
            problem = Explanation("The model proposed no field.", "", "Add fields in the form.")
            extractor = Extractor(self.engine, None, instructions=TASK, images=images)
            try:
                schema = await propose_schema(extractor, text, f"session-{request.session_hash}")
            except EXPLAINED as error:
                problem = explain(error, self.engine.state)
        if schema is None:
            # Not in place of the verdict, which belongs to the record.
            raise gr.Error(str(problem), print_exception=False)
        return None, *self.panel.show(dump(schema))

    def offer_files(self) -> Any:
        """Offer photographs if the model sees images, which is known when the engine has started."""
        return gr.update(file_types=[*FILE_TYPES, *IMAGE_TYPES]) if self.engine.sees_images else gr.skip()

    async def open_file(self, path: str, request: gr.Request) -> tuple[Any, ...]:
        """Show an uploaded file in place of text and record; or, as the verdict, why it cannot be read."""
        try:
            opened = await read_apart(path, open_path, Path(path), self.engine.sees_images)
        except UnreadableSource as error:
            problem = Explanation(
                "This file cannot be read.", f"{error}.", "Open a text file or a PDF with text in it."
            )
            kept = (gr.skip() for _ in (*NO_RESULT[1:], *NO_FILE))
            return gr.skip(), gr.skip(), problem.as_html(), *kept
        await self.stops.end(str(request.session_hash))
        text = opened.source.text
        tab = "image" if opened.is_photo else "page" if opened.is_pdf and not text.strip() else "text"
        page = await show_page(opened, 1) if opened.is_pdf else ""
        tabs = [gr.update(visible=is_shown) for is_shown in (opened.is_photo, opened.is_pdf)]
        shown = (path if opened.is_photo else None, tabs[0], page, tabs[1], opened)
        return text, gr.update(selected=tab), *NO_RESULT, *shown


logger = logging.getLogger("troupe.ui")

# Lower bounds of the table's bands.
BANDS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)
WORDS = (
    "<p>Confidence is the mean probability of a value's own tokens <b>before</b> the grammar's mask; tokens that "
    "the schema forced are left out. It ranks the fields of a record and says where to look first. "
    "It is not the chance of being right.</p>"
)
UNMEASURED = (
    "<p>How often such values are right has not been measured for this model. "
    "<code>python -m app extract --evaluate FILE --calibration calibration.json</code> measures it; beside the model's "
    "weights the file is shown here.</p>"
)


def render_calibration(engine: Engine) -> str:
    """Return the folded explanation under the record."""
    found = find_calibration(Path(engine.config.model))
    table = make_table(found) if found is not None else UNMEASURED
    return (
        '<details class="calibration"><summary>How reliable is the confidence?</summary>'
        f"<div>{WORDS}{table}</div></details>"
    )


def find_calibration(model: Path) -> Calibration | None:
    """Return the measurements of the model in that folder; an unreadable file is logged and ignored."""
    try:
        return read_calibration(model / FILE_NAME)
    except CalibrationError as error:
        logger.warning("%s", error)
        return None


def make_table(calibration: Calibration) -> str:
    """Return bands of confidence with the share of correct values."""
    rows = ""
    for low, high in zip(BANDS, (*BANDS[1:], 1.01), strict=True):
        measured = [each for found in calibration.sets.values() for each in found.deciles]
        points = [each for each in measured if low <= each.confidence < high]
        count = sum(each.fields for each in points)
        if count:
            right = sum(each.accuracy * each.fields for each in points) / count
            rows += f"<tr><td>{low:.0%} to {min(high, 1):.0%}</td><td>{right:.0%}</td><td>{count:,}</td></tr>"
    heads = "".join(f'<th scope="col">{word}</th>' for word in ("Confidence", "Right", "Values"))
    num_cases = sum(found.cases for found in calibration.sets.values())
    words = f"Measured on {num_cases} documents with {html.escape(calibration.model)}."
    return f"<p>{words}</p><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
