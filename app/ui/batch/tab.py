"""The batch tab: open files, pick a column, extract records with progress, download the results.

A run is a job of the store, as /v1/jobs has them: it goes on when its page is closed and after a restart of the server,
and a page that is loaded later shows it again.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder

from app.api.context import ApiContext
from app.api.errors import ApiError
from app.api.jobs import add_job, cancel
from app.api.model_pool import ModelPool
from app.extraction import Extractor, Schema
from app.extraction.export import FORMATS
from app.extraction.schema_check import SchemaChecker
from app.extraction.sources import OFFICE_TYPES, TEXT_COLUMN, Row, Table, UnreadableSource, dump_source
from app.store import Connection, Item, StoreError, jobs, objects
from app.ui.batch.downloads import label, write_files
from app.ui.batch.review import RowReview
from app.ui.batch.run import BatchRun
from app.ui.batch.tables import NO_TABLE, OpenTables, open_table
from app.ui.batch.view import (
    EMPTY_BATCH,
    NUM_PREVIEWED,
    STALE_NOTE,
    render_note,
    render_preview,
    render_progress,
    render_records,
)
from app.ui.examples import Examples
from app.ui.explain import Explanation, explain, explain_bug
from app.ui.extract.desk import Update
from app.ui.extract.schema_panel import BLANK_PROBLEM, SchemaPanel, is_blank
from app.ui.model_choice import ModelChoice, ReaderChooser
from app.ui.owner import find_owner
from app.ui.scripts import read_kept, read_script
from app.ui.stops import Stops
from grammar import GrammarError

FILE_TYPES = [".csv", ".tsv", ".jsonl", ".ndjson", ".txt", ".md", ".log", ".xml", ".json", ".pdf", *OFFICE_TYPES]
AS_IN_EXTRACT = "as in the Extract tab"
UPDATE_INTERVAL_S = 0.25
NOT_OPEN = Explanation(
    "These files are not open any more.", "Others needed the room, or the connection was lost.", "Open them again."
)
GONE = "The server does not have the files any more: open them again to run more rows."
MAX_OPENED, MAX_OPENED_BYTES = 20, 1_000_000  # of one owner, as the projects of the Extract tab
WAITS = "The engine is not ready; the batch goes on when it is."


class BatchTab:
    """Extracts records from many texts with one schema on one engine."""

    def __init__(
        self, context: ApiContext, examples: Examples, interval_s: float = UPDATE_INTERVAL_S,
        pool: ModelPool | None = None,
    ) -> None:
        self.context = context
        self.models = ModelChoice(context.engine, pool)
        self.reader = ReaderChooser(self.models)
        self.store = context.store
        self.examples = examples
        self.interval_s = interval_s
        self.stops = Stops()  # of the handlers that show a run
        self.tables = OpenTables()
        self.shown: dict[str, BatchRun] = {}  # the run that each session's page shows
        self.checker = SchemaChecker()
        self.review = RowReview(context, self.shown, self._redraw)

    def build(self, demo: gr.Blocks, of_extract: SchemaPanel) -> None:
        """Put the tab's components on the page and connect them."""
        with gr.Row(elem_id="batch", equal_height=False):
            with gr.Column(scale=3, min_width=280):
                self._build_inputs()
            with gr.Column(scale=10, min_width=300):
                self._build_results()
        # Never displayed; carries the id of the run that the browser knows into the event.
        known = gr.HTML("", html_template="", apply_default_css=False, elem_id="kept-batch")
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        at_once = {"queue": False, **quiet}
        buttons = [self.trial, self.run_button, self.stop_button, *self.downloads, self.again, self.samples]
        outputs = [self.progress, self.records, *buttons, self.reader.dropdown]
        choice = [self.column, self.schema, of_extract.code]
        opened = [self.files, self.column, *outputs, self.review.panel]
        self.files.change(self.open_files, [self.files, self.schema], opened, **at_once)
        self.folder.upload(self.open_folder, [self.folder, self.schema], opened, **at_once)
        for part in (self.column, self.schema):
            part.input(self.show_choice, choice, self.records, **at_once)
        of_extract.code.change(self.show_schema, choice, self.records, trigger_mode="always_last", **at_once)
        reader = self.reader.dropdown
        inputs = [*choice, of_extract.problem, self.order, reader]
        attached = demo.load(self.attach, known, [*opened, self.schema], js=read_kept("readBatch"), **quiet)
        attached.then(self.show_choice, choice, self.records, **at_once)
        self.trial.click(self.run_some, inputs, outputs, **quiet)
        self.run_button.click(self.run_all, inputs, outputs, **quiet)
        self.again.click(self.run_again, self.order, outputs, **quiet)
        self.samples.click(self.run_samples, [self.order, reader], [*opened, self.schema], **quiet)
        self.order.input(self.sort, self.order, self.records, **at_once)
        self.stop_button.click(self.stop, None, None, **at_once)
        self.review.connect(self.records, [self.progress, self.records, *self.downloads])

    def _build_inputs(self) -> None:
        # Its heading is there on small screens only, where batch.js folds it when files are open.
        with gr.Accordion("Files, column and schema", elem_id="batch-inputs", elem_classes="fold"):
            self.files = gr.File(
                label="CSV, JSONL, texts or PDFs", file_count="multiple", file_types=FILE_TYPES, height=150,
                elem_id="batch-files",
            )
            # Without file_types, with which Gradio would refuse a whole folder for one unsupported file.
            self.folder = gr.UploadButton("Open a folder", file_count="directory", size="sm")
            self.column = gr.Dropdown([], label="Column with the text", interactive=True)
            self.schema = gr.Dropdown(
                [AS_IN_EXTRACT, *self.examples.schemas], value=AS_IN_EXTRACT, label="Schema of a record"
            )
            self.reader.build()
        with gr.Row():
            self.trial = gr.Button(f"Try the first {NUM_PREVIEWED}", interactive=False, min_width=120)
            self.run_button = gr.Button(
                "Run all", variant="primary", interactive=False, elem_id="batch-run", min_width=120
            )
            self.stop_button = gr.Button("Stop", variant="stop", visible=False, min_width=80)

    def _build_results(self) -> None:
        self.progress = gr.HTML("", elem_id="batch-progress", apply_default_css=False)
        with gr.Row(elem_classes="bar"):
            self.downloads = [
                gr.DownloadButton(label(file_format), visible=False, size="sm", min_width=150)
                for file_format in FORMATS
            ]
            self.again = gr.Button("Run failed rows again", visible=False, size="sm", min_width=220)
            self.order = gr.Checkbox(
                False, label="Least sure first", container=False, min_width=140, elem_id="batch-order"
            )
        gr.HTML(STALE_NOTE, apply_default_css=False)
        self.review.build()
        self.records = gr.HTML(
            EMPTY_BATCH, elem_id="batch-records", apply_default_css=False,
            js_on_load=read_script("kept") + read_script("batch"),
        )
        self.samples = gr.Button(
            "Try it with sample texts", size="sm", min_width=200, elem_id="batch-samples",
            visible=bool(self.examples.samples),
        )

    async def open_files(self, paths: Sequence[str] | None, schema: str, request: gr.Request) -> Update:
        """Open files as a table; a run over earlier files is stopped first, because the page no longer shows it."""
        session = str(request.session_hash)
        if paths and list(paths) == self.tables.paths.get(session):
            return gr.skip()  # the page shows what is open
        stopped = await self._leave_run(session)
        note = render_note("The run before was stopped; what is done is kept.") if stopped else ""
        # Before reading the new table, because a visitor has one table at a time.
        self.tables.drop(session)
        try:
            table = await open_table(paths or ())
        except UnreadableSource as error:
            refused = Explanation("These files cannot be opened.", f"{error}.", "")
            table, note = NO_TABLE, refused.as_html() + note
        self.tables.put(session, table, paths or ())
        column = table.pick_text_column()
        batch_id = await self._keep(column, schema, request)
        return {
            **self._show_table(table, column, batch_id), self.progress: note,
            self.review.panel: gr.update(visible=False),
            **(await self._save(stopped) if stopped else {}),
        }

    def _show_table(self, table: Table, column: str | None, batch_id: str) -> Update:
        return {
            self.column: gr.update(choices=list(table.columns), value=column),
            self.records: render_preview(table, column, batch_id),
            self.samples: gr.update(visible=not table.rows and bool(self.examples.samples)),
            **self._buttons(False, column is not None),
        }

    async def _keep(self, column: str | None, schema: str, request: gr.Request) -> str:
        """Keep the open files and what was chosen for them; returns the id by which a later page finds them."""
        batch_id = secrets.token_urlsafe(16)
        opened = self._describe_choice(str(request.session_hash), column, schema)

        def put(db: Connection, owner: str) -> None:
            objects.put(db, owner, "opened", batch_id, opened)
            objects.keep_latest(db, owner, "opened", MAX_OPENED, MAX_OPENED_BYTES)

        with suppress(StoreError):  # a reload then opens no file
            await self.store.run(put, find_owner(request))
        return batch_id

    def _describe_choice(self, session: str, column: str | None, schema: str) -> dict[str, Any]:
        return {"paths": self.tables.paths.get(session, []), "column": column, "schema": schema}

    async def open_folder(self, paths: Sequence[str] | None, schema: str, request: gr.Request) -> Update:
        """Open a folder, with those of its files that are supported."""
        fitting = [path for path in paths or () if Path(path).suffix.lower() in FILE_TYPES]
        opened = {**await self.open_files(fitting, schema, request), self.files: fitting}
        if num_others := len(paths or ()) - len(fitting):
            opened[self.progress] += render_note(f"Files of other types in the folder, left out: {num_others:,}.")
        return opened

    async def show_schema(self, column: str | None, schema: str, code: str, request: gr.Request) -> Any:
        """Compare the schema of the Extract tab, which has changed, with that of the run, if it is chosen here."""
        is_shown = schema == AS_IN_EXTRACT and str(request.session_hash) in self.shown
        return await self.show_choice(column, schema, code, request) if is_shown else gr.skip()

    async def show_choice(self, column: str | None, schema: str, code: str, request: gr.Request) -> Any:
        """Keep what was chosen for the open files, and preview that column where the records of a run are not of it."""
        session = str(request.session_hash)
        table, run = self.tables.get(session), self.shown.get(session)
        if run is not None:
            run.is_stale = column != run.column or not await self._is_schema_of(run, schema, code)
            if run.is_running:
                return gr.skip()
        if not table.rows:
            return gr.skip() if run is None else render_records(run)
        if run is None:
            return render_preview(table, column, await self._keep(column, schema, request))
        await self.store.run(jobs.keep_opened, run.job.number, self._describe_choice(session, column, schema))
        preview = render_preview(table, column, run.job.id) if run.is_stale or not run.records else ""
        return preview + render_records(run)

    async def _is_schema_of(self, run: BatchRun, name: str, code: str) -> bool:
        try:
            checked = await asyncio.to_thread(self.checker.check, self.examples.schemas.get(name, code))
        except GrammarError:
            return False
        return checked.schema == run.schema

    def leave(self, session: str) -> None:
        """Free the tables of a session whose page was closed or lost its connection; its run goes on."""
        self.stops.ask(session, "leave")
        self.tables.drop(session)
        self.shown.pop(session, None)

    async def attach(self, batch_id: str | None, request: gr.Request) -> AsyncGenerator[Update, None]:
        """Show the files that this browser opened before the page was loaded, and the run that it began on them."""
        session, owner = str(request.session_hash), find_owner(request)
        job = await self.store.run(objects.get, owner, "job", str(batch_id))
        found = job or await self.store.run(objects.get, owner, "opened", str(batch_id))
        if found is None or session in self.shown or self.tables.get(session).rows:
            yield gr.skip()
            return
        opened = found.body.get("opened", {}) if job else found.body
        if opened.get("paths"):
            yield await self._open_again(session, str(batch_id), opened)
        if job is None:
            return
        async with aclosing(self._show(session, self._make_run(owner, job))) as updates:
            async for update in updates:
                yield update

    async def _open_again(self, session: str, batch_id: str, opened: dict[str, Any]) -> Update:
        """Open the files of an earlier page with what was chosen for them."""
        paths, column, schema = opened["paths"], opened["column"], opened["schema"]
        table = NO_TABLE
        if await asyncio.to_thread(lambda: all(map(os.path.isfile, paths))):
            with suppress(UnreadableSource):
                table = await open_table(paths)
        known = {self.schema: schema if schema in self.examples.schemas else AS_IN_EXTRACT}
        if not table.rows:
            choices = [column] if column else []
            return {**known, self.column: gr.update(choices=choices, value=column), self.progress: render_note(GONE)}
        self.tables.put(session, table, paths)
        root = Path(get_upload_folder())
        files = [path for path in paths if Path(path).is_relative_to(root)]
        return {**self._show_table(table, column, batch_id), **known, self.files: files or None}

    async def run_some(self, request: gr.Request, *given: Any) -> AsyncGenerator[Update, None]:
        """Extract the first rows only, to test the schema."""
        async with aclosing(self.run_all(request, *given, num_rows=NUM_PREVIEWED)) as updates:
            async for update in updates:
                yield update

    async def run_again(self, request: gr.Request, order: bool) -> AsyncGenerator[Update, None]:
        """Extract failed rows again."""
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

    async def run_samples(self, request: gr.Request, order: bool, model: str) -> AsyncGenerator[Update, None]:
        """Open the sample texts of the schema that has most of them, and run it."""
        found = {name: str(self.examples.schema_for(name)) for name in self.examples.samples}
        schema = max(found.values(), key=list(found.values()).count)
        paths = [str(path) for name, path in self.examples.samples.items() if found[name] == schema]
        opened = await self.open_files(paths, schema, request)
        column = opened[self.column]["value"]
        yield {**opened, self.schema: schema}
        async with aclosing(self.run_all(request, column, schema, "", None, order, model)) as updates:
            async for update in updates:
                yield update

    async def sort(self, order: bool, request: gr.Request) -> Any:
        """Sort the records by confidence, lowest first, or in row order."""
        run = self.shown.get(str(request.session_hash))
        if run is None:
            return gr.skip()
        # A run that goes on keeps this order.
        run.lowest_first = order
        return render_records(run)

    async def run_all(
        self, request: gr.Request, column: str, name: str, schema: str, problem: Explanation | None, order: bool,
        model: str, *, num_rows: int | None = None,
    ) -> AsyncGenerator[Update, None]:
        """Extract every row; finished records stay and can be downloaded after a stop or failure.

        Args:
            schema, problem: of the Extract tab; they count when no example schema of that name is chosen.
            order: whether records with the lowest confidence come first.
            model: which of the loaded models reads the rows.
        """
        session, owner = str(request.session_hash), find_owner(request)
        rows = self.tables.get(session).rows[:num_rows]
        refused = problem if name == AS_IN_EXTRACT else None
        if not rows:
            refused = NOT_OPEN
        found: Schema = {}
        try:
            checked = await asyncio.to_thread(self.checker.check, self.examples.schemas.get(name, schema))
            found = checked.schema
            refused = refused or (BLANK_PROBLEM if is_blank(found) else None)
        except GrammarError as error:
            refused = refused or explain(error)
        if self.models.find(model) is None:
            refused = self.reader.explain_gone(model)
            yield {self.reader.dropdown: self.reader.show(model)}
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
        async with aclosing(self._show(session, self._make_run(owner, job, order))) as updates:
            async for update in updates:
                yield update

    def _make_run(self, owner: str, job: Item, lowest_first: bool = False) -> BatchRun:
        engine = self.models.find(job.body["model"])
        sure_from = None if engine is None else Extractor(engine).sure_from
        return BatchRun(owner, job, sure_from, lowest_first)

    async def _show(self, session: str, run: BatchRun) -> AsyncGenerator[Update, None]:
        """Update the page while the run goes on, and at its end; closing the generator leaves the run alone."""
        self.shown[session] = run
        with self.stops.running(session) as flag:
            await run.update(self.store)
            yield self._draw(run) | self._buttons(True) | self._hide_files() | {self.samples: gr.update(visible=False)}
            while run.is_running:
                await asyncio.sleep(self.interval_s)
                is_changed = await run.update(self.store)
                if flag.asked:
                    return
                # Gradio notices a closed page only when a handler yields.
                yield self._draw(run) if is_changed else gr.skip()
            buttons = self._buttons(False, bool(self.tables.get(session).rows))
            try:
                yield self._draw(run) | buttons | await self._save(run)
            except Exception as error:
                # Raise unexpected errors, but enable the buttons again.
                yield {self.progress: explain_bug(error).as_html(), **buttons, **self._hide_files()}
                raise

    def _draw(self, run: BatchRun) -> Update:
        waits = ""
        if run.is_running:
            if (engine := self.models.find(run.model)) is None:
                waits = render_note(f"{run.model} is not loaded any more: load it under Engine, and the batch goes on.")
            elif engine.state != "ready":
                waits = render_note(WAITS)
        return {self.progress: waits + render_progress(run), self.records: render_records(run)}

    async def _leave_run(self, session: str) -> BatchRun | None:
        """Let the page show no run; one that no other page shows is stopped, and returned."""
        await self.stops.end(session)
        run = self.shown.pop(session, None)
        if run is None or any(each.job.id == run.job.id for each in self.shown.values()):
            return None
        return run if await self._cancel(run) else None

    async def _cancel(self, run: BatchRun) -> bool:
        """End a run; returns False if it had ended."""
        try:
            await cancel(self.context, run.owner, run.job.id)
        except ApiError:
            return False
        await run.update(self.store)
        return True

    async def stop(self, request: gr.Request) -> None:
        """End the batch and keep the finished records."""
        if run := self.shown.get(str(request.session_hash)):
            await self._cancel(run)

    def _buttons(self, is_busy: bool, is_ready: bool = False) -> Update:
        idle = gr.update(interactive=is_ready)
        return {self.trial: idle, self.run_button: idle, self.stop_button: gr.update(visible=is_busy)}

    def _hide_files(self) -> Update:
        return dict.fromkeys([*self.downloads, self.again], gr.update(visible=False))

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
        files = await asyncio.to_thread(write_files, batch.for_files)
        again = gr.update(visible=bool(batch.counts["failed"]))
        return {**dict(zip(self.downloads, files, strict=True)), self.again: again}


def _dump(row: Row, column: str) -> str:
    """Return the document of a row as JSON; the text of a table is among the cells that the files repeat."""
    source = row.pick(column)
    if column == TEXT_COLUMN and not source.others:
        return dump_source(source)  # a whole file
    return dump_source(replace(source, others={k: v for k, v in row.cells.items() if k in (*source.others, column)}))
