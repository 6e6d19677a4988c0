"""Free strings are quotations; choices, dates, times and patterns are not."""

from typing import Any

import pytest

from app.extraction import Extractor
from app.extraction.verbatim import GROUNDED, is_free_at, mark_grounded
from tests.fakes import FakeEngine

TEXT: dict[str, Any] = {"type": "string"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": TEXT, "phone": {"anyOf": [TEXT, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": ["string", "null"]}},
        "mood": {"enum": ["good", "bad"], "type": "string"}, "day": {"type": "string", "format": "date"},
        "starts": {"type": "string", "description": "24 hour HH:MM"}, "count": {"type": "integer"},
        "size": {"enum": ["large", None]},
    },
    "required": ["name"],
}


def test_free_strings_are_marked_wherever_they_stand_and_the_given_schema_stays() -> None:
    marked = mark_grounded(SCHEMA, "no date").schema
    fields = marked["properties"]
    assert fields["name"][GROUNDED] and fields["phone"]["anyOf"][0][GROUNDED] and fields["tags"]["items"][GROUNDED]
    assert not any(GROUNDED in fields[name] for name in ("mood", "day", "count"))
    assert GROUNDED not in SCHEMA["properties"]["name"]


@pytest.mark.parametrize(
    ("pointer", "is_free"),
    [
        ("/name", True), ("/phone", True), ("/tags/0", True), ("/mood", False), ("/day", False),
        ("/size", False), ("/else", True),
    ],
)
def test_a_value_is_free_by_the_schema_at_its_pointer(pointer: str, is_free: bool) -> None:
    assert is_free_at(SCHEMA, pointer) is is_free


@pytest.mark.parametrize(
    ("ground", "text", "more"),
    [
        (True, "Ada is 36.", ""), (True, "Doors at 6:30 pm on 5 May 2026, over at 22:00.", "\n2026-05-05\n18:30"),
        (False, "Ada is 36.", None), (True, " \n", None),
    ],
)
async def test_the_grammar_gets_the_text_and_usual_spellings(ground: bool, text: str, more: str | None) -> None:
    engine = FakeEngine()
    await Extractor(engine, ground=ground).extract(SCHEMA, text)
    grammar = engine.requests[0].params.grammar
    assert grammar is not None and grammar.source == (None if more is None else text + more)
    assert (GROUNDED in grammar.text) == (more is not None)
