"""Pydantic classes as text: written so that Pydantic itself makes the same schema of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.ui.schema.pydantic_writer import NotAClass, schema_to_pydantic
from tests.app.ui.schema.classes import load_record, simplify

SCHEMAS = sorted((Path(__file__).resolve().parents[4] / "assets" / "schemas").glob("*.json"))


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_pydantic_makes_the_same_schema_of_the_written_classes(path: Path, tmp_path: Path) -> None:
    schema = json.loads(path.read_text())
    record = load_record(schema_to_pydantic(schema), tmp_path)
    assert simplify(record.model_json_schema()) == simplify(schema)


def test_a_field_that_may_be_left_out_need_not_take_null(tmp_path: Path) -> None:
    group = {"type": "object", "properties": {"x": {"type": "boolean"}}}
    fields = {
        "a": {"type": "integer", "minimum": 1},
        "b": {"type": "string"},
        "c": {"type": ["string", "null"]},
        "d": {"type": "array", "items": {"type": "string"}},
        "group": group,
    }
    schema = {"type": "object", "title": "Record", "properties": fields, "additionalProperties": False}
    code = schema_to_pydantic(schema)
    assert simplify(load_record(code, tmp_path).model_json_schema()) == simplify(schema)


@pytest.mark.parametrize(
    ("subschema", "words"),
    [
        ({"not": {}}, "not at /properties/x"),
        ({"type": "string", "format": "ipv4"}, "ipv4"),
        ({"type": "array"}, "items"),
        ({"type": "array", "items": {"type": "string", "maxLength": 3}}, "limits at /properties/x/items"),
        ({"type": "string", "format": "date", "maxLength": 10}, "maxLength .* the format date"),
        ({"type": "number", "maximum": 1e999}, "maximum at /properties/x is inf"),
        ({"type": "number", "maximum": 10**400}, "maximum at /properties/x is 1000"),
        ({"type": "integer", "maximum": 3.5}, "3.5"),
        ({"type": "integer", "multipleOf": 0}, "multipleOf"),
        ({"type": "integer", "minimum": True}, "True"),
        ({"type": "string", "minLength": -1}, "minLength"),
        ({"type": "string", "minimum": 3}, "minimum .* for string"),
        ({"type": ["string", "integer"], "maxLength": 3}, "more than one type"),
        ({"type": "string", "enum": ["a"], "maxLength": 3}, "an enum"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"enum": []}, "the enum at /properties/x is empty"),
        ({"enum": [1e999]}, "inf at /properties/x"),
        (
            {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
            "limits at /properties/x/anyOf/0",
        ),
    ],
)
def test_what_pydantic_does_not_take_is_not_written(subschema: Any, words: str) -> None:
    with pytest.raises(NotAClass, match=words):
        schema_to_pydantic({"type": "object", "properties": {"x": subschema}})


@pytest.mark.parametrize(
    ("required", "words"),
    [(["x", "y"], "'y', which is no property"), ([["x"]], "no property"), (5, "no list")],
)
def test_a_required_name_without_a_property_is_refused(required: Any, words: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}, "required": required}
    with pytest.raises(NotAClass, match=words):
        schema_to_pydantic(schema)


def test_limits_beside_null_and_further_fields_are_written(tmp_path: Path) -> None:
    fields = {
        "a": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}], "description": "d"},
        "b": {"anyOf": [{"type": "array", "items": {"type": "integer"}, "minItems": 1}, {"type": "null"}]},
    }
    schema = {"type": "object", "properties": fields, "required": ["a"], "additionalProperties": True}
    code = schema_to_pydantic({"title": "Record"} | schema)
    assert simplify(load_record(code, tmp_path).model_json_schema()) == simplify(schema)
