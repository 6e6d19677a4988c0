"""Checks across fields: sums, products and orders that the values of a record must keep.

A schema asks for them in `x-checks`, a list at its root; `*` stands for every item of a list:

    {"sum": ["/lines/*/amount", "/shipping"], "equals": "/total"}
    {"sum_of_products": ["/lines/*/quantity", "/lines/*/unit_price"], "equals": "/total"}
    {"order": ["/start", "/end"]}          numbers, dates as YYYY-MM-DD or times as HH:MM, each at most the next

Without `x-checks`, pairs of neighbours such as start and end, or min and max, must be in order, and the lines of a
list with a quantity and a price must come to the total beside it, to which taxes of up to 30 % may be added.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from app.extraction.pointers import escape_pointer, split_pointer
from app.extraction.prompt import Schema
from grammar import InvalidGrammar

KEYWORD = "x-checks"
KINDS = ("sum", "sum_of_products", "order")
# Amounts are rounded to cents line by line.
CENT = 0.01
MAX_TAX = 0.3
WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
ORDERED = (("start", "end"), ("from", "to"), ("from", "until"), ("min", "max"), ("low", "high"), ("begin", "end"),
           ("departure", "arrival"), ("issued", "due"), ("opens", "closes"))  # fmt: skip
QUANTITIES, PRICES = ("quantity", "qty", "count"), ("price", "rate")
TOTALS = ("total", "subtotal", "sum")


@dataclass(frozen=True, slots=True)
class Check:
    """One check and its outcome; `pointers` are the values that it compared."""

    kind: str
    holds: bool
    message: str
    pointers: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The check as a JSON-able dict."""
        return {
            "kind": self.kind,
            "holds": self.holds,
            "message": self.message,
            "fields": list(self.pointers),
        }


def run_checks(schema: Schema, record: Any) -> tuple[Check, ...]:
    """Run the checks of a schema, or those that its property names suggest, on a record.

    A check that misses a value is left out.

    Raises:
        InvalidGrammar: `x-checks` is malformed.
    """
    asked = read_checks(schema)
    found = asked if asked is not None else list(_suggest(record, ""))
    checks = (_run(check, record) for check in found)
    return tuple(check for check in checks if check is not None)


def read_checks(schema: Schema) -> list[dict[str, Any]] | None:
    """Return the schema's own checks; None without any.

    Raises:
        InvalidGrammar: they are malformed.
    """
    asked = schema.get(KEYWORD)
    if asked is None:
        return None
    if not isinstance(asked, list):
        raise InvalidGrammar(f"{KEYWORD} must be a list of objects", f"/{KEYWORD}")
    for number, check in enumerate(asked):
        kind = next((kind for kind in KINDS if isinstance(check, dict) and kind in check), None)
        needed = {kind} if kind == "order" else {kind, "equals"}
        if kind is None or set(check) != needed or not _is_pointers(check[kind], check.get("equals", "/")):
            raise InvalidGrammar(
                f"{KEYWORD}[{number}] must have {', '.join(KINDS[:-1])} with equals, or order; "
                "each names values by JSON pointers such as /lines/*/amount",
                f"/{KEYWORD}/{number}",
            )
    return asked


def _is_pointers(places: Any, total: Any) -> bool:
    texts = [*places, total] if isinstance(places, list) and places else [None]
    return all(isinstance(text, str) and text.startswith("/") for text in texts)


def _run(check: dict[str, Any], record: Any) -> Check | None:
    if "order" in check:
        return _run_order(check["order"], record)
    kind = "sum" if "sum" in check else "sum_of_products"
    columns = [list(_find(record, place)) for place in check[kind]]
    totals = list(_find(record, check["equals"]))
    numbers = [value for column in [*columns, totals] for _, value in column]
    if len(totals) != 1 or not all(columns) or not all(map(_is_number, numbers)):
        return None
    if kind == "sum":
        parts = [value for column in columns for _, value in column]
    else:
        if len({len(column) for column in columns}) > 1:
            return None
        parts = [
            math.prod(values) for values in zip(*([v for _, v in column] for column in columns), strict=True)
        ]
    (place, total), found = totals[0], math.fsum(parts)
    cents = CENT * max(1, len(parts))
    # Taxes may stand between the lines and the total, unless the schema requires them to be equal.
    holds = found - cents <= total <= (1 + check.get("slack", 0.0)) * found + cents
    message = (
        f"{_name(place)} is {total:g}, {'the' if holds else 'but the'} lines come to {round(found, 2):g}"
    )
    return Check(kind, holds, message, (place, *(pointer for column in columns for pointer, _ in column)))


def _run_order(places: Sequence[str], record: Any) -> Check | None:
    found = [next(_find(record, place), None) for place in places]
    known = [each for each in found if each is not None]
    values = [value for _, value in known]
    is_alike = all(map(_is_number, values)) or (
        all(isinstance(value, str) for value in values) and len({len(value) for value in values}) == 1
    )
    if len(known) < len(places) or not is_alike:
        return None
    holds = all(first <= second for first, second in pairwise(values))
    names = [_name(pointer) for pointer, _ in known]
    message = f"{names[0]} ({values[0]}) is {'not ' if not holds else ''}before {names[-1]} ({values[-1]})"
    return Check("order", holds, message, tuple(pointer for pointer, _ in known))


def _find(record: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Return (JSON pointer, value) of every scalar at a place."""
    found: list[tuple[str, Any]] = [("", record)]
    for step in split_pointer(place):
        inner: list[tuple[str, Any]] = []
        for pointer, value in found:
            if isinstance(value, list):
                chosen = range(len(value)) if step == "*" else [int(step)] if step.isdecimal() else []
                inner += [(f"{pointer}/{index}", value[index]) for index in chosen if index < len(value)]
            elif isinstance(value, dict) and step in value:
                inner.append((f"{pointer}/{escape_pointer(step)}", value[step]))
        found = inner
    return ((pointer, value) for pointer, value in found if isinstance(value, str | int | float))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _name(pointer: str) -> str:
    return " ".join(split_pointer(pointer)[-1:])


def _suggest(record: Any, pointer: str) -> Iterator[dict[str, Any]]:
    """Return the checks that the names of an object's properties suggest."""
    if not isinstance(record, dict):
        return
    names = {name: [word.lower() for word in WORDS.findall(name)] for name in record}
    for first, first_words in names.items():
        for second, second_words in names.items():
            if any(_is_pair(first_words, second_words, pair) for pair in ORDERED):
                yield {"order": [f"{pointer}/{escape_pointer(name)}" for name in (first, second)]}
    total = next((name for name, words in names.items() if words and words[-1] in TOTALS), None)
    for name, value in record.items():
        here = f"{pointer}/{escape_pointer(name)}"
        yield from _suggest(value, here)
        lines = value[0] if isinstance(value, list) and value else None
        if isinstance(lines, dict) and total is not None:
            columns = [_pick(lines, words) for words in (QUANTITIES, PRICES)]
            if None not in columns:
                places = [f"{here}/*/{escape_pointer(str(column))}" for column in columns]
                total_place = f"{pointer}/{escape_pointer(total)}"
                yield {"sum_of_products": places, "equals": total_place, "slack": MAX_TAX}


def _is_pair(first: list[str], second: list[str], pair: tuple[str, str]) -> bool:
    """Return whether two names differ only by the two words of a pair."""
    swapped = [pair[1] if word == pair[0] else word for word in first]
    return pair[0] in first and swapped == second


def _pick(line: dict[str, Any], words: Sequence[str]) -> str | None:
    return next((name for name in line if {word.lower() for word in WORDS.findall(name)} & set(words)), None)
