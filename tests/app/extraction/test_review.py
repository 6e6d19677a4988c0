"""Edits reach the value they name and no other; a comparison tells field by field what changed."""

import copy
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.extraction.review import Change, EditError, _match_similar, apply_edits, change_items, compare


@pytest.mark.parametrize(
    ("record", "pointer", "text", "expected"),
    [
        ({"a": "x"}, "/a", "12", {"a": "12"}), ({"a": 1}, "/a", "12", {"a": 12}),
        ({"a": 1}, "/a", "1.5", {"a": 1.5}), ({"a": True}, "/a", "false", {"a": False}),
        ({"a": None}, "/a", "Ada", {"a": "Ada"}), ({"a": 1}, "/a", "[1]", {"a": "[1]"}),
        ({"a/b": {"~": [1, 2]}}, "/a~1b/~0/1", "3", {"a/b": {"~": [1, 3]}}), ("x", "", "y", "y"),
    ],
)
def test_a_typed_text_becomes_a_value_of_the_kind_it_replaces(
    record: Any, pointer: str, text: str, expected: Any
) -> None:
    before = copy.deepcopy(record)
    assert apply_edits(record, {pointer: text}) == expected and record == before


@pytest.mark.parametrize(
    ("pointer", "action", "changed", "before"),
    [
        ("/a/1", "remove", ["x", "z"], {"/a/0": "/a/0", "/a/1": "/a/2", "/n": "/n"}),
        ("/a/0", "add", ["x", "", "y", "z"], {"/a/0": "/a/0", "/a/1": None, "/a/2": "/a/1", "/a/3": "/a/2"}),
    ],
)
def test_after_a_change_of_items_every_value_is_found_where_it_was(
    pointer: str, action: Any, changed: list[str], before: dict[str, str | None]
) -> None:
    record, find_before = change_items({"a": ["x", "y", "z"], "n": 1}, pointer, action)
    assert record["a"] == changed and {after: find_before(after) for after in before} == before


def test_the_values_of_an_added_item_are_empty() -> None:
    record, _ = change_items([{"name": "x", "price": 5, "is_paid": True, "tags": ["y"]}], "/0", "add")
    assert record[1] == {"name": "", "price": None, "is_paid": None, "tags": []}


@pytest.mark.parametrize("pointer", ["/b", "/a/5", "/a/x", "/a"])
def test_an_edit_of_no_value_is_refused(pointer: str) -> None:
    with pytest.raises(EditError, match=repr(pointer)):
        apply_edits({"a": [1]}, {pointer: "2"})


def test_every_scalar_of_both_records_is_compared() -> None:
    now = {"a": 1, "b": [{"c": "x"}], "d": 2, "e": True}
    then = {"a": 1.0, "b": [{"c": "y"}, {"c": "z"}], "e": 1}
    assert compare(now, then) == {
        "/a": Change("same", 1.0), "/b/0/c": Change("changed", "y"), "/d": Change("new"), "/e": Change("changed", 1),
        "-/b/1/c": Change("missing", "z"),
    }


def test_items_of_lists_are_compared_with_those_of_most_equal_fields() -> None:
    prices = {"lamp": 9, "desk": 90, "chair": 40}
    lamp, desk, chair = ({"what": what, "count": 2, "price": price} for what, price in prices.items())
    now, then = {"rows": [desk, {**chair, "price": 41}]}, {"rows": [lamp, desk, chair, {"what": "rug"}]}
    found = {pointer: each for pointer, each in compare(now, then).items() if each.kind != "same"}
    assert found == {
        "/rows/1/price": Change("changed", 40), "-/rows/0/what": Change("missing", "lamp"),
        "-/rows/0/count": Change("missing", 2), "-/rows/0/price": Change("missing", 9),
        "-/rows/3/what": Change("missing", "rug"),
    }  # fmt: skip
    assert {pointer for pointer, each in compare(then, now).items() if each.kind == "new"} == {
        pointer.removeprefix("-") for pointer in found if pointer.startswith("-")
    }
    # Items without an equal field are compared by their place.
    assert compare(["a", "b", "c"], ["x", "b", "y"]) == {
        "/0": Change("changed", "x"), "/1": Change("same", "b"), "/2": Change("changed", "y"),
    }


@given(*[st.lists(st.fixed_dictionaries({name: st.integers(0, 2) for name in "ab"}), max_size=5)] * 2)
def test_no_other_choice_of_pairs_has_more_equal_fields(now: list[Any], then: list[Any]) -> None:
    pairs = list(_match_similar(now, then))
    assert all(one < other for one, other in itertools.pairwise(pairs))
    assert all(one[1] < other[1] for one, other in itertools.pairwise(pairs))

    def count(first: int, second: int) -> int:
        if first == len(now) or second == len(then):
            return 0
        equal = sum(now[first][name] == then[second][name] for name in "ab")
        return max(equal + count(first + 1, second + 1), count(first + 1, second), count(first, second + 1))

    assert sum(now[one][name] == then[other][name] for one, other in pairs for name in "ab") == count(0, 0)


FIELDS: dict[str, Any] = {
    "zip": {"type": ["string", "null"]}, "fax": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "n": {"type": "number"}, "sum": {"type": ["number", "null"]}, "id": {"$ref": "#/$defs/id"},
    "size": {"enum": [1, 2]}, "name": {"type": "string"}, "any": {},
    "rows": {"type": "array", "items": {"type": "object", "additionalProperties": {"type": "string"}}},
}
SCHEMA: dict[str, Any] = {"type": "object", "properties": FIELDS, "$defs": {"id": {"type": ["string", "null"]}}}


@pytest.mark.parametrize(
    ("before", "text", "expected"),
    [
        ({"zip": None}, "12345", "12345"), ({"zip": "made up"}, "", None), ({"name": "Ann"}, "", ""),
        ({"zip": "made up"}, "null", None), ({"fax": "made up"}, "null", None), ({"fax": None}, "true", "true"),
        ({"id": None}, "7", "7"), ({"sum": 5}, "null", None), ({"sum": 5}, " ", None), ({"sum": None}, "12.5", 12.5),
        ({"n": 5}, "6", 6), ({"n": 5}, "5,5", "5,5"), ({"n": 5}, "NaN", "NaN"), ({"n": 5}, "1e999", "1e999"),
        ({"n": 5}, "[" * 100_000, "[" * 100_000), ({"size": 1}, "2", 2), ({"name": "Ann"}, "null", "null"),
        ({"any": None}, "5", 5), ({"any": "x"}, "5", "5"),
    ],
)
def test_an_edit_is_read_by_what_the_schema_allows_there(before: dict[str, Any], text: str, expected: Any) -> None:
    (name,) = before
    edited = apply_edits(before, {f"/{name}": text}, SCHEMA)[name]
    assert edited == expected and type(edited) is type(expected)


def test_the_type_is_found_in_lists_and_at_the_root() -> None:
    record = {"rows": [{"zip": "1"}, {"zip": None}]}
    assert apply_edits(record, {"/rows/1/zip": "12345"}, SCHEMA) == {"rows": [{"zip": "1"}, {"zip": "12345"}]}
    assert apply_edits(None, {"": "12345"}, {"type": ["string", "null"]}) == "12345"
    recursive = {"$ref": "#", "anyOf": [{"$ref": "#/missing"}, {"$ref": "#/anyOf/0"}]}
    assert apply_edits(None, {"": "5"}, recursive) == 5


def test_no_pattern_of_a_schema_holds_up_an_edit() -> None:
    """Python's own patterns would try 2 ** 60 ways."""
    schema = {"type": "object", "patternProperties": {"^(a|a)*$": {"type": "integer"}}}
    name = "a" * 60 + "!"
    assert apply_edits({name: 1}, {f"/{name}": "2"}, schema) == {name: 2}
    with pytest.raises(EditError, match="has no field"):
        apply_edits({}, {f"/{name}": "2"}, schema)
