"""The observatory tab: drawings that poll while they are visible."""

from __future__ import annotations

from typing import Any

import gradio as gr

from app.ui.observatory.recorder import Recorder
from app.ui.scripts import read_script
from engine import Engine


def build_observatory_tab(engine: Engine) -> None:
    """Put the drawings on the page."""
    recorder = Recorder(engine)

    # Asynchronous, so that it reads the engine on the engine's own loop.
    async def poll(_: Any = None) -> dict[str, Any]:
        return await recorder.poll()

    gr.HTML(
        html_template='<div class="observatory"></div>', apply_default_css=False, elem_id="observatory",
        js_on_load=read_script("observatory"), server_functions=[poll],
    )  # fmt: skip
