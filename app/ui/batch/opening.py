"""Opens files and earlier runs in the batch tab, and keeps the column and the schema that are chosen for them."""

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

from app.extraction.sources import OFFICE_TYPES, TABLE_TYPES, Table, UnreadableSource
from app.store import Connection, StoreError, jobs, objects
from app.ui.batch.recent import list_runs, name_files
from app.ui.batch.review import RowReview
from app.ui.batch.run import BatchRun
from app.ui.batch.runner import AS_IN_EXTRACT, BatchRunner
from app.ui.batch.tables import NO_TABLE, open_table
from app.ui.batch.view import render_note, render_preview, render_records
from app.ui.explain import Explanation
from app.ui.extract.desk import Update
from app.ui.extract.pages import Opened
from app.ui.extract.schema_panel import MAX_TITLE_CHARS, parse_schema
from app.ui.owner import find_owner
from app.ui.stops import Flag
from grammar import GrammarError

FILE_TYPES = [*TABLE_TYPES, ".txt", ".md", ".log", ".xml", ".json", ".pdf", ".zip", *OFFICE_TYPES]
GONE = "The server does not have the files any more: open them again to run more rows."
INPUTS = "Files, column and schema"
MAX_OPENED, MAX_OPENED_BYTES = 20, 1_000_000  # of one owner, as the projects of the Extract tab


class BatchOpening(BatchRunner):
    """Opens files and earlier runs for the pages of all sessions, and follows what is chosen for them."""

    files: gr.File
    column: gr.Dropdown
    schema: gr.Dropdown
    inputs: gr.Accordion
    review: RowReview

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
                if not flag.asked:
                    yield drawn
            if flag.asked:
                return  # a person has opened something else meanwhile
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


def _list_uploads(paths: Sequence[str]) -> list[str]:
    """Return the files that the page lists as open: those that a visitor has sent, without the samples."""
    root = Path(get_upload_folder())
    return [path for path in paths if Path(path).is_relative_to(root)]
