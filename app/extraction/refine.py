"""Better values from the same weights: votes over several samples, and a second reading of flagged fields.

Both return the values to change and the new confidence, by JSON pointer; the record keeps its shape.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from app.extraction.flags import NOT_FOUND, SHARED
from app.extraction.json_spans import Scalar
from app.extraction.pointers import follow, split_pointer
from app.extraction.prompt import Schema
from app.extraction.result import ExtractionResult

Values = dict[str, Scalar]
ABSENT = object()
# A second reading in which the model believes less than this is not better than the first.
MIN_CONFIDENCE = 0.5


def vote(result: ExtractionResult, samples: Sequence[Any]) -> tuple[Values, dict[str, float]]:
    """The values that more than half of the records have where the first record has another one.

    The confidence of a value is lowered to the share of records that agree with it.
    """
    values: Values = {}
    confidence = dict(result.confidence)
    for leaf in result.leaves:
        found = [leaf.value, *(_scalar_at(sample, leaf.pointer) for sample in samples)]
        counts = Counter(map(_spell, found))
        spelling, most = counts.most_common(1)[0]
        winner = next(value for value in found if _spell(value) == spelling)
        if 2 * most > len(found) and winner is not ABSENT and spelling != _spell(leaf.value):
            values[leaf.pointer] = winner
        else:
            most = counts[_spell(leaf.value)]
        if leaf.pointer in confidence:
            confidence[leaf.pointer] = round(min(confidence[leaf.pointer], most / len(found)), 4)
    return values, confidence


@dataclass(frozen=True, slots=True)
class Recheck:
    """Fields to read once more.

    Attributes:
        schema: that of the record with only these fields.
        source: the text without the places of the other fields, in which the values have to be.
        pointers: the fields.
    """

    schema: Schema
    source: str
    pointers: frozenset[str]


def plan_recheck(schema: Schema, text: str, result: ExtractionResult) -> Recheck | None:
    """Plan a second reading of the flagged fields; of fields that share a place the surest one keeps its value."""
    pointers = frozenset(
        pointer
        for pointer, reasons in result.flags.items()
        if {SHARED, NOT_FOUND} & set(reasons) and not is_surest(result, pointer)
    )
    narrow = narrow_schema(schema, pointers)
    kept = [e for pointer, e in result.evidence.items() if pointer not in pointers and e.match != "none"]
    pieces = list(text)
    for evidence in kept:
        pieces[evidence.start : evidence.end] = "\n" * (evidence.end - evidence.start)
    source = "".join(pieces)
    return Recheck(narrow, source, pointers) if narrow is not None and source.strip() else None


def is_surest(result: ExtractionResult, pointer: str) -> bool:
    """Return whether no field that shares the place of this one has more confidence."""
    own = result.evidence.get(pointer)
    if own is None or own.match == "none":
        return False
    rivals = [
        result.confidence.get(other, 1.0)
        for other, e in result.evidence.items()
        if other != pointer and e.match != "none" and e.start < own.end and own.start < e.end
    ]
    return all(result.confidence.get(pointer, 1.0) > rival for rival in rivals)


def weigh(
    result: ExtractionResult, second: ExtractionResult, plan: Recheck
) -> tuple[Values, dict[str, float]]:
    """The values of a second reading that are better supported than the first ones.

    A value of the second reading wins if the text shows it, or if it is null where null is allowed.
    """
    values: Values = {}
    confidence = dict(result.confidence)
    for leaf in second.leaves:
        found = second.evidence.get(leaf.pointer)
        if leaf.pointer in plan.pointers and _spell(follow(result.record, leaf.pointer)) != _spell(
            leaf.value
        ):
            is_found = leaf.value is None or (found is not None and found.match != "none")
            sure = second.confidence.get(leaf.pointer, 1.0)
            if is_found and sure >= MIN_CONFIDENCE:
                values[leaf.pointer] = leaf.value
                confidence[leaf.pointer] = sure
    return values, confidence


def narrow_schema(schema: Schema, pointers: Iterable[str]) -> Schema | None:
    """The schema with only those of its properties that hold one of these places; None where it cannot be cut so."""
    properties = schema.get("properties")
    # In a list the items of a second reading need not be those of the first.
    names = {
        steps[0] for steps in map(split_pointer, pointers) if not any(step.isdecimal() for step in steps)
    }
    if not isinstance(properties, dict) or not names & properties.keys() or "$ref" in schema:
        return None
    required = [name for name in schema.get("required", ()) if name in names]
    kept = {name: inner for name, inner in properties.items() if name in names}
    return {**schema, "properties": kept, "required": required}


def _scalar_at(record: Any, pointer: str) -> Any:
    value = follow(record, pointer) if pointer else record
    return ABSENT if isinstance(value, dict | list) else value


def _spell(value: Any) -> str:
    return "" if value is ABSENT else json.dumps(value).casefold()
