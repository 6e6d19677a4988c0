"""The models of this machine: what is loaded, and buttons to fetch, load and unload others."""

from __future__ import annotations

import asyncio
import html
import time
from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from app.api.errors import ApiError, scrub
from app.api.model_pool import ModelPool
from app.ui.header import STATE_WORDS, RateMeter
from app.ui.scripts import read_script
from engine import CatalogueEntry, ConfigError, Engine

HINT = "Choose one beside the button in Extract and Batch, or under the text box in Chat: it is loaded when needed."
ELSEWHERE = (
    '<p class="hint-line">Others can be chosen here when the server is reachable from its own machine only and has no '
    "API key, or with <code>--models-dir FOLDER</code>.</p>"
)
HEADS = ("Model", "State", "Action", "Size", "Context", "Speed", "License")
MAX_UNFOLDED = 4  # models that are not loaded; more are folded away, so that the drawings stay on the first screen


@dataclass
class Work:
    """A model that is being fetched or loaded, or the reason why that failed."""

    task: asyncio.Task[None]
    progress: list[tuple[int, int]] = field(default_factory=list)  # bytes that are here, and of the whole
    problem: str = ""

    def describe(self) -> str:
        """Say how far a download is, or why it failed, in HTML; "" while the model is loaded."""
        if self.task.done():
            return f'<span class="bad">{html.escape(self.problem)}</span>'
        if not self.progress:
            return ""
        done, total = self.progress[-1]
        return f'<progress value="{done}" max="{total}"></progress> {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB'


class ModelPanel:
    """The list of one server, the same for all its pages."""

    def __init__(self, pool: ModelPool) -> None:
        self.pool = pool
        self._first_license: str | None = None  # read once, in HTML
        self._work: dict[str, Work] = {}  # by the model's name
        self._meters: dict[str, RateMeter] = {}  # by the same

    def build(self) -> None:
        """Put the list on the page. Its script asks for it once a second while it is visible."""

        async def look(_: Any = None) -> str:
            return await self.draw()

        async def act(what: str) -> str:
            verb, _, name = what.partition(" ")
            await self.act(verb, name)
            return await self.draw()

        gr.HTML(
            html_template='<div class="models batch-table"></div>', apply_default_css=False, elem_id="models",
            js_on_load=read_script("models"), server_functions=[look, act],
        )

    async def act(self, verb: str, name: str) -> None:
        """Begin to fetch or load a model, or end it. What is not offered is left alone: the list was old."""
        entry = (await self.pool.list_choices()).get(name)
        if entry is None or ((work := self._work.get(name)) is not None and not work.task.done()):
            return
        if verb == "end":
            await self.pool.unload(entry)
        elif verb in ("fetch", "load"):
            work = self._work[name] = Work(asyncio.create_task(self._bring(entry)))
            if verb == "fetch":
                work.progress.append((0, entry.num_bytes))

    async def _bring(self, entry: CatalogueEntry) -> None:
        """Fetch a model if it is not here, and load it."""
        try:
            if not entry.is_here:
                report = self._work[entry.name].progress
                await asyncio.to_thread(self.pool.catalogue.fetch, entry.name, lambda *pair: report.append(pair))
                report.clear()
                entry = (await self.pool.list_choices())[entry.name]
            async with self.pool.hold(entry):
                del self._work[entry.name]
        except (ApiError, ConfigError) as error:
            self._work[entry.name].problem = scrub(str(error))

    async def draw(self) -> str:
        """Return the list as HTML."""
        first = self.pool.first
        if self._first_license is None:
            entries = await asyncio.to_thread(self.pool.catalogue.list)
            model = first.engine.config.model
            self._first_license = next((_license(each) for each in entries if each.model == model), "not stated")
        rows = [self._draw_loaded(first.served_names[0], first.engine, entry=None)]
        others: list[CatalogueEntry] = []
        for entry in (await self.pool.list_choices()).values():
            context = self.pool.find_loaded(entry)
            if context is not None:
                rows.append(self._draw_loaded(entry.name, context.engine, entry))
            else:
                others.append(entry)
        changing = [each for each in others if self._is_at_work(each) or each.name in self._work]
        resting = sorted((each for each in others if each not in changing), key=_rank)
        rows += map(self._draw_other, changing)
        heads = "".join(f'<th scope="col">{head}</th>' for head in HEADS)
        shown, folded = "".join(rows), "".join(map(self._draw_other, resting))
        bodies = f"<tbody>{shown}</tbody>{_fold(resting)}<tbody>{folded}</tbody>"
        return f"<table><thead><tr>{heads}</tr></thead>{bodies}</table>" + ("" if self.pool.is_open else ELSEWHERE)

    def _is_at_work(self, entry: CatalogueEntry) -> bool:
        work = self._work.get(entry.name)
        return entry.model in self.pool.slots or (work is not None and not work.task.done())

    def _say_loading(self, entry: CatalogueEntry) -> str:
        """Say what is done to load a model, and since when, in HTML."""
        slot = self.pool.slots.get(entry.model)
        phase, began = (slot.phase, slot.began) if slot is not None else ("beginning", time.monotonic())
        return f"<progress></progress> {phase}, {time.monotonic() - began:.0f} s"

    def _draw_loaded(self, name: str, engine: Engine, entry: CatalogueEntry | None) -> str:
        state = STATE_WORDS.get(engine.state) or ("writing" if engine.stats().num_running else "ready")
        rate = self._meters.setdefault(name, RateMeter()).update(engine.stats().generation_tokens)
        size = context = ""
        if engine.state in ("ready", "sleeping"):
            report = engine.describe_model()
            weights, cache = report.weight_bytes / 2**20, engine.resolved.cache.num_bytes / 2**20
            size = f"{weights:,.0f} MiB, KV cache up to {cache:,.0f} MiB, computes in {engine.resolved.worker.dtype}"
            context = f"{engine.resolved.max_model_len:,} tokens"
        if entry is None:
            action = "stays: the server was started with it"
        elif roles := [role for role, each in self.pool.roles.items() if each.model == entry.model]:
            action = f"stays: the default model to {' and '.join(roles)}"
        else:
            action = _draw_button("end", name, "Unload") if engine.state != "closed" else ""
        license_ = _license(entry) if entry is not None else self._first_license or ""
        badge = f'<span class="state good">{state}</span>'
        return _draw_row(name, (badge, action, size, context, f"{rate:,.0f} tok/s", license_))

    def _draw_other(self, entry: CatalogueEntry) -> str:
        work, is_at_work = self._work.get(entry.name), self._is_at_work(entry)
        state = "here" if entry.is_here else "not here"
        if is_at_work or work is not None:
            state = (work.describe() if work is not None else "") or self._say_loading(entry)
        elif entry.problem:
            state = f'<span class="bad">{html.escape(scrub(entry.problem))}</span>'
        context = f"{entry.context_length:,} tokens" if entry.context_length else ""
        button = "" if is_at_work or entry.problem else _draw_button(
            *(("load", entry.name, "Load") if entry.is_here else ("fetch", entry.name, "Fetch and load"))
        )
        size = f"{entry.num_bytes / 2**20:,.0f} MiB"
        context += ", reads images" if "image" in entry.modalities else ""
        return _draw_row(entry.name, (state, button, size, context, "", _license(entry)))


def _rank(entry: CatalogueEntry) -> int:
    """Models that can be loaded at once come first, those that cannot be loaded at all last."""
    return 2 if entry.problem else int(not entry.is_here)


def _fold(resting: list[CatalogueEntry]) -> str:
    """Return the line above the models that are not loaded, with a button where they are many."""
    if not resting:
        return ""
    num_here = sum(each.is_here for each in resting)
    words = f"Other models: {num_here} here, {len(resting) - num_here} to fetch"
    is_folded = len(resting) > MAX_UNFOLDED
    label = f'<button type="button" aria-expanded="false">{words}</button>' if is_folded else words
    return f'<tbody class="fold-line"><tr><td colspan="{len(HEADS)}">{label} <span>{HINT}</span></td></tr></tbody>'


def _license(entry: CatalogueEntry) -> str:
    return html.escape(entry.license or "not stated")


def _draw_button(verb: str, name: str, label: str) -> str:
    return f'<button type="button" data-act="{verb} {html.escape(name, quote=True)}">{label}</button>'


def _draw_row(name: str, cells: tuple[str, ...]) -> str:
    return f'<tr><th scope="row">{html.escape(name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
