"""A record is valid only when it is complete and an independent validator agrees with the user's schema."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.extraction import (
    ExtractionResult,
    Extractor,
    PartialExtraction,
    Source,
    TextTooLong,
    extract_records,
)
from app.extraction.batch import MAX_CONCURRENT
from app.extraction.cases import Case
from app.extraction.evaluate import score_cases
from app.extraction.extractor import check_record
from app.extraction.flags import ENDED
from engine import CompletionOutput, Engine, EngineConfig, EngineDead
from grammar import GrammarError, InvalidGrammar, UnsupportedGrammar
from tests.app.busy_engine import BusyEngine
from tests.fakes import PERSON, FakeEngine

TEXT = "Ada is 36 years old."


async def extract(engine: Any, schema: dict[str, Any] = PERSON, text: str = TEXT, **options: Any) -> ExtractionResult:
    return await Extractor(engine, **options).extract(schema, text)


async def test_a_complete_record_is_valid_with_confidence_and_evidence() -> None:
    result = await extract(FakeEngine())
    assert result.valid and result.record == {"name": "Ada", "age": 36} and result.errors == ()
    assert result.confidence == {"/name": 0.7788, "/age": 0.7788}
    assert {pointer: found.quote for pointer, found in result.evidence.items()} == {"/name": "Ada", "/age": "36"}


async def test_the_record_grows_and_ends_in_one_result() -> None:
    parts = [part async for part in Extractor(FakeEngine()).stream(PERSON, TEXT)]
    assert [type(part) for part in parts[-2:]] == [PartialExtraction, ExtractionResult]
    records = [part.record for part in parts[:-1]]
    assert records[0] == {} and {"name": "Ad"} in records and records[-1] == {"name": "Ada", "age": 36}


async def test_limits_that_leave_nothing_of_a_schema_are_left_out(engine: Engine) -> None:
    day, defined = {"enum": [["a"] * 33]}, {"type": "array"}
    schema = {
        "type": "object", "properties": {"day": {"$ref": "#/$defs/day", **day}}, "required": ["day"],
        "additionalProperties": False, "$defs": {"day": defined},
    }
    result = await extract(engine, schema, "the day of the battle")
    assert result.valid and result.bounds.added == ()
    assert result.notes == ("with the added limits nothing satisfies the schema: read without them",)


async def test_values_of_the_text_that_leave_nothing_of_a_schema_do_not_limit_it(engine: Engine) -> None:
    day = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}, "required": ["day"]}
    schema = {**day, "additionalProperties": False, "allOf": [{"properties": {"day": {"pattern": "^2026-03"}}}]}
    for text, words in (("made 2026-02-12", "any"), ("made 2026-02-12, due 12 March", "'12 March' may be one")):
        result = await extract(engine, schema, text, ground=True)
        assert result.valid and result.record["day"].startswith("2026-03") and words in result.notes[0]
    result = await extract(engine, schema, "made 2026-02-12, due 12. März 2026", ground=True)
    assert result.record == {"day": "2026-03-12"} and result.notes == ()


async def test_a_schema_that_nothing_satisfies_is_refused_with_and_without_limits(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": False}, "required": ["a", "b"]}
    with pytest.raises(GrammarError, match="unsatisfiable"):
        await extract(engine, schema)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine(EngineConfig(num_threads=1, num_blocks=200)) as started:
        yield started


async def test_generation_is_greedy_and_bound_by_the_schema_with_limits_unless_they_are_off() -> None:
    engine = FakeEngine()
    await Extractor(engine).extract(PERSON, TEXT, cache_salt="me")
    result = await extract(engine, limits=None)
    first, second = engine.requests
    assert first.params.temperature == 0 and '"maxLength": 200' in first.params.grammar.text
    assert first.options["cache_salt"] == "me"
    assert "maxLength" not in second.params.grammar.text and result.bounds.added == ()


@pytest.mark.parametrize(
    ("record", "max_tokens", "reason", "kept", "words"),
    [
        ('{"name": "Ada", "age": 36}', 20, "length", {"name": "Ada"}, ""),
        ('{"name": "Ada", "age": "old"}', 99, "stop", {"name": "Ada", "age": "old"}, "/age"),
        ("{oops", 99, "stop", None, "not JSON"),
    ],
)
async def test_what_is_not_complete_or_refused_by_the_validator_is_not_valid(
    record: str, max_tokens: int, reason: str, kept: Any, words: str
) -> None:
    result = await extract(FakeEngine(record=record), max_tokens=max_tokens)
    assert not result.valid and result.finish_reason == reason and words in result.errors[0]
    assert kept is None or result.record == kept


@pytest.mark.parametrize(
    ("schema", "text", "error", "words"),
    [
        (PERSON, "x" * 3000, TextTooLong, r"[\d,]+ tokens, but the model takes 2,048"),
        ({"type": "strin"}, TEXT, GrammarError, "strin"),
    ],
)
async def test_what_cannot_run_is_refused_before_anything_runs(
    schema: Any, text: str, error: type[Exception], words: str
) -> None:
    engine = FakeEngine()
    with pytest.raises(error, match=words):
        await extract(engine, schema, text)
    assert engine.requests == []


WORDS = "upright engineer pressure warranty vessels machines " * 10


@pytest.mark.parametrize(
    ("name", "text", "more", "note"),
    [
        (WORDS[:200], TEXT, {}, "/name ends at the added limit of 200 characters; raise"),
        (WORDS[:190], TEXT, {}, "/name ends at the added limit of 200 characters, after 190; raise"),
        ("a b " * 48, TEXT, {}, "/name was ended after 3 characters, because the model repeated itself"),
        # The next word has no room.
        (WORDS[:198].rstrip(), WORDS, {}, "/name ends at the added limit of 200 characters, after 198; raise"),
        (WORDS[:190], f"{WORDS[:190]} a b c", {}, ""),
        (WORDS[:200], WORDS[:200], {}, ""),
        (WORDS[:198].rstrip(), WORDS, {"maxLength": 200}, ""),
        (WORDS[:100], TEXT, {}, ""),
    ],
)
async def test_a_text_that_an_added_limit_may_have_cut_is_noted(
    name: str, text: str, more: dict[str, Any], note: str
) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", **more}, "b": {"type": "string"}}}
    result = await extract(FakeEngine(record=json.dumps({"name": name})), schema, text)
    assert result.valid and "".join(result.notes).startswith(note) and bool(result.notes) == bool(note)
    assert result.to_json().get("notes", []) == list(result.notes)


LIST: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}


@pytest.mark.parametrize(("items", "text"), [([*range(32)], TEXT), ([7] * 32, "7, " * 40)])
async def test_a_list_as_long_as_an_added_limit_is_noted(items: list[int], text: str) -> None:
    result = await extract(FakeEngine(record=json.dumps({"a": items})), LIST, text)
    assert result.notes == ("/a ends at the added limit of 32 items; raise or switch off the limit",)


@pytest.mark.parametrize(
    ("items", "text", "length"),
    [
        ([1, 2, *[3] * 30], TEXT, 3),
        ([1, *[2, 3] * 16], TEXT, 3),
        ([7] * 5, "7 7 7 7 7", None),  # as often as in the text
        ([7, 8, 9, 7, 8, 9], TEXT, None),
    ],
)
async def test_a_list_that_loops_is_written_again_and_ends_before_the_copies(
    items: list[int], text: str, length: int | None
) -> None:
    engine = FakeEngine(record=json.dumps({"a": items}))
    result = await extract(engine, LIST, text)
    *looping, last = engine.requests
    assert [request.is_aborted for request in looping] == [True] * (length is not None)
    assert (f'"maxItems": {length}' in last.params.grammar.text) is (length is not None)
    assert any("the model repeated itself" in note for note in result.notes) is (length is not None)
    assert (ENDED in result.flags[result.leaves[-1].pointer]) is (length is not None)


LONG: dict[str, Any] = {"type": "string", "maxLength": 5000}
TEXTS: dict[str, Any] = {
    "plain": ({"a": LONG}, "a", '"maxLength": 17'),
    "may be null": ({"a": {"anyOf": [LONG, {"type": "null"}]}}, "a", '"maxLength": 17'),
    "inner": ({"o": {"properties": {"a": LONG}}}, "o/a", '"maxLength": 17'),
    "within items": ({"l": {"items": {"type": "string"}}}, "l/0", '"maxLength": 200'),
}


@pytest.mark.parametrize("case", TEXTS)
@pytest.mark.parametrize("is_shown", [False, True])
async def test_a_text_that_loops_is_written_again_and_ends_before_the_copies(case: str, is_shown: bool) -> None:
    properties, place, limit = TEXTS[case]
    value = "A desk. " + "Very new. " * 90
    record: Any = value
    for step in reversed(place.split("/")):
        record = [record] if step == "0" else {step: record}
    engine = FakeEngine(record=json.dumps(record))
    result = await extract(engine, {"properties": properties}, value if is_shown else TEXT, limits=None)
    assert [request.is_aborted for request in engine.requests] == [True, False][is_shown:]
    assert (limit in engine.requests[-1].params.grammar.text) is not is_shown
    assert engine.requests[0].num_sent < 400 or is_shown
    assert any("the model repeated itself" in note for note in result.notes) is not is_shown
    assert (ENDED in result.flags.get(f"/{place}", ())) is not is_shown


async def test_a_loop_at_the_token_limit_is_named() -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": "^.*$"}}}
    result = await extract(FakeEngine(record=json.dumps({"a": "new " * 400})), schema, max_tokens=900)
    assert "because the model repeated itself" in result.errors[0]


@pytest.mark.parametrize("more", [{"minItems": 30}, {"items": {"type": "boolean"}}])
async def test_a_list_that_must_be_long_or_is_chosen_is_not_shortened(more: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {**LIST["properties"]["a"], **more}}}
    engine = FakeEngine(record=json.dumps({"a": [True if "items" in more else 5] * 31}))
    await extract(engine, schema)
    assert len(engine.requests) == 1


async def test_leaving_a_stream_aborts_its_request() -> None:
    engine = FakeEngine()
    stream = Extractor(engine).stream(PERSON, TEXT)
    await anext(stream)
    await stream.aclose()
    assert engine.requests[0].is_aborted


async def test_many_sources_come_in_order_as_json_able_lines() -> None:
    sources = [Source(f"{number}.txt", TEXT) for number in range(MAX_CONCURRENT + 3)]
    lines = [line async for line, _ in extract_records(Extractor(FakeEngine()), PERSON, sources)]
    assert [line["source"] for line in lines] == [source.name for source in sources]
    assert set(lines[0]) == {"source", "record", "valid", "finish_reason", "confidence", "evidence", "flags", "checks"}
    assert lines[0]["evidence"]["/name"] == {"match": "exact", "start": 0, "end": 3, "quote": "Ada"}


async def test_one_bad_source_does_not_stop_the_others() -> None:
    sources = [Source("long", "x" * 200_000), Source("good", TEXT)]
    lines = [line async for line, _ in extract_records(Extractor(FakeEngine()), PERSON, sources)]
    assert [line["valid"] for line in lines] == [False, True]
    assert "more than 64 parts" in lines[0]["error"]


async def test_a_dead_engine_ends_the_batch() -> None:
    lines = extract_records(Extractor(FakeEngine(reject=EngineDead("gone"))), PERSON, [Source("a", TEXT)])
    with pytest.raises(EngineDead):
        await anext(lines)
    await lines.aclose()


async def test_a_full_engine_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.concurrency.RETRY_S", 0.0)
    sources = [Source(f"{number}.txt", TEXT) for number in range(5)]
    lines = [line async for line, _ in extract_records(Extractor(BusyEngine(num_refused=9)), PERSON, sources)]
    assert [line["valid"] for line in lines] == [True] * 5
    case = Case("person", PERSON, TEXT, {"name": "Ada", "age": 36})
    assert [scored.is_whole for scored in await score_cases(Extractor(BusyEngine(num_refused=3)), [case])] == [True]


class Refusing(FakeEngine):
    """Has no grammar for a text with Cy in it, with limits or without."""

    async def generate(self, prompt: Any, sampling_params: Any, *given: Any, **more: Any) -> Any:
        if "Cy" in "".join(map(chr, prompt)):
            raise InvalidGrammar("no part of the source has that length")
        async for output in super().generate(prompt, sampling_params, *given, **more):
            yield output


async def test_a_text_that_grounds_nothing_fails_alone() -> None:
    sources = [Source("a", TEXT), Source("c", "Cy"), Source("d", "half a \ud83d"), Source("e", TEXT)]
    lines = [line async for line, _ in extract_records(Extractor(Refusing(), ground=True), PERSON, sources)]
    assert [line["valid"] for line in lines] == [True, False, False, True]
    assert "that length" in lines[1]["error"] and "surrogate" in lines[2]["error"]


async def test_a_refusal_of_verbatim_texts_names_the_option_and_not_a_keyword_nobody_wrote(engine: Engine) -> None:
    for more in (
        {"not": {"type": "null"}}, {"type": ["string", "null"], "anyOf": [{"enum": ["a"]}, {"type": "null"}]}
    ):
        schema = {"type": "object", "properties": {"name": {"type": "string", **more}}}
        assert (await Extractor(engine).extract(schema, TEXT)).record is not None
        with pytest.raises(UnsupportedGrammar, match="verbatim text") as caught:
            await Extractor(engine, ground=True).extract(schema, TEXT)
        assert "/properties/name" in caught.value.pointer and "x-grounded" not in str(caught.value)


@pytest.mark.parametrize("ground", [False, True])
async def test_a_schema_that_cannot_be_used_ends_the_run(ground: bool) -> None:
    lines = extract_records(Extractor(FakeEngine(), ground=ground), {"type": "strin"}, [Source("a", TEXT)])
    with pytest.raises(GrammarError):
        await anext(lines)


async def test_a_long_run_of_digits_does_not_end_the_run() -> None:
    schema = PERSON | {"properties": {"name": {"type": "string"}, "age": {"type": "number"}}}
    sources = [Source("a", TEXT), Source("b", f"{TEXT} Key: {'9' * 320}"), Source("c", TEXT)]
    lines = [line async for line, _ in extract_records(Extractor(FakeEngine(), ground=True), schema, sources)]
    assert [line["valid"] for line in lines] == [True, True, True]


async def test_a_long_text_that_grounds_is_too_long_rather_than_no_grammar() -> None:
    with pytest.raises(TextTooLong):
        await extract(FakeEngine(), text="On 3 May 2024 we paid 12.50 for it. " * 10_000, ground=True)


@pytest.mark.parametrize(
    ("schema", "text", "error"),
    [
        *(({"type": "object"}, f'{{"a": {number}}}', "") for number in ("1e999", "-1e999", "1" * 5000)),
        ({}, "[" * 100_000 + "]" * 100_000, "nested"),
        ({"type": "object", "items": {"$ref": "http://127.0.0.1:9/x"}}, "{}", "cannot be used for validation"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_python_or_the_validator_cannot_read_is_no_valid_record(schema: Any, text: str, error: str) -> None:
    record, (found,) = check_record(schema, CompletionOutput(0, text, [], finish_reason="stop"), "stop")
    assert record == ({} if text == "{}" else None) and error in found


@pytest.mark.parametrize("record", ['{"name": "Ada", "age": 1e999}', '{"age": 1e999, "name": "A'])
async def test_a_number_that_json_cannot_spell_leaves_no_record_but_the_raw_text(record: str) -> None:
    result = await extract(FakeEngine(record=record))
    line = json.dumps(result.to_json(), allow_nan=False)
    assert result.record is None and not result.valid and not result.leaves
    assert json.loads(line)["error"] == f"a number is larger than a double holds: {record}"
