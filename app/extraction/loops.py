"""Stops a list in which the model repeats itself: the record is written again, and the list ends before the copies.

A list loops when its last items are copies of those before them, several times over, and the text does not show them as
often. Only a list of the record itself is shortened, not one within the items of another, which have lengths of their
own; nor one that the schema wants longer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.extraction.flags import LOOPED, is_chosen, list_repeated
from app.extraction.grounding import find_evidence
from app.extraction.json_spans import Scan, scan
from app.extraction.pointers import escape_pointer
from app.extraction.prompt import Schema

# Copies at the end of a list, and the number of different items in turn.
NUM_COPIES, MAX_PERIOD = 4, 3
# Characters that a record grows by between two looks.
LOOK_CHARS = 160
Names = tuple[str, ...]  # the path to a list through objects


@dataclass(slots=True)
class LoopWatch:
    """The lists of one record that were found to loop, and the lengths at which they end."""

    schema: Schema
    text: str
    lengths: tuple[tuple[Names, int], ...] = ()
    num_seen: int = 0

    async def look(self, raw: str, is_finished: bool) -> LoopWatch | None:
        """Return a watch with another list shortened; None while nothing loops."""
        if not is_finished and len(raw) < self.num_seen + LOOK_CHARS:
            return None
        self.num_seen = len(raw)
        seen = scan(raw)
        shortened = {names for names, _ in self.lengths}
        for names, items in _walk((), seen.value):
            if names in shortened or not (period := find_period(items)):
                continue
            length = await asyncio.to_thread(self._find_length, seen, names, items, period)
            if length is not None:
                return replace(self, lengths=(*self.lengths, (names, length)), num_seen=0)
        return None

    def _find_length(self, seen: Scan, names: Names, items: list[Any], period: int) -> int | None:
        """Return the number of items before the copies; None if the text shows them, or the list cannot be shorter."""
        inside = [leaf for leaf in seen.leaves if leaf.path[: len(names)] == names]
        if all(is_chosen(self.schema, leaf) for leaf in inside):
            return None
        copied = list_repeated(inside, find_evidence(inside, self.text))
        places = {leaf.path[len(names)] for leaf in inside if leaf.pointer not in copied}
        last = max((place for place in places if isinstance(place, int) and place < len(items) - 1), default=0)
        place = find_list(self.schema, names)
        is_loop = len(items) - 1 - last >= period * (NUM_COPIES - 1)
        return last + 1 if is_loop and place is not None and place.get("minItems", 0) <= last + 1 else None

    def shorten(self, schema: Schema) -> Schema:
        """Return the schema with the lengths of the lists that loop."""
        if not self.lengths:
            return schema
        shorter = json.loads(json.dumps(schema))
        for names, length in self.lengths:
            place = find_list(shorter, names)
            if place is not None:
                place["maxItems"] = length
        return shorter

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(
            f"/{'/'.join(map(escape_pointer, names))} was ended after item {length}, {LOOPED}; "
            "items may be missing"
            for names, length in self.lengths
        )


def find_period(items: Sequence[Any], max_period: int = MAX_PERIOD) -> int:
    """Return how many items repeat at the end of a list; 0 if none do. The last one may be incomplete."""
    for period in range(1, max_period + 1):
        for end in (len(items), len(items) - 1):
            tail = items[max(end - period * NUM_COPIES, 0) : end]
            if len(tail) == period * NUM_COPIES and tail[period:] == tail[:-period]:
                return period
    return 0


def find_list(schema: Schema, names: Names) -> Schema | None:
    """Return the schema of a list, reached through plain properties; None if its place is shared or combined."""
    place: Any = schema
    for name in names:
        properties = place.get("properties") if isinstance(place, dict) else None
        place = properties.get(name) if isinstance(properties, dict) else None
    return place if isinstance(place, dict) and "items" in place else None


def _walk(names: Names, value: Any) -> Iterator[tuple[Names, list[Any]]]:
    if isinstance(value, list):
        yield names, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _walk((*names, name), inner)
