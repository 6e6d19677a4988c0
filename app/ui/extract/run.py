"""Handlers of the workbench: extract a record, and review it."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import gradio as gr

from app.api.model_pool import ModelPool
from app.extraction import ExtractionResult, Extractor, Limits, PartialExtraction
from app.extraction.choices import NUM_RIVALS, find_choices
from app.extraction.chunks import PartsDone, stream_whole
from app.extraction.json_spans import scan
from app.extraction.prompt import parse_examples
from app.extraction.schema_check import CheckedSchema, SchemaChecker
from app.store import Store
from app.ui.explain import EXPLAINED, Explanation, explain, explain_bug
from app.ui.extract.approvals import (
    find_approvals,
    get_approved,
    read_trust,
    render_examples,
    render_trust,
)
from app.ui.extract.desk import Desk, Update, find_first_page, find_page
from app.ui.extract.pages import Opened, show_page
from app.ui.extract.projects import find_readings, is_same_text, is_worked_on
from app.ui.extract.record_view import render_badge, render_figures, render_growing
from app.ui.extract.reliability import render_calibration
from app.ui.extract.schema_panel import BLANK_PROBLEM, is_blank
from app.ui.extract.shown import Shown, restore
from app.ui.model_choice import ModelChoice, ReaderChooser, say_loading
from app.ui.owner import find_owner
from app.ui.pacing import pace
from app.ui.stops import Stops
from engine import Engine, LoRARequest

MIN_DOUBTFUL, SHARE_DOUBTFUL = 4, 1 / 3  # values of a record that a larger model should read again
NO_TEXT = Explanation("There is no text yet.", "", "Paste a text, open a file or pick an example.")


class ExtractRun:
    """The handlers of one workbench."""

    # Made by `build`, as the desk's components.
    run_button: gr.Button
    stop_button: gr.Button
    source_tabs: gr.Tabs
    figures: gr.HTML
    page: gr.HTML
    calibration: gr.HTML
    read_again: gr.Button

    def __init__(self, engine: Engine, store: Store, interval_s: float, pool: ModelPool | None = None) -> None:
        self.engine = engine
        self.models = ModelChoice(engine, pool)
        self.reader = ReaderChooser(self.models, "extract")
        self.store = store
        self.interval_s = interval_s
        self.stops = Stops()
        self.checker = SchemaChecker()
        self.desk = Desk()

    async def run(
        self, text: str, schema_text: str, problem: Explanation | None, with_limits: bool, is_verbatim: bool,
        instructions: str, examples: str, opened: Opened | None, model: str, request: gr.Request,
    ) -> AsyncGenerator[Update, None]:
        """Extract one record and show it while it is written."""
        images = () if opened is None else opened.source.images
        if not text.strip() and not images:
            problem = NO_TEXT
        if self.models.find(model) is None and model not in await self.models.list_here():
            gone = self.reader.explain_gone(model).as_html()
            yield {self.desk.badge: gone, self.reader.dropdown: await self.reader.show(model)}
            return
        if problem is not None:
            yield self._refuse(problem)
            return
        session = str(request.session_hash)
        # Before the first wait, so that a text opened from now on ends this run.
        with self.stops.running(session) as flag:
            checked: CheckedSchema | None = None
            try:
                checked = await asyncio.to_thread(self.checker.check, schema_text)
                problem = BLANK_PROBLEM if is_blank(checked.schema) else None
                # The page sends None for a text box that was never seen.
                shots = parse_examples(examples or "")
            except EXPLAINED as error:
                problem = explain(error)
            except ValueError as error:
                problem = Explanation("The examples cannot be used.", f"{error}.", "Correct them and run again.")
            if flag.is_asked():
                yield self._idle()
                return
            if problem is not None or checked is None:
                yield self._refuse(problem)
                return
            owner = find_owner(request)
            trust = await self.store.run(read_trust, owner, checked.schema, model)
            busy = {self.run_button: gr.update(interactive=False), self.stop_button: gr.update(visible=True)}
            beside: Update = {self.figures: "", self.calibration: render_calibration(self.models.find(model))}
            beside[self.read_again] = gr.update(visible=False)
            yield {**self.desk.clear(render_badge("busy", "reading"), text), **beside, **busy}

            def make_extractor(engine: Engine, adapter: LoRARequest | None) -> Extractor:
                return Extractor(
                    engine, Limits() if with_limits else None, ground=is_verbatim, lora_request=adapter,
                    instructions=instructions or "", examples=shots, images=images, num_rivals=NUM_RIVALS,
                    approved_from=trust.sure_from if trust is not None else None,
                )

            try:
                # Leaving the block closes the stream, which aborts the engine's requests.
                async with aclosing(self._read(model, make_extractor, checked, text, opened, session)) as parts:
                    async for part in parts:
                        if isinstance(part, Shown):
                            shown = await self._recall(part, owner)
                            beside = {self.desk.trust: render_trust(trust), self.read_again: await self._offer(shown)}
                            yield self.show(shown) | beside | self._idle()
                            if (page := await find_first_page(shown)) is not None:
                                yield {self.page: page}
                            return
                        yield self._progress(part, model)
                        if flag.is_asked():
                            break
            except EXPLAINED as error:
                engine = self.models.find(model)
                yield self._end(explain(error, engine.state if engine is not None else ""), text)
                return
            except Exception as error:
                # Raise unexpected errors, but do not leave the page in its busy state.
                yield self._end(explain_bug(error), text)
                raise
            stopped = {self.desk.badge: render_badge("cut", "stopped", "the record is not complete")}
            yield self._idle() if flag.asked == "leave" else stopped | self._idle()

    async def _read(
        self, model: str, make_extractor: Callable[[Engine, LoRARequest | None], Extractor], checked: CheckedSchema,
        text: str, opened: Opened | None, session: str,
    ) -> AsyncGenerator[int | PartialExtraction | PartsDone | Shown | None, None]:
        """Yield the seconds while the model is loaded, what it has written so far, and the record."""
        async for waited_s in self.models.load(model):
            yield waited_s
        async with self.models.hold(model) as (engine, adapter):
            extractor = make_extractor(engine, adapter)
            # A separate cache salt, so that one visitor's text never shows in another's cache timings.
            stream = stream_whole(extractor, checked.schema, text, cache_salt=f"session-{session}")
            async with aclosing(pace(stream, self.interval_s)) as parts:
                async for part in parts:
                    if isinstance(part, ExtractionResult):
                        yield await asyncio.to_thread(self._begin, part, text, checked, extractor, opened)
                        return
                    yield part

    def _begin(
        self, result: ExtractionResult, text: str, checked: CheckedSchema, extractor: Extractor, opened: Opened | None
    ) -> Shown:
        if opened is not None:
            source = opened.path.name if is_same_text(opened.source.text, text) else ""
            result = replace(result, source=source, notes=(*opened.source.notes, *result.notes))
        choices, reading = find_choices(result, extractor.engine, text), secrets.token_urlsafe(8)
        return Shown(result, text, checked.schema, extractor.model_name, opened, choices, reading=reading)

    async def _recall(self, shown: Shown, owner: str) -> Shown:
        """Compare a record with those of the same text and schema: the approved one, and another model's."""
        approved = await self.store.run(get_approved, owner, shown)
        readings = await self.store.run(find_readings, owner, shown)
        other = next((each for each in readings if each["model"] != shown.model), None)
        before = next((each for each in readings if is_worked_on(each)), None)
        if before is not None:
            shown = replace(shown, before=replace(restore(before, shown.text, shown.schema), opened=shown.opened))
        if other is not None:
            shown = replace(shown, other=(other["model"], other["record"]))
        return shown if approved is None else replace(shown, verified=approved["record"])

    async def add_approved(self, shown: Shown | None, examples: str | None, request: gr.Request) -> str:
        """Append the latest approved records of the shown schema to the examples."""
        found = []
        if shown is not None:
            approvals = await self.store.run(find_approvals, find_owner(request), shown.schema)
            found = render_examples([each for each in approvals if each["text"] != shown.text])
        if not found:
            raise gr.Error("No other record of this schema is approved yet.", print_exception=False)
        return "\n".join(dict.fromkeys(filter(None, [*(examples or "").strip().splitlines(), *found])))

    def stop(self, request: gr.Request) -> None:
        """End the running extraction."""
        self.stops.ask(str(request.session_hash))

    async def _offer(self, shown: Shown) -> Any:
        """Offer to read again with a much larger model that is here, where many values are doubtful."""
        is_doubtful = len(shown.to_check) >= max(MIN_DOUBTFUL, SHARE_DOUBTFUL * len(shown.result.leaves))
        name = await self.models.find_larger(shown.model) if is_doubtful else None
        words = f"Many values are doubtful: read again with {name} ›"
        return gr.update(visible=name is not None, value=words)

    async def choose_larger(self, shown: Shown | None) -> Any:
        """Choose the model that `_offer` names."""
        name = await self.models.find_larger(shown.model) if shown is not None else None
        return gr.skip() if name is None else await self.reader.show(name)

    async def locate(self, shown: Shown | None, pointer: str) -> Any:
        """Show the page of the PDF where a value is."""
        page = await find_page(shown, pointer)
        return gr.skip() if page is None else page

    async def turn(self, opened: Opened | None, data: gr.EventData) -> Any:
        """Show another page of the opened PDF."""
        number = int(data._data["number"])
        if opened is None or not 1 <= number <= len(opened.source.page_starts):
            return gr.skip()
        return await show_page(opened, number)

    def show(self, shown: Shown) -> Update:
        """Return a finished extraction."""
        tabs = gr.update(selected=choose_tab(shown))
        return {**self.desk.draw(shown), self.figures: render_figures(shown.result), self.source_tabs: tabs}

    def clear(self, badge: str = "", text: str = "") -> Update:
        """Clear the record and its figures, and show the text unmarked."""
        hidden = gr.update(visible=False)
        return {**self.desk.clear(badge, text), self.figures: "", self.desk.trust: "", self.read_again: hidden}

    def _progress(self, part: int | PartialExtraction | PartsDone | None, model: str) -> Update:
        """Return the record as far as it has been generated, or the seconds that the model has been loading."""
        desk = self.desk
        if part is None:
            return gr.skip()
        if isinstance(part, int):
            return {desk.badge: render_badge("busy", "loading", f"{say_loading(model, part)} Then it reads the text.")}
        if isinstance(part, PartsDone):
            detail = f"{part.num_done} of {part.num_parts} parts of the text"
            return {desk.badge: render_badge("busy", "reading", detail)}
        fields = render_growing(scan(part.raw).leaves)
        return {desk.badge: render_badge("busy", "writing"), desk.fields: fields, desk.record: part.raw}

    def _idle(self) -> Update:
        return {self.run_button: gr.update(interactive=True), self.stop_button: gr.update(visible=False)}

    def _refuse(self, problem: Explanation | None) -> Update:
        """Return the reason why nothing is read; the earlier record stays, set aside."""
        return {self.desk.badge: problem.as_html() if problem else ""} | self._idle()

    def _end(self, problem: Explanation, text: str) -> Update:
        """Return the reason why there is no record."""
        return self.clear(problem.as_html(), text) | self._idle()


def add_example(shown: Shown | None, examples: str | None) -> str:
    """Append the shown record, with its edits, to the examples."""
    if shown is None or not shown.result.valid:
        raise gr.Error("Extract a record that fits the schema, and correct it, before it can be an example.")
    line = json.dumps({"text": shown.text, "record": shown.result.record}, ensure_ascii=False)
    return "\n".join(part for part in ((examples or "").strip(), line) if part)


def choose_tab(shown: Shown) -> str:
    """Return the tab of the source that shows the evidence best."""
    if shown.opened and shown.opened.source.images:
        return "image" if shown.opened.is_photo else "page"
    return "page" if any(map(shown.find_page, shown.result.evidence.values())) else "evidence"
