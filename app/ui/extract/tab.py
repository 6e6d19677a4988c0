"""The extraction workbench and front page: a document beside its record, and what to do with a text of one's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from app.api.model_pool import ModelPool
from app.extraction import Extractor, Limits
from app.extraction.pdf import find_ocr
from app.extraction.reading import read_apart
from app.extraction.sources import IMAGE_TYPES, OFFICE_TYPES, Source, UnreadableSource, read_text
from app.store import Store, StoreError, objects
from app.ui.examples import Examples, is_demo_model
from app.ui.explain import EXPLAINED, Explanation, explain
from app.ui.extract.approvals import read_trust, render_trust
from app.ui.extract.desk import Update, find_first_page
from app.ui.extract.pages import Opened, open_path, show_page
from app.ui.extract.projects import is_same_text, list_recent, put_project, render_name
from app.ui.extract.record_view import NO_SOURCE, render_source
from app.ui.extract.reliability import render_calibration
from app.ui.extract.run import NO_TEXT, ExtractRun, add_example, choose_tab
from app.ui.extract.saving import FILE_FORMATS, SAVE, save_record
from app.ui.extract.schema_panel import BEGIN_CHANGE, END_CHANGE, SchemaPanel, dump
from app.ui.extract.shown import Shown, restore
from app.ui.owner import describe_keeping, find_owner
from app.ui.pacing import UPDATE_INTERVAL_S
from app.ui.schema.suggest import TASK, propose_schema, read_names
from app.ui.scripts import read_script
from engine import Engine

FILE_TYPES = ["text", ".md", ".csv", ".log", ".xml", ".pdf", *OFFICE_TYPES]
IN_BATCH = "A table, read here as one text. In Batch each of its rows becomes a record ›"
# The text that the page opens with.
PROOF = "invoice 2"
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
const keep = () => { if (!document.querySelector("#source-name span")) globalThis.typedBefore = box.value; };
if (is_new && box) box.oninput = keep;
return [{ project, draft, is_new, reader: read("troupe-reader extract") }, ...inputs.slice(1)];
}"""
KEEP_PROJECT = """watch("value", () => {
if (typeof props.value !== "string") return;
try { sessionStorage.setItem("troupe-project", props.value); } catch { /* forbidden */ }
});"""


class ExtractTab(ExtractRun):
    """The layout of one workbench on one engine; ExtractRun has its handlers."""

    def __init__(
        self, engine: Engine, examples: Examples, store: Store, interval_s: float = UPDATE_INTERVAL_S,
        pool: ModelPool | None = None,
    ) -> None:
        super().__init__(engine, store, interval_s, pool)
        self.examples = examples
        self.panel = SchemaPanel(examples)

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
                self.desk.build_record()
                with gr.Row(elem_classes="bar", elem_id="save-record"):
                    saves = [gr.Button(name, size="sm", scale=0, min_width=90) for name in FILE_FORMATS.values()]
                self.saved = gr.HTML({}, html_template="", apply_default_css=False, elem_id="saved-record")
                self.figures = gr.HTML("", elem_id="figures", apply_default_css=False)
                self.trust = gr.HTML("", elem_id="trust", apply_default_css=False)
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
            self.name = gr.HTML("", elem_id="source-name", apply_default_css=False)
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
        ran = [*desk.parts, self.figures, self.trust, self.source_tabs, self.run_button, self.stop_button, self.page]
        ran += [self.reader.dropdown, self.calibration]
        file = [self.name, self.text, self.image, self.image_tab, self.page_tab, self.opened, self.sample]
        file.append(self.to_batch)
        inputs = [self.text, panel.code, panel.problem, *settings, self.opened, self.reader.dropdown]
        proved = [*ran, *file, *panel.views]
        opening = demo.load(self.open, self.kept, [*proved, self.project], js=READ_OPENING, **quiet)
        opening.then(None, js=SHOW_EVIDENCE, **at_once)
        demo.load(self.list_recent, None, self.recent, **at_once)
        self.recent.list(self.list_recent, None, self.recent, **at_once)
        self.recent.pick(self.reopen, None, [*proved, self.project, self.kept], **at_once).then(
            None, js=END_CHANGE, **at_once
        )
        # "input" also comes when the list is left without a choice.
        self.sample.select(None, js=BEGIN_CHANGE, **at_once)
        changes = [*panel.changes, self.run_button.click(self.run, inputs, ran, **quiet)]
        self.stop_button.click(self.stop, None, None, **at_once)
        # One after the other, so that each action builds on the one before.
        changes += [desk.fields.act(
            self.act, desk.shown, [*desk.parts, self.trust], concurrency_limit=1, concurrency_id="review",
            trigger_mode="multiple", **quiet,
        )]
        desk.on_look(desk.explain, desk.why)
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

    async def keep(
        self, project: str, text: str, schema: str, opened: Opened | None, shown: Shown | None, request: gr.Request
    ) -> tuple[str, str]:
        """Keep text, file, schema and record with its review in the store; returns the project's id, twice."""
        record = None
        if shown is not None and shown.drafted.record is not None:
            record = shown.dump() | {"text": shown.text, "schema": shown.schema}
        path = str(opened.path) if opened is not None else ""
        body = {"text": text, "schema": schema, "record": record, "path": path, "name": self._name(opened, text)}
        try:
            project = await self.store.run(put_project, find_owner(request), project, body)
        except StoreError as error:
            raise gr.Error(f"A reload loses this record: {error}.", print_exception=False) from error
        return project, project

    async def open(self, kept: Mapping[str, Any], request: gr.Request) -> AsyncGenerator[Update, None]:
        """Open the project of this browser tab, or the proof, while the page opens."""
        project, owner = str(kept.get("project") or ""), find_owner(request)
        if owner.startswith(objects.GUEST):
            gr.Info(describe_keeping(self.store, owner))
        found = await self.store.run(objects.get, owner, "project", project) if project else None
        if found is not None:
            drawn = await self._draw(found, owner, kept.get("draft"))
            if kept.get("reader"):
                drawn[self.reader.dropdown] = self.reader.show(kept["reader"])
            yield drawn
        elif kept.get("is_new"):
            async with aclosing(self.prove(request)) as updates:
                async for update in updates:
                    yield update
        else:
            yield gr.skip()

    async def reopen(self, data: gr.EventData, request: gr.Request) -> Update:
        """Open one of the visitor's recent documents in place of text and record."""
        await self.stops.end(str(request.session_hash))
        owner = find_owner(request)
        found = await self.store.run(objects.get, owner, "project", str(data._data.get("id")))
        if found is None:
            raise gr.Error("This document is not kept any more.", print_exception=False)
        return await self._draw(found, owner) | {self.kept: found.id}

    async def list_recent(self, request: gr.Request) -> dict[str, Any]:
        """Return the visitor's recent documents."""
        samples = [str(path) for path in self.examples.samples.values()]
        return {"recent": await self.store.run(list_recent, find_owner(request), samples)}

    async def _draw(self, found: objects.Item, owner: str, draft: str | None = None) -> Update:
        """Return a project with its text, or what was typed since, its schema and its record."""
        body = found.body
        record = {"model": self.engine.model_name} | (body["record"] or {})
        reader = self.models.find(record["model"])
        opened = await self._open_again(body.get("path"), (reader or self.engine).sees_images)
        drawn = {**self._put(draft or body["text"], opened), **self.panel.show(body["schema"])}
        if opened is not None and opened.source.page_starts:
            drawn[self.page] = await show_page(opened, 1)
        if body["record"] is not None:
            shown = await asyncio.to_thread(restore, record, record["text"], record["schema"])
            shown = replace(shown, opened=opened)
            trust = await self.store.run(read_trust, owner, shown.schema, shown.model)
            drawn |= self.desk.draw(shown) | {self.trust: render_trust(trust)}
            drawn[self.reader.dropdown] = self.reader.show(shown.model)
            drawn[self.calibration] = render_calibration(reader)
            drawn[self.source_tabs] = gr.update(selected=choose_tab(shown))
            drawn |= {self.page: page} if (page := await find_first_page(shown)) is not None else {}
        return drawn | {self.project: found.id}

    async def prove(self, request: gr.Request) -> AsyncGenerator[Update, None]:
        """Extract an example, so that the first look shows what the page is for."""
        has_proof = PROOF in self.examples.samples and self.examples.schema_for(PROOF) is not None
        if not has_proof or self.engine.config.load_format == "dummy" or self.engine.refusal:
            yield gr.skip()
            return
        picked = await self.pick_sample(PROOF, request)
        yield picked
        schema = picked[self.panel.code]
        model = self.engine.model_name
        running = self.run(picked[self.text], schema, None, True, False, "", "", picked[self.opened], model, request)
        async with aclosing(running) as updates:
            async for update in updates:
                # SHOW_EVIDENCE opens the tab, because only the page knows whether the text is being edited.
                yield {block: value for block, value in update.items() if block is not self.source_tabs}

    async def pick_sample(self, name: str, request: gr.Request) -> Update:
        """Show an example text with its schema, in place of text and record; its heading changes nothing."""
        if name not in self.examples.samples:
            return {self.sample: ""}
        await self.stops.end(str(request.session_hash))
        opened, schema = open_sample(self.examples.samples[name]), self.examples.schema_for(name)
        views = self.panel.show(self.examples.schemas[schema]) if schema else {}
        return {**self._put(opened.source.text, opened), **views}

    async def _open_again(self, path: str | None, sees_images: bool) -> Opened | None:
        """Read the file of a project again; without its content when the server does not have it any more."""
        if not path:
            return None
        if Path(path) in self.examples.samples.values():
            return open_sample(Path(path))
        with suppress(UnreadableSource):
            return await read_apart(path, open_path, Path(path), sees_images)
        return Opened(Path(path), Source(Path(path).name, ""))

    def _name(self, opened: Opened | None, text: str) -> str:
        """Return the name of the file, or "" for a text that shares less than half its words; as in review.js."""
        if opened is None:
            return ""
        if not is_same_text(opened.source.text, text):
            return ""
        samples = {path: f"Example: {name}" for name, path in self.examples.samples.items()}
        return samples.get(opened.path, opened.path.name)

    def _put(self, text: str, opened: Opened | None = None, badge: str = "") -> Update:
        """Return another text, or none, in place of text and record."""
        name = ""
        is_photo = is_pdf = False
        if opened is not None:
            name, is_here = self._name(opened, opened.source.text), not opened.source.is_empty
            is_photo, is_pdf = opened.is_photo and is_here, opened.is_pdf and is_here
        tab = "image" if is_photo else "page" if is_pdf and not text.strip() else "text"
        return {
            **self.clear(badge),
            self.desk.marked: render_source((), {}, text) if text.strip() else NO_SOURCE,
            self.name: render_name(name, opened.source.text if opened is not None else ""),
            self.text: text, self.source_tabs: gr.update(selected=tab),
            self.image: str(opened.path) if opened is not None and is_photo else None,
            self.image_tab: gr.update(visible=is_photo), self.page: "",
            self.page_tab: gr.update(visible=is_pdf), self.opened: opened, self.sample: "",
            self.to_batch: gr.update(visible=opened is not None and opened.is_table),
        }

    async def describe(
        self, wish: str, text: str, opened: Opened | None, model: str, request: gr.Request
    ) -> Update:
        """Make a schema of the names that a person lists, or have the model propose one for the text."""
        schema, engine = read_names(wish or ""), self.models.find(model) or self.engine
        if schema is None and is_demo_model(engine):
            why = "The demo model cannot read a description. List the fields, as in: customer, order date, total."
            raise gr.Error(why, print_exception=False)
        images = () if opened is None else opened.source.images
        problem = NO_TEXT
        if schema is None and (text.strip() or images):
            problem = Explanation("The model proposed no field.", "", "Add fields in the form.")
            asked = f"{TASK} {wish or ''}".strip()
            try:
                async with self.models.hold(model) as (engine, adapter):
                    extractor = Extractor(engine, None, instructions=asked, images=images, lora_request=adapter)
                    schema = await propose_schema(extractor, text, f"session-{request.session_hash}")
            except EXPLAINED as error:
                problem = explain(error, engine.state)
        if schema is None:
            raise gr.Error(str(problem), print_exception=False)
        return self.panel.show(dump(schema))

    def offer_files(self) -> Any:
        """Offer pictures if a model sees them, which is known when its engine has started, or if there is OCR."""
        engines = map(self.models.find, self.models.list_loaded())
        reads_images = any(each is not None and each.sees_images for each in engines) or find_ocr()
        return gr.update(file_types=[*FILE_TYPES, *IMAGE_TYPES]) if reads_images else gr.skip()

    async def open_file(self, path: str, model: str, request: gr.Request) -> Update:
        """Show an uploaded file in place of text and record; or nothing, and why it cannot be read."""
        await self.stops.end(str(request.session_hash))
        engine = self.models.find(model) or self.engine
        try:
            opened = await read_apart(path, open_path, Path(path), engine.sees_images)
        except UnreadableSource as error:
            advice = "Open a PDF with text in it, a Word, Excel, PowerPoint, HTML, mail or text file."
            return self._put("", badge=Explanation("This file cannot be read.", f"{error}.", advice).as_html())
        page = await show_page(opened, 1) if opened.is_pdf else ""
        return {**self._put(opened.source.text, opened), self.page: page}


def open_sample(path: Path) -> Opened:
    return Opened(path, Source(path.name, read_text(path)))
