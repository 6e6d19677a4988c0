"""Notes on the values that an added limit may have cut, so that no record looks whole where it may not be."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from app.extraction.bounds import ARRAY_LIMITS, STRING_LIMITS, BoundedSchema, count_digits
from app.extraction.flags import LOOPED
from app.extraction.grounding import Evidence
from app.extraction.loops import find_copies
from app.extraction.pointers import escape_pointer
from app.extraction.prompt import Schema
from app.extraction.schema_places import list_places

ADVICE = "; raise or switch off the limit"
# A text may end before its limit because the next word does not fit.
MAX_WORD = 16
NEXT_WORD = re.compile(r"\s*\S+")
MIN_REPEATS = 3


def list_cuts(
    schema: Schema, bounds: BoundedSchema, record: Any, evidence: Mapping[str, Evidence], text: str
) -> list[str]:
    """Return a note for each value that ends at an added limit, or so near to it that no word fits.

    Args:
        schema: the user's own.
    """
    limits = {bound.keyword: bound.value for bound in bounds.added}
    max_length, max_items = limits.get("maxLength"), limits.get("maxItems")
    notes: list[str] = []
    for pointer, value in _walk("", record):
        if isinstance(value, str) and max_length is not None and 2 * len(value) > max_length:
            found = evidence.get(pointer)
            if _is_cut(value, max_length, found, text) and _is_open(schema, pointer, STRING_LIMITS):
                end = f"ends at the added limit of {max_length} characters"
                near = f", after {len(value)}" if len(value) < max_length else ""
                is_loop = (found is None or found.match == "none") and find_copies(value)[1]
                why = f", {LOOPED}" if is_loop else ADVICE
                notes.append(f"{pointer or '/'} {end}{near}{why}")
        elif isinstance(value, list) and len(value) == max_items and _is_open(schema, pointer, ARRAY_LIMITS):
            is_copied = all(item == value[-1] for item in value[-MIN_REPEATS:])
            is_loop = is_copied and not _is_shown_apart(pointer, range(max_items - MIN_REPEATS, max_items), evidence)
            end = f", {LOOPED}" if is_loop else ADVICE
            notes.append(f"{pointer or '/'} ends at the added limit of {max_items} items{end}")
        elif side := _find_full_side(value, limits, evidence.get(pointer)):
            notes.append(f"{pointer or '/'} ends at the added limit of {limits[side]} {side}{ADVICE}")
    return notes


def _is_shown_apart(pointer: str, numbers: Iterable[int], evidence: Mapping[str, Evidence]) -> bool:
    """Return whether the text shows each of these items of a list at a place of its own."""
    places = [
        frozenset(
            (each.start, each.end)
            for inside, each in evidence.items()
            if f"{inside}/".startswith(f"{pointer}/{number}/") and each.match != "none"
        )
        for number in numbers
    ]
    return all(places) and len(set(places)) == len(places)


def _walk(pointer: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value with its JSON pointer, in the order of the record."""
    waiting = [(pointer, value)]
    while waiting:
        pointer, value = waiting.pop()
        yield pointer, value
        inner = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
        waiting += [(f"{pointer}/{escape_pointer(str(step))}", each) for step, each in reversed([*inner])]


def _is_cut(value: str, limit: int, evidence: Evidence | None, text: str) -> bool:
    """Return whether what follows the value in the text had no room, or might not have had any."""
    room = limit - len(value)
    if evidence is None or evidence.match == "none":
        return room < MAX_WORD
    following = NEXT_WORD.match(text[evidence.end : evidence.end + limit])
    return following is not None and len(following.group()) > room


def _find_full_side(value: Any, limits: Mapping[str, int], evidence: Evidence | None) -> str:
    """Return the side of a number's point that has as many digits as an added limit allows.

    A number that the text shows is whole.
    """
    is_shown = evidence is not None and evidence.match != "none"
    if is_shown or isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    sizes = dict(zip(("digits", "decimals"), count_digits(value), strict=True))
    return next((side for side, size in sizes.items() if side in limits and size >= limits[side]), "")


def _is_open(schema: Schema, pointer: str, keywords: tuple[str, ...]) -> bool:
    """Return whether the user's own schema leaves the length at this place open."""
    return not any(keyword in place for place in list_places(schema, pointer) for keyword in keywords)
