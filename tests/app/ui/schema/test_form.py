"""A schema and its form say the same: there and back nothing is lost."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.ui.schema.form import NotAForm, form_to_schema, schema_to_form

SCHEMAS = sorted((Path(__file__).resolve().parents[4] / "assets" / "schemas").glob("*.json"))
names = st.sampled_from(["a", "b", "c d", "e/f", "g~h"])
leaves = st.sampled_from(
    [
        {"type": "string"}, {"type": "integer", "minimum": 3}, {"type": ["number", "null"]}, {"const": 4},
        {"type": "string", "format": "date"}, {"type": "string", "format": "ipv4"}, {"type": "string", "enum": ["x"]},
        {"enum": ["x", 1]}, {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}], "description": "d"},
        {"type": "boolean", "description": "yes?"}, {"$ref": "#/$defs/x"}, True, {"type": "string", "pattern": "a+"},
    ]
)


def make_object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": sorted(properties)[:1] or ["z"]}


schemas = st.recursive(
    leaves,
    lambda inner: (
        st.dictionaries(names, inner, min_size=1, max_size=3).map(make_object)
        | inner.map(lambda item: {"type": "array", "items": item, "maxItems": 9})
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_an_example_schema_survives_the_form(path: Path) -> None:
    schema = json.loads(path.read_text())
    back = form_to_schema(schema_to_form(schema))
    assert back == schema and list(back["properties"]) == list(schema["properties"])


@given(st.dictionaries(names, schemas, max_size=4), st.booleans())
def test_any_object_survives_the_form(properties: dict[str, Any], is_closed: bool) -> None:
    schema = make_object(properties) | ({"additionalProperties": False} if is_closed else {})
    form = json.loads(json.dumps(schema_to_form(schema)))
    assert form_to_schema(form) == schema


@pytest.mark.parametrize("schema", [{"type": "array"}, {}, {"type": "object", "properties": 3}])
def test_a_root_that_is_no_object_has_no_form(schema: dict[str, Any]) -> None:
    with pytest.raises(NotAForm):
        schema_to_form(schema)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ([{"name": "", "kind": "text"}], "has no name yet"),
        ([{"name": "a", "kind": "text"}, {"name": "a ", "kind": "date"}], "two fields are called 'a'"),
        ([{"name": "a", "kind": "choice", "choices": [" "]}], "nothing to choose from"),
        ([{"name": "a", "kind": "group", "fields": []}], "'a' has no fields"),
    ],
)
def test_a_form_that_is_not_complete_says_what_is_missing(fields: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        form_to_schema({"fields": fields})


def test_a_new_group_is_closed() -> None:
    group = {"name": "a", "kind": "group", "fields": [{"name": "b", "kind": "text", "required": True}]}
    inner = form_to_schema({"fields": [group | {"many": True}]})["properties"]["a"]["items"]
    assert inner["additionalProperties"] is False and inner["required"] == ["b"]


@pytest.mark.parametrize(
    "a", [{"type": "array", "items": {"type": ["string", "null"]}}, {"enum": 5}, {"maximum": 2**53, "type": "integer"}]
)
def test_a_keyword_that_is_not_well_formed_or_just_exact_survives_the_form(a: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"} | a}}
    assert form_to_schema(schema_to_form(schema)) == schema


@pytest.mark.parametrize("required", [5, None, "a", {}, [["a"]], ["a", ["a"]], ["z"]])
def test_a_required_that_is_not_well_formed_survives_the_form(required: Any) -> None:
    inner = {"type": "object", "properties": {"a": {"type": "string"}}, "required": required}
    schema = {"type": "object", "properties": {"b": inner}, "required": required}
    assert form_to_schema(schema_to_form(schema)) == schema


@pytest.mark.parametrize("field", [{"const": 2**53 + 1}, {"type": "array", "items": {"enum": [-(10**400)]}}])
def test_a_whole_number_that_the_browser_would_change_has_no_form(field: dict[str, Any]) -> None:
    with pytest.raises(NotAForm, match="beyond 9,007,199,254,740,992"):
        schema_to_form({"type": "object", "properties": {"a": field}})
