"""A schema that the model proposes for a text."""

import json
from typing import Any

from app.extraction import Extractor
from app.ui.schema.suggest import propose_schema
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
