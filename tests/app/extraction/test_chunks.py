"""Long texts: the parts cover the text, and merging neither loses nor doubles what they found."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.extraction import ExtractionResult, Extractor, TextTooLong
from app.extraction.bounds import Bound, BoundedSchema
from app.extraction.chunks import PartsDone, cut, extract_long, stream_whole
from app.extraction.grounding import find_evidence
from app.extraction.json_spans import scan
from app.extraction.merging import Part, merge
from engine import PromptTooLong
from tests.app.busy_engine import BusyEngine
from tests.fakes import FakeEngine, FakeTokenizer

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"items": {"type": "array"}, "total": {"type": "number"}}}


class UnevenTokenizer(FakeTokenizer):
    """Three tokens for a character that is not ASCII."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [token for char in text for token in [ord(char)] * (1 if char.isascii() else 3)]


def make_result(record: Any, text: str, confidence: float = 0.9, finish_reason: str = "stop") -> ExtractionResult:
    leaves = scan(json.dumps(record) + " ").leaves
    errors = () if finish_reason == "stop" else ("cut off",)
    return ExtractionResult(
        source="", record=record, raw=json.dumps(record), valid=not errors, errors=errors, finish_reason=finish_reason,
        confidence={leaf.pointer: confidence for leaf in leaves}, evidence=find_evidence(leaves, text),
        leaves=tuple(leaves), bounds=BoundedSchema({}),
    )


def test_a_single_value_comes_from_the_part_that_shows_it_best() -> None:
    results = [make_result({"total": 1}, "nothing", 0.99), make_result({"total": 7}, "x 7", 0.4)]
    merged = merge(SCHEMA, [Part(0, 7), Part(7, 10)], results)
    assert merged.record == {"total": 7} and merged.confidence == {"/total": 0.4}
    assert (merged.evidence["/total"].start, merged.evidence["/total"].end) == (9, 10)


def test_confidence_and_evidence_move_with_the_items() -> None:
    results = [make_result({"items": ["a"]}, "a", 0.9), make_result({"items": ["a", "c"]}, "a c", 0.5)]
    merged = merge(SCHEMA, [Part(0, 1), Part(0, 3)], results)
    assert merged.confidence == {"/items/0": 0.9, "/items/1": 0.5} and merged.evidence["/items/1"].quote == "c"


def test_one_part_that_was_cut_off_makes_the_whole_not_valid() -> None:
    results = [make_result({"total": 1}, "1"), make_result({"total": 2}, "2", finish_reason="length")]
    merged = merge(SCHEMA, [Part(0, 1), Part(1, 2)], results)
    assert not merged.valid and merged.finish_reason == "length" and "part 2 of 2" in merged.errors[0]
    lost = replace(results[0], record=None, errors=("a number is too large",), leaves=())
    merged = merge(SCHEMA, [Part(0, 1), Part(1, 2)], [results[0], lost])
    assert not merged.valid and merged.errors == ("part 2 of 2: a number is too large",)


def test_the_merged_record_is_checked_again() -> None:
    schema = SCHEMA | {"properties": {"items": {"maxItems": 1}}}
    results = [make_result({"items": ["a"]}, "a"), make_result({"items": ["b"]}, "b")]
    assert not merge(schema, [Part(0, 1), Part(1, 2)], results).valid


def test_what_was_added_for_a_later_part_is_shown_too() -> None:
    length = Bound("/properties/day", "maxLength", 200)
    first, second = make_result({"total": 1}, "1815"), make_result({"total": 1}, "1")
    results = [first, replace(second, bounds=BoundedSchema({}, (length,)))]
    assert merge(SCHEMA, [Part(0, 4), Part(4, 5)], results).bounds.added == (length,)


async def test_a_long_text_is_read_in_parts_that_fit_and_wait_while_the_queue_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.concurrency.RETRY_S", 0.0)
    engine = BusyEngine(num_refused=5)
    *steps, last = [step async for step in extract_long(Extractor(engine), {"type": "object"}, "Ada is 36. " * 400)]
    num_parts = len(engine.requests)
    assert num_parts > 2 and steps[-1] == PartsDone(num_parts, num_parts)
    assert isinstance(last, ExtractionResult) and last.valid and engine.num_refused == 0
    engine = FakeEngine()
    steps = [step async for step in extract_long(Extractor(engine), {"type": "object"}, "Ada, 36")]
    assert len(engine.requests) == 1 and steps[0] == PartsDone(1, 1)


@pytest.mark.parametrize(("num_lines", "record_chars"), [(70, 300), (110, 300), (40, 900)])
async def test_text_and_record_share_the_room_or_the_text_is_divided(num_lines: int, record_chars: int) -> None:
    engine = FakeEngine(record=json.dumps({"a": "x" * record_chars}))
    stream = stream_whole(Extractor(engine, limits=None), {"type": "object"}, "Ada, 36.\n" * num_lines)
    *_, last = [step async for step in stream]
    assert isinstance(last, ExtractionResult) and last.valid and last.finish_reason == "stop"


async def test_a_record_that_no_part_has_room_for_is_cut_off_and_said_to_be() -> None:
    engine = FakeEngine(record=json.dumps({"a": "x" * 1500}))
    *_, last = [step async for step in stream_whole(Extractor(engine, limits=None), {"type": "object"}, "Ada " * 60)]
    assert isinstance(last, ExtractionResult) and not last.valid and last.finish_reason == "length"
    # The user's own limit is no lack of room.
    engine = FakeEngine()
    *_, last = [step async for step in stream_whole(Extractor(engine, max_tokens=9), {"type": "object"}, "Ada " * 100)]
    assert len(engine.requests) == 1 and last.finish_reason == "length"


@given(st.text(alphabet="aé \n.", max_size=2500), st.integers(250, 600))
def test_parts_that_do_not_fit_are_cut_shorter_and_still_cover_the_text(text: str, max_chars: int) -> None:
    def weigh(part: str) -> int:
        return sum(1 if char.isascii() else 3 for char in part)

    parts = cut(text, max_chars, lambda part: weigh(part) <= 610)
    assert parts[0].start == 0 and parts[-1].end == len(text)
    assert all(weigh(text[part.start : part.end]) <= 610 and part.end - part.start <= max_chars for part in parts)
    assert all(a.start < b.start <= a.end < b.end for a, b in pairwise(parts))
    lines = "one two three\nfour five six\nseven"
    assert lines[: cut(lines, 30)[0].end] == "one two three\nfour five six\n"


def test_a_part_that_ends_within_the_overlap_is_left_out() -> None:
    parts = cut("a" * 9000 + "é" * 3000, 6000, lambda part: len(part) + 19 * part.count("é") <= 6000)
    assert parts[-1].end == 12_000 and all(a.end < b.end for a, b in pairwise(parts))


async def test_a_text_with_a_dense_end_is_read_in_parts_that_fit() -> None:
    text = "The town hall was full. " * 120 + "漢字仮名交文東京都港区芝公園" * 60
    engine = FakeEngine(tokenizer=UnevenTokenizer())
    *_, last = [step async for step in extract_long(Extractor(engine), {"type": "object"}, text)]
    assert isinstance(last, ExtractionResult) and last.valid
    # The fake writes a token as a character: the room that is left is what the plan keeps for a record.
    assert all(2048 - len(request.prompt) >= 614 for request in engine.requests)
    assert sum("芝芝芝" in request.prompt for request in engine.requests) > 1


def test_a_place_too_dense_for_the_smallest_part_is_named() -> None:
    with pytest.raises(TextTooLong, match=r"characters 1 to \d+ of the text are more tokens"):
        cut("é" * 900, 500, lambda part: len(part) < 50)


@pytest.mark.parametrize(
    ("schema", "text", "words"),
    [
        ({"type": "object"}, "Ada " * 50_000, "more than 64 parts"),
        ({"type": "object", "description": "x" * 1500}, "Ada " * 900, "leaves no room"),
    ],
)
async def test_what_no_parts_can_be_made_for_is_refused(schema: Any, text: str, words: str) -> None:
    with pytest.raises(TextTooLong, match=words):
        _ = [step async for step in extract_long(Extractor(FakeEngine()), schema, text)]


async def test_a_text_whose_length_alone_is_too_much_for_the_model_is_divided() -> None:
    class Bounded(FakeEngine):
        async def render_chat(self, messages: Any, /, **options: Any) -> list[int]:
            if (size := len(messages[-1]["content"])) > 20_000:
                raise PromptTooLong(f"messages has {size} characters, and they hold at most 20000", "messages")
            return await super().render_chat(messages, **options)

    *_, last = [step async for step in stream_whole(Extractor(Bounded()), {"type": "object"}, "Ada is 36. " * 2000)]
    assert isinstance(last, ExtractionResult) and "overlapping parts" in last.notes[0]
    with pytest.raises(TextTooLong, match="text and schema have"):
        await Extractor(Bounded()).extract({"type": "object"}, "Ada " * 6000)


async def test_leaving_early_ends_the_parts_that_run() -> None:
    engine = FakeEngine()
    stream = extract_long(Extractor(engine), {"type": "object"}, "Ada is 36. " * 400)
    await anext(stream)
    await stream.aclose()
    assert all(request.is_finished or request.is_aborted for request in engine.requests)


def test_parts_of_different_shapes_do_not_break_the_merge() -> None:
    results = [make_result({"items": None}, ""), make_result({"items": ["a"]}, "a")]
    assert merge({}, [Part(0, 0), Part(0, 1)], results).record == {"items": ["a"]}


def read_parts(text: str, *records: tuple[str, Any]) -> ExtractionResult:
    """Return the merged result of the parts of a text that begin and end with these words."""
    parts, results = [], []
    for words, record in records:
        first, last = words.split("…")
        part = Part(text.index(first), text.index(last) + len(last))
        parts.append(part)
        results.append(make_result(record, text[part.start : part.end]))
    return merge(SCHEMA, parts, results)


def test_equal_items_at_different_places_are_two() -> None:
    text = "Mon: Tea, Coffee\nTue: open\nWed: Coffee, Milk\n"
    first, second = (("Mon…open\n", {"items": ["Tea", "Coffee"]}), ("Tue…Milk\n", {"items": ["Coffee", "Milk"]}))
    merged = read_parts(text, first, second)
    assert merged.record == {"items": ["Tea", "Coffee", "Coffee", "Milk"]}
    assert [merged.evidence[f"/items/{n}"].start for n in range(4)] == [5, 10, 32, 40]


RECEIPT = "Chair\n 10.50\nTable\n 99.25\nLamp\n 30.75\nRug\n 45.00\n"


def make_sales(**prices: float | None) -> dict[str, Any]:
    return {"items": [{"what": name, "price": price} for name, price in prices.items()]}


@pytest.mark.parametrize("lamp", [None, 7.0])
def test_an_item_that_its_part_cuts_off_is_made_whole_by_the_next(lamp: float | None) -> None:
    first = ("Chair…Lamp\n", make_sales(Chair=10.5, Table=99.25, Lamp=lamp))
    second = ("Table…45.00\n", make_sales(Table=99.25, Lamp=30.75, Rug=45.0))
    merged = read_parts(RECEIPT, first, second)
    assert merged.record == make_sales(Chair=10.5, Table=99.25, Lamp=30.75, Rug=45.0)
    assert merged.evidence["/items/2/price"].quote == "30.75" and len(merged.notes) == 1


def test_a_text_that_its_part_cuts_off_gives_way_to_the_whole_one() -> None:
    text = "Sold to Bell and Acme Trading Ltd today"
    first, second = (
        ("Sold…Acme ", {"items": ["Bell", "Acme"]}), ("Bell…today", {"items": ["Bell", "Acme Trading Ltd"]})
    )
    assert read_parts(text, first, second).record == {"items": ["Bell", "Acme Trading Ltd"]}


def test_an_item_that_one_part_missed_stands_in_its_order() -> None:
    merged = read_parts(
        RECEIPT,
        ("Chair…30.75\n", {"items": ["Chair", "Lamp"]}),
        ("Table…45.00\n", {"items": ["Table", "Lamp", "Rug"]}),
    )
    assert merged.record == {"items": ["Chair", "Table", "Lamp", "Rug"]}


def test_a_place_that_all_items_share_makes_none_of_them_the_same() -> None:
    text = "Ann pays Bob pays in EUR Cy pays Di pays"
    pay = [{"who": name, "in": "EUR"} for name in ("Ann", "Bob", "Cy", "Di")]
    merged = read_parts(text, ("Ann…EUR ", {"items": pay[:2]}), ("in…Di pays", {"items": pay[2:]}))
    assert merged.record == {"items": pay}


def test_items_that_stand_nowhere_are_told_by_their_values_and_that_is_noted() -> None:
    first, second = ("Chair…30.75\n", {"items": [True, False]}), ("Table…45.00\n", {"items": [False, True]})
    merged = read_parts(RECEIPT, first, second)
    assert merged.record == {"items": [True, False, True]}
    assert merged.notes[1].startswith("/items: 1 item is equal in parts 1 and 2, without a place in the text")


def test_parts_without_an_overlap_have_no_item_in_common() -> None:
    merged = read_parts(RECEIPT, ("Chair…99.25\n", {"items": [True]}), ("Lamp…45.00\n", {"items": [True]}))
    assert merged.record == {"items": [True, True]} and len(merged.notes) == 1


@given(st.lists(st.sampled_from(["tea", "milk", "pie"]), min_size=2, max_size=12), st.data())
def test_exact_parts_come_to_the_items_of_the_whole_text(words: list[str], data: st.DataObject) -> None:
    text = "".join(f"{word}\n" for word in words)
    starts = [0, *(at + 1 for at, char in enumerate(text) if char == "\n")]
    end = data.draw(st.integers(1, len(words)))
    begin = data.draw(st.integers(0, end))
    parts = [Part(0, starts[end]), Part(starts[begin], len(text))]
    results = [
        make_result({"items": text[part.start : part.end].split()}, text[part.start : part.end]) for part in parts
    ]
    assert merge(SCHEMA, parts, results).record == {"items": words}


@pytest.mark.parametrize(("sure", "record"), [(0.9, {"items": ["a", "c"]}), (0.1, {"items": "b"})])
def test_of_a_list_and_a_text_the_surer_one_is_kept(sure: float, record: Any) -> None:
    results = [make_result({"items": ["a", "c"]}, "a c", sure), make_result({"items": "b"}, "b", 0.5)]
    merged = merge({}, [Part(0, 3), Part(3, 4)], results)
    assert merged.record == record
    shown = ["/items/0", "/items/1"] if sure > 0.5 else ["/items"]
    assert list(merged.confidence) == list(merged.evidence) == shown
