"""The schema panel: a form and a JSON Schema that follow each other."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from typing import Any

import gradio as gr

from app.extraction import Limits, Schema, add_bounds, describe_added
from app.extraction.schema_check import CheckedSchema, SchemaChecker
from app.ui.examples import Examples
from app.ui.explain import EXPLAINED, Explanation, explain
from app.ui.schema.form import KINDS, NotAForm, form_to_schema, schema_to_form
from app.ui.scripts import read_kept, read_script

DEFAULT_SCHEMA = "invoice"
BLANK = "blank"
BLANK_SCHEMA = '{\n  "type": "object",\n  "properties": {}\n}'
MAX_TITLE_CHARS = 60
CORRECT_FIRST = "Complete it first: until then nothing is extracted with this schema."
WHO = {
    "residual": "checked after the value",
    "annotation": "annotation only",
    "no effect": "always true here",
}

Views = tuple[Any, ...]  # form, JSON Schema, status, problem


@dataclass(frozen=True, slots=True)
class SchemaParts:
    """The panel's components that other classes use."""

    chooser: gr.Dropdown
    suggest: gr.Button
    form: gr.HTML
    code: gr.Code
    status: gr.HTML
    # Why the form is incomplete. The JSON Schema is then older than the form and must not run.
    problem: gr.State

    @property
    def views(self) -> list[gr.components.Component]:
        """Return the components that `SchemaPanel.show` fills."""
        return [self.form, self.code, self.status, self.problem]


class SchemaPanel:
    """One schema in two views: the JSON Schema, which extractions use, and a form to edit it."""

    def __init__(self, examples: Examples) -> None:
        self.examples = examples
        self.checker = SchemaChecker()

    def build(self, demo: gr.Blocks, can_suggest: bool) -> SchemaParts:
        """Put the panel on the page and connect its parts.

        Args:
            can_suggest: whether the model is able to write a schema for a text.
        """
        names = list(self.examples.schemas)
        first = DEFAULT_SCHEMA if DEFAULT_SCHEMA in names else names[0] if names else None
        form, text, status, _ = self.show(self.examples.schemas.get(first or "", BLANK_SCHEMA))
        with gr.Row(elem_classes="bar"):
            chooser = gr.Dropdown(
                [*names, BLANK],
                value=first or BLANK,
                label="Schema",
                interactive=True,
                scale=3,
                min_width=140,
            )
            save = gr.Button("Save in this browser", size="sm", scale=1, min_width=150)
            suggest = gr.Button("Suggest from the text", size="sm", scale=1, min_width=150, visible=can_suggest)
            # As an input, all schemas stored in the browser; as an output, one more.
            saved = gr.HTML(
                {}, html_template="", apply_default_css=False, elem_id="saved-schemas",
                js_on_load=read_script("kept") + 'watch("value", () => addSchema(props.value));',
            )  # fmt: skip
        with gr.Tabs(elem_classes="schema-tabs"):
            with gr.Tab("Form"):
                form_view = gr.HTML(
                    form["value"], hints=form["hints"], elem_id="schema-form", apply_default_css=False,
                    html_template=f"<div class='schema-form' data-kinds='{json.dumps(list(KINDS))}'></div>",
                    js_on_load=read_script("form"),
                )  # fmt: skip
            with gr.Tab("JSON Schema"):
                schema = gr.Code(
                    text, language="json", label="JSON Schema", show_label=False, lines=14, max_lines=19,
                    elem_id="schema",
                )  # fmt: skip
        under = gr.HTML(status, elem_id="schema-status")
        parts = SchemaParts(chooser, suggest, form_view, schema, under, gr.State(None))
        quiet: dict[str, Any] = {
            "queue": False, "show_progress": "hidden", "api_visibility": "private", "trigger_mode": "always_last",
        }  # fmt: skip
        # Not `input`, which also fires when the list is closed without a choice, and would undo edits.
        chooser.select(self.pick, saved, parts.views, js=read_kept("readSchemas"), **quiet)
        save.click(self.save, [schema, saved], [saved, chooser], js=read_kept("readSchemas"), **quiet)
        demo.load(self.list_names, saved, chooser, js=read_kept("readSchemas"), **quiet)
        schema.input(self.edit_json, schema, [form_view, under, parts.problem], **quiet)
        form_view.edit(self.edit_form, form_view, parts.views, **quiet)
        return parts

    def pick(self, saved: dict[str, str] | None, data: gr.SelectData) -> Views:
        """Show the chosen schema: an example, a stored one, or a blank one."""
        texts = {BLANK: BLANK_SCHEMA, **(saved or {}), **self.examples.schemas}
        return self.show(texts.get(data.value, BLANK_SCHEMA))

    def save(self, text: str, saved: dict[str, str] | None) -> tuple[Any, Any]:
        """Store the schema in the browser under its title."""
        schema = _parse(text)
        title = str((schema or {}).get("title") or "").strip()[:MAX_TITLE_CHARS]
        if not title:
            raise gr.Error("Give the schema a title first, in the form or as the keyword title.")
        while title in self.examples.schemas or title == BLANK:
            title += " (mine)"
        return {title: text}, self.list_names({**(saved or {}), title: text}, title)

    def list_names(self, saved: dict[str, str] | None, chosen: str | None = None) -> Any:
        """Return the chooser with the stored schemas."""
        names = list(dict.fromkeys([*(saved or {}), *self.examples.schemas, BLANK]))
        return gr.update(choices=names) if chosen is None else gr.update(choices=names, value=chosen)

    def show(self, text: str) -> Views:
        """Return all views of a schema's text."""
        form, status, problem = self.edit_json(text)
        return form, text, status, problem

    def edit_json(self, text: str) -> Views:
        """Return form, status and no problem for the text of the JSON editor, which is used unchanged."""
        try:
            checked = self.checker.check(text)
        except EXPLAINED as error:
            explanation = explain(error)
            refused = {"refused": f"{explanation.what} {explanation.why}"}
            schema = _parse(text)
            form = refused if schema is None else _make_form(schema)
            return gr.update(value=form, hints={}), explanation.as_html(), None
        form = _make_form(checked.schema)
        return gr.update(value=form, hints=make_hints(checked)), render_plan(checked), None

    def edit_form(self, form: dict[str, Any]) -> Views:
        """Return hints, JSON Schema, status and problem for the form's content."""
        try:
            schema = form_to_schema(form)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{error}." if isinstance(error, ValueError) else "the form is not complete."
            problem = Explanation("The form is not complete.", why[0].upper() + why[1:], CORRECT_FIRST)
            return gr.skip(), gr.skip(), problem.as_html(), problem
        update, *others = self.show(dump(schema))
        # Do not update the form itself: a person may be typing in it.
        return gr.update(hints=update["hints"]), *others


def _parse(text: str) -> Schema | None:
    try:
        schema = json.loads(text)
        # A lone surrogate, such as "\ud800", cannot be sent to the page.
        dump(schema).encode()
    except (ValueError, RecursionError):
        return None
    return schema if isinstance(schema, dict) else None


def dump(schema: Schema) -> str:
    return json.dumps(schema, indent=2, ensure_ascii=False)


def _make_form(schema: Schema) -> dict[str, Any]:
    try:
        return schema_to_form(schema)
    except NotAForm as error:
        message = str(error)
        return {"refused": message[0].upper() + message[1:] + "."}


def make_hints(checked: CheckedSchema) -> dict[str, list[list[str]]]:
    """Return keywords and who enforces them, by the pointer of the schema that contains them."""
    hints: dict[str, list[list[str]]] = {}
    for entry in checked.plan:
        hints.setdefault(entry.pointer, []).append(
            [entry.keyword, WHO.get(entry.enforced_by, entry.enforced_by)]
        )
    return hints


def render_plan(checked: CheckedSchema) -> str:
    """Return the line under the schema, and on demand every keyword, its enforcer and possible added limits."""
    num_residual = sum(entry.enforced_by == "residual" for entry in checked.plan)
    more = f", {num_residual} checked after the value" if num_residual else ""
    items = "".join(
        f"<tr><th scope='row'>{html.escape(pointer) or 'root'}</th><td>"
        + " ".join(
            f"<span class='hint'><code>{html.escape(keyword)}</code> {html.escape(who)}</span>"
            for keyword, who in found
        )
        + "</td></tr>"
        for pointer, found in make_hints(checked).items()
    )
    added = ", ".join(describe_added(add_bounds(checked.schema, Limits())))
    limits = f"<p>Limits for open texts and lists: {html.escape(added)}</p>" if added else ""
    return (
        f'<details class="plan"><summary>All {checked.num_enforced + num_residual} schema keywords are enforced'
        f"{more}.</summary><table>{items}</table>{limits}</details>"
    )
