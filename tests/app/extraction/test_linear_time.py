"""Reading a text takes time in proportion to its length, whatever it is made of."""

import json
import time
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import pytest

from app.extraction.candidates import bind_amounts
from app.extraction.chunks import cut
from app.extraction.grounding import find_evidence
from app.extraction.json_spans import scan
from app.extraction.verbatim import list_spellings

FAMILIES = [
    *("\n", " ", "\t \n", ".", "-", "- ", "((", "'", '"', "*", "- a\n", "a", "a ", "aé", "e\u0301", "fifty ", "fifty-"),
    *("1", "1 ", "1.", "1,", "1 000 ", "−1", "(1", "1)", "’1", "$1", "EUR ", "1e9", "10:30", "at 1.30 ", "1000 "),
    *("2026-", "1/1/", "12 March ", "12 mar", "1 de de ", "月1", "2026-03-12 "),
]
SMALL, FACTOR, LIMIT, FLOOR_S = 1_500, 4, 8, 0.005
VALUES: dict[str, Any] = {"d": {"type": "string", "format": "date"}, "n": {"type": "number"}, "i": {"type": "integer"}}
SCHEMA: dict[str, Any] = {"properties": VALUES}
RECORD = [1, -1, 1000, "1", "a", "aa", "2026-03-12", "10:30", "12 mar 1", "1,000", ["1", "1", "a"]]


def ground(text: str) -> None:
    bind_amounts(json.loads(json.dumps(SCHEMA)), text)
    list_spellings(text)


def show(text: str) -> None:
    find_evidence(scan(json.dumps(RECORD) + " ").leaves, text)


def measure(read: Callable[[str], Any], text: str) -> float:
    begun = time.thread_time()
    read(text)
    return time.thread_time() - begun


@pytest.mark.parametrize("read", [ground, show, lambda text: cut(text, 300)], ids=["values", "evidence", "parts"])
def test_a_text_four_times_as_long_takes_about_four_times_as_long(read: Callable[[str], Any]) -> None:
    read("1 a")
    for family in FAMILIES:
        small, large = ("5 " + "".join(islice(cycle(family), size)) for size in (SMALL, SMALL * FACTOR))
        # Again where it looks slow, because the processor is shared.
        ratios = (measure(read, large) / max(measure(read, small), FLOOR_S) for _ in range(3))
        assert any(ratio < LIMIT for ratio in ratios), family
