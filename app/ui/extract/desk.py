"""Desk: a text with its evidence beside its record, to check and correct; in the Extract and in the Batch tab."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import gradio as gr

from app.ui.extract.pages import show_page
from app.ui.extract.record_view import (
    EMPTY,
    NO_SOURCE,
    render_badge,
    render_fields,
    render_source,
    render_status,
)
from app.ui.extract.shown import Shown
from app.ui.extract.why import render_why
from app.ui.scripts import read_script

Update = dict[Any, Any]  # new values of components; others stay

# Gradio sends an event that had to wait with the data of the one before it; this reads the value looked at last.
READ_LOOKED_AT = "(shown, _) => [shown, globalThis.lookedAt]"


class Desk:
    """The components of one desk, and what fills them. Its row has the class `desk`."""

    def build_evidence(self) -> None:
        """Put the text with its evidence on the page."""
        self.marked = gr.HTML(NO_SOURCE, elem_classes="evidence", apply_default_css=False, js_on_load=None)

    def build_record(self) -> None:
        """Put the record on the page: its verdict, its values, and why the chosen one is what it is."""
        self.badge = gr.HTML("", elem_classes="record-status", apply_default_css=False)
        gr.HTML(
            '<p class="stale-note" role="status">The text or the schema has changed since this record was read. '
            "Extract again, or undo the change.</p>",
            apply_default_css=False,
        )
        with gr.Tabs(elem_classes="result-tabs"):
            with gr.Tab("Fields"):
                # Above the record's first line, which has the button to approve it.
                self.trust = gr.HTML("", elem_classes="trust", apply_default_css=False)
                self.fields = gr.HTML(
                    EMPTY, elem_classes="fields", apply_default_css=False, js_on_load=read_script("review")
                )
                self.why = gr.HTML("", elem_classes="why-box", apply_default_css=False)
            with gr.Tab("JSON"):
                self.record = gr.Code(
                    "", language="json", label="Record as JSON", show_label=False, lines=12, max_lines=26,
                    interactive=False, wrap_lines=True,
                )
        self.shown = gr.State(None)

    @property
    def parts(self) -> list[Any]:
        """Return the components that a record fills."""
        return [self.badge, self.fields, self.why, self.record, self.marked, self.shown]

    def draw(self, shown: Shown) -> Update:
        """Return a record with all that follows from its values."""
        result = shown.result
        return {
            self.badge: render_status(shown), self.fields: render_fields(shown),
            self.record: json.dumps(result.record, indent=2, ensure_ascii=False) if result.valid else result.raw,
            self.marked: render_source(result.leaves, result.evidence, shown.text, shown.to_check),
            self.shown: shown,
        }

    def clear(self, badge: str = "", text: str = "") -> Update:
        """Return a desk without a record; the text stays, unmarked."""
        return {
            self.badge: badge, self.fields: EMPTY, self.why: "", self.record: "",
            self.marked: render_source((), {}, text) if text.strip() else NO_SOURCE, self.shown: None,
        }

    def refuse(self, problem: Exception) -> Update:
        """Return why an action was not done; the record stays."""
        return {self.badge: render_badge("bad", "not done", f"{problem}. Correct it and try again.")}

    def draw_newer(self, newer: Shown, action: Mapping[str, Any]) -> Update:
        """Draw the record that another page has changed, and say which change was not applied to it."""
        typed = ", ".join(f"“{text}”" for text in (action.get("edits") or {}).values())
        detail = f"this is the newer record; not applied: {typed or 'what you did'}"
        return {**self.draw(newer), self.badge: render_badge("cut", "changed in another tab", detail)}

    def judge(self, shown: Shown | None) -> Any:
        """Return the verdict on the record; it replaces the reason why an action was refused."""
        return gr.skip() if shown is None else render_status(shown)

    def on_look(self, answer: Callable[..., Any], output: Any, *also: Any) -> None:
        """Fill `output` with `answer(shown, pointer)` for the value that had the focus last, at these events too."""
        for event in (self.fields.look, *also):
            event(
                answer, [self.shown, self.why], output, js=READ_LOOKED_AT, trigger_mode="always_last", queue=False,
                show_progress="hidden", api_visibility="private",
            )

    def explain(self, shown: Shown | None, pointer: str) -> Any:
        """Return why a value is what it is."""
        return gr.skip() if shown is None else render_why(shown, pointer)


async def find_first_page(shown: Shown) -> str | None:
    found = [(shown.find_page(each), each.start, each) for each in shown.result.evidence.values()]
    number, _, evidence = min(filter(lambda each: each[0], found), default=(0, 0, None), key=itemgetter(0, 1))
    return await show_page(shown.opened, number, evidence) if shown.opened and number else None


async def find_page(shown: Shown | None, pointer: str) -> str | None:
    """Return the page of the opened PDF that shows a value; None if there is none."""
    evidence = shown.result.evidence.get(pointer) if shown else None
    if shown is None or shown.opened is None or not (number := shown.find_page(evidence)):
        return None
    return await show_page(shown.opened, number, evidence)
