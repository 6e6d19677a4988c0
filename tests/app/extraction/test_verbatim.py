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


async def test_a_time_or_date_in_another_spelling_may_be_written_in_the_usual_one() -> None:
    engine = FakeEngine()
    await Extractor(engine, ground=True).extract(SCHEMA, "Doors at 6:30 pm on 5 May 2026, over at 22:00.")
    assert engine.requests[0].params.grammar.source.split("\n")[1:] == ["2026-05-05", "18:30"]


@pytest.mark.parametrize(
    ("pointer", "is_free"),
    [
        ("/name", True), ("/phone", True), ("/tags/0", True), ("/mood", False), ("/day", False),
        ("/size", False), ("/else", True),
    ],
)
def test_a_value_is_free_by_the_schema_at_its_pointer(pointer: str, is_free: bool) -> None:
    assert is_free_at(SCHEMA, pointer) is is_free


async def test_grounding_hands_the_text_to_the_grammar() -> None:
    engine = FakeEngine()
    await Extractor(engine, ground=True).extract(SCHEMA, "Ada is 36.")
    grammar = engine.requests[0].params.grammar
    assert grammar is not None and grammar.source == "Ada is 36." and GROUNDED in grammar.text


@pytest.mark.parametrize(("ground", "text"), [(False, "Ada is 36."), (True, " \n")])
async def test_nothing_is_grounded_unasked_or_in_an_empty_text(ground: bool, text: str) -> None:
    engine = FakeEngine()
    await Extractor(engine, ground=ground).extract(SCHEMA, text)
    grammar = engine.requests[0].params.grammar
    assert grammar is not None and grammar.source is None and GROUNDED not in grammar.text
