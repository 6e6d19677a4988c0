"""ModelChoice: the models that one tab of the page may use, by name; ReaderChooser offers those that are loaded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import gradio as gr

from app.api.errors import ApiError
from app.api.model_pool import ModelPool
from app.ui.choices import accept_unsent
from app.ui.explain import Explanation
from engine import Engine, InvalidRequest, LoRARequest

READ_CHOICE = """(chosen) => { try { return sessionStorage.getItem("%s") || chosen; } catch { return chosen; } }"""
KEEP_CHOICE = """(chosen) => { try { sessionStorage.setItem("%s", chosen); } catch { /* forbidden */ } }"""


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
        """Return the names that `hold` takes, also of models that it would load; empty without a choice."""
        if not self.has_choice:
            return []
        names = self._own
        if self.pool is not None:
            choices = await self.pool.list_choices()
            names += [*self.pool.first.model_names, *(name for name, each in choices.items() if each.is_here)]
        return list(dict.fromkeys(names))

    def list_loaded(self) -> list[str]:
        """Return the names of the models that are loaded and of the adapters, the tab's own model first."""
        return list(dict.fromkeys([*self._own, *(self.pool.loaded if self.pool is not None else ())]))

    def find(self, name: str) -> Engine | None:
        """Return the engine of a loaded model or adapter."""
        if name in self._own:
            return self.engine
        context = self.pool.loaded.get(name) if self.pool is not None else None
        return None if context is None else context.engine

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
    """The choice of the model that extracts, on the page while more than one is loaded; kept for a reload.

    Args:
        tab: the name under which the browser keeps the choice.
    """

    def __init__(self, models: ModelChoice, tab: str) -> None:
        self.models = models
        self.key = f"troupe-reader {tab}"

    def build(self) -> None:
        """Put the choice on the page, hidden until `offer` finds several models."""
        name = self.models.engine.model_name
        self.dropdown = gr.Dropdown(
            _name_choices([name]), value=name, label="Read by", show_label=False, container=False, interactive=True,
            filterable=False, min_width=120, scale=0, visible=False, elem_classes="reader",
        )
        accept_unsent(self.dropdown)  # a kept name

    def connect(self, *opening: Any) -> None:
        """Offer the models whenever one of these events comes: the page or its tab is opened."""
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        offered = gr.on(opening, self.offer, self.dropdown, self.dropdown, js=READ_CHOICE % self.key, **quiet)
        for chosen in (offered.then, self.dropdown.change):
            chosen(None, self.dropdown, None, js=KEEP_CHOICE % self.key, queue=False, **quiet)

    async def offer(self, chosen: str) -> Any:
        """Offer the models that are loaded now; if the chosen one is not, say so and choose the tab's own."""
        names, shown = self.models.list_loaded(), self.show(chosen)
        if chosen not in names:
            gr.Warning(f"{chosen} is not loaded any more. {names[0]} reads from now on.")
        elif chosen == names[0]:
            del shown["value"]  # the page opens at the same time with the model of its record
        return shown

    def explain_gone(self, name: str) -> Explanation:
        """Say that a model is not loaded any more, and what can be done."""
        own = self.models.engine.model_name
        advice = f"Run again to read with {own}, choose another one beside the button, or load it again under Engine."
        return Explanation(f"{name} is not loaded any more.", "", advice)

    def show(self, chosen: str) -> Any:
        """Return the choice with a model chosen, or the tab's own if it is not loaded."""
        names = self.models.list_loaded()
        value = chosen if chosen in names else names[0]
        return gr.update(choices=_name_choices(names), value=value, visible=len(names) > 1)


def _name_choices(names: list[str]) -> list[tuple[str, str]]:
    return [(f"Read by {name}", name) for name in names]
