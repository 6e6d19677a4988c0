"""JSON text is read as far as it goes, and every scalar knows where it stands."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.extraction.json_spans import scan

RECORD = '{"a": "x\\"y", "b": [1, -2.5, true], "c": {"d/e": null}}'

# Those that are escaped, and some of each length in UTF-16; of all characters Hypothesis makes a table for seconds.
CHARS = 'ab"\\/\b\n\x00\x7fé\u2028漢\U0001f600'
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(CHARS, max_size=6),
    lambda inner: (st.lists(inner, max_size=3) | st.dictionaries(st.text(CHARS, max_size=4), inner, max_size=3)),
    max_leaves=8,
)


def test_leaves_carry_pointer_value_and_span() -> None:
    leaves = {leaf.pointer: (leaf.value, RECORD[leaf.start : leaf.end]) for leaf in scan(RECORD).leaves}
    assert leaves == {
        "/a": ('x"y', '"x\\"y"'), "/b/0": (1, "1"), "/b/1": (-2.5, "-2.5"), "/b/2": (True, "true"),
        "/c/d~1e": (None, "null"),
    }


def test_a_path_tells_places_in_lists_from_names_of_digits() -> None:
    assert [leaf.path for leaf in scan('{"2023": [{"0": 1}], "a/b": 2} ').leaves] == [("2023", 0, "0"), ("a/b",)]


@given(json_values)
def test_a_complete_text_is_read_as_json_does(value: object) -> None:
    assert scan(json.dumps(value) + " ").value == value


@given(json_values, st.integers(0, 60))
def test_no_cut_makes_it_fail(value: object, cut: int) -> None:
    text = json.dumps(value)[:cut]
    for leaf in scan(text).leaves:
        assert 0 <= leaf.start < leaf.end <= len(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None), ('{"a": "hal', {"a": "hal"}), ('{"a": "x\\', {"a": "x"}), ('{"a": "x\\u00', {"a": "x"}),
        ('{"a": 12', {"a": 12}), ('{"a": [1, ', {"a": [1]}), ('{"a": tr', {}), ('{"a', {}),
    ],
)
def test_what_is_cut_off_keeps_its_beginning(text: str, value: object) -> None:
    assert scan(text).value == value


def test_a_value_that_may_go_on_is_not_complete() -> None:
    assert [leaf.is_complete for leaf in scan('{"a": "x", "b": 12').leaves] == [True, False]


def test_nesting_beyond_reason_ends_the_reading_and_not_the_process() -> None:
    assert scan("[" * 100_000).leaves == []
