"""Values of a record that are quotations: free strings, as opposed to choices, dates, times and patterns.

Such strings can be grounded: the grammar then lets them be nothing but parts of the source text. Dates and
amounts are grounded by listing those that the text offers (candidates.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from app.extraction.bounds import allows_strings, walk_narrowable
from app.extraction.candidates import bind_amounts
from app.extraction.dates import find_dates
from app.extraction.grounding import find_clocks
from app.extraction.prompt import Schema
from app.extraction.schema_places import list_places

GROUNDED = "x-grounded"
WITHOUT_LISTS = "nothing satisfies the schema with the dates and numbers of the text alone: read with any"
# A string under one of these has a form of its own, which need not be that of the text.
FORMED = ("enum", "const", "format", "pattern")


@dataclass(frozen=True, slots=True)
class GroundedSchema:
    """A schema for one text.

    Attributes:
        has_lists: whether dates and numbers may only be those of the text.
        notes: why some of them may be others.
    """

    schema: Schema
    has_lists: bool
    notes: tuple[str, ...]


def mark_grounded(schema: Schema, text: str, with_lists: bool = True) -> GroundedSchema:
    """A copy of the schema in which free strings must be parts of the text, and dates and amounts those in it."""
    marked: Schema = json.loads(json.dumps(schema))
    has_lists, notes = bind_amounts(marked, text) if with_lists else (False, [WITHOUT_LISTS])
    for _, subschema in walk_narrowable(marked):
        if allows_strings(subschema) and not any(keyword in subschema for keyword in FORMED):
            subschema[GROUNDED] = True
    return GroundedSchema(marked, has_lists, tuple(notes))


def list_spellings(text: str) -> list[str]:
    """Dates as YYYY-MM-DD and times of day as HH:MM that a text has in another spelling: free strings may be these."""
    clocks = ((clock[:5], start, end) for clock, (start, end) in find_clocks(text))
    found = {spelling: text[start:end] for spelling, start, end in (*find_dates(text), *clocks)}
    return [spelling for spelling, written in found.items() if spelling != written]


def is_free_at(schema: Schema, pointer: str) -> bool:
    """Return whether the schema makes the value at a JSON pointer a free string, or says nothing about it."""
    places = [place for place in list_places(schema, pointer) if "type" not in place or allows_strings(place)]
    return not any(keyword in place for place in places for keyword in FORMED)
