"""The schema's two views follow each other; schemas that the form cannot show are explained."""

import asyncio
import functools
import json
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.api.context import ApiContext
from app.config import AppConfig
from app.extraction.sources import Row, make_table
from app.store import Store
from app.ui.batch.tab import AS_IN_EXTRACT, BatchTab
from app.ui.examples import Examples
from app.ui.extract.schema_panel import SchemaPanel
from app.ui.extract.tab import ExtractTab
from tests.fakes import FakeEngine

SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}}}'


@functools.cache
def make_panel(name: str = "person") -> SchemaPanel:
    async def build() -> SchemaPanel:
        panel = SchemaPanel(Examples({name: SCHEMA}, {}))
        with gr.Blocks() as demo:
            panel.build_chooser()
            panel.build(demo)
        return panel

    # In a loop, which Gradio would otherwise make and never close.
    return asyncio.run(build())


def check(text: str) -> tuple[Any, Any]:
    """Form and status for the text of the JSON editor."""
    panel = make_panel()
    shown = panel.edit_json(text)
    return shown[panel.form], shown[panel.status]


def make_form(**field: Any) -> dict[str, Any]:
    return {"fields": [{"name": "age", "kind": "whole number", "required": True} | field], "more": {}}


def test_the_editor_shows_errors_at_once_with_their_place() -> None:
    panel = make_panel()
    assert "schema keywords are enforced" in check(SCHEMA)[1]
    assert panel.pick("person", "", None)[panel.code] == SCHEMA
    blank, person = (panel.pick(name, SCHEMA, None)[panel.fold] for name in ("blank", "person"))
    assert blank["open"] and "open" not in person
    assert "line 1 column 2" in check("{")[1]
    assert "“$dynamicRef” at the root" in check('{"type": "array", "$dynamicRef": "#a"}')[1]


def test_an_edit_of_the_form_reaches_the_json_schema_and_the_name_no_longer_holds() -> None:
    panel = make_panel()
    shown = panel.edit_form(make_form())
    assert json.loads(shown[panel.code])["properties"] == {"age": {"type": "integer"}}
    assert shown[panel.problem] is None and "value" not in shown[panel.form]
    assert "schema keywords are enforced" in shown[panel.status] and "1 field." in shown[panel.fold]["label"]
    assert shown[panel.chooser]["value"] is None
    assert panel.edit_json(f" {SCHEMA}")[panel.chooser]["value"] == "person"


async def test_a_form_that_is_not_complete_changes_nothing_and_lets_nothing_run() -> None:
    request: Any = SimpleNamespace(session_hash="abc", request=None)
    engine, examples = FakeEngine(), Examples({"person": SCHEMA}, {})
    context: Any = ApiContext(engine, AppConfig())  # type: ignore[arg-type]
    tab, batch = ExtractTab(engine, examples, Store()), BatchTab(context, examples)
    with gr.Blocks() as demo:
        tab.build(demo)
        batch.build(demo, tab.panel, tab.to_batch, [tab.opened, tab.reader.dropdown])
    panel = tab.panel
    refused = panel.edit_form(make_form(name=" "))
    problem = refused[panel.problem]
    assert set(refused) == {panel.status, panel.problem} and "has no name yet" in refused[panel.status]
    last = [update async for update in tab.run("Ada", SCHEMA, problem, True, False, "", "", None, "fake", request)][-1]
    assert last[tab.desk.badge] == refused[panel.status] and last[tab.run_button]["interactive"] is True
    batch.tables.put("abc", make_table([Row("a", {"text": "Ada"})]))
    (last,) = [update async for update in batch.run_all(request, "text", AS_IN_EXTRACT, SCHEMA, problem, False, "fake")]
    assert last[batch.progress] == refused[panel.status] and engine.requests == []
    await anext(batch.run_all(request, "text", "person", "", problem, False, "fake"))
    assert batch.shown["abc"].schema == json.loads(SCHEMA)


def test_a_schema_beyond_the_form_is_sent_to_the_editor() -> None:
    form, _ = check('{"type": "array", "items": {"type": "string"}}')
    assert "edit this one as JSON" in form["value"]["refused"]


def test_hints_name_who_enforces_each_keyword_of_a_field() -> None:
    form, status = check('{"type": "object", "properties": {"day": {"format": "date"}}}')
    assert [keyword for keyword, _ in form["hints"]["/properties/day"]] == ["format"]
    assert "<code>format</code>" in status


def test_the_plan_lists_the_limits_that_would_be_added() -> None:
    _, status = check(SCHEMA)
    assert "Limits for open texts and lists: 200 characters a text" in status


@pytest.mark.parametrize(
    "change",
    [
        {"required": 5}, {"required": [["name"]]}, {"properties": {"name": {"type": "string", "enum": 5}}},
        {"properties": {"name": {"type": "object", "properties": {"a": {}}, "required": 5}}},
    ],
)
def test_a_schema_that_is_not_well_formed_yet_is_explained(change: dict[str, Any]) -> None:
    _, status = check(json.dumps(json.loads(SCHEMA) | change))
    assert "The schema is malformed at" in status


@pytest.mark.parametrize("value", [None, True, 5, "a", [], [["a"]], {}, {"a": 5}, {"a": {"type": []}}])
def test_whatever_stands_behind_a_keyword_is_shown_or_explained(value: Any) -> None:
    panel = make_panel()
    keywords = "type enum const required properties items anyOf format minLength maximum description title"
    for keyword in [*keywords.split(), "additionalProperties", "pattern", "$ref"]:
        inner = {"type": "string", keyword: value}
        group = {"type": "object", "properties": {"a": inner}, keyword: value}
        for schema in ({"type": "object", "properties": {"a": inner, "b": group}}, group):
            shown = panel.edit_json(json.dumps(schema))
            form, status = shown[panel.form], shown[panel.status]
            assert form["value"] and ("problem" in status or "schema keywords are enforced" in status)


@pytest.mark.parametrize("value", [10**400, {"minItems": 10**400}])
def test_a_whole_number_of_400_digits_is_shown_beside_the_form(value: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [value]}}}
    form, status = check(json.dumps(schema))
    assert "whole numbers beyond" in form["value"]["refused"] and "schema keywords are enforced" in status


def test_half_a_surrogate_pair_never_reaches_the_page() -> None:
    form, status = check(json.dumps(json.loads(SCHEMA) | {"description": "\ud800"}))
    assert json.dumps([form, status], ensure_ascii=False).encode() and "problem" in status


def test_a_schema_that_is_nested_too_deeply_is_explained() -> None:
    inner = '{"type": "array", "items": ' * 900 + "{}" + "}" * 900
    _, status = check(f'{{"type": "object", "properties": {{"a": {inner}}}}}')
    assert "problem" in status


def test_a_schema_is_kept_under_its_title_and_found_again() -> None:
    panel = make_panel("invoice")
    mine = json.dumps({"title": "invoice", "type": "object", "properties": {}})
    kept, chooser = panel.save(mine, {"older": SCHEMA})
    assert kept == {"invoice (mine)": mine} and chooser["value"] == "invoice (mine)"
    assert chooser["choices"] == [
        (name, name) for name in ("older", "invoice (mine)", "invoice", "blank")
    ] or (chooser["choices"] == ["older", "invoice (mine)", "invoice", "blank"])
    assert panel.pick("invoice (mine)", mine, kept)[panel.code] == mine
    assert json.loads(panel.pick("blank", mine, kept)[panel.code])["properties"] == {}
    with pytest.raises(gr.Error, match="title"):
        panel.save(SCHEMA, None)
