"""The batch tab: open files and pick a column; runner.py extracts their records, review.py corrects them."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder

from app.api.context import ApiContext
from app.api.model_pool import ModelPool
from app.extraction.export import FORMATS
from app.extraction.sources import OFFICE_TYPES, TABLE_TYPES, Table, UnreadableSource
from app.store import Connection, StoreError, jobs, objects
from app.ui.batch.downloads import label
from app.ui.batch.recent import list_runs, name_files
from app.ui.batch.review import RowReview
from app.ui.batch.run import BatchRun
from app.ui.batch.runner import AS_IN_EXTRACT, UPDATE_INTERVAL_S, BatchRunner
from app.ui.batch.tables import NO_TABLE, open_table
from app.ui.batch.view import (
    EMPTY_BATCH,
    NUM_PREVIEWED,
    STALE_NOTE,
    render_note,
    render_preview,
    render_records,
)
from app.ui.choices import accept_unsent
from app.ui.examples import Examples
from app.ui.explain import Explanation
from app.ui.extract.desk import Update
from app.ui.extract.pages import Opened
from app.ui.extract.schema_panel import MAX_TITLE_CHARS, SchemaPanel, parse_schema
from app.ui.owner import find_owner
from app.ui.scripts import read_kept, read_script
from app.ui.stops import Flag
from grammar import GrammarError

FILE_TYPES = [*TABLE_TYPES, ".txt", ".md", ".log", ".xml", ".json", ".pdf", ".zip", *OFFICE_TYPES]
GONE = "The server does not have the files any more: open them again to run more rows."
INPUTS = "Files, column and schema"
TO_BATCH = """(opened, reader) => {
try { sessionStorage.setItem("%s", reader); } catch { /* forbidden */ }
location.hash = "batch";
return [opened, reader];
}"""
MAX_OPENED, MAX_OPENED_BYTES = 20, 1_000_000  # of one owner, as the projects of the Extract tab


class BatchTab(BatchRunner):
    """Extracts records from many texts with one schema on one engine."""

    def __init__(
        self, context: ApiContext, examples: Examples, interval_s: float = UPDATE_INTERVAL_S,
        pool: ModelPool | None = None,
    ) -> None:
        super().__init__(context, examples, interval_s, pool)
        self.review = RowReview(context, self.shown, self._redraw)

    def build(self, demo: gr.Blocks, of_extract: SchemaPanel, to_batch: gr.Button, given: Sequence[Any]) -> None:
        """Put the tab's components on the page and connect them.

        Args:
            of_extract: the schema of the Extract tab.
            to_batch: the button that opens the table of the Extract tab here.
            given: the table, and the model that is chosen there.
        """
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
        outputs = [self.progress, self.unwritten, self.records, *buttons, self.reader.dropdown, self.review.panel]
        choice = [self.column, self.schema, of_extract.code]
        opened = [self.files, self.column, *outputs]
        begun = [
            self.files.change(self.open_files, [self.files, self.schema], opened, **at_once),
            self.folder.upload(self.open_folder, [self.folder, self.schema], opened, **at_once),
            to_batch.click(
                self.open_table, given, [*opened, self.schema], js=TO_BATCH % self.reader.key, **at_once
            ),
        ]
        for part in (self.column, self.schema):
            part.input(self.show_choice, choice, self.records, **at_once)
        of_extract.code.change(self.show_schema, choice, self.records, trigger_mode="always_last", **at_once)
        reader = self.reader.dropdown
        inputs = [*choice, of_extract.problem, self.order, reader]
        attached = demo.load(self.attach, known, [*opened, self.schema], js=read_kept("readBatch"), **quiet)
        back = self.records.back(self.attach, known, [*opened, self.schema], js=read_kept("readBatch"), **quiet)
        reopened = self.recent.pick(self.reopen, None, [*opened, self.schema], **quiet)
        for event in (attached, back, reopened):
            event.then(self.show_choice, choice, self.records, **at_once)
        ran = [
            self.trial.click(self.run_some, inputs, outputs, **quiet),
            self.run_button.click(self.run_all, inputs, outputs, **quiet),
            self.again.click(self.run_again, self.order, outputs, **quiet),
            self.samples.click(self.run_samples, [self.order, reader], [*opened, self.schema], **quiet),
        ]
        choices = [*choice, reader]
        for event in (*begun, attached, back, reopened):
            event.then(self.describe, choices, [self.inputs, self.schema], **at_once)
        changed = [self.column.change, self.schema.change, of_extract.code.change, reader.change]
        gr.on(changed, self.describe, choices, [self.inputs, self.schema], trigger_mode="always_last", **at_once)
        self.order.input(self.sort, self.order, self.records, **at_once)
        self.stop_button.click(self.stop, None, None, **at_once)
        reviewed = self.review.connect(self.records, [self.progress, self.records, *self.downloads, self.unwritten])
        demo.load(self.list_recent, None, self.recent, **at_once)
        self.recent.list(self.list_recent, None, self.recent, **at_once)
        for event in (*begun, reopened, *ran, *reviewed):
            event.then(self.list_recent, None, self.recent, **at_once)

    def _build_inputs(self) -> None:
        # Its heading is there on small screens only, where batch.js folds it when files are open.
        with gr.Accordion(INPUTS, elem_id="batch-inputs", elem_classes="fold") as self.inputs:
            self.files = gr.File(
                label="CSV, Excel, JSONL, texts, PDFs, zip", file_count="multiple", file_types=FILE_TYPES, height=150,
                elem_id="batch-files",
            )
            with gr.Row():
                # Without file_types, with which Gradio would refuse a whole folder for one unsupported file.
                self.folder = gr.UploadButton("Open a folder", file_count="directory", size="sm", min_width=120)
                self.recent = gr.HTML(
                    {}, html_template='<select aria-label="Recent batches" hidden></select>', apply_default_css=False,
                    elem_id="batch-recent", js_on_load=read_script("recent"),
                )
            self.column = gr.Dropdown([], label="Column with the text", interactive=True)
            accept_unsent(self.column)
            self.schema = gr.Dropdown(
                [("as in Extract", AS_IN_EXTRACT), *self.examples.schemas], value=AS_IN_EXTRACT,
                label="Schema of a record",
            )
            self.reader.build()
        with gr.Row():
            self.trial = gr.Button(
                f"Try the first {NUM_PREVIEWED}", interactive=False, elem_id="batch-trial", min_width=120
            )
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
                True, label="Most to check first", container=False, min_width=150, elem_id="batch-order"
            )
        self.unwritten = gr.HTML("", apply_default_css=False)
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
        known = self.tables.paths.get(session, [])
        if paths is not None and list(paths) in (known, _list_uploads(known)):
            return gr.skip()  # the page shows what is open; Clear sends None
        stopped = await self._leave_run(session)
        note = render_note("The run before was stopped; what is done is kept under Recent.") if stopped else ""
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
            **self._hide_files(),
        }

    async def open_table(self, opened: Opened, reader: str, request: gr.Request) -> Update:
        """Open the table of the Extract tab, to be read with the schema and by the model that are chosen there."""
        paths = [str(opened.path)]
        chosen = {self.schema: AS_IN_EXTRACT, self.reader.dropdown: await self.reader.show(reader)}
        return {**await self.open_files(paths, AS_IN_EXTRACT, request), **chosen, self.files: paths}

    async def describe(self, column: str | None, schema: str, code: str, model: str, request: gr.Request) -> Update:
        """Return the heading of the folded inputs: what is open, and how it will be read; and the schemas to choose."""
        session = str(request.session_hash)
        paths = self.tables.paths.get(session, [])
        parts = [name_files(paths), column or "no column", self._name_schema(schema, code), model]
        schemas = gr.update(choices=self._list_schemas(session, schema, code))
        return {self.inputs: gr.update(label=" · ".join(parts) if paths else INPUTS), self.schema: schemas}

    def _list_schemas(self, session: str, schema: str, code: str) -> list[tuple[str, str]]:
        """Return the schemas to choose; the chosen one and that of the shown records are among them in any case."""
        run, texts = self.shown.get(session), {AS_IN_EXTRACT: code, **self.examples.schemas}
        known = [parse_schema(text) for text in texts.values()]
        others = [schema] if parse_schema(schema) is not None else []
        others += [json.dumps(run.schema)] if run is not None and run.schema not in known else []
        named = [(f"{self._name_schema(text, code)}, as read before", text) for text in dict.fromkeys(others)]
        as_there = f"as in Extract ({self._name_schema(AS_IN_EXTRACT, code)})"
        return [(as_there, AS_IN_EXTRACT), *((name, name) for name in self.examples.schemas), *named]

    def _name_schema(self, schema: str, code: str) -> str:
        """Return what people call a choice of a schema: the name of an example, or the title of another schema."""
        title = (parse_schema(self.find_schema(schema, code)) or {}).get("title")
        return schema if schema in self.examples.schemas else str(title or "no title")[:MAX_TITLE_CHARS]

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
        if column is None and table.columns:
            return gr.skip()  # the page has not drawn the column that was picked for its files yet
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
            checked = await asyncio.to_thread(self.checker.check, self.find_schema(name, code))
        except GrammarError:
            return False
        return checked.schema == run.schema

    def leave(self, session: str) -> None:
        """Free the tables of a session whose page was closed or lost its connection; its run goes on."""
        self.stops.ask(session, "leave")
        self.tables.drop(session)
        self.shown.pop(session, None)

    async def list_recent(self, request: gr.Request) -> dict[str, Any]:
        """Return the visitor's recent runs."""
        return {"recent": await self.store.run(list_runs, find_owner(request))}

    async def reopen(self, request: gr.Request, data: gr.EventData) -> AsyncGenerator[Update, None]:
        """Show one of the visitor's recent runs in place of what the page shows; a run that goes on is not stopped."""
        session, batch_id = str(request.session_hash), str(data._data["id"])
        if await self.store.run(objects.get, find_owner(request), "job", batch_id) is None:
            raise gr.Error("This batch is not kept any more.", print_exception=False)
        await self.stops.end(session)
        self.leave(session)
        yield {self.review.panel: gr.update(visible=False)}
        async with aclosing(self.attach(batch_id, request, is_as_read=True)) as updates:
            async for update in updates:
                yield update

    async def attach(
        self, batch_id: str | None, request: gr.Request, *, is_as_read: bool = False
    ) -> AsyncGenerator[Update, None]:
        """Show the files that this browser opened before the page was loaded, and the run that it began on them.

        Args:
            is_as_read: choose what the run was begun with, whatever was chosen since.
        """
        session, owner = str(request.session_hash), find_owner(request)
        job = await self.store.run(objects.get, owner, "job", str(batch_id))
        found = job or await self.store.run(objects.get, owner, "opened", str(batch_id))
        if found is None or session in self.shown or self.tables.get(session).rows:
            yield gr.skip()
            return
        opened = found.body.get("opened", {}) if job else found.body
        if job and is_as_read:
            schema, texts = job.body["request"]["schema"], self.examples.schemas
            name = next((name for name, text in texts.items() if parse_schema(text) == schema), json.dumps(schema))
            opened |= {"column": job.body.get("column", opened.get("column")), "schema": name}
        if opened.get("paths"):
            with self.stops.running(session) as flag:
                drawn = await self._open_again(session, str(batch_id), opened, flag)
            if flag.asked:
                return  # a person has opened something else meanwhile
            yield drawn
        if job is None:
            return
        async with aclosing(self._show(session, self._make_run(owner, job))) as updates:
            async for update in updates:
                yield update

    async def _open_again(self, session: str, batch_id: str, opened: dict[str, Any], flag: Flag) -> Update:
        """Open the files of an earlier page with what was chosen for them."""
        paths, column, schema = opened["paths"], opened["column"], opened["schema"]
        table = NO_TABLE
        if await asyncio.to_thread(lambda: all(map(os.path.isfile, paths))):
            with suppress(UnreadableSource):
                table = await open_table(paths)
        if flag.asked:
            return gr.skip()
        known: Update = {self.schema: schema if schema in self.examples.schemas else AS_IN_EXTRACT}
        if parse_schema(schema) is not None:
            known = {self.schema: gr.update(choices=self._list_schemas(session, schema, ""), value=schema)}
        if not table.rows:
            choices = [column] if column else []
            shown = {self.column: gr.update(choices=choices, value=column), self.progress: render_note(GONE)}
            return {**known, **shown, self.files: []}
        self.tables.put(session, table, paths)
        return {**self._show_table(table, column, batch_id), **known, self.files: _list_uploads(paths)}

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
        """Sort the records by how much there is to check in them, or in row order."""
        run = self.shown.get(str(request.session_hash))
        if run is None:
            return gr.skip()
        # A run that goes on keeps this order.
        run.asking_first = order
        return render_records(run)


def _list_uploads(paths: Sequence[str]) -> list[str]:
    """Return the files that the page lists as open: those that a visitor has sent, without the samples."""
    root = Path(get_upload_folder())
    return [path for path in paths if Path(path).is_relative_to(root)]
