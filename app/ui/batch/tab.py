"""The batch tab: open files, pick a column, extract records with progress, download the results."""

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
from app.ui.explain import EXPLAINED, Explanation, explain, explain_bug
from app.ui.extract.run import NUM_SAMPLES, Shown, show
from app.ui.extract.schema_panel import SchemaPanel, SchemaParts
from app.ui.extract.tab import NO_FILE
from app.ui.pacing import pace
from app.ui.scripts import read_script
from app.ui.stops import Flag, Stops
from engine import Engine

FILE_TYPES = [
    ".csv", ".tsv", ".jsonl", ".ndjson", ".txt", ".md", ".eml", ".log", ".html", ".xml", ".json", ".pdf",
]  # fmt: skip
FILE_NAMES = {"jsonl": "JSONL", "csv": "CSV", "parquet": "Parquet"}
AS_IN_EXTRACT = "as in the Extract tab"
UPDATE_INTERVAL_S = 0.25

Update = tuple[Any, ...]  # progress, records, buttons (try, run, stop), downloads


class BatchTab:
    """Extracts records from many texts with one schema on one engine."""

    def __init__(
        self, engine: Engine, examples: Examples, reviews: Stops, interval_s: float = UPDATE_INTERVAL_S
    ) -> None:
        self.reviews = reviews  # runs of the Extract tab, which `open_row` ends
        self.engine = engine
        self.examples = examples
        self.interval_s = interval_s
        self.stops = Stops()
        self.tables = OpenTables()
        self.batches: dict[str, BatchRun] = {}  # the latest run of each session
        self.checker = SchemaChecker()

    def build(self, of_extract: SchemaParts, review: Sequence[Any]) -> None:
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
                        "Run failed and flagged rows again", visible=False, size="sm", min_width=220
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
                    js_on_load=read_script("batch"),
                )
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        opened = [column, progress, records, trial, run]
        files.change(self.open_files, files, opened, queue=False, **quiet)
        folder.upload(self.open_folder, folder, opened, queue=False, **quiet)
        column.input(self.show_column, column, records, queue=False, **quiet)
        inputs = [column, schema, of_extract.code, of_extract.problem]
        outputs = [progress, records, trial, run, stop, *downloads, again]
        inputs.append(order)
        trial.click(self.run_some, inputs, outputs, **quiet)
        run.click(self.run_all, inputs, outputs, **quiet)
        again.click(self.run_again, inputs, outputs, **quiet)
        order.input(self.sort, order, records, queue=False, **quiet)
        records.open(self.open_row, None, list(review), queue=False, **quiet)
        stop.click(self.stop, None, None, queue=False, **quiet)

    async def open_files(self, paths: Sequence[str] | None, request: gr.Request) -> Update:
        """Open files as a table; a run over earlier files is stopped first, because the page no longer shows it."""
        session = str(request.session_hash)
        was_running = await self.stops.end(session)
        note = render_note("The run before was stopped; what is done is kept.") if was_running else ""
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
        return picker, note, render_preview(table, column), is_ready, is_ready

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
        """Stop the runs of a session whose page was closed, and free its tables."""
        self.stops.ask(session, "leave")
        self.tables.drop(session)
        self.batches.pop(session, None)

    async def run_some(self, request: gr.Request, *given: Any) -> AsyncGenerator[Update, None]:
        """Extract the first rows only, to test the schema."""
        async with aclosing(self.run_all(request, *given, num_rows=NUM_PREVIEWED)) as updates:
            async for update in updates:
                yield update

    async def run_again(self, request: gr.Request, *given: Any) -> AsyncGenerator[Update, None]:
        """Extract failed and flagged rows again, with a vote and a second reading."""
        batch = self.batches.get(str(request.session_hash))
        async with aclosing(self.run_all(request, *given, again=batch)) as updates:
            async for update in updates:
                yield update

    async def sort(self, order: bool, request: gr.Request) -> Any:
        """Sort the records by confidence, lowest first, or in row order."""
        batch = self.batches.get(str(request.session_hash))
        if batch is None:
            return gr.skip()
        # A run that goes on keeps this order.
        batch.lowest_first = order
        return render_records(batch)

    async def open_row(self, request: gr.Request, data: gr.EventData) -> Update:
        """Open a row in the Extract tab for review, in place of an extraction that runs there."""
        batch, index = self.batches.get(str(request.session_hash)), int(data._data["row"])
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
            again: a run whose doubtful rows are extracted again.
        """
        session = str(request.session_hash)
        batch = again or BatchRun(self.tables.get(session).rows[:num_rows], column)
        refused = problem if name == AS_IN_EXTRACT else None
        if not batch.rows:
            refused = Explanation(
                "These files are not open any more.",
                "Others needed the room, or the connection was lost.",
                "Open them again.",
            )
        if refused is not None:
            yield refused.as_html(), *(gr.skip() for _ in range(8))
            return
        # One run at a time, because two would overwrite each other's display.
        await self.stops.end(session)
        with self.stops.running(session) as flag:
            self.batches[session] = batch
            batch.lowest_first = order
            yield "", render_records(batch), *_buttons(is_busy=True), *_hide_files()
            try:
                text = self.examples.schemas.get(name, schema)
                checked = await asyncio.to_thread(self.checker.check, text)
                extractor = Extractor(
                    self.engine, Limits(), num_samples=NUM_SAMPLES if again else 1, recheck=again is not None
                )
                indices = None if again is None else again.list_doubtful()
                stream = batch.run(extractor, checked.schema, f"session-{session}", indices)
                async with aclosing(self._watch(batch, stream, flag)) as updates:
                    async for update in updates:
                        yield update
                progress = render_progress(batch, "stopped" if flag.asked else "done")
                yield _end(flag, progress, render_records(batch), await self._save(batch))
            except EXPLAINED as error:
                what = explain(error, self.engine.state).as_html()
                kept = render_progress(batch, "stopped") if batch.records else ""
                yield _end(flag, what + kept, render_records(batch), await self._save(batch))
            except Exception as error:
                # Raise unexpected errors, but enable the buttons again.
                yield _end(flag, explain_bug(error).as_html(), gr.skip(), _hide_files())
                raise

    async def _watch(
        self, batch: BatchRun, stream: AsyncGenerator[int, None], flag: Flag
    ) -> AsyncGenerator[Update, None]:
        """Update the page while the batch runs; closing the generator aborts running rows."""
        rest = tuple(gr.skip() for _ in range(7))
        drawn = 0.0
        async with aclosing(pace(stream, 0)) as steps:
            async for _ in steps:
                if flag.asked:
                    return
                now = time.monotonic()
                if now - drawn >= self.interval_s:
                    drawn = now
                    yield render_progress(batch, "running"), render_records(batch), *rest

    def stop(self, request: gr.Request) -> None:
        """End the batch and keep the finished records."""
        self.stops.ask(str(request.session_hash))

    async def _save(self, batch: BatchRun) -> list[Any]:
        """Return the download buttons with their files."""
        if not batch.records:
            return _hide_files()
        again = gr.update(visible=bool(batch.list_doubtful()))
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


def _buttons(is_busy: bool = False) -> tuple[Any, Any, Any]:
    idle = gr.update(interactive=not is_busy)
    return idle, idle, gr.update(visible=is_busy)


def _hide_files() -> list[Any]:
    return [gr.update(visible=False)] * 4  # enable the button that runs rows again


def _end(flag: Flag, progress: str, records: Any, downloads: list[Any]) -> Update:
    """Final update of a batch run. If the table was replaced, only hide the last button and set the downloads."""
    if flag.asked == "leave":
        return *(gr.skip() for _ in range(4)), gr.update(visible=False), *downloads
    return progress, records, *_buttons(), *downloads
