"""Flags: the values of a record that a person should check, each with its reasons.

A value is flagged if the text does not show it, if the model was unsure, if another field uses the same place of the
text, if its item repeats the one before it without a place of its own, or if a check across fields fails. Values that
are chosen (enum, true, false) need not be in the text. The bounds are those below which, on the project's hand-written
and unseen sets, fewer than about three of four values were right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from app.extraction.checks import Check
from app.extraction.grounding import Evidence
from app.extraction.json_spans import Leaf, Path, Scalar
from app.extraction.prompt import Schema
from app.extraction.schema_places import list_places

LOW_CONFIDENCE = 0.99
LOW_CHOICE_CONFIDENCE = 0.95
NOT_FOUND = "not in the text"
UNSURE = "the model was unsure"
SHARED = "shares its place in the text with another field"
REPEATED = "repeats the item before it, which the text has once"


def find_flags(
    schema: Schema,
    leaves: Sequence[Leaf],
    confidence: Mapping[str, float],
    evidence: Mapping[str, Evidence],
    checks: Iterable[Check] = (),
) -> dict[str, tuple[str, ...]]:
    """Reasons by JSON pointer, in the order of the record."""
    shared, repeated = _list_shared(evidence), _list_repeated(leaves, evidence)
    failed: dict[str, list[str]] = {}
    for check in checks:
        # The first pointer is the total, or the smaller value: enough to send a person to the right place.
        for pointer in check.pointers[:1] if not check.holds else ():
            failed.setdefault(pointer, []).append(check.message)
    flags: dict[str, tuple[str, ...]] = {}
    for leaf in leaves:
        found, sure = evidence.get(leaf.pointer), confidence.get(leaf.pointer)
        is_choice = isinstance(leaf.value, bool) or any(
            "enum" in place or "const" in place for place in list_places(schema, leaf.pointer)
        )
        reasons = list(failed.get(leaf.pointer, ()))
        if found is not None and found.match == "none" and not is_choice:
            reasons.append(NOT_FOUND)
        if sure is not None and sure < (LOW_CHOICE_CONFIDENCE if is_choice else LOW_CONFIDENCE):
            reasons.append(UNSURE)
        if leaf.pointer in repeated:
            reasons.append(REPEATED)
        elif leaf.pointer in shared:
            reasons.append(SHARED)
        if reasons:
            flags[leaf.pointer] = tuple(reasons)
    return flags


def _list_shared(evidence: Mapping[str, Evidence]) -> set[str]:
    """Pointers whose ranges of the text overlap with that of another field."""
    spans = sorted((e.start, e.end, pointer) for pointer, e in evidence.items() if e.match != "none")
    shared: set[str] = set()
    reach, holder = 0, ""
    for start, end, pointer in spans:
        if start < reach:
            shared |= {pointer, holder}
        if end > reach:
            reach, holder = end, pointer
    return shared


def _list_repeated(leaves: Sequence[Leaf], evidence: Mapping[str, Evidence]) -> set[str]:
    """Pointers of items that are equal to the one before them and of which the text shows no further place."""
    items: dict[Path, list[Leaf]] = {}
    for leaf in leaves:
        at = next((at for at, step in enumerate(leaf.path) if isinstance(step, int)), None)
        if at is not None:
            items.setdefault(leaf.path[: at + 1], []).append(leaf)
    repeated: set[str] = set()
    used: dict[Path, set[tuple[int, int]]] = {}
    before: tuple[Path, list[tuple[Path, Scalar]]] = ((), [])
    for path, inside in items.items():
        spans = used.setdefault(path[:-1], set())
        found = [evidence[leaf.pointer] for leaf in inside if leaf.pointer in evidence]
        own = {(each.start, each.end) for each in found if each.match != "none"} - spans
        values = [(leaf.path[len(path) :], leaf.value) for leaf in inside]
        if found and not own and before == (path[:-1], values):
            repeated |= {leaf.pointer for leaf in inside}
        spans |= own
        before = path[:-1], values
    return repeated
