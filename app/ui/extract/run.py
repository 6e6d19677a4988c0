"""Handlers of the workbench: extract a record, store a corrected one, compare later runs with it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import gradio as gr

from app.extraction import Evidence, ExtractionResult, Extractor, Limits, PartialExtraction, Schema
from app.extraction.chunks import PartsDone, stream_whole
from app.extraction.extractor import make_again
from app.extraction.json_spans import scan
from app.extraction.prompt import parse_examples
from app.extraction.review import Change, EditError, apply_edits, change_items, compare
from app.extraction.schema_check import SchemaChecker
from app.ui.explain import EXPLAINED, Explanation, explain, explain_bug
from app.ui.extract.pages import Opened, show_page
from app.ui.extract.record_view import (
    EMPTY,
    NO_SOURCE,
    render_badge,
    render_fields,
    render_figures,
    render_source,
    render_status,
    render_table,
)
from app.ui.pacing import pace
from app.ui.stops import Stops
from engine import Engine

# The outputs of a run, in order.
PARTS = ("badge", "fields", "record", "table", "figures", "marked", "tabs", "run", "stop", "shown", "page")
IDLE: dict[str, Any] = {"run": gr.update(interactive=True), "stop": gr.update(visible=False)}
BUSY: dict[str, Any] = {"run": gr.update(interactive=False), "stop": gr.update(visible=True)}
EMPTIED: dict[str, Any] = {
    "fields": EMPTY,
    "record": "",
    "table": EMPTY,
    "figures": "",
    "marked": NO_SOURCE,
    "shown": None,
}
STOPPED = render_badge("cut", "stopped", "the record is not complete")

Update = tuple[Any, ...]
Verified = dict[str, dict[str, Any]]  # {"record", "time"} by the key of text and schema


@dataclass(frozen=True, slots=True)
class Shown:
    """State of the result column: the result, its inputs, and which values a person edited."""

    result: ExtractionResult
    text: str
    schema: Schema
    by_hand: frozenset[str] = frozenset()
    opened: Opened | None = None  # where the text or the images come from

    @property
    def key(self) -> str:
        """Return the storage key of a verified record: equal for equal text and schema."""
        digest = self.opened.digest if self.opened else ""
        source = [self.text, digest] if digest else self.text
        both = json.dumps([self.schema, source], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(both.encode(errors="surrogatepass")).hexdigest()[:16]

    def find_page(self, evidence: Evidence | None) -> int:
        """Return the page of a value in the opened PDF; 0 if there is none, or the text was edited."""
        if self.opened is None or evidence is None or evidence.match == "none":
            return 0
        source = self.opened.source
        return source.find_page(evidence.start) if source.text == self.text else 0


class ExtractRun:
    """The handlers of one workbench."""

    def __init__(self, engine: Engine, interval_s: float) -> None:
        self.engine = engine
        self.interval_s = interval_s
        self.stops = Stops()
        self.checker = SchemaChecker()

    async def run(
        self,
        text: str,
        schema_text: str,
        schema_problem: Explanation | None,
        with_limits: bool,
        is_verbatim: bool,
        instructions: str,
        examples: str,
        opened: Opened | None,
        verified: Verified | None,
        request: gr.Request,
    ) -> AsyncGenerator[Update, None]:
        """Extract one record and show it while it is written."""
        images = () if opened is None else opened.source.images
        if not text.strip() and not images:
            problem = Explanation(
                "There is no text yet.", "", "Paste a text, open a file or pick an example."
            )
            yield refuse(problem)
            return
        if schema_problem is not None:
            yield refuse(schema_problem)
            return
        session = str(request.session_hash)
        # Before the first wait, so that a text opened from now on ends this run.
        with self.stops.running(session) as flag:
            try:
                checked = await asyncio.to_thread(self.checker.check, schema_text)
                # The page sends None for a text box that was never opened.
                shots = parse_examples(examples or "")
            except EXPLAINED as error:
                schema_problem = explain(error, self.engine.state)
            except ValueError as error:
                what = "The examples cannot be used."
                schema_problem = Explanation(what, f"{error}.", "Correct them and run again.")
            if flag.is_asked():
                yield update(**IDLE)
                return
            if schema_problem is not None:
                yield refuse(schema_problem)
                return
            extractor = Extractor(
                self.engine,
                Limits() if with_limits else None,
                ground=is_verbatim,
                instructions=instructions,
                examples=shots,
                images=images,
            )
            # A separate cache salt, so that one visitor's text never shows in another's cache timings.
            stream = stream_whole(extractor, checked.schema, text, cache_salt=f"session-{session}")
            yield update(badge=render_badge("busy", "reading"), **EMPTIED, **BUSY)
            try:
                # Leaving the block closes the stream, which aborts the engine's requests.
                async with aclosing(pace(stream, self.interval_s)) as parts:
                    async for part in parts:
                        if isinstance(part, ExtractionResult):
                            notes = opened.source.notes if opened is not None else ()
                            result = replace(part, notes=(*notes, *part.notes))
                            shown = Shown(result, text, checked.schema, opened=opened)
                            yield show(shown, verified or {})
                            if (page := await self.show_first_page(shown)) is not None:
                                yield update(page=page)
                            return
                        yield progress(part)
                        if flag.is_asked():
                            break
            except EXPLAINED as error:
                yield fail(explain(error, self.engine.state))
                return
            except Exception as error:
                # Raise unexpected errors, but do not leave the page in its busy state.
                yield fail(explain_bug(error))
                raise
            if flag.asked == "leave":
                yield update(**IDLE)
            else:
                yield update(badge=STOPPED, shown=None, **IDLE)

    def stop(self, request: gr.Request) -> None:
        """End the running extraction."""
        self.stops.ask(str(request.session_hash))

    async def show_first_page(self, shown: Shown) -> str | None:
        """Return the first page that shows a value; None if no page does."""
        found = [(shown.find_page(each), each.start, each) for each in shown.result.evidence.values()]
        number, _, evidence = min(
            filter(lambda each: each[0], found), default=(0, 0, None), key=itemgetter(0, 1)
        )
        return await show_page(shown.opened, number, evidence) if shown.opened and number else None

    async def locate(self, shown: Shown | None, typed: tuple[Shown, Shown] | None, data: gr.EventData) -> Any:
        """Show the page of the PDF where the value that has the focus is."""
        if typed is not None and typed[0] is shown:
            shown = typed[1]
        evidence = shown.result.evidence.get(str(data._data["pointer"])) if shown else None
        if shown is None or shown.opened is None or not (number := shown.find_page(evidence)):
            return gr.skip()
        return await show_page(shown.opened, number, evidence)

    async def turn(self, opened: Opened | None, data: gr.EventData) -> Any:
        """Show another page of the opened PDF."""
        number = int(data._data["number"])
        if opened is None or not 1 <= number <= len(opened.source.page_starts):
            return gr.skip()
        return await show_page(opened, number)

    def edit(self, shown: Shown | None, data: gr.EventData) -> Update:
        """Apply a correction at once: update JSON, table and checked record, but not the fields.

        Every event carries all edits since the fields were drawn; a value changed back is not an edit.
        Therefore the record of the fields is kept too, beside the edited one.
        """
        if shown is None:
            return tuple(gr.skip() for _ in range(4))
        try:
            edited = correct(shown, data._data.get("edits") or {})
        except EditError:
            return tuple(gr.skip() for _ in range(4))
        _, record, table, marked = views(edited, {})
        # Do not update the verdict: the click that stores the record also ends an edit, and its verdict must stay.
        return record, table, marked, (shown, edited)

    def change_items(self, shown: Shown | None, verified: Verified | None, data: gr.EventData) -> Update:
        """Add or remove a list item, after applying the edits so far."""
        if shown is None:
            return tuple(gr.skip() for _ in range(6))
        try:
            edited = correct(shown, data._data.get("edits") or {})
            record = change_items(edited.result.record, str(data._data["pointer"]), data._data["action"])
        except EditError as error:
            badge = render_badge("bad", "not changed", f"{error}.")
            return (badge, *(gr.skip() for _ in range(5)))
        result = make_again(edited.schema, edited.text, edited.result, record)
        # Pointers of other items have changed, so it is no longer known which values were edited.
        edited = replace(edited, result=result, by_hand=frozenset())
        before = (verified or {}).get(edited.key)
        fields, text, table, marked = views(edited, compare(record, before["record"]) if before else {})
        return render_status(result), fields, text, table, marked, edited

    def keep(self, shown: Shown | None, data: gr.EventData) -> Update:
        """Apply corrections, validate the record, and store it in the browser for comparison."""
        if shown is None:
            return tuple(gr.skip() for _ in range(7))
        try:
            edited = correct(shown, data._data.get("edits") or {})
        except EditError as error:
            problem = Explanation("This record cannot be kept.", f"{error}.", "Run the extraction again.")
            return (problem.as_html(), *(gr.skip() for _ in range(6)))
        if not edited.result.valid:
            badge = render_badge(
                "bad", "not kept", f"{'; '.join(edited.result.errors)}. Correct it and keep it again."
            )
            return (badge, *(gr.skip() for _ in range(6)))
        added: Verified = {edited.key: {"record": edited.result.record, "time": time.time()}}
        badge = render_badge(
            "good", "verified", "kept in this browser; later runs on this text are compared with it"
        )
        fields, record, table, marked = views(edited, {})
        return badge, fields, record, table, marked, edited, added


def add_example(shown: Shown | None, typed: tuple[Shown, Shown] | None, examples: str | None) -> str:
    """Append the shown record, with its edits, to the examples."""
    if typed is not None and typed[0] is shown:
        shown = typed[1]
    if shown is None or not shown.result.valid:
        raise gr.Error("Extract a record that fits the schema, and correct it, before it can be an example.")
    line = json.dumps({"text": shown.text, "record": shown.result.record}, ensure_ascii=False)
    return "\n".join(part for part in ((examples or "").strip(), line) if part)


def correct(shown: Shown, edits: Mapping[str, str]) -> Shown:
    """Return the result with the edits applied and everything derived from the values recomputed.

    Raises:
        EditError: an edit names no value of the record.
    """
    result = make_again(
        shown.schema, shown.text, shown.result, apply_edits(shown.result.record, edits, shown.schema)
    )
    return replace(shown, result=result, by_hand=shown.by_hand | set(edits))


def views(shown: Shown, changes: Mapping[str, Change]) -> tuple[str, str, str, str]:
    """Return fields, JSON, table and marked source of a result."""
    result = shown.result
    text = json.dumps(result.record, indent=2, ensure_ascii=False) if result.valid else result.raw
    return (
        render_fields(result.leaves, result, changes, shown.by_hand, shown.find_page),
        text,
        render_table(result.record) or EMPTY,
        render_source(result.leaves, result.evidence, shown.text),
    )


def show(shown: Shown, verified: Verified) -> Update:
    """Show a finished extraction."""
    before = verified.get(shown.key)
    changes = compare(shown.result.record, before["record"]) if before else {}
    fields, record, table, marked = views(shown, changes)
    return update(
        badge=render_status(shown.result),
        fields=fields,
        record=record,
        table=table,
        figures=render_figures(shown.result),
        marked=marked,
        tabs=gr.update(selected=choose_tab(shown)),
        shown=shown,
        **IDLE,
    )


def choose_tab(shown: Shown) -> str:
    """Return the tab of the source that shows the evidence best."""
    if shown.opened and shown.opened.source.images:
        return "image" if shown.opened.is_photo else "page"
    return "page" if any(map(shown.find_page, shown.result.evidence.values())) else "evidence"


def progress(part: PartialExtraction | PartsDone | None) -> Update:
    """Show the record as far as it has been generated."""
    if part is None:
        return update()
    if isinstance(part, PartsDone):
        detail = f"{part.num_done} of {part.num_parts} parts; the text is long"
        return update(badge=render_badge("busy", "reading", detail))
    fields = render_fields(scan(part.raw).leaves, None)
    return update(badge=render_badge("busy", "writing"), fields=fields, record=part.raw)


def update(**values: Any) -> Update:
    """Return an update of PARTS; those without a value stay as they are."""
    return tuple(values.get(name, gr.skip()) for name in PARTS)


# Hide results of an earlier text: all but the page, the tabs and the buttons.
NO_RESULT = ("", EMPTY, "", EMPTY, "", NO_SOURCE, None)


def refuse(problem: Explanation) -> Update:
    """Show why nothing was started; earlier results stay."""
    return update(badge=problem.as_html(), **IDLE)


def fail(problem: Explanation) -> Update:
    """Show the reason, in place of the badge, if there is no result."""
    return update(badge=problem.as_html(), **EMPTIED, **IDLE)
