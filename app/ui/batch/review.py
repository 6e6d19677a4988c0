"""RowReview: one row of a batch, open beside its text, to be corrected and approved."""

from __future__ import annotations

import asyncio
import html
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import gradio as gr

from app.api.context import ApiContext
from app.extraction.review import EditError
from app.store import StoreError
from app.ui.batch.run import BatchRun
from app.ui.batch.view import render_records
from app.ui.extract.approvals import approve
from app.ui.extract.desk import Desk, Update
from app.ui.extract.shown import ChangedElsewhere


class RowReview:
    """Opens rows of the run that a session's page shows.

    Args:
        shown: the runs, by session.
        redraw: draws what else the page shows of a run, after a row was changed.
    """

    def __init__(
        self, context: ApiContext, shown: Mapping[str, BatchRun], redraw: Callable[[BatchRun], Awaitable[Update]]
    ) -> None:
        self._context = context
        self._shown = shown
        self._redraw = redraw
        self.desk = Desk()

    def build(self) -> None:
        """Put the components on the page, hidden until a row is opened."""
        with gr.Column(visible=False, elem_id="batch-review") as self.panel:
            with gr.Row(elem_classes="bar"):
                self.place = gr.HTML("", elem_id="batch-place", apply_default_css=False)
                self.previous = gr.Button("‹ Previous row", size="sm", scale=0, min_width=110)
                self.next = gr.Button("Next row ›", size="sm", scale=0, min_width=110)
                self.close = gr.Button("Close", size="sm", scale=0, min_width=70)
            with gr.Row(elem_classes="desk", equal_height=False):
                with gr.Column(scale=1, min_width=280, elem_classes="source-side"):
                    self.desk.build_evidence()
                with gr.Column(scale=1, min_width=280, elem_classes="record-side"):
                    self.desk.build_record()

    def connect(self, records: gr.HTML, redrawn: list[gr.components.Component]) -> list[Any]:
        """Connect the components with the table of records, and return the events that change records.

        Args:
            redrawn: what `redraw` draws.
        """
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        at_once = {"queue": False, **quiet}
        self._records = records
        parts = [self.panel, self.place, self.previous, self.next, *self.desk.parts]
        records.open(self.open_row, None, parts, trigger_mode="multiple", **at_once)
        records.pick(self.pick, None, [records, self.panel], trigger_mode="multiple", **at_once)
        in_turn: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "review", **quiet}
        changes = [
            event(handler, None, [*redrawn, self.panel], **in_turn)
            for event, handler in ((records.confirm, self.confirm), (records.undo, self.undo))
        ]
        self.previous.click(self.go_back, None, parts, **at_once)
        self.next.click(self.go_on, None, parts, **at_once)
        self.close.click(lambda: gr.update(visible=False), None, self.panel, **at_once)
        act = self.desk.fields.act
        changes.append(act(
            self.act, None, [*parts, *redrawn], trigger_mode="multiple", **in_turn
        ))
        self.desk.on_look(self.desk.explain, self.desk.why, self.desk.fields.redrawn)
        return changes

    async def open_row(self, request: gr.Request, data: gr.EventData) -> Update:
        return await self._review(str(request.session_hash), int(data._data["row"])) or gr.skip()

    async def pick(self, request: gr.Request, data: gr.EventData) -> Update:
        """Show one field of the rows that ask for a look at it, side by side, or whole records again."""
        run = self._shown.get(str(request.session_hash))
        if run is None:
            return gr.skip()
        await run.show_field(self._context.store, str(data._data["field"]))
        return {self._records: render_records(run), self.panel: gr.update(visible=False)}

    async def confirm(self, request: gr.Request, data: gr.EventData) -> Update:
        """Mark the values that stand side by side as checked."""
        run = self._shown.get(str(request.session_hash))
        if run is None:
            return gr.skip()
        await run.confirm_field(self._context.store, str(data._data["field"]), data._data["rows"])
        return {self.panel: gr.update(visible=False), **await self._redraw(run)}

    async def undo(self, request: gr.Request) -> Update:
        """Let the values that were approved together last ask for a check again."""
        run = self._shown.get(str(request.session_hash))
        if run is None or not run.confirmed:
            return gr.skip()
        await run.undo_confirm(self._context.store)
        return {self.panel: gr.update(visible=False), **await self._redraw(run)}

    async def go_back(self, request: gr.Request) -> Update:
        """Open the row before."""
        return await self._step(str(request.session_hash), -1)

    async def go_on(self, request: gr.Request) -> Update:
        """Open the row behind."""
        return await self._step(str(request.session_hash), 1)

    async def act(self, data: gr.EventData, request: gr.Request) -> Update:
        """Apply what a person did to a row, and write the row back; an approved row makes way for the next.

        The person may have opened another row since, which then stays on the page as it is.
        """
        session, reading = str(request.session_hash), str(data._data.get("of"))
        run = self._shown.get(session)
        job_id, _, row = reading.rpartition("/")
        if run is None or job_id != run.job.id:
            return gr.skip()
        index = int(row)
        is_open = run.open is not None and run.open.reading == reading
        shown = run.open if is_open else await run.open_row(self._context.store, index)
        if shown is None:
            return gr.skip()
        try:
            newer = await run.open_row(self._context.store, index)
            if newer is None:
                raise EditError("this row is not here any more")
            changed = await asyncio.to_thread(shown.act_on, newer, data._data)
            await run.keep(self._context.store, index, changed)
            run.confirmed = {}
            if run.at in (None, index):
                run.at, run.open = index, changed
            if changed.is_approved:
                await self._context.store.run(approve, run.owner, changed)
        except ChangedElsewhere as error:
            drawn = await self._redraw(run)
            if run.at not in (None, index):
                return drawn
            run.at, run.open = index, error.shown
            return drawn | self.desk.draw_newer(error.shown, data._data)
        except (EditError, StoreError) as error:
            return self.desk.refuse(error)
        drawn = await self._redraw(run)
        if run.at != index:
            return drawn
        drawn |= self.desk.draw(changed)
        if changed.is_approved and (following := run.find_open(index)) is not None:
            drawn |= await self._review(session, following)
        return drawn

    async def _step(self, session: str, step: int) -> Update:
        run = self._shown.get(session)
        following = run.find_next(run.at, step) if run else None
        return gr.skip() if following is None else await self._review(session, following) or gr.skip()

    async def _review(self, session: str, index: int) -> Update:
        """Open a row; returns nothing to draw if a person has opened another one meanwhile."""
        run = self._shown.get(session)
        shown = None if run is None else await run.look_at(self._context.store, index)
        if run is None or shown is None:
            raise gr.Error("This row is not here any more. Run the batch again.")
        if run.at != index:
            return {}
        run.open = shown
        name, queue = html.escape(run.records[index]["source"]), run.list_reviewed()
        place = f"{queue.index(index) + 1:,} of {len(queue):,} · " if index in queue else ""
        steps = {self.previous: -1, self.next: 1}
        return {
            **{
                button: gr.update(interactive=run.is_running or run.find_next(index, step) is not None)
                for button, step in steps.items()
            },
            self.panel: gr.update(visible=True),
            self.place: f"<b>{place}row {index + 1:,}</b> {name}",
            **self.desk.draw(shown), self.desk.why: "",
        }
