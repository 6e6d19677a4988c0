"""The observatory tab: drawings that poll while they are visible."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
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


class Observatory:
    """Records the loaded models, and gives each page the one that it draws.

    Args:
        list_engines: returns the engines that are loaded, the first one first.
    """

    def __init__(self, list_engines: Callable[[], Sequence[Engine]]) -> None:
        self._list_engines = list_engines
        self._recorders: dict[str, Recorder] = {}
        self._latest = ""  # the model that works, or did most since the last look
        self._written: dict[str, int] = {}  # tokens at the last look
        self._sending: set[asyncio.Task[None]] = set()

    def _find(self, chosen: str) -> Recorder:
        """Return the recorder of the chosen model; without a choice of the one that works, or worked most lately."""
        engines = {each.model_name: each for each in self._list_engines()}
        kept = {name: each for name, each in self._recorders.items() if engines.get(name) is each.engine}
        self._recorders = {name: kept.get(name) or Recorder(each) for name, each in engines.items()}
        stats = {name: each.stats() for name, each in engines.items()}
        written = {name: each.generation_tokens for name, each in stats.items()}
        work = {name: (each.num_running, written[name] - self._written.get(name, 0)) for name, each in stats.items()}
        self._written = written
        busiest = max(work, key=lambda name: work[name])
        if work[busiest] > (0, 0) and not work.get(self._latest, (0, 0))[0]:
            self._latest = busiest
        name = next((each for each in (chosen, self._latest) if each in engines), next(iter(engines)))
        return self._recorders[name]

    # Asynchronous, so that they read the engine on the engine's own loop.
    async def poll(self, chosen: str = "") -> dict[str, Any]:
        """Return what a page draws, with the names of the models that it may choose."""
        recorder = self._find(chosen)
        models = {"models": list(self._recorders), "model": recorder.engine.model_name}
        return models | await recorder.poll()

    async def send(self, chosen: str = "") -> int:
        """Give a model something to show; the requests end by themselves, and only one crowd runs at a time."""
        if not self._sending:
            self._sending.add(task := asyncio.create_task(_send_crowd(self._find(chosen).engine)))
            task.add_done_callback(self._sending.discard)
        return NUM_SENT


def build_observatory_tab(list_engines: Callable[[], Sequence[Engine]]) -> None:
    """Put the drawings on the page."""
    observatory = Observatory(list_engines)

    async def poll(chosen: Any = None) -> dict[str, Any]:
        return await observatory.poll(str(chosen or ""))

    async def send(chosen: Any = None) -> int:
        return await observatory.send(str(chosen or ""))

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
