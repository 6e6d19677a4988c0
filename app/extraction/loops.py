"""Stops a list or a text in which the model repeats itself: the record is written again, and it ends before the copies.

A list loops when its last items are copies of those before them, several times over, a text when its last words are;
and the text of the document does not show them as often. Only those of the record itself are shortened, not those
within the items of a list, which have lengths of their own; nor those that the schema wants longer. Where no limits
hold, the others get the limits that are otherwise added.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.extraction.bounds import COMBINING, STRING_LIMITS, list_types
from app.extraction.flags import LOOPED, is_chosen, list_repeated
from app.extraction.grounding import find_evidence
from app.extraction.json_spans import Leaf, Scan, scan
from app.extraction.pointers import escape_pointer
from app.extraction.prompt import Schema

# Copies at the end of a list or a text, the number of different items in turn, and the characters of all copies.
NUM_COPIES, MAX_PERIOD, MIN_LOOP_CHARS = 4, 3, 60
# Characters that a record grows by between two looks.
LOOK_CHARS = 160
LIMITED = f"texts and lists were limited, {LOOPED}"
Names = tuple[str, ...]  # the path to a list or a text through objects


@dataclass(frozen=True, slots=True)
class Ending:
    """A list or a text that is ended after `length` items or characters, the value of `keyword`."""

    names: Names
    keyword: str
    length: int

    def __str__(self) -> str:
        place = f"/{'/'.join(map(escape_pointer, self.names))} was ended after"
        if self.keyword == "maxItems":
            return f"{place} item {self.length}, {LOOPED}; items may be missing"
        return f"{place} {self.length} characters, {LOOPED}; words may be missing"


@dataclass(slots=True)
class LoopWatch:
    """The lists and texts of one record that were found to loop, and the lengths at which they end.

    Attributes:
        is_limited: whether lists and texts have limits.
    """

    schema: Schema
    text: str
    is_limited: bool = True
    endings: tuple[Ending, ...] = ()
    notes: tuple[str, ...] = ()
    num_seen: int = 0

    async def look(self, raw: str, is_finished: bool) -> LoopWatch | None:
        """Return a watch with another list or text shortened; None while nothing loops."""
        if not is_finished and len(raw) < self.num_seen + LOOK_CHARS:
            return None
        seen, since, self.num_seen = scan(raw), self.num_seen, len(raw)
        shortened = {ending.names for ending in self.endings}
        for names, items in _walk((), seen.value):
            if names not in shortened and (period := find_period(items)):
                length = await asyncio.to_thread(self._find_length, seen, names, items, period)
                if length is not None and self._may_end(names, "array", "minItems", length):
                    return self._end(Ending(names, "maxItems", length))
        for leaf in (leaf for leaf in seen.leaves if leaf.end > since and isinstance(leaf.value, str)):
            if leaf.path in shortened or (length := await asyncio.to_thread(self._find_text_length, leaf)) is None:
                continue
            names = tuple(step for step in leaf.path if isinstance(step, str))
            if names == leaf.path and self._may_end(names, "string", "minLength", length):
                return self._end(Ending(names, "maxLength", length))
            if not self.is_limited:
                return replace(self, is_limited=True, notes=(*self.notes, LIMITED), num_seen=0)
        return None

    def _end(self, ending: Ending) -> LoopWatch:
        return replace(self, endings=(*self.endings, ending), notes=(*self.notes, str(ending)), num_seen=0)

    def _may_end(self, names: Names, kind: str, keyword: str, length: int) -> bool:
        place = find_place(self.schema, names, kind)
        return place is not None and place.get(keyword, 0) <= length

    def _find_length(self, seen: Scan, names: Names, items: list[Any], period: int) -> int | None:
        """Return the number of items before the copies; None if the text shows them."""
        inside = [leaf for leaf in seen.leaves if leaf.path[: len(names)] == names]
        if all(is_chosen(self.schema, leaf) for leaf in inside):
            return None
        copied = list_repeated(inside, find_evidence(inside, self.text))
        places = {leaf.path[len(names)] for leaf in inside if leaf.pointer not in copied}
        last = max((place for place in places if isinstance(place, int) and place < len(items) - 1), default=0)
        return last + 1 if len(items) - 1 - last >= period * (NUM_COPIES - 1) else None

    def _find_text_length(self, leaf: Leaf) -> int | None:
        """Return the number of characters before the copies; None if there are none, or the text shows them."""
        value = str(leaf.value)
        start, period = find_copies(value)
        if not period or is_chosen(self.schema, leaf):
            return None
        found = find_evidence([replace(leaf, value=value[start:])], self.text).get(leaf.pointer)
        if found is not None and found.match != "none":
            return None
        end = start + period
        while end < start + 2 * period and not any(map(str.isspace, value[end - 1 : end + 1])):
            end += 1  # to the end of the word
        return len(value[:end].rstrip())

    def shorten(self, schema: Schema) -> Schema:
        """Return the schema with the lengths of the lists and texts that loop."""
        if not self.endings:
            return schema
        shorter = json.loads(json.dumps(schema))
        for ending in self.endings:
            place = find_place(shorter, ending.names, "array" if ending.keyword == "maxItems" else "string")
            if place is not None:
                place[ending.keyword] = ending.length
        return shorter


def find_period(items: Sequence[Any]) -> int:
    """Return how many items repeat at the end of a list; 0 if none do. The last one may be incomplete."""
    for period in range(1, MAX_PERIOD + 1):
        for end in (len(items), len(items) - 1):
            tail = items[max(end - period * NUM_COPIES, 0) : end]
            if len(tail) == period * NUM_COPIES and tail[period:] == tail[:-period]:
                return period
    return 0


def find_copies(text: str) -> tuple[int, int]:
    """Return where the copies at the end of a text begin, and the characters of one; (0, 0) if there are none."""
    for period in range(1, len(text) // NUM_COPIES + 1):
        start = len(text) - max(period * NUM_COPIES, MIN_LOOP_CHARS)
        if start < 0 or text[start + period :] != text[start:-period]:
            continue
        while start and text[start - 1] == text[start - 1 + period]:
            start -= 1
        return start, period
    return 0, 0


def find_place(schema: Schema, names: Names, kind: str) -> Schema | None:
    """Return the schema of a list or a text, reached through plain properties that may be null besides.

    Returns None if its place is shared or combined, or has a form of its own.
    """
    place: Any = schema
    for name in names:
        properties = place.get("properties") if isinstance(place, dict) and not _is_combined(place) else None
        place = properties.get(name) if isinstance(properties, dict) else None
        choices = place.get("anyOf") if isinstance(place, dict) else None
        if isinstance(choices, list) and len(choices) == 2 and {"type": "null"} in choices:
            place = next((each for each in choices if each != {"type": "null"}), None)
    if not isinstance(place, dict) or _is_combined(place):
        return None
    if kind == "array":
        return place if "items" in place else None
    # A length was added, or is the user's own; other keywords give the text a form.
    has_form = any(keyword in place for keyword in STRING_LIMITS if keyword != "maxLength")
    return place if "string" in list_types(place) and not has_form else None


def _is_combined(place: Schema) -> bool:
    return any(keyword in place for keyword in COMBINING)


def _walk(names: Names, value: Any) -> Iterator[tuple[Names, list[Any]]]:
    if isinstance(value, list):
        yield names, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _walk((*names, name), inner)
