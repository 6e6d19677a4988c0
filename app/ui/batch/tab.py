"""The batch tab: its layout and events.

opening.py opens files and earlier runs, runner.py extracts their records, review.py corrects them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import gradio as gr

from app.api.context import ApiContext
from app.api.model_pool import ModelPool
from app.extraction.export import FORMATS
from app.ui.batch.downloads import label
from app.ui.batch.opening import FILE_TYPES, INPUTS, BatchOpening
from app.ui.batch.review import RowReview
from app.ui.batch.runner import AS_IN_EXTRACT, UPDATE_INTERVAL_S
from app.ui.batch.view import (
    EMPTY_BATCH,
    NUM_PREVIEWED,
    STALE_NOTE,
    render_records,
)
from app.ui.choices import OpenDropdown
from app.ui.examples import Examples
from app.ui.extract.desk import Update
from app.ui.extract.schema_panel import SchemaPanel
from app.ui.scripts import read_kept, read_script

TO_BATCH = """(opened, reader) => {
try { sessionStorage.setItem("%s", reader); } catch { /* forbidden */ }
location.hash = "batch";
return [opened, reader];
}"""


class BatchTab(BatchOpening):
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
            self.column = OpenDropdown([], label="Column with the text", interactive=True)
            self.schema = OpenDropdown(
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
