"""The schema: chosen by its name, described in words, or edited as a form or as JSON, which follow each other."""

from __future__ import annotations

import html
import json
from typing import Any

import gradio as gr

from app.extraction import Limits, Schema, add_bounds, describe_added
from app.extraction.schema_check import CheckedSchema, SchemaChecker
from app.ui.choices import OpenRadio
from app.ui.examples import Examples
from app.ui.explain import EXPLAINED, Explanation, explain
from app.ui.extract.shown import digest
from app.ui.schema.form import KINDS, NotAForm, form_to_schema, schema_to_form
from app.ui.scripts import read_kept, read_script

DEFAULT_SCHEMA = "invoice"
BLANK = "blank"
BLANK_SCHEMA = '{\n  "type": "object",\n  "properties": {}\n}'
MAX_TITLE_CHARS = 60
# Keywords of a schema that asks for nothing unless it has properties.
PLAIN = {"$schema", "$id", "title", "description", "type", "properties", "required", "additionalProperties"}
BLANK_PROBLEM = Explanation("The schema has no field yet.", "", "Choose one, describe it, or add a field to the form.")
CORRECT_FIRST = "Complete it first: until then nothing is extracted with this schema."
WHO = {"residual": "checked after the value", "annotation": "annotation only", "no effect": "always true here"}

Views = dict[Any, Any]  # new values of the panel's components

# While a schema or an example is on its way to the page, polish.js holds a press of Extract back.
BEGIN_CHANGE, END_CHANGE = "() => { globalThis.changes.begin(); }", "() => { globalThis.changes.end(); }"
# A blank schema opens the panel; its description is typed next.
DESCRIBE_BLANK = """(name) => {
if (name === "blank") setTimeout(() => document.querySelector("#wish textarea")?.focus(), 100);
}"""


class SchemaPanel:
    """One schema: a name, a form to edit it, and the JSON Schema, which extractions use.

    Attributes:
        problem: why the form is incomplete. The JSON Schema is then older than the form and must not run.
        changes: the events that end a change of the schema by a person.
        describe: its click is connected by the Extract tab, which has the text and the model.
    """

    def __init__(self, examples: Examples) -> None:
        self.examples = examples
        self.checker = SchemaChecker()

    @property
    def first(self) -> str:
        """Return the schema that the page opens with."""
        names = list(self.examples.schemas)
        return DEFAULT_SCHEMA if DEFAULT_SCHEMA in names else names[0] if names else BLANK

    def build_chooser(self) -> None:
        """Put the names of the schemas on the page."""
        self.chooser = OpenRadio(
            [*self.examples.schemas, BLANK], value=self.first, label="Schema of the record", elem_id="schema-names",
            elem_classes="chips",
        )
        self.before = gr.State("")  # the schema that a choice has replaced
        self.undo = gr.Button("Undo: bring back the schema before", size="sm", visible=False, elem_id="undo-schema")
        # As an input, all schemas stored in the browser; as an output, one more.
        self.saved = gr.HTML(
            {}, html_template="", apply_default_css=False, elem_id="saved-schemas",
            js_on_load=read_script("kept") + 'watch("value", () => addSchema(props.value));',
        )

    def build(self, demo: gr.Blocks) -> None:
        """Put the editors on the page, folded to one line, and connect them."""
        text = self.examples.schemas.get(self.first, BLANK_SCHEMA)
        checked = self.checker.check(text)
        self.fold = gr.Accordion(describe(checked.schema), open=False, elem_classes="fold")
        with self.fold:
            with gr.Row(elem_classes="bar"):
                self.wish = gr.Textbox(
                    label="Describe it", placeholder="customer, order date, total, skills (list)", max_lines=3,
                    scale=4, min_width=180, elem_id="wish",
                )
                self.describe = gr.Button("Make the fields", size="sm", scale=1, min_width=120)
                save = gr.Button("Save schema", size="sm", scale=0, min_width=110)
            with gr.Tabs(elem_classes="schema-tabs"):
                with gr.Tab("Form"):
                    self.form = gr.HTML(
                        _make_form(checked.schema) | {"hints": make_hints(checked)}, elem_id="schema-form",
                        apply_default_css=False, js_on_load=read_script("make") + read_script("form"),
                        html_template=f"<div class='schema-form' data-kinds='{json.dumps(list(KINDS))}'></div>",
                    )
                with gr.Tab("JSON Schema"):
                    self.code = gr.Code(
                        text, language="json", label="JSON Schema", show_label=False, lines=14, max_lines=19,
                        elem_id="schema",
                    )
        # Outside the fold, so that errors show, and the record can be compared with the schema.
        self.status = gr.HTML(render_plan(checked), elem_id="schema-status")
        self.problem = gr.State(None)
        quiet: dict[str, Any] = {
            "queue": False, "show_progress": "hidden", "api_visibility": "private", "trigger_mode": "always_last",
        }
        chosen, saved = [self.chooser, self.code, self.saved], read_kept("readSchemas")
        changed = [*self.views, self.before, self.undo]
        picked = self.chooser.input(self.pick, chosen, changed, js=saved, **quiet)
        undone = self.undo.click(self.bring_back, self.before, changed, **quiet)
        # Through the queue, because only such events may show notices.
        in_queue = {**quiet, "queue": True}
        kept = [self.saved, self.chooser]
        save.click(self.save, [self.code, self.saved], kept, js=saved, **in_queue)
        demo.load(self.list_names, self.saved, self.chooser, js=saved, **quiet)
        edited = [self.form, self.fold, self.chooser, self.status, self.problem]
        typed = self.code.input(self.edit_json, self.code, edited, **quiet)
        filled = self.form.edit(self.edit_form, self.form, self.views, **quiet)
        self.changes = [picked, undone, typed, filled]
        for change in (picked, filled):
            change.then(None, js=END_CHANGE, **quiet)
        picked.then(None, self.chooser, None, js=DESCRIBE_BLANK, **quiet)

    @property
    def views(self) -> list[Any]:
        """Return the components that `show` fills."""
        return [self.chooser, self.fold, self.form, self.code, self.status, self.problem]

    def pick(self, name: str | None, before: str, saved: dict[str, str] | None) -> Views:
        """Show the chosen schema: an example, a stored one, or a blank one; what no name brings back can be undone."""
        texts = {BLANK: BLANK_SCHEMA, **(saved or {}), **self.examples.schemas}
        shown = self.show(texts.get(name or BLANK, BLANK_SCHEMA))
        shown[self.fold] |= {"open": True} if name == BLANK else {}
        is_lost = name == BLANK or (self.find_name(parse_schema(before)) is None and before not in texts.values())
        # Arrow keys pass other choices; Undo still brings back the schema before them.
        kept = {self.before: before, self.undo: gr.update(visible=True)} if is_lost else {}
        return {part: value for part, value in shown.items() if part is not self.chooser} | kept

    def bring_back(self, before: str) -> Views:
        """Show the schema that the last choice has replaced."""
        return self.show(before) | {self.undo: gr.update(visible=False)}

    def save(self, text: str, saved: dict[str, str] | None) -> tuple[Any, Any]:
        """Store the schema in the browser under its title."""
        schema = parse_schema(text)
        title = str((schema or {}).get("title") or "").strip()[:MAX_TITLE_CHARS]
        if not title:
            raise gr.Error("Give the schema a title first, in the form or as the keyword title.")
        while title in self.examples.schemas or title == BLANK:
            title += " (mine)"
        gr.Info(f"Saved as {title}.")
        return {title: text}, self.list_names({**(saved or {}), title: text}, title)

    def list_names(self, saved: dict[str, str] | None, chosen: str | None = None) -> Any:
        """Return the chooser with the stored schemas."""
        names = list(dict.fromkeys([*(saved or {}), *self.examples.schemas, BLANK]))
        return gr.update(choices=names) if chosen is None else gr.update(choices=names, value=chosen)

    def show(self, text: str) -> Views:
        """Return all views of a schema's text."""
        return {**self.edit_json(text), self.code: text}

    def edit_json(self, text: str) -> Views:
        """Return all other views for the text of the JSON editor, which is used unchanged."""
        schema, hints = parse_schema(text), {}
        try:
            checked = self.checker.check(text)
        except EXPLAINED as error:
            explanation = explain(error)
            refused = {"refused": f"{explanation.what} {explanation.why}"}
            form, status = refused if schema is None else _make_form(schema), explanation.as_html()
            title = "Schema: not usable yet"
        else:
            form, hints, status = _make_form(checked.schema), make_hints(checked), render_plan(checked)
            title = describe(checked.schema)
        return {
            # Twice, because the form may not be drawn yet, and then takes nothing but a value.
            self.form: gr.update(value=form | {"hints": hints}, hints=hints),
            self.fold: gr.update(label=title),
            self.chooser: gr.update(value=self.find_name(schema)),
            self.status: status,
            self.problem: None,
        }

    def find_name(self, schema: Schema | None) -> str | None:
        """Return the name of a schema that the chooser offers; None for one of its own."""
        texts = {BLANK: BLANK_SCHEMA, **self.examples.schemas}
        return next((name for name, text in texts.items() if json.loads(text) == schema), None)

    def edit_form(self, form: dict[str, Any]) -> Views:
        """Return hints, JSON Schema, status and problem for the form's content."""
        try:
            schema = form_to_schema(form)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{error}." if isinstance(error, ValueError) else "the form is not complete."
            problem = Explanation("The form is not complete.", why[0].upper() + why[1:], CORRECT_FIRST)
            return {self.status: problem.as_html(), self.problem: problem}
        shown = self.show(dump(schema))
        # Do not update the form itself: a person may be typing in it.
        return {**shown, self.form: gr.update(hints=shown[self.form]["hints"])}


def is_blank(schema: Schema) -> bool:
    """Return whether a schema asks for nothing, so that a record of it would be invented."""
    return not set(schema) - PLAIN and schema.get("type", "object") == "object" and not schema.get("properties")


def describe(schema: Schema) -> str:
    """Return the schema in one line."""
    names = list(schema.get("properties") or ()) if isinstance(schema.get("properties"), dict) else []
    title = str(schema.get("title") or "Schema").strip()[:MAX_TITLE_CHARS]
    count = f"{len(names)} field{'s' if len(names) != 1 else ''}"
    return f"{title}: {count}. Edit, or describe your own" if names else f"{title}: describe or add the fields"


def parse_schema(text: str) -> Schema | None:
    """Return the schema of a text; None if it is none."""
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
        hints.setdefault(entry.pointer, []).append([entry.keyword, WHO.get(entry.enforced_by, entry.enforced_by)])
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
        f'<details class="plan" data-schema-now="{digest(checked.schema)}"><summary>'
        f"All {checked.num_enforced + num_residual} schema keywords are enforced"
        f"{more}.</summary><table>{items}</table>{limits}</details>"
    )
