"""The observatory tab: drawings that poll while they are visible."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import gradio as gr

from app.concurrency import take_last
from app.ui.observatory.recorder import Recorder
from app.ui.scripts import read_script
from engine import Engine, EngineError, SamplingParams

NUM_SENT = 12
PROMPT = "Count from one to a hundred: one, two, three,"
INTRO = (
    '<p class="lead"><b>Watch the model work.</b> Each bar is a request, each square a block of its memory of texts '
    "(the KV cache), drawn live while this tab is open.</p>"
)


def build_observatory_tab(engine: Engine) -> None:
    """Put the drawings on the page."""
    recorder = Recorder(engine)
    sending: set[asyncio.Task[None]] = set()

    # Asynchronous, so that it reads the engine on the engine's own loop.
    async def poll(_: Any = None) -> dict[str, Any]:
        return await recorder.poll()

    async def send(_: Any = None) -> int:
        """Give the engine something to show; the requests end by themselves, and only one crowd runs at a time."""
        if not sending:
            sending.add(task := asyncio.create_task(_send_crowd(engine)))
            task.add_done_callback(sending.discard)
        return NUM_SENT

    gr.HTML(
        html_template='<div class="observatory"></div>', apply_default_css=False, elem_id="observatory",
        js_on_load=read_script("observatory"), server_functions=[poll, send],
    )


async def _send_crowd(engine: Engine) -> None:
    async def read(number: int) -> None:
        params = SamplingParams(max_tokens=60 + 20 * number, min_tokens=40, temperature=1.0, seed=number)
        with suppress(EngineError):
            await take_last(engine.generate(PROMPT, params))

    await asyncio.gather(*map(read, range(NUM_SENT)))
