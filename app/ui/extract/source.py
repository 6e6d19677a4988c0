"""Handlers of the workbench's source: open an example, a file or a kept document, and keep what is on the page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr

from app.api.model_pool import ModelPool
from app.extraction import Extractor
from app.extraction.pdf import find_ocr
from app.extraction.reading import read_apart
from app.extraction.review import EditError
from app.extraction.sources import IMAGE_TYPES, OFFICE_TYPES, Source, UnreadableSource, read_text
from app.store import Connection, Store, StoreError, objects
from app.ui.examples import Examples, is_demo_model
from app.ui.explain import EXPLAINED, Explanation, explain
from app.ui.extract.approvals import Trust, approve, read_trust, render_trust
from app.ui.extract.desk import Update, find_first_page
from app.ui.extract.pages import Opened, open_path, show_page
from app.ui.extract.projects import change_record, is_same_text, keep_page, list_recent, render_name
from app.ui.extract.reliability import render_calibration
from app.ui.extract.run import NO_TEXT, ExtractRun, choose_tab
from app.ui.extract.schema_panel import SchemaPanel, dump
from app.ui.extract.shown import ChangedElsewhere, Shown, restore
from app.ui.owner import describe_keeping, find_owner
from app.ui.schema.suggest import TASK, propose_schema, read_names
from engine import Engine

FILE_TYPES = ["text", ".md", ".csv", ".log", ".xml", ".pdf", *OFFICE_TYPES]
# The text that the page opens with.
PROOF = "invoice 2"


class ExtractSource(ExtractRun):
    """The handlers of one workbench that put a text, a file or a kept document on the page."""

    # Made by `build`.
    name: gr.HTML
    sample: gr.Dropdown
    text: gr.Textbox
    image: gr.Image
    image_tab: gr.Tab
    page_tab: gr.Tab
    to_batch: gr.Button
    opened: gr.State
    kept: gr.HTML
    project: gr.State

    def __init__(
        self, engine: Engine, examples: Examples, store: Store, interval_s: float, pool: ModelPool | None = None
    ) -> None:
        super().__init__(engine, store, interval_s, pool)
        self.examples = examples
        self.panel = SchemaPanel(examples)

    async def keep(
        self, project: str, text: str, schema: str, opened: Opened | None, shown: Shown | None, request: gr.Request
    ) -> tuple[str, str]:
        """Keep text, file, schema and record with its review in the store; returns the project's id, twice."""
        body = self._make_body(text, schema, opened)
        try:
            project = await self.store.run(keep_page, find_owner(request), project, body, shown)
        except StoreError as error:
            raise gr.Error(f"A reload loses this record: {error}.", print_exception=False) from error
        return project, project

    async def act(self, shown: Shown | None, project: str, data: gr.EventData, request: gr.Request) -> Update:
        """Apply what a person did to the record, as it is kept; all that follows from its values follows at once."""
        if shown is None:
            return gr.skip()
        if data._data.get("of") != shown.reading:
            raise gr.Error("Another record took the place of this one before the correction arrived.")
        body = self._make_body(shown.text, dump(shown.schema), shown.opened)

        def change(db: Connection, owner: str) -> tuple[str, Shown, Trust | None]:
            kept, changed = change_record(db, owner, project, body, shown, data._data)
            return kept, changed, approve(db, owner, changed) if changed.is_approved else None

        try:
            project, changed, trust = await self.store.run(change, find_owner(request))
        except ChangedElsewhere as newer:
            return self.desk.draw_newer(newer.shown, data._data)
        except (EditError, StoreError) as error:
            return self.desk.refuse(error)
        drawn = {**self.desk.draw(changed), self.project: project}
        return drawn | {self.desk.trust: render_trust(trust)} if changed.is_approved else drawn

    async def open(self, kept: Mapping[str, Any], request: gr.Request) -> AsyncGenerator[Update, None]:
        """Open the project of this browser tab, or the proof, while the page opens."""
        project, owner = str(kept.get("project") or ""), find_owner(request)
        if owner.startswith(objects.GUEST):
            gr.Info(describe_keeping(self.store, owner))
        found = await self.store.run(objects.get, owner, "project", project) if project else None
        if found is not None:
            drawn = await self._draw(found, owner, kept.get("draft"))
            if kept.get("reader"):
                drawn[self.reader.dropdown] = await self.reader.show(kept["reader"])
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
            drawn |= self.desk.draw(shown) | {self.desk.trust: render_trust(trust)}
            drawn[self.reader.dropdown] = await self.reader.show(shown.model)
            drawn[self.calibration] = render_calibration(reader)
            drawn[self.read_again] = await self._offer(shown)
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
        yield picked | {self.sample: ""}
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
        return {**self._put(opened.source.text, opened), **views, self.sample: name}

    async def run_picked(self, request: gr.Request, name: str, *asked: Any) -> AsyncGenerator[Update, None]:
        """Extract the example that was picked, as `run` does; the heading of the list is none."""
        if not name:
            yield gr.skip()
            return
        yield {self.sample: ""}
        async with aclosing(self.run(*[*asked, request])) as updates:
            async for update in updates:
                yield update

    async def _open_again(self, path: str | None, sees_images: bool) -> Opened | None:
        """Read the file of a project again; without its content when the server does not have it any more."""
        if not path:
            return None
        if Path(path) in self.examples.samples.values():
            return open_sample(Path(path))
        with suppress(UnreadableSource):
            return await read_apart(path, open_path, Path(path), sees_images)
        return Opened(Path(path), Source(Path(path).name, ""))

    def _make_body(self, text: str, schema: str, opened: Opened | None) -> dict[str, Any]:
        """Return a project without its record."""
        path = str(opened.path) if opened is not None else ""
        return {"text": text, "schema": schema, "path": path, "name": self._name(opened, text)}

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
            **self.clear(badge, text),
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
