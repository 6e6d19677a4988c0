"""Checks across fields: sums, products and orders that the values of a record must keep.

A schema asks for them in `x-checks`, a list at its root; `*` stands for every item of a list:

    {"sum": ["/lines/*/amount", "/shipping"], "equals": "/total"}
    {"sum_of_products": ["/lines/*/quantity", "/lines/*/unit_price"], "equals": "/total"}
    {"order": ["/start", "/end"]}          numbers, dates, or times as HH:MM, each at most the next

Numbers and dates may be texts in any spelling. One that has two readings does not fail a check that one of them keeps.

Without `x-checks`, pairs of neighbours such as start and end, or min and max, must be in order, and the lines of a
list with a quantity and a price must come to the totals beside it, with those taxes, charges and discounts that the
record, or a line of the text, names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from app.extraction.dates import read_date
from app.extraction.numbers import Number, find_numbers, read_number
from app.extraction.pointers import escape_pointer, split_pointer
from app.extraction.prompt import Schema
from grammar import InvalidGrammar

KEYWORD = "x-checks"
KINDS = ("sum", "sum_of_products", "order")
# Amounts are rounded to cents line by line.
CENT = 0.01
MAX_EXTRAS = 6  # of one record; each is left out, an amount or a rate
MOMENT = re.compile(r"(?:\d{4}-\d{2}-\d{2}T)?\d{2}:\d{2}(?::\d{2})?Z?", re.ASCII)
WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
ORDERED = (("start", "end"), ("from", "to"), ("from", "until"), ("min", "max"), ("low", "high"), ("begin", "end"),
           ("departure", "arrival"), ("issued", "due"), ("opens", "closes"))
QUANTITIES, PRICES = ("quantity", "qty", "count"), ("price", "rate")
TOTALS = {"total", "subtotal", "sum"}
ADDED = {"tax", "taxes", "vat", "gst", "hst", "mwst", "ust", "iva", "tva", "shipping", "delivery", "freight", "postage",
         "handling", "tip", "gratuity", "fee", "fees", "surcharge", "charge", "charges", "rounding"}
DEDUCTED = {"discount", "discounts", "rebate", "deduction", "coupon", "voucher", "credit"}
# The name of a tax, charge or discount, its amount, and its rate if it is one; both are negative if it is deducted.
Extra = tuple[str, float, float]


@dataclass(frozen=True, slots=True)
class Check:
    """One check and its outcome; `pointers` are the values that it compared."""

    kind: str
    holds: bool
    message: str
    pointers: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The check as a JSON-able dict."""
        return {"kind": self.kind, "holds": self.holds, "message": self.message, "fields": list(self.pointers)}


def run_checks(schema: Schema, record: Any, text: str = "") -> tuple[Check, ...]:
    """Run the checks of a schema, or those that its property names suggest, on a record.

    A check that misses a value is left out.

    Raises InvalidGrammar: `x-checks` is malformed.
    """
    asked = read_checks(schema)
    found = asked if asked is not None else list(_suggest(record, "", text))
    checks = (_run(check, record) for check in found)
    return tuple(check for check in checks if check is not None)


def read_checks(schema: Schema) -> list[dict[str, Any]] | None:
    """Return the schema's own checks; None without any."""
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
    columns = [_find_numbers(record, place) for place in check[kind]]
    totals = _find_numbers(record, check["equals"])
    if len(totals) != 1 or not all(columns):
        return None
    if kind == "sum":
        parts = [value for column in columns for _, value in column]
    else:
        if len({len(column) for column in columns}) > 1:
            return None
        parts = [math.prod(values) for values in zip(*([v for _, v in column] for column in columns), strict=True)]
    (place, total), found, extras = totals[0], math.fsum(parts), check.get("extras", ())
    cents = CENT * max(1, len(parts))
    used = _find_extras(found, total, cents, extras)
    if used is None:
        used = _find_extras(found, total, cents, [*_read_extras(check.get("text", ""))])
    lines = f"lines come to {round(found, 2):g}"
    if used is None:
        more = f", and {', '.join(name for name, *_ in extras)} cannot explain the rest" if extras else ""
        message = f"{_name(place)} is {total:g}, but the {lines}{more}"
    else:
        message = f"{_name(place)} is {total:g}, the {lines}{''.join(f' and {name}' for name in used)}"
    return Check(kind, used is not None, message, (place, *(pointer for column in columns for pointer, _ in column)))


def _find_extras(found: float, total: float, cents: float, extras: Sequence[Extra]) -> list[str] | None:
    """Return the names of the extras that lead from the lines to the total; None if none do."""
    ways = [[(0.0, 0.0), (amount, 0.0), (0.0, rate)] for _, amount, rate in extras[:MAX_EXTRAS]]
    for chosen in product(*ways):
        amount = found + math.fsum(amount for amount, _ in chosen)
        rate = math.fsum(rate for _, rate in chosen)
        # A rate applies to the lines, or to them with what was added or deducted.
        if any(abs(amount + rate * base - total) <= cents + 1e-9 for base in (found, amount)):
            return [name for (name, *_), way in zip(extras, chosen, strict=False) if any(way)]
    return None


def _run_order(places: Sequence[str], record: Any) -> Check | None:
    found = [next(_find(record, place), None) for place in places]
    known = [each for each in found if each is not None]
    values = [value for _, value in known]
    readings = next((read for reader in READERS if all(read := [reader(value) for value in values])), None)
    if len(known) < len(places) or readings is None:
        return None
    holds = all(min(first) <= max(second) for first, second in pairwise(readings))
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


def _find_numbers(record: Any, place: str) -> list[tuple[str, int | float]]:
    """Return the numbers at a place; none if a value there is none, or has several readings."""
    found = [(pointer, _read_number(value)) for pointer, value in _find(record, place)]
    is_clear = all(len(values) == 1 for _, values in found)
    return [(pointer, values[0]) for pointer, values in found] if is_clear else []


def _read_number(value: Any) -> list[int | float]:
    if isinstance(value, str):
        return sorted(read_number(value))
    return [] if isinstance(value, bool) else [value]


def _read_date(value: Any) -> list[str]:
    return sorted(read_date(value)) if isinstance(value, str) else []


def _read_moment(value: Any) -> list[str]:
    """Return a time as HH:MM or a date with one, which are in order as they are."""
    return [value] if isinstance(value, str) and MOMENT.fullmatch(value) else []


READERS: tuple[Callable[[Any], list[Any]], ...] = (_read_number, _read_date, _read_moment)


def _name(pointer: str) -> str:
    return " ".join(split_pointer(pointer)[-1:])


def _suggest(record: Any, pointer: str, text: str) -> Iterator[dict[str, Any]]:
    """Return the checks that the names of an object's properties suggest."""
    if not isinstance(record, dict):
        return
    names = {name: tuple(word.lower() for word in WORDS.findall(name)) for name in record}
    by_words = {words: name for name, words in reversed(names.items())}
    for first, words in names.items():
        for before, after in ORDERED:
            swapped = tuple(after if word == before else word for word in words)
            if before in words and (second := by_words.get(swapped)) is not None:
                yield {"order": [f"{pointer}/{escape_pointer(name)}" for name in (first, second)]}
    totals = [name for name, words in names.items() if _is_total(words)]
    for name, value in record.items():
        here = f"{pointer}/{escape_pointer(name)}"
        yield from _suggest(value, here, text)
        lines = value[0] if isinstance(value, list) and value else None
        columns = [_pick(lines, words) for words in (QUANTITIES, PRICES)] if isinstance(lines, dict) else [None]
        if None not in columns:
            places = [f"{here}/*/{escape_pointer(str(column))}" for column in columns]
            others = {key: other for key, other in record.items() if key not in (name, *totals)}
            extras = [*_list_extras(others), *_sum_extras(value)]
            for total in totals:
                total_place = f"{pointer}/{escape_pointer(total)}"
                yield {"sum_of_products": places, "equals": total_place, "extras": extras, "text": text}


def _is_total(words: Sequence[str]) -> bool:
    is_named = bool(words) and (words[-1] in TOTALS or {"total", "amount"} <= {*words})
    return is_named and not {*words} & (ADDED | DEDUCTED)


def _list_extras(value: Any, name: str = "", sign: int = 0) -> Iterator[Extra]:
    """Yield the taxes, charges and discounts at any depth; what is inside one of them is one, too."""
    words = {word.lower() for word in WORDS.findall(name)}
    sign = -1 if words & DEDUCTED else 1 if words & ADDED else sign
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _list_extras(inner, key, sign)
    elif isinstance(value, list):
        for inner in value:
            yield from _list_extras(inner, name, sign)
    elif sign and isinstance(value, str | int | float) and len(found := _read_number(value)) == 1:
        amount = -abs(found[0]) if sign < 0 else float(found[0])
        yield name, amount, amount if abs(amount) < 1 else amount / 100 if abs(amount) <= 100 else 0.0


def _read_extras(text: str) -> Iterator[Extra]:
    """Yield the lines of the text that name a tax, charge or discount, with the number at their end."""
    for line in text.splitlines():
        words = {word.lower() for word in WORDS.findall(line)}
        if words & (ADDED | DEDUCTED) and (found := max(find_numbers(line), key=_place, default=None)):
            amount = abs(found.readings[0]) * (-1 if words & DEDUCTED else 1)
            yield " ".join(line.split())[:60], amount, amount if abs(amount) < 1 else 0.0


def _place(number: Number) -> tuple[int, int]:
    return number.end, -number.start


def _sum_extras(lines: Sequence[Any]) -> Iterator[Extra]:
    """Yield the taxes, charges and discounts of the lines: their sum, and their rate if it is the same for all."""
    by_name: dict[str, list[Extra]] = {}
    for extra in _list_extras([*lines]):
        by_name.setdefault(extra[0], []).append(extra)
    for name, found in by_name.items():
        rates = {rate for *_, rate in found}
        yield name, math.fsum(amount for _, amount, _ in found), rates.pop() if len(rates) == 1 else 0.0


def _pick(line: dict[str, Any], words: Sequence[str]) -> str | None:
    return next((name for name in line if {word.lower() for word in WORDS.findall(name)} & set(words)), None)
