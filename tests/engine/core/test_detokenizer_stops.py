"""StopStrings: the first stop string ends the text, and no part of it is ever shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.stop_strings import StopStrings

LETTERS = st.text(alphabet="abc", max_size=24)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


def run(stops: StopStrings, chunks: Iterable[str]) -> tuple[list[str], str | None]:
    """The released pieces and the hit."""
    released = []
    for num_tokens, chunk in enumerate(chunks, 1):
        text, hit = stops.feed(chunk, num_tokens)
        released.append(text)
        if hit is not None:
            return released, hit
    return [*released, stops.finish()], None


def find_first(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The obvious way: (start, stop string) of the one that is complete first, the longest of several."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None


@given(text=LETTERS, stops=STOPS, data=st.data())
def test_any_chunking_cuts_at_the_stop_string_that_is_complete_first(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    released, hit = run(StopStrings(stops), chunks)
    first = find_first(text, stops)
    expected = (text, None) if first is None else (text[: first[0]], first[1])
    assert ("".join(released), hit) == expected


@given(text=LETTERS, stops=STOPS)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    if find_first(text, stops) is not None:
        return
    released, _ = StopStrings(stops).feed(text)
    prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}
    longest = max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)
    assert released == text[: len(text) - longest]


def test_the_stop_string_is_kept_when_asked_for() -> None:
    released, hit = run(StopStrings(["END"], include_in_output=True), ["some E", "N", "D more"])
    assert ("".join(released), hit) == ("some END", "END")


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["abcd", "bc"], "xabcd", ("xa", "bc")),  # complete first
        (["bc", "abc"], "xabc", ("x", "abc")),  # complete together: the longest
        (["aab"], "aaab", ("a", "aab")),
        (["ab", "cd"], "zcdab", ("z", "cd")),
    ],
)
def test_overlapping_stop_strings(stops: list[str], text: str, expected: tuple[str, str]) -> None:
    assert StopStrings(stops).feed(text) == expected


def test_a_stop_string_before_min_tokens_is_ordinary_text() -> None:
    released, hit = run(StopStrings(["."], min_tokens=3), ["a.", "b.", "c.", "d."])
    assert ("".join(released), hit) == ("a.b.c", ".")


def test_a_stop_string_completed_at_min_tokens_counts_although_it_began_before() -> None:
    released, hit = run(StopStrings(["abc"], min_tokens=3), ["a", "b", "c"])
    assert ("".join(released), hit) == ("", "abc")


def test_a_stop_string_completed_before_min_tokens_does_not_count_later() -> None:
    released, hit = run(StopStrings(["ab", "xabyz"], min_tokens=2), ["xab", "y", "q"])
    assert ("".join(released), hit) == ("xabyq", None)


def test_long_stop_strings_cost_nothing_until_the_text_follows_them() -> None:
    stops = StopStrings(["a" * 1023 + "b"] * 16)
    released, hit = run(stops, ["a" * 4000, "b"])
    assert ("".join(released), hit) == ("a" * (4000 - 1023), "a" * 1023 + "b")
