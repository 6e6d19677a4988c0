"""Votes and second readings change values for better ones, and keep the record valid."""

import json

from app.extraction import Extractor
from app.extraction.refine import narrow_schema, vote
from tests.fakes import PERSON, FakeEngine


async def test_the_majority_of_the_records_decides_each_value() -> None:
    first = await Extractor(FakeEngine(record='{"name": "Ada", "age": 36}')).extract(PERSON, "Ada, 36")
    other = {"name": "Ada", "age": 63}
    values, confidence = vote(first, [other, other])
    assert values == {"/age": 63} and confidence["/age"] == 0.6667 and confidence["/name"] == 0.7788
    assert vote(first, [other, {"name": "Bob"}]) == ({}, {"/name": 0.6667, "/age": 0.3333})


async def test_samples_are_drawn_beside_the_greedy_record() -> None:
    engine = FakeEngine()
    result = await Extractor(engine, num_samples=3).extract(PERSON, "Ada is 36.")
    first, more = engine.requests
    assert (first.params.temperature, more.params.n) == (0.0, 2) and more.params.temperature > 0
    assert result.valid and result.record == {"name": "Ada", "age": 36}


async def test_a_value_that_the_text_does_not_show_is_read_again_on_its_own() -> None:
    engine = FakeEngine(record='{"name": "Bob", "age": 36}')
    await Extractor(engine, recheck=True).extract(PERSON, "Ada is 36.")
    _, second = engine.requests[:2]
    asked = json.loads(second.params.grammar.text)
    assert list(asked["properties"]) == ["name"] and asked["required"] == ["name"]
    assert "36" not in second.params.grammar.source and "Ada is" in second.params.grammar.source


async def test_a_record_without_flags_is_not_read_again() -> None:
    engine = FakeEngine()
    await Extractor(engine, recheck=True).extract(PERSON, "Ada is 36.")
    assert len(engine.requests) == 1


def test_items_of_lists_are_not_read_again() -> None:
    assert narrow_schema(PERSON, ["/names/0"]) is None and narrow_schema({"$ref": "#/x"}, ["/name"]) is None
    assert narrow_schema(PERSON, ["/age"])["properties"] == {"age": {"type": "integer"}}  # type: ignore[index]
