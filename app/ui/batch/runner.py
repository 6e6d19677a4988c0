"""The runs of the batch tab: begin, show, stop and repeat them, and write their files.

A run is a job of the store, as /v1/jobs has them: it continues when its page is closed and after a restart of the
server, and a page that is loaded later shows it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import gradio as gr

from app.api.context import ApiContext
from app.api.errors import ApiError
from app.api.jobs import add_job, cancel
from app.api.model_pool import ModelPool
from app.extraction import Extractor, Schema
from app.extraction.schema_check import SchemaChecker
from app.extraction.sources import TEXT_COLUMN, Row, dump_source
from app.store import Item, StoreError, jobs
from app.ui.batch.downloads import write_files
from app.ui.batch.review import RowReview
from app.ui.batch.run import BatchRun
from app.ui.batch.tables import OpenTables
from app.ui.batch.view import NUM_PREVIEWED, render_note, render_progress, render_records
from app.ui.examples import Examples
from app.ui.explain import Explanation, explain, explain_bug
from app.ui.extract.desk import Update
from app.ui.extract.schema_panel import BLANK_PROBLEM, is_blank
from app.ui.model_choice import ModelChoice, ReaderChooser, say_loading
from app.ui.owner import find_owner
from app.ui.stops import Stops
from engine import InvalidRequest
from grammar import GrammarError

AS_IN_EXTRACT = "as in the Extract tab"
UPDATE_INTERVAL_S = 0.25
NOT_OPEN = Explanation(
    "These files are not open any more.", "Others needed the room, or the connection was lost.", "Open them again."
)
WAITS = "The engine is not ready; the batch goes on when it is."


class BatchRunner:
    """Runs batches for the pages of all sessions. BatchTab builds the components that it updates."""

    progress: gr.HTML
    records: gr.HTML
    trial: gr.Button
    run_button: gr.Button
    stop_button: gr.Button
    again: gr.Button
    samples: gr.Button
    downloads: list[gr.DownloadButton]
    review: RowReview
    unwritten: gr.HTML  # why some downloads have no file

    def __init__(
        self, context: ApiContext, examples: Examples, interval_s: float = UPDATE_INTERVAL_S,
        pool: ModelPool | None = None,
    ) -> None:
        self.context = context
        self.models = ModelChoice(context.engine, pool)
        self.reader = ReaderChooser(self.models, "batch")
        self.store = context.store
        self.examples = examples
        self.interval_s = interval_s
        self.stops = Stops()  # of the handlers that show a run
        self.tables = OpenTables()
        self.shown: dict[str, BatchRun] = {}  # the run that each session's page shows
        self.checker = SchemaChecker()

    async def run_some(self, request: gr.Request, *given: Any) -> AsyncGenerator[Update, None]:
        """Extract the first rows only, to test the schema."""
        async with aclosing(self.run_all(request, *given, num_rows=NUM_PREVIEWED)) as updates:
            async for update in updates:
                yield update

    async def run_again(self, request: gr.Request, order: bool) -> AsyncGenerator[Update, None]:
        """Extract failed rows again, and the rows that a stop has left."""
        session = str(request.session_hash)
        run = self.shown.get(session)
        if run is None or run.is_running:
            yield gr.skip()
            return
        await self.stops.end(session)
        await self.store.run(jobs.retry_failed, run.job.number)
        self.context.jobs.wake()
        begun = self._make_run(run.owner, run.job, order)
        begun.is_stale = run.is_stale
        async with aclosing(self._show(session, begun)) as updates:
            async for update in updates:
                yield update

    async def run_all(
        self, request: gr.Request, column: str, name: str, schema: str, problem: Explanation | None, order: bool,
        model: str, *, num_rows: int | None = None,
    ) -> AsyncGenerator[Update, None]:
        """Extract every row; finished records stay and can be downloaded after a stop or failure.

        Args:
            name: the choice, as `find_schema` takes it.
            schema, problem: of the Extract tab.
            order: whether records with most to check come first, once the run has ended.
            model: which of the loaded models reads the rows.
        """
        session, owner = str(request.session_hash), find_owner(request)
        rows = self.tables.get(session).rows[:num_rows]
        refused = problem if name == AS_IN_EXTRACT else None
        if not rows:
            refused = NOT_OPEN
        found: Schema = {}
        try:
            checked = await asyncio.to_thread(self.checker.check, self.find_schema(name, schema))
            found = checked.schema
            refused = refused or (BLANK_PROBLEM if is_blank(found) else None)
        except GrammarError as error:
            refused = refused or explain(error)
        try:
            async for waited_s in self.models.load(model):
                yield {self.progress: render_note(say_loading(model, waited_s))}
        except InvalidRequest as error:
            refused = self.reader.explain_gone(model, error)
            yield {self.reader.dropdown: await self.reader.show(model)}
        if refused is not None:
            yield {self.progress: refused.as_html()}
            return
        # A page shows one run at a time; two would overwrite each other's display.
        await self._leave_run(session)
        asked = {"schema": found, "model": model, "cache_salt": f"session-{session}"}
        opened = self._describe_choice(session, column, name)
        body = {"model": model, "request": asked, "is_weighed": True, "opened": opened, "column": column}
        try:
            job = await add_job(self.context, owner, "extract", body, (_dump(row, column) for row in rows))
        except StoreError as error:
            yield {self.progress: Explanation("The batch was not begun.", f"{error}.", "").as_html()}
            return
        close = {self.review.panel: gr.update(visible=False)}  # its row is one of the run before
        async with aclosing(self._show(session, self._make_run(owner, job, order), close)) as updates:
            async for update in updates:
                yield update

    def find_schema(self, name: str, code: str) -> str:
        """Return the text of a chosen schema: of an example, of the Extract tab, or that of an earlier run itself.

        Args:
            code: the schema of the Extract tab.
        """
        return code if name == AS_IN_EXTRACT else self.examples.schemas.get(name, name)

    def _make_run(self, owner: str, job: Item, asking_first: bool = True) -> BatchRun:
        engine = self.models.find(job.body["model"])
        sure_from = None if engine is None else Extractor(engine).sure_from
        return BatchRun(owner, job, sure_from, asking_first)

    async def _show(self, session: str, run: BatchRun, first: Update | None = None) -> AsyncGenerator[Update, None]:
        """Update the page while the run goes on, and at its end; closing the generator leaves the run alone.

        Args:
            first: what the first update changes, too.
        """
        self.shown[session] = run
        with self.stops.running(session) as flag:
            await run.update(self.store)
            is_over = not run.is_running
            hidden = {self.samples: gr.update(visible=False)}
            yield self._draw(run) | self._buttons(True) | self._hide_files() | hidden | (first or {})
            while not is_over:
                await asyncio.sleep(self.interval_s)
                is_changed, is_over = await run.update(self.store), not run.is_running
                if flag.asked:
                    return
                # Gradio notices a closed page only when a handler yields.
                yield self._draw(run) if is_changed or is_over else gr.skip()
            buttons = self._buttons(False, bool(self.tables.get(session).rows))
            try:
                yield buttons | await self._save(run)  # not the table, in which a person may have picked a field
            except Exception as error:
                # Raise unexpected errors, but enable the buttons again.
                yield {self.progress: explain_bug(error).as_html(), **buttons, **self._hide_files()}
                raise

    def _draw(self, run: BatchRun) -> Update:
        waits = ""
        if run.is_running:
            if (engine := self.models.find(run.model)) is None:
                advice = "choose it above Run all, or load it under Engine, and the batch goes on"
                waits = render_note(f"{run.model} is not loaded any more: {advice}.")
            elif engine.state != "ready":
                waits = render_note(WAITS)
        return {self.progress: waits + render_progress(run), self.records: render_records(run)}

    async def _leave_run(self, session: str) -> bool:
        """Let the page show no run; one that no other page shows is stopped. Returns whether one was."""
        await self.stops.end(session)
        run = self.shown.pop(session, None)
        if run is None or any(each.job.id == run.job.id for each in self.shown.values()):
            return False
        return await self._cancel(run)

    async def _cancel(self, run: BatchRun) -> bool:
        """End a run; returns False if it had ended."""
        try:
            await cancel(self.context, run.owner, run.job.id)
        except ApiError:
            return False
        return True

    async def stop(self, request: gr.Request) -> None:
        """End the batch and keep the finished records."""
        if run := self.shown.get(str(request.session_hash)):
            await self._cancel(run)

    def _buttons(self, is_busy: bool, is_ready: bool = False) -> Update:
        idle = gr.update(interactive=is_ready)
        return {self.trial: idle, self.run_button: idle, self.stop_button: gr.update(visible=is_busy)}

    def _hide_files(self) -> Update:
        return {**dict.fromkeys([*self.downloads, self.again], gr.update(visible=False)), self.unwritten: ""}

    async def _redraw(self, run: BatchRun) -> Update:
        """Draw a run again of which a row was reviewed."""
        if run.is_running:
            return {self.records: render_records(run)}
        drawn = {self.progress: render_progress(run), self.records: render_records(run), **await self._save(run)}
        return {part: value for part, value in drawn.items() if part is not self.again}

    async def _save(self, batch: BatchRun) -> Update:
        """Return the download buttons with their files, and the button that runs rows again."""
        if not batch.records:
            return self._hide_files()
        files, reasons = await asyncio.to_thread(write_files, batch.for_files, batch.document)
        num_left = batch.num_rows - len(batch.records)
        words = f"Go on with the other {num_left:,} rows" if num_left else "Run failed rows again"
        again = gr.update(visible=bool(num_left or batch.counts["failed"]), value=words)
        why = render_note(reasons) if reasons else ""
        return {**dict(zip(self.downloads, files, strict=True)), self.again: again, self.unwritten: why}

    def _describe_choice(self, session: str, column: str | None, schema: str) -> dict[str, Any]:
        return {"paths": self.tables.paths.get(session, []), "column": column, "schema": schema}


def _dump(row: Row, column: str) -> str:
    """Return the document of a row as JSON; the text of a table is among the cells that the files repeat."""
    source = row.pick(column)
    if column == TEXT_COLUMN and not source.others:
        return dump_source(source)  # a whole file
    return dump_source(replace(source, others={k: v for k, v in row.cells.items() if k in (*source.others, column)}))
