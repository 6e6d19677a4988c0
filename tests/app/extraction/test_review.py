"""Edits reach the value they name and no other; a comparison tells field by field what changed."""

from typing import Any

import pytest

from app.extraction.review import Change, EditError, apply_edits, compare


@pytest.mark.parametrize(
    ("record", "pointer", "text", "expected"),
    [
        ({"a": "x"}, "/a", "12", {"a": "12"}),
        ({"a": 1}, "/a", "12", {"a": 12}),
        ({"a": 1}, "/a", "1.5", {"a": 1.5}),
        ({"a": True}, "/a", "false", {"a": False}),
        ({"a": None}, "/a", "Ada", {"a": "Ada"}),
        ({"a": 1}, "/a", "[1]", {"a": "[1]"}),
        ({"a/b": {"~": [1, 2]}}, "/a~1b/~0/1", "3", {"a/b": {"~": [1, 3]}}),
        ("x", "", "y", "y"),
    ],
)
def test_a_typed_text_becomes_a_value_of_the_kind_it_replaces(
    record: Any, pointer: str, text: str, expected: Any
) -> None:
    assert apply_edits(record, {pointer: text}) == expected


def test_the_record_itself_stays_as_it_was() -> None:
    record = {"a": [1]}
    apply_edits(record, {"/a/0": "2"})
    assert record == {"a": [1]}


@pytest.mark.parametrize("pointer", ["/b", "/a/5", "/a/x", "/a"])
def test_an_edit_of_no_value_is_refused(pointer: str) -> None:
    with pytest.raises(EditError, match=repr(pointer)):
        apply_edits({"a": [1]}, {pointer: "2"})


def test_every_scalar_of_both_records_is_compared() -> None:
    now, then = {"a": 1, "b": [{"c": "x"}], "d": 2}, {"a": 1.0, "b": [{"c": "y"}, {"c": "z"}]}
    assert compare(now, then) == {
        "/a": Change("same", 1.0),
        "/b/0/c": Change("changed", "y"),
        "/d": Change("new"),
        "/b/1/c": Change("missing", "z"),
    }


def test_true_is_not_one() -> None:
    assert compare({"a": True}, {"a": 1})["/a"].kind == "changed"
