"""A schema suggested from a text: by its labels and patterns, or by the model."""

import json
from typing import Any

import pytest

from app.extraction import Extractor
from app.ui.schema.suggest import propose_schema, suggest_schema
from grammar import SchemaValidator
from tests.fakes import FakeEngine


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Total: 36.00 EUR\nPaid: yes\nDue: 3 May 2026\nPages: 12", "number boolean date integer"),
        ("Contact e-mail: a@b.org\nDoors: 19:30\nSite: https://x.org/a", "email time uri"),
        ("Phone: +49 40 555 0199\nNumber: 007\nNote: from 3 to 5", "string string string"),
        ("Write to ada@b.org by 2026-05-03 or pay 12 €.", "email date number"),
        ("4 x Pen, 3.50 EUR\n2 x Pad, 1 EUR\nName: Ada\nName: Bob", "array array"),
    ],
)
def test_labels_and_patterns_become_fields_of_their_kind(text: str, kinds: str) -> None:
    schema = suggest_schema(text)
    assert schema is not None and schema["required"] == list(schema["properties"])
    found = [each.get("format", each["type"]) for each in schema["properties"].values()]
    assert found == kinds.split()
    assert SchemaValidator(schema).first_error({}) is not None


def test_a_label_is_named_as_code_names_it() -> None:
    schema = suggest_schema(
        "- Größe (in m): 3\nNo label here: \nhttp://x.org: 1\n12: 3\nIt says in a long sentence so: 5"
    )
    assert schema is not None and list(schema["properties"]) == ["groe_in_m", "link"]
    assert suggest_schema("Nothing to see.") is None


async def test_the_model_proposes_fields_under_a_grammar() -> None:
    fields: list[Any] = [{"name": "who", "kind": "text"}, {"name": "days", "kind": "date (list)"}]
    engine = FakeEngine(record=json.dumps({"title": "Shift", "fields": [*fields, {"name": "cut"}]}))
    schema = await propose_schema(Extractor(engine, None), "Ada works on Monday.", "salt")
    assert schema == {
        "title": "Shift", "type": "object", "required": ["who", "days"],
        "properties": {
            "who": {"type": "string"}, "days": {"type": "array", "items": {"type": "string", "format": "date"}}
        },
    }  # fmt: skip
    assert (
        "snake_case" not in engine.requests[0].prompt and engine.requests[0].options["cache_salt"] == "salt"
    )
