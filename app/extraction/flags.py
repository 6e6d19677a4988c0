"""Flags: the values of a record that a person should check, each with its reasons.

A value is flagged if the text does not show it, if the model was unsure, if another field uses the same place of the
text, if its item repeats an earlier one without a place of its own, if the model repeated itself behind it, or if a
check across fields fails. Values that are chosen (enum, true, false) need not be in the text, unless another choice
is. Below LOW_CONFIDENCE, on the project's hand-written and unseen sets, fewer than about three of four values of the
demo model were right; for other models approved records give such a bound. Without one the confidence only ranks the
values: the lowest third is flagged, of a large record the lowest few.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from app.extraction.checks import Check
from app.extraction.grounding import Evidence
from app.extraction.json_spans import Leaf, Path
from app.extraction.pointers import escape_pointer
from app.extraction.prompt import Schema
from app.extraction.schema_places import list_places

LOW_CONFIDENCE = 0.99
LOW_CHOICE_CONFIDENCE = 0.95
NOT_FOUND = "not in the text"
UNSURE = "the model was unsure"
LEAST_SURE = "the model was least sure here"
SHARE_OF_LEAST_SURE, MAX_LEAST_SURE = 1 / 3, 5
SHARED = "shares its place in the text with another field"
LOOPED = "because the model repeated itself"  # in the notes on lists and texts that were ended
ENDED = "the model repeated itself here; what follows may be missing"
PARTIAL = "has texts that are only parts of their cells: "  # in the notes on lists that were read from a table
PART_OF_CELL = "the cell of the table says more"
REPEATED = "repeats an item before it, which the text does not repeat"

# Signs and words for currencies, of which some stand for several.
CURRENCIES = {
    "EUR": r"€|\beuros?\b", "GBP": r"£|\bpounds?\b|\bsterling\b", "JPY": r"[¥￥円]|\byen\b",
    "CNY": r"[¥￥元]|\byuan\b|\bRMB\b", "INR": r"₹|\bRs\b|\brupees?\b",
    "CHF": r"\bS?fr\b|\bfrancs?\b|\bFranken\b", "PLN": r"\bzł",
    **dict.fromkeys(("USD", "CAD", "AUD", "NZD", "SGD", "HKD", "MXN"), r"\$|\bdollars?\b|\bbucks?\b"),
    **dict.fromkeys(("SEK", "NOK", "DKK"), r"\bkr\b|\bkron(?:or|er|a|e)\b"),
}


def find_flags(
    schema: Schema, leaves: Sequence[Leaf], confidence: Mapping[str, float],
    evidence: Mapping[str, Evidence], checks: Iterable[Check] = (), sure_from: float | None = LOW_CONFIDENCE,
    notes: Iterable[str] = (), text: str = "",
) -> dict[str, tuple[str, ...]]:
    """Reasons by JSON pointer, in the order of the record.

    Args:
        sure_from: the confidence from which on values may pass unseen; None if it was not measured.
        notes: of the record; they name the lists and texts that were ended, and the texts that are parts of a cell.
        text: the document, in which another choice may stand.
    """
    notes = tuple(notes)
    partial = " ".join(note for note in notes if PARTIAL in note)
    ended = _list_ended(leaves, notes)
    shared, repeated = _list_shared(evidence), list_repeated(leaves, evidence)
    checks = tuple(checks)
    proven = _list_proven(checks, evidence) - shared
    doubted = {pointer: sure for pointer, sure in confidence.items() if pointer not in proven}
    least = _list_least_sure(doubted) if sure_from is None else set()
    bound = sure_from or 0.0
    shows = functools.cache(functools.partial(_shows, text))
    failed: dict[str, list[str]] = {}
    for check in checks:
        # The first pointer is the total, or the smaller value: enough to send a person to the right place.
        for pointer in check.pointers[:1] if not check.holds else ():
            failed.setdefault(pointer, []).append(check.message)
    flags: dict[str, tuple[str, ...]] = {}
    for leaf in leaves:
        found, sure = evidence.get(leaf.pointer), doubted.get(leaf.pointer)
        is_choice = is_chosen(schema, leaf)
        reasons = list(failed.get(leaf.pointer, ()))
        if found is not None and found.match == "none" and not is_choice:
            reasons.append(NOT_FOUND)
        if is_choice and (other := _find_other_choice(schema, leaf, shows)) is not None:
            reasons.append(f"{NOT_FOUND}, but {other} is")
        if sure is not None and sure < (_bound_choice(leaf, sure_from) if is_choice else bound):
            reasons.append(UNSURE)
        if leaf.pointer in ended:
            reasons.append(ENDED)
        if isinstance(leaf.value, str) and name_partial(leaf.pointer, leaf.value) in partial:
            reasons.append(PART_OF_CELL)
        if leaf.pointer in repeated:
            reasons.append(REPEATED)
        elif leaf.pointer in shared:
            reasons.append(SHARED)
        if leaf.pointer in least and not reasons:
            reasons.append(LEAST_SURE)
        if reasons:
            flags[leaf.pointer] = tuple(reasons)
    return flags


def name_partial(pointer: str, value: str) -> str:
    """Return the name of a text in a note about parts of cells; a corrected text no longer matches it."""
    return f"{pointer} ({value!r})"


def is_chosen(schema: Schema, leaf: Leaf) -> bool:
    """Return whether the schema lists the values that are possible there; the text need not show them."""
    places = list_places(schema, leaf.pointer)
    return isinstance(leaf.value, bool) or any("enum" in place or "const" in place for place in places)


def _list_proven(checks: Iterable[Check], evidence: Mapping[str, Evidence]) -> set[str]:
    """Return the numbers of sums that hold and of which the text shows every number at a place of its own."""
    proven: set[str] = set()
    for check in checks:
        found = [evidence.get(pointer) for pointer in check.pointers]
        places = {(each.start, each.end) for each in found if each is not None and each.match != "none"}
        if check.holds and check.kind != "order" and len(places) == len(check.pointers):
            proven |= {*check.pointers}
    return proven


def _bound_choice(leaf: Leaf, sure_from: float | None) -> float:
    """Return the confidence that a choice needs; without measurements true and false are only ranked."""
    if sure_from is None:
        return 0.0 if isinstance(leaf.value, bool) else LOW_CHOICE_CONFIDENCE
    return min(sure_from, LOW_CHOICE_CONFIDENCE)


def _find_other_choice(schema: Schema, leaf: Leaf, shows: Callable[[str], bool]) -> str | None:
    """Return another choice that the text shows, if it does not show the one that was made."""
    if not isinstance(leaf.value, str) or shows(leaf.value):
        return None
    choices = [each for place in list_places(schema, leaf.pointer) for each in place.get("enum", ())]
    return next((each for each in choices if isinstance(each, str) and shows(each)), None)


def _shows(text: str, choice: str) -> bool:
    """Return whether a choice stands in a text in some spelling: "full_time" as "Full-time", "EUR" as "€"."""
    words = r"[\s_-]*".join(map(re.escape, re.split(r"[\s_-]+", choice)))
    pattern = rf"(?<![^\W\d_]){words}(?![^\W\d_])"
    other = CURRENCIES.get(choice, "")
    return re.search(f"{pattern}|{other}" if other else pattern, text, re.IGNORECASE) is not None


def _list_least_sure(confidence: Mapping[str, float]) -> set[str]:
    """Return the pointers of the lowest third, at most a few, without those of which the model was certain."""
    unsure = sorted((sure, pointer) for pointer, sure in confidence.items() if sure < LOW_CONFIDENCE)
    return {pointer for _, pointer in unsure[: min(math.ceil(len(confidence) * SHARE_OF_LEAST_SURE), MAX_LEAST_SURE)]}


def _list_ended(leaves: Sequence[Leaf], notes: Iterable[str]) -> set[str]:
    """Return the pointers of the last values of what the notes say was ended in a loop."""
    looped = [note for note in notes if LOOPED in note]
    last = {
        "".join(f"/{escape_pointer(str(step))}" for step in leaf.path[:at]) or "/": leaf.pointer
        for leaf in leaves if looped
        for at in range(len(leaf.path) + 1)
    }
    return {
        pointer
        for place, pointer in last.items()
        if any(note.startswith((f"{place} was ended", f"{place} ends at")) for note in looped)
    }


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


def list_repeated(leaves: Sequence[Leaf], evidence: Mapping[str, Evidence]) -> set[str]:
    """Return the pointers of items that equal an earlier one and of which the text shows no further place."""
    items: dict[Path, list[Leaf]] = {}
    for leaf in leaves:
        at = next((at for at, step in enumerate(leaf.path) if isinstance(step, int)), None)
        if at is not None:
            items.setdefault(leaf.path[: at + 1], []).append(leaf)
    repeated: set[str] = set()
    used: dict[Path, set[tuple[int, int]]] = {}
    seen: set[tuple[Path, str]] = set()
    for path, inside in items.items():
        spans = used.setdefault(path[:-1], set())
        found = [evidence[leaf.pointer] for leaf in inside if leaf.pointer in evidence]
        own = {(each.start, each.end) for each in found if each.match != "none"} - spans
        values = (path[:-1], repr([(leaf.path[len(path) :], leaf.value) for leaf in inside]))
        if found and not own and values in seen:
            repeated |= {leaf.pointer for leaf in inside}
        spans |= own
        seen.add(values)
    return repeated
