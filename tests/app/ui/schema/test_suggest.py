"""A schema that the model proposes for a text."""

import json
from typing import Any

import pytest

from app.extraction import Extractor
from app.ui.schema.suggest import propose_schema, read_names
from tests.fakes import FakeEngine


async def test_the_model_proposes_fields_under_a_grammar() -> None:
    fields: list[Any] = [{"name": "who", "kind": "text"}, {"name": "days", "kind": "date (list)"}]
    engine = FakeEngine(record=json.dumps({"title": "Shift", "fields": [*fields, {"name": "cut"}]}))
    schema = await propose_schema(Extractor(engine, None), "Ada works on Monday.", "salt")
    assert schema == {
        "title": "Shift", "type": "object", "required": ["who", "days"],
        "properties": {
            "who": {"type": "string"}, "days": {"type": "array", "items": {"type": "string", "format": "date"}}
        },
    }
    assert "snake_case" not in engine.requests[0].prompt and engine.requests[0].options["cache_salt"] == "salt"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("number of guests", "integer"), ("count of due dates", "integer"), ("How many nights", "integer"),
        ("quantity", "integer"), ("total number of items", "integer"), ("phone number", "string"), ("guest", "string"),
        ("how much paid", "number"), ("total price", "number"), ("amounts (list)", "array of number"),
        ("arrival date", "date"), ("due dates (list)", "array of date"), ("wishes (list)", "array of string"),
    ],
)
def test_a_name_suggests_the_kind_of_its_field(name: str, kind: str) -> None:
    schema = read_names(f"{name}, other")
    assert schema is not None
    found = next(iter(schema["properties"].values()))
    inner = found.get("items", found)
    assert kind == ("array of " if inner is not found else "") + inner.get("format", inner["type"])
