"""The header strip: model, state and speed. The page asks for it once a second."""

from __future__ import annotations

import html
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import gradio as gr

from app.ui.scripts import read_script
from engine import Engine

# Seconds over which the rate is averaged: long enough to be steady, short enough to be current.
RATE_WINDOW_S = 3.0

STATE_WORDS = {
    "new": "loading", "starting": "loading", "restarting": "restarting", "falling_asleep": "falling asleep",
    "sleeping": "sleeping", "waking_up": "waking up", "dead": "stopped", "closed": "closed",
}


class RateMeter:
    """Tokens per second of an engine, from its counter; shared by all pages."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.samples: deque[tuple[float, int]] = deque()

    def update(self, num_tokens: int) -> float:
        """Add the counter's value and return the rate over the window."""
        now = self.clock()
        if self.samples and num_tokens < self.samples[-1][1]:
            # The counter decreased, because the engine was restarted.
            self.samples.clear()
        self.samples.append((now, num_tokens))
        while len(self.samples) > 2 and self.samples[1][0] <= now - RATE_WINDOW_S:
            self.samples.popleft()
        (start, before), (end, after) = self.samples[0], self.samples[-1]
        return (after - before) / (end - start) if end > start else 0.0


def render_header(engine: Engine, tokens_per_second: float, card: str = "") -> str:
    """Return the strip as HTML; the card is the tooltip of the model's name."""
    card = html.escape(card, quote=True)
    stats = engine.stats()
    state = STATE_WORDS.get(engine.state) or ("busy" if stats.num_running else "ready")
    title = html.escape(engine.error or "", quote=True) if engine.state in ("dead", "restarting") else ""
    return (
        '<div class="strip"><h1 class="brand">Troupe</h1>'
        f'<a class="model" href="#engine" title="{card}">{html.escape(engine.model_name)}</a>'
        f'<span class="state {state}" title="{title}"><i></i>{state}</span>'
        f'<span class="figure"><b>{tokens_per_second:,.0f}</b> tok/s</span>'
        '<button type="button" class="theme" title="Switch between light and dark">'
        '<span class="visually-hidden">Light or dark</span>◐</button></div>'
    )


def build_header(engine: Engine) -> None:
    """Put the strip on the page."""
    meter = RateMeter()
    cards: list[str] = []  # one, once the engine has started

    async def refresh(_: Any = None) -> str:
        # On the event loop, as all that reads the engine: Gradio runs other functions in threads.
        if not cards and engine.state == "ready":
            cards.append("\n".join(f"{name}: {fact}" for name, fact in engine.describe_model().list_facts()))
        return render_header(engine, meter.update(engine.stats().generation_tokens), *cards)

    # Not a timer of Gradio's: its events pass through the state of all components.
    gr.HTML(
        render_header(engine, 0), elem_id="strip", container=False, padding=False,
        js_on_load=read_script("polish"), server_functions=[refresh],
    )
