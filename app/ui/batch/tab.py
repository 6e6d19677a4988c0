"""The batch tab: open files, pick a column, extract records with progress, download the results.

A run belongs to the server: it goes on when its page is closed or loses its connection, and a page that is loaded
later shows it again.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder

from app.extraction import Extractor, Limits
from app.extraction.export import FORMATS, ExportError, export
from app.extraction.schema_check import SchemaChecker
from app.extraction.sources import UnreadableSource
from app.ui.batch.run import BatchRun
from app.ui.batch.tables import NO_TABLE, OpenTables, open_table
from app.ui.batch.view import (
    EMPTY_BATCH,
    NUM_PREVIEWED,
    render_note,
    render_preview,
    render_progress,
    render_records,
)
from app.ui.examples import Examples
from app.ui.explain import Explanation, explain_bug
from app.ui.extract.run import Shown, show
from app.ui.extract.schema_panel import SchemaPanel, SchemaParts
from app.ui.extract.tab import NO_FILE
from app.ui.jobs import Jobs
from app.ui.scripts import read_kept, read_script
from app.ui.stops import Stops
from engine import Engine

FILE_TYPES = [
    ".csv", ".tsv", ".jsonl", ".ndjson", ".txt", ".md", ".eml", ".log", ".html", ".xml", ".json", ".pdf",
]  # fmt: skip
FILE_NAMES = {"jsonl": "JSONL", "csv": "CSV", "parquet": "Parquet"}
AS_IN_EXTRACT = "as in the Extract tab"
UPDATE_INTERVAL_S = 0.25
# Runs that no page shows: they are kept, and go on, for this time and up to this number.
KEEP_S = 12 * 3600.0
MAX_UNSEEN = 8

Update = tuple[Any, ...]  # progress, records, buttons (try, run, stop), downloads, again
UNCHANGED: Update = tuple(gr.skip() for _ in range(9))


class BatchTab:
    """Extracts records from many texts with one schema on one engine."""

    def __init__(
        self, engine: Engine, examples: Examples, reviews: Stops, interval_s: float = UPDATE_INTERVAL_S
    ) -> None:
        self.reviews = reviews  # runs of the Extract tab, which `open_row` ends
        self.engine = engine
        self.examples = examples
        self.interval_s = interval_s
        self.stops = Stops()  # of the handlers that show a run
        self.tables = OpenTables()
        self.runs: Jobs[BatchRun] = Jobs(engine, KEEP_S, MAX_UNSEEN)
        self.shown: dict[str, BatchRun] = {}  # the run that each session's page shows
        self.checker = SchemaChecker()

    def build(self, demo: gr.Blocks, of_extract: SchemaParts, review: Sequence[Any]) -> None:
        """Put the tab's components on the page and connect them.

        Args:
            review: what `open_row` fills: the Extract tab's results, its text, its schema, and the choice of the tab.
        """
        with gr.Row(elem_id="batch", equal_height=False):
            with gr.Column(scale=4, min_width=300):
                files = gr.File(
                    label="CSV, JSONL, texts or PDFs", file_count="multiple", file_types=FILE_TYPES, height=150,
                    elem_id="batch-files",
                )  # fmt: skip
                # Without file_types, with which Gradio would refuse a whole folder for one unsupported file.
                folder = gr.UploadButton("Open a folder", file_count="directory", size="sm")
                column = gr.Dropdown([], label="Column with the text", interactive=True)
                schema = gr.Dropdown(
                    [AS_IN_EXTRACT, *self.examples.schemas], value=AS_IN_EXTRACT, label="Schema of a record"
                )
                with gr.Row():
                    trial = gr.Button(f"Try the first {NUM_PREVIEWED}", interactive=False, min_width=120)
                    run = gr.Button(
                        "Run all", variant="primary", interactive=False, elem_id="batch-run", min_width=120
                    )
                    stop = gr.Button("Stop", variant="stop", visible=False, min_width=80)
            with gr.Column(scale=9, min_width=300):
                progress = gr.HTML("", elem_id="batch-progress", apply_default_css=False)
                with gr.Row(elem_classes="bar"):
                    downloads = [
                        gr.DownloadButton(_label(file_format), visible=False, size="sm", min_width=120)
                        for file_format in FORMATS
                    ]
                    again = gr.Button(
                        "Run failed rows again", visible=False, size="sm", min_width=220
                    )
                    order = gr.Checkbox(
                        False,
                        label="Lowest confidence first",
                        container=False,
                        min_width=140,
                        elem_id="batch-order",
                    )
                records = gr.HTML(
                    EMPTY_BATCH,
                    elem_id="batch-records",
                    apply_default_css=False,
                    js_on_load=read_script("kept") + read_script("batch"),
                )
        # Never displayed; carries the id of the run that the browser knows into the event.
        known = gr.HTML("", html_template="", apply_default_css=False, elem_id="kept-batch")
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        outputs = [progress, records, trial, run, stop, *downloads, again]
        opened = [column, *outputs]
        files.change(self.open_files, files, opened, queue=False, **quiet)
        folder.upload(self.open_folder, folder, opened, queue=False, **quiet)
        column.input(self.show_column, column, records, queue=False, **quiet)
        inputs = [column, schema, of_extract.code, of_extract.problem]
        inputs.append(order)
        demo.load(self.attach, known, outputs, js=read_kept("readBatch"), **quiet)
        trial.click(self.run_some, inputs, outputs, **quiet)
        run.click(self.run_all, inputs, outputs, **quiet)
        again.click(self.run_again, inputs, outputs, **quiet)
        order.input(self.sort, order, records, queue=False, **quiet)
        records.open(self.open_row, None, list(review), queue=False, **quiet)
        stop.click(self.stop, None, None, queue=False, **quiet)

    async def open_files(self, paths: Sequence[str] | None, request: gr.Request) -> Update:
        """Open files as a table; a run over earlier files is stopped first, because the page no longer shows it."""
        session = str(request.session_hash)
        before = self.shown.get(session)
        is_running = before is not None and before.is_running
        await self._leave_run(session)
        stopped = before if before is not None and is_running and before.is_over else None
        note = render_note("The run before was stopped; what is done is kept.") if stopped else ""
        # Before reading the new table, because a visitor has one table at a time.
        self.tables.drop(session)
        try:
            table = await open_table(paths or ())
        except UnreadableSource as error:
            refused = Explanation("These files cannot be opened.", f"{error}.", "")
            table, note = NO_TABLE, refused.as_html() + note
        self.tables.put(session, table)
        column = table.pick_text_column()
        is_ready = gr.update(interactive=column is not None)
        picker = gr.update(choices=list(table.columns), value=column)
        downloads = await self._save(stopped) if stopped else UNCHANGED[5:]
        buttons = is_ready, is_ready, gr.update(visible=False)
        return picker, note, render_preview(table, column), *buttons, *downloads

    async def open_folder(self, paths: Sequence[str] | None, request: gr.Request) -> Update:
        """Open a folder, with those of its files that are supported."""
        fitting = [path for path in paths or () if Path(path).suffix.lower() in FILE_TYPES]
        picker, progress, *rest = await self.open_files(fitting, request)
        if num_others := len(paths or ()) - len(fitting):
            progress += render_note(f"Files of other types in the folder, left out: {num_others:,}.")
        return picker, progress, *rest

    def show_column(self, column: str | None, request: gr.Request) -> Any:
        """Preview another column first; during a run the records stay."""
        session = str(request.session_hash)
        if self.stops.is_running(session):
            return gr.skip()
        return render_preview(self.tables.get(session), column)

    def leave(self, session: str) -> None:
        """Free the tables of a session whose page was closed or lost its connection; its run goes on."""
        self.stops.ask(session, "leave")
        self.tables.drop(session)
        if run := self.shown.pop(session, None):
            self.runs.release(run, session)
            asyncio.get_running_loop().call_later(KEEP_S + 1, self.runs.drop_old)

    async def attach(self, run_id: str | None, request: gr.Request) -> AsyncGenerator[Update, None]:
        """Show the run that this browser began before the page was loaded."""
        session, run = str(request.session_hash), self.runs.find(str(run_id))
        if run is None or session in self.shown or self.tables.get(session).rows:
            yield UNCHANGED
            return
        async with aclosing(self._show(session, run)) as updates:
            async for update in updates:
                yield update

    async def run_some(self, request: gr.Request, *given: Any) -> AsyncGenerator[Update, None]:
        """Extract the first rows only, to test the schema."""
        async with aclosing(self.run_all(request, *given, num_rows=NUM_PREVIEWED)) as updates:
            async for update in updates:
                yield update

    async def run_again(self, request: gr.Request, *given: Any) -> AsyncGenerator[Update, None]:
        """Extract failed rows again."""
        run = self.shown.get(str(request.session_hash))
        async with aclosing(self.run_all(request, *given, again=run)) as updates:
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

    async def open_row(self, request: gr.Request, data: gr.EventData) -> Update:
        """Open a row in the Extract tab for review, in place of an extraction that runs there."""
        batch, index = self.shown.get(str(request.session_hash)), int(data._data["row"])
        if batch is None or batch.records.get(index, {}).get("record") is None:
            raise gr.Error("This row is not here any more. Run the batch again.")
        await self.reviews.end(str(request.session_hash))
        text = batch.rows[index].pick(batch.column).text
        shown = Shown(batch.restore(index), text, batch.schema)
        views = SchemaPanel(self.examples).show(json.dumps(batch.schema, indent=2, ensure_ascii=False))
        return (*show(shown, {}), *NO_FILE, text, *views, gr.update(selected="extract"))

    async def run_all(
        self,
        request: gr.Request,
        column: str,
        name: str,
        schema: str,
        problem: Explanation | None,
        order: bool,
        *,
        num_rows: int | None = None,
        again: BatchRun | None = None,
    ) -> AsyncGenerator[Update, None]:
        """Extract every row; finished records stay and can be downloaded after a stop or failure.

        Args:
            schema, problem: of the Extract tab; they count when no example schema of that name is chosen.
            order: whether records with the lowest confidence come first.
            again: a run whose failed rows are extracted again.
        """
        session = str(request.session_hash)
        run = again or BatchRun(self.tables.get(session).rows[:num_rows], column)
        refused = problem if name == AS_IN_EXTRACT else None
        if not run.rows:
            refused = Explanation(
                "These files are not open any more.",
                "Others needed the room, or the connection was lost.",
                "Open them again.",
            )
        if refused is not None:
            yield refused.as_html(), *UNCHANGED[1:]
            return
        # A page shows one run at a time; two would overwrite each other's display.
        await self._leave_run(session)
        run.lowest_first = order
        if not run.is_running:  # by another page that shows it
            text = self.examples.schemas.get(name, schema)
            self.runs.start(run, self._extract(run, text, f"session-{session}", again is not None))
        async with aclosing(self._show(session, run)) as updates:
            async for update in updates:
                yield update

    async def _extract(self, run: BatchRun, schema: str, salt: str, is_again: bool) -> None:
        checked = await asyncio.to_thread(self.checker.check, schema)
        failed = run.list_failed() if is_again else None
        await run.run(Extractor(self.engine, Limits()), checked.schema, salt, failed)

    async def _show(self, session: str, run: BatchRun) -> AsyncGenerator[Update, None]:
        """Update the page while the run goes on, and at its end; closing the generator leaves the run alone."""
        self.shown[session] = run
        self.runs.take(run, session)
        with self.stops.running(session) as flag:
            yield render_progress(run, "running"), render_records(run), *_buttons(True), *_hide_files()
            drawn = time.monotonic()
            async with aclosing(run.watch()) as changes:
                async for _ in changes:
                    if flag.asked:
                        return
                    now = time.monotonic()
                    if now - drawn >= self.interval_s:
                        drawn = now
                        yield render_progress(run, "running"), render_records(run), *UNCHANGED[2:]
            if flag.asked:
                return
            progress = render_progress(run, "stopped" if run.is_stopped or run.problem else "done")
            if run.problem is not None:
                progress = run.problem.as_html() + (progress if run.records else "")
            try:
                yield progress, render_records(run), *self._open_buttons(session), *await self._save(run)
            except Exception as error:
                # Raise unexpected errors, but enable the buttons again.
                yield explain_bug(error).as_html(), gr.skip(), *self._open_buttons(session), *_hide_files()
                raise

    async def _leave_run(self, session: str) -> None:
        """Let the page show no run; the one that it showed is stopped if no other page shows it."""
        await self.stops.end(session)
        run = self.shown.pop(session, None)
        if run is None:
            return
        self.runs.release(run, session)
        if not run.readers and run.is_running:
            run.stop()
            async with aclosing(run.watch()) as changes:
                async for _ in changes:
                    pass

    def stop(self, request: gr.Request) -> None:
        """End the batch and keep the finished records."""
        if run := self.shown.get(str(request.session_hash)):
            run.stop()

    def _open_buttons(self, session: str) -> tuple[Any, Any, Any]:
        return _buttons(False, bool(self.tables.get(session).rows))

    async def _save(self, batch: BatchRun) -> list[Any]:
        """Return the download buttons with their files."""
        if not batch.records:
            return _hide_files()
        again = gr.update(visible=bool(batch.list_failed()))
        return [*await asyncio.to_thread(_write_files, batch.ordered), again]


def _label(file_format: str) -> str:
    return f"Download {FILE_NAMES[file_format]}"


def _write_files(records: list[dict[str, Any]]) -> list[Any]:
    # In Gradio's own folder, from which old files are deleted.
    root = Path(get_upload_folder())
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="batch-", dir=root))
    buttons = []
    for file_format in FORMATS:
        path = folder / f"records.{file_format}"
        try:
            path.write_bytes(export(records, file_format))
            # An earlier failure disabled the button and changed its label.
            buttons.append(
                gr.update(visible=True, interactive=True, value=str(path), label=_label(file_format))
            )
        except ExportError as error:
            buttons.append(gr.update(visible=True, interactive=False, value=None, label=str(error)))
    return buttons


def _buttons(is_busy: bool, is_ready: bool = False) -> tuple[Any, Any, Any]:
    idle = gr.update(interactive=is_ready)
    return idle, idle, gr.update(visible=is_busy)


def _hide_files() -> list[Any]:
    return [gr.update(visible=False)] * 4  # enable the button that runs rows again
