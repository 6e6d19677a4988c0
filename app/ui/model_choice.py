"""ModelChoice: the models that one tab of the page may use, by name; ReaderChooser offers them and loads the chosen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import gradio as gr

from app.api.errors import ApiError
from app.api.model_pool import ModelPool
from app.ui.choices import OpenDropdown
from app.ui.examples import is_demo_model
from app.ui.explain import Explanation
from engine import Engine, InvalidRequest, LoRARequest

READ_CHOICE = """(chosen) => { try { return sessionStorage.getItem("%s") || chosen; } catch { return chosen; } }"""
KEEP_CHOICE = """(chosen) => { try { sessionStorage.setItem("%s", chosen); } catch { /* forbidden */ } }"""

READ_BY = "Read by "
MIN_LARGER = 300_000_000  # parameters of a model that reads a text better than the demo model
LOAD_INTERVAL_S = 1.0  # between two reports of how long a model has been loading


class ModelChoice:
    """The model of a tab, its adapters, and further models.

    Args:
        engine: the model that is used unless another one is chosen.
        pool: further models.
    """

    def __init__(self, engine: Engine, pool: ModelPool | None = None) -> None:
        self.engine = engine
        self.pool = pool

    @property
    def has_choice(self) -> bool:
        """Return whether another model or an adapter may be used."""
        return self.engine.config.enable_lora or (
            self.pool is not None and (self.pool.is_open or self.pool.serves_several)
        )

    @property
    def _own(self) -> list[str]:
        return [self.engine.model_name, *(ref.name for ref in self.engine.adapters.refs)]

    async def list_here(self) -> list[str]:
        """Return the names that `hold` takes, those of loaded models first; empty without a choice."""
        if not self.has_choice:
            return []
        names = self.list_loaded()
        if self.pool is not None:
            choices = await self.pool.list_choices()
            names += [*self.pool.first.model_names, *(name for name, each in choices.items() if each.is_here)]
        return list(dict.fromkeys(names))

    async def label_here(self) -> list[tuple[str, str]]:
        """Return the choices of `list_here` as label and name; the label says which model is not loaded."""
        return [(name if self.find(name) else f"{name} (not loaded)", name) for name in await self.list_here()]

    def list_loaded(self) -> list[str]:
        """Return the names of the models that are loaded and of the adapters, the tab's own model first."""
        return list(dict.fromkeys([*self._own, *(self.pool.loaded if self.pool is not None else ())]))

    def find(self, name: str) -> Engine | None:
        """Return the engine of a loaded model or adapter."""
        if name in self._own:
            return self.engine
        if self.pool is not None and name in self.pool.first.model_names:
            return self.pool.first.engine
        context = self.pool.loaded.get(name) if self.pool is not None else None
        return None if context is None else context.engine

    async def find_larger(self, name: str) -> str | None:
        """Return a model that reads better than the demo model: the largest that is loaded, or else that is here."""
        engine = self.find(name)
        if self.pool is None or engine is None or not is_demo_model(engine):
            return None
        here, entries = await self.list_here(), await self.pool.list_choices()
        sizes = {each: entry.num_parameters for each, entry in entries.items() if each in here and not entry.problem}
        if not is_demo_model(first := self.pool.first.engine):
            sizes[first.model_name] = self.pool.first.report.num_parameters
        usable = [each for each, size in sizes.items() if each != name and size >= MIN_LARGER]
        return max(usable, key=lambda each: (self.find(each) is not None, sizes[each]), default=None)

    async def load(self, name: str) -> AsyncGenerator[int, None]:
        """Load a model if it is not loaded; yields the seconds that this has taken so far.

        Raises InvalidRequest: there is no such model, or it cannot be loaded.
        """
        if self.find(name) is not None:
            return

        async def touch() -> None:
            async with self.hold(name):
                pass

        start, task = time.monotonic(), asyncio.create_task(touch())
        try:
            while not task.done():
                yield int(time.monotonic() - start)
                await asyncio.wait([task], timeout=LOAD_INTERVAL_S)
            task.result()
        finally:
            task.cancel()  # ends the wait only: the model goes on loading

    @asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[tuple[Engine, LoRARequest | None]]:
        """Load a model if it is not loaded, and keep it for as long as the block runs.

        Raises InvalidRequest: there is no such model, or it cannot be loaded.
        """
        if self.pool is None or name in self._own:
            yield self.engine, None if name == self.engine.model_name else LoRARequest(name)
            return
        try:
            entry = None if name in self.pool.first.model_names else (await self.pool.list_choices()).get(name)
            if entry is None and name not in self.pool.first.model_names:
                raise InvalidRequest(f"the model {name!r} is not here any more; choose another one", "model")
            async with self.pool.hold(entry) as context:
                yield context.engine, None
        except ApiError as error:
            raise InvalidRequest(str(error), "model") from error


class ReaderChooser:
    """The choice of the model that extracts, on the page where there is more than one; kept for a reload.

    Args:
        tab: the name under which the browser keeps the choice.
    """

    def __init__(self, models: ModelChoice, tab: str) -> None:
        self.models = models
        self.key = f"troupe-reader {tab}"

    def build(self) -> None:
        """Put the choice on the page, hidden until `offer` finds several models."""
        name = self.models.engine.model_name
        self.dropdown = OpenDropdown(
            [(f"{READ_BY}{name}", name)], value=name, label="Read by", show_label=False, container=False,
            interactive=True, filterable=False, min_width=120, scale=0, visible=False, elem_classes="reader",
        )

    def connect(self, *opening: Any) -> None:
        """Offer the models whenever one of these events comes: the page or its tab is opened. Load a chosen one."""
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        offered = gr.on(opening, self.offer, self.dropdown, self.dropdown, js=READ_CHOICE % self.key, **quiet)
        for chosen in (offered.then, self.dropdown.change):
            chosen(None, self.dropdown, None, js=KEEP_CHOICE % self.key, queue=False, **quiet)
        self.dropdown.input(
            self.load, self.dropdown, self.dropdown, trigger_mode="multiple", concurrency_limit=None, **quiet
        )

    async def offer(self, chosen: str) -> Any:
        """Offer the models that are here now; if the chosen one is not, say so and choose the tab's own."""
        own, shown = self.models.engine.model_name, await self.show(chosen)
        if shown["value"] != chosen:
            gr.Warning(f"{chosen} is not here any more. {own} reads from now on.")
        elif chosen == own:
            del shown["value"]  # the page opens at the same time with the model of its record
        return shown

    async def load(self, chosen: str) -> AsyncGenerator[Any, None]:
        """Load the chosen model, and count the seconds in its label; the choice stays what a person makes it."""
        try:
            async for waited_s in self.models.load(chosen):
                loading = say_loading(chosen, waited_s)
                choices = await self._list_choices()
                yield gr.update(choices=[(loading if name == chosen else label, name) for label, name in choices])
        except InvalidRequest as error:
            gr.Warning(f"{error}.")
        yield gr.update(choices=await self._list_choices())

    def explain_gone(self, name: str, why: InvalidRequest | None = None) -> Explanation:
        """Say that a model cannot be used, and what can be done."""
        advice = f"Run again to read with {self.models.engine.model_name}, or choose another one beside the button."
        if why is None:
            return Explanation(f"{name} is not here any more.", "", advice)
        return Explanation(f"{name} cannot be used.", f"{why}.", advice)

    async def show(self, chosen: str) -> Any:
        """Return the choice with a model chosen, or the tab's own if it is not here."""
        choices = await self._list_choices()
        is_here = any(name == chosen for _, name in choices)
        value = chosen if is_here else self.models.engine.model_name
        return gr.update(choices=choices, value=value, visible=len(choices) > 1)

    async def _list_choices(self) -> list[tuple[str, str]]:
        name = self.models.engine.model_name
        return [(f"{READ_BY}{label}", name) for label, name in await self.models.label_here() or [(name, name)]]


def say_loading(name: str, waited_s: int) -> str:
    """Say that a model is being loaded, and for how long."""
    return f"Loading {name}, {waited_s} s …"
