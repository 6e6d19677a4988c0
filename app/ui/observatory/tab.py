"""The observatory tab: drawings that poll while they are visible, and the trace of one example's masks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import gradio as gr

from app.concurrency import take_last
from app.extraction import Limits, add_bounds, make_messages
from app.extraction.schema_check import SchemaChecker
from app.extraction.sources import read_text
from app.ui.examples import Examples
from app.ui.explain import EXPLAINED, explain
from app.ui.observatory.recorder import Recorder
from app.ui.observatory.trace import NUM_TOP, Tracer
from app.ui.scripts import read_script
from engine import Engine, InvalidRequest, RequestOutput, SamplingParams
from grammar import GrammarSpec

MAX_TRACED_TOKENS = 256
# Send the steps as JSON text: Gradio would traverse every value of a list on the event loop.
NO_TRACE: dict[str, Any] = {"steps": "[]"}
DEFAULT_SAMPLE = "contact 1"


def build_observatory_tab(engine: Engine, examples: Examples) -> None:
    """Put the drawings and the trace on the page."""
    recorder = Recorder(engine)

    # Asynchronous, so that it reads the engine on the engine's own loop.
    async def poll(_: Any = None) -> dict[str, Any]:
        return await recorder.poll()

    gr.HTML(
        html_template='<div class="observatory"></div>', apply_default_css=False, elem_id="observatory",
        js_on_load=read_script("observatory"), server_functions=[poll],
    )  # fmt: skip
    if not examples.samples:
        return
    names = list(examples.samples)
    with gr.Column(elem_id="tracing"):
        gr.HTML(
            '<h2 class="section">One request\'s masks</h2><p class="section-note">At every step the grammar says which '
            "tokens may come, and the model chooses among them. Step through an example with the arrow keys.</p>",
            apply_default_css=False,
        )
        with gr.Row(elem_classes="bar"):
            sample = gr.Dropdown(
                names, value=DEFAULT_SAMPLE if DEFAULT_SAMPLE in names else names[0], label="Example", scale=2,
                min_width=160,
            )  # fmt: skip
            run = gr.Button("Trace it", variant="secondary", scale=1, min_width=120)
        problem = gr.HTML("", elem_id="trace-problem", apply_default_css=False)
        view = gr.HTML(
            NO_TRACE, html_template='<div class="trace"></div>', apply_default_css=False, elem_id="trace",
            js_on_load=read_script("trace"),
        )  # fmt: skip
    tracing = Tracing(engine, examples)
    run.click(tracing.run, sample, [problem, view], show_progress="hidden", api_visibility="private")


class Tracing:
    """Runs an example with its alternatives recorded, and replays its masks."""

    def __init__(self, engine: Engine, examples: Examples) -> None:
        self.engine = engine
        self.examples = examples
        self.tracer = Tracer(engine)
        self.checker = SchemaChecker()

    async def run(self, name: str | None, request: gr.Request) -> AsyncGenerator[tuple[Any, Any], None]:
        """Extract from the example and show every step."""
        if name is None:
            yield gr.skip(), gr.skip()
            return
        yield "", NO_TRACE | {"busy": True}
        try:
            spec, output = await self._generate(name, f"session-{request.session_hash}")
            traced = spec, output.outputs[0].token_ids, output.outputs[0].logprobs or []
            steps = await asyncio.to_thread(
                lambda: json.dumps(self.tracer.trace(*traced), ensure_ascii=False)
            )
            yield "", {"steps": steps}
        except EXPLAINED as error:
            yield explain(error, self.engine.state).as_html(), NO_TRACE

    async def _generate(self, name: str, salt: str) -> tuple[GrammarSpec, RequestOutput]:
        schema_name = self.examples.schema_for(name)
        if schema_name is None:
            raise InvalidRequest(f"the example {name!r} has no schema of its name")
        checked = await asyncio.to_thread(self.checker.check, self.examples.schemas[schema_name])
        text = read_text(self.examples.samples[name])
        spec = GrammarSpec.json_schema(add_bounds(checked.schema, Limits()).schema, whitespace="spaced")
        prompt_ids = await self.engine.render_chat(make_messages(checked.schema, text))
        params = SamplingParams(
            max_tokens=MAX_TRACED_TOKENS, temperature=0.0, logprobs=NUM_TOP, grammar=spec, output_kind="final"
        )
        return spec, await take_last(self.engine.generate(prompt_ids, params, cache_salt=salt))
