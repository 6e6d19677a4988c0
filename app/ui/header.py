"""The header strip: the model that works, its state and speed. The page asks for it once a second."""

from __future__ import annotations

import html
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

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


def render_header(
    engines: Sequence[Engine], rates: Sequence[float], card: str = "", loaded: Sequence[Engine] = ()
) -> str:
    """Return the strip as HTML.

    Args:
        engines: those that are at work, or all if none is.
        rates: the tokens per second of each.
        card: the tooltip of the model's name.
        loaded: all; their names are data for scripts, such as that of the chat's choice.
    """
    first, stats = engines[0], [each.stats() for each in engines]
    name, rate = first.model_name, sum(rates)
    if len(engines) > 1:
        name = f"{len(engines)} models"
        card = "\n".join(f"{each.model_name}: {own:,.0f} tok/s" for each, own in zip(engines, rates, strict=True))
    is_writing = rate >= 0.5 or any(each.num_running for each in stats)
    state = STATE_WORDS.get(first.state) or ("writing" if is_writing else "ready")
    title = html.escape(first.error or "", quote=True) if first.state in ("dead", "restarting") else ""
    names = html.escape(" ".join(each.model_name for each in loaded), quote=True)
    return (
        f'<div class="strip" data-loaded="{names}"><h1 class="brand">Troupe</h1>'
        f'<a class="model" href="#engine" title="{html.escape(card, quote=True)}">{html.escape(name)}</a>'
        f'<span class="state {state}" title="{title}"><i></i>{state}</span>'
        f'<span class="figure"><b>{rate:,.0f}</b> tok/s</span>'
        '<button type="button" class="theme" title="Switch between light and dark">'
        '<span class="visually-hidden">Light or dark</span>◐</button></div>'
    )


class Header:
    """The strip of one server: of the models that work now, or of all that are loaded.

    Args:
        list_engines: returns the engines that are loaded, the first one first.
    """

    def __init__(self, list_engines: Callable[[], Sequence[Engine]]) -> None:
        self._list_engines = list_engines
        self._meters: WeakKeyDictionary[Engine, RateMeter] = WeakKeyDictionary()
        self._cards: WeakKeyDictionary[Engine, str] = WeakKeyDictionary()  # once an engine has started

    def draw(self) -> str:
        """Return the strip as it is now. The rate of a model lasts a little longer than its work."""
        engines = self._list_engines()
        rates = [
            self._meters.setdefault(each, RateMeter()).update(each.stats().generation_tokens) for each in engines
        ]
        working = [at for at, each in enumerate(engines) if rates[at] > 0 or each.stats().num_running]
        working = working or [*range(len(engines))]
        first = engines[working[0]]
        if first not in self._cards and first.state == "ready":
            facts = first.describe_model().list_facts()
            self._cards[first] = "\n".join(f"{name}: {fact}" for name, fact in facts)
        at_work, their_rates = [engines[at] for at in working], [rates[at] for at in working]
        return render_header(at_work, their_rates, self._cards.get(first, ""), engines)


def build_header(list_engines: Callable[[], Sequence[Engine]]) -> None:
    """Put the strip on the page."""
    header = Header(list_engines)

    async def refresh(_: Any = None) -> str:
        # On the event loop, as all that reads the engine: Gradio runs other functions in threads.
        return header.draw()

    # Not a timer of Gradio's: its events pass through the state of all components.
    gr.HTML(
        header.draw(), elem_id="strip", container=False, padding=False,
        js_on_load=read_script("polish"), server_functions=[refresh],
    )
