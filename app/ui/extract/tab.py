"""The extraction workbench and front page: a document beside its record, and what to do with a text of one's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import gradio as gr

from app.api.model_pool import ModelPool
from app.extraction import Limits
from app.extraction.export import FILE_RULE
from app.store import Store
from app.ui.examples import Examples
from app.ui.extract.projects import render_name
from app.ui.extract.reliability import render_calibration
from app.ui.extract.run import add_example
from app.ui.extract.saving import FILE_FORMATS, SAVE, save_record
from app.ui.extract.schema_panel import BEGIN_CHANGE, END_CHANGE
from app.ui.extract.source import FILE_TYPES, ExtractSource
from app.ui.pacing import UPDATE_INTERVAL_S
from app.ui.scripts import read_script
from engine import Engine

IN_BATCH = "A table, read here as one text. In Batch each of its rows becomes a record ›"
LEAD = (
    '<button type="button" class="skip">To the record</button>'
    '<p class="lead"><b>Turn documents into data you can check.</b> For all who retype mails, invoices or CVs: each '
    "value shows its place, doubtful ones ask you, nothing leaves this machine.</p>"
)
# The project that this browser tab had open, and the text that was typed since; whether the page was opened here by
# somebody who has neither: the proof is not for others.
# The example that the page has read by itself shows its evidence, unless a person has begun to edit the text.
SHOW_EVIDENCE = """() => {
const [text, evidence] = ["Text", "Evidence"].map((name) =>
  [...document.querySelectorAll('#source-tabs [role="tab"]')].find((tab) => tab.textContent.trim() === name));
if (text?.ariaSelected !== "true" || document.activeElement?.matches("#source textarea")) return;
if (document.querySelector("#extract .record .value")) evidence.click();
}"""
READ_OPENING = """(...inputs) => {
const read = (key) => { try { return sessionStorage.getItem(key) || ""; } catch { return ""; } };
const project = read("troupe-project"), draft = read("troupe-draft #source textarea");
const box = document.querySelector("#source textarea");
const is_new = ["", "#extract"].includes(location.hash) && !draft && !project && !box?.value;
// What is typed before the proof arrives is given back by review.js.
const span = () => document.querySelector("#source-name span");
const keep = () => { if (!span()?.dataset.name) globalThis.typedBefore = box.value; };
if (is_new && box) box.oninput = keep;
return [{ project, draft, is_new, reader: read("troupe-reader extract") }, ...inputs.slice(1)];
}"""
BEGIN_REOPENING = "() => { globalThis.typedBefore = null; globalThis.changes.begin(); }"
KEEP_PROJECT = """watch("value", () => {
if (typeof props.value !== "string") return;
try { sessionStorage.setItem("troupe-project", props.value); } catch { /* forbidden */ }
});"""


class ExtractTab(ExtractSource):
    """The layout of one workbench on one engine; ExtractRun and ExtractSource have its handlers."""

    def __init__(
        self, engine: Engine, examples: Examples, store: Store, interval_s: float = UPDATE_INTERVAL_S,
        pool: ModelPool | None = None,
    ) -> None:
        super().__init__(engine, examples, store, interval_s, pool)

    def build(self, demo: gr.Blocks) -> None:
        """Put the tab's components on the page and connect them."""
        gr.HTML(LEAD, apply_default_css=False)
        with gr.Row(elem_id="extract", elem_classes="desk", equal_height=False):
            with gr.Column(scale=1, min_width=300, elem_classes="source-side"):
                self._build_source()
                self.panel.build_chooser()
                with gr.Row(elem_classes="bar"):
                    self.run_button = gr.Button("Extract", variant="primary", elem_id="run", min_width=120)
                    self.reader.build()
                    self.stop_button = gr.Button("Stop", variant="stop", visible=False, elem_id="stop", min_width=80)
                self.panel.build(demo)
                settings, add, add_approved = self._build_settings()
            with gr.Column(scale=1, min_width=300, elem_classes="record-side"):
                self.read_again = gr.Button("", size="sm", visible=False, elem_id="read-again")
                self.desk.build_record()
                with gr.Row(elem_classes="bar", elem_id="save-record"):
                    saves = [gr.Button(name, size="sm", scale=0, min_width=90) for name in FILE_FORMATS.values()]
                    gr.HTML(f'<p class="hint-line">{FILE_RULE}</p>', apply_default_css=False)
                self.saved = gr.HTML({}, html_template="", apply_default_css=False, elem_id="saved-record")
                self.figures = gr.HTML("", elem_id="figures", apply_default_css=False)
                self.calibration = gr.HTML(
                    render_calibration(self.engine), elem_id="calibration", apply_default_css=False
                )
        # Never displayed: carries what READ_OPENING has read into the event, and the project's id to the browser.
        self.kept = gr.HTML(
            {}, html_template="", apply_default_css=False, elem_id="kept-project", js_on_load=KEEP_PROJECT
        )
        self.project = gr.State("")
        self._connect(demo, settings, add, add_approved)
        for file_format, button in zip(FILE_FORMATS, saves, strict=True):
            button.click(
                partial(save_record, file_format), self.desk.shown, self.saved, queue=False, show_progress="hidden",
                api_visibility="private",
            ).success(None, self.saved, None, js=SAVE, queue=False, show_progress="hidden", api_visibility="private")

    def _build_source(self) -> None:
        with gr.Row(elem_classes="bar"):
            self.name = gr.HTML(render_name("", ""), elem_id="source-name", apply_default_css=False)
            self.sample = gr.Dropdown(
                [("Examples …", ""), *self.examples.samples], value="", label="Examples", show_label=False,
                container=False, interactive=True, min_width=130, scale=0, elem_id="samples",
                visible=bool(self.examples.samples),
            )
            self.recent = gr.HTML(
                {}, html_template='<select aria-label="Recent documents" hidden></select>', elem_id="recent",
                js_on_load=read_script("recent"), apply_default_css=False,
            )
            self.upload = gr.UploadButton(
                "Open file", file_types=FILE_TYPES, size="sm", scale=0, min_width=100, elem_id="open-file"
            )
        self.to_batch = gr.Button(IN_BATCH, size="sm", visible=False, elem_id="to-batch")
        with gr.Tabs(selected="text", elem_id="source-tabs") as self.source_tabs:
            with gr.Tab("Text", id="text"):
                self.text = gr.Textbox(
                    label="Text", show_label=False, lines=13, max_lines=13, elem_id="source", container=False,
                    placeholder="Paste your text here, or drop a file",
                )
            with gr.Tab("Evidence", id="evidence"):
                self.desk.build_evidence()
            with gr.Tab("Image", id="image", visible=False) as self.image_tab:
                self.image = gr.Image(
                    show_label=False, interactive=False, buttons=["fullscreen"], elem_id="source-image", height=420
                )
            with gr.Tab("Page", id="page", visible=False) as self.page_tab:
                self.page = gr.HTML("", elem_id="page", apply_default_css=False, js_on_load=read_script("page"))
        self.opened = gr.State(None)  # Opened, or None

    def _build_settings(self) -> tuple[list[gr.components.Component], gr.Button, gr.Button]:
        limits = Limits()
        with gr.Accordion("Options", open=False, elem_classes="fold"):
            with_limits = gr.Checkbox(
                True, label="Limit texts and lists",
                info=f"To {limits.max_length} characters and {limits.max_items} items, where the schema has no limit.",
            )
            is_verbatim = gr.Checkbox(
                False, label="Only values that occur in the text",
                info="Texts are copied from the source; dates and numbers must appear in it.",
            )
            instructions = gr.Textbox(
                label="Instructions", lines=2, max_lines=4, placeholder="Optional: what the model should know"
            )
            examples = gr.Textbox(
                "", label='Examples, one per line: {"text": ..., "record": ...}', lines=2, max_lines=8,
                elem_classes="mono",
                placeholder="Optional: texts with their correct records, which the model reads first",
            )
            with gr.Row():
                add = gr.Button("Add the shown record", size="sm", min_width=140)
                add_approved = gr.Button("Add approved records", size="sm", min_width=140)
        return [with_limits, is_verbatim, instructions, examples], add, add_approved

    def _connect(
        self, demo: gr.Blocks, settings: list[gr.components.Component], add: gr.Button, add_approved: gr.Button
    ) -> None:
        desk, panel = self.desk, self.panel
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        at_once = {"queue": False, **quiet}
        ran = [*desk.parts, self.figures, desk.trust, self.source_tabs, self.run_button, self.stop_button, self.page]
        ran += [self.reader.dropdown, self.calibration, self.read_again]
        file = [self.name, self.text, self.image, self.image_tab, self.page_tab, self.opened, self.sample]
        file.append(self.to_batch)
        inputs = [self.text, panel.code, panel.problem, *settings, self.opened, self.reader.dropdown]
        proved = [*ran, *file, *panel.views]
        opening = demo.load(self.open, self.kept, [*proved, self.project], js=READ_OPENING, **quiet)
        opening.then(None, js=SHOW_EVIDENCE, **at_once)
        demo.load(self.list_recent, None, self.recent, **at_once)
        self.recent.list(self.list_recent, None, self.recent, **at_once)
        self.recent.pick(None, js=BEGIN_REOPENING, **at_once)
        self.recent.pick(self.reopen, None, [*proved, self.project, self.kept], **at_once).then(
            None, js=END_CHANGE, **at_once
        )
        # "input" also comes when the list is left without a choice.
        self.sample.select(None, js=BEGIN_CHANGE, **at_once)
        for change in panel.changes:  # a run's message about the earlier schema no longer applies
            change.then(desk.judge, desk.shown, desk.badge, **at_once)
        changes = [*panel.changes, self.run_button.click(self.run, inputs, ran, **quiet)]
        larger = self.read_again.click(self.choose_larger, desk.shown, self.reader.dropdown, **at_once)
        changes.append(larger.then(self.run, inputs, ran, **quiet))
        self.stop_button.click(self.stop, None, None, **at_once)
        # One after the other, so that each action builds on the one before.
        changes += [desk.fields.act(
            self.act, [desk.shown, self.project], [*desk.parts, desk.trust, self.project], concurrency_limit=1,
            concurrency_id="review", trigger_mode="multiple", **quiet,
        )]
        desk.on_look(desk.explain, desk.why, desk.fields.redrawn)
        desk.on_look(self.locate, self.page)
        self.page.turn(self.turn, self.opened, self.page, trigger_mode="always_last", **at_once)
        add.click(add_example, [desk.shown, settings[-1]], settings[-1], **at_once)
        add_approved.click(self.add_approved, [desk.shown, settings[-1]], settings[-1], **quiet)
        changes += [
            self.upload.upload(self.open_file, [self.upload, self.reader.dropdown], [*ran, *file], **at_once),
            picked := self.sample.select(self.pick_sample, self.sample, proved, **at_once),
            panel.describe.click(
                self.describe, [panel.wish, self.text, self.opened, self.reader.dropdown], panel.views, **quiet
            ),
        ]
        picked.then(None, js=END_CHANGE, **at_once)
        changes.append(picked.then(self.run_picked, [self.sample, *inputs], [*ran, self.sample], **quiet))
        for change in changes:
            change.then(
                self.keep, [self.project, self.text, panel.code, self.opened, desk.shown], [self.project, self.kept],
                trigger_mode="always_last", **at_once,
            ).then(self.list_recent, None, self.recent, **at_once)

    def connect_opening(self, *opening: Any) -> None:
        """Offer what the loaded models can read whenever one of these events comes: another may have been loaded."""
        self.reader.connect(*opening)
        quiet: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
        gr.on(opening, self.offer_files, None, self.upload, **quiet)
