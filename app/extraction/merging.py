"""Merges the records of a long text's parts into one: every field once, every item of a list once."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from app.extraction.bounds import BoundedSchema
from app.extraction.checks import run_checks
from app.extraction.extractor import ExtractionResult, list_violations
from app.extraction.flags import find_flags
from app.extraction.grounding import Evidence
from app.extraction.json_spans import Leaf, scan
from app.extraction.pointers import escape_pointer, split_pointer
from app.extraction.prompt import Schema

# Characters between the last word of a part and its end.
EDGE_CHARS = 2


@dataclass(frozen=True, slots=True)
class Part:
    """The half-open range [start, end) of the text."""

    start: int
    end: int


def merge(
    schema: Schema, parts: list[Part], results: list[ExtractionResult], text: str = "", note: str = ""
) -> ExtractionResult:
    """One result of the parts' results: lists joined, single values taken where they are surest.

    Args:
        note: how the parts were read, if not as overlapping ones of a long text.
    """
    if len(results) == 1:
        return results[0]
    merger = _Merger(parts, results)
    record = merger.join([(index, result.record, "") for index, result in enumerate(results)], "")
    errors = tuple(
        f"part {number} of {len(parts)}: {error}"
        for number, result in enumerate(results, 1)
        for error in result.errors
        if result.finish_reason != "stop" or result.record is None
    )
    errors = errors or list_violations(schema, record)
    raw = json.dumps(record, indent=2, ensure_ascii=False)
    added = [bound for result in results for bound in result.bounds.added]
    leaves, checks = scan(raw).leaves, run_checks(schema, record, text)
    reasons = [result.finish_reason for result in results if result.finish_reason != "stop"]
    note = note or f"read in {len(parts)} overlapping parts; single values come from the part that was surest of them"
    notes = (note, *merger.notes, *dict.fromkeys(note for result in results for note in result.notes))
    return replace(
        results[0],
        record=record,
        raw=raw,
        valid=not errors,
        errors=errors,
        finish_reason=reasons[0] if reasons else "stop",
        confidence=merger.confidence,
        evidence=merger.evidence,
        leaves=tuple(leaves),
        checks=checks,
        flags=find_flags(
            schema, leaves, merger.confidence, merger.evidence, checks, results[0].sure_from, notes, text
        ),
        # One part may have been read without limits.
        bounds=BoundedSchema(results[0].bounds.schema, tuple(dict.fromkeys(added))),
        notes=notes,
        output=None,
    )


Found = tuple[int, Any, str]  # part, value, its pointer in that part's record
Span = tuple[int, int]  # start and end in the whole text
Spans = dict[tuple[str, ...], set[Span]]  # spans of an item's values, by property path


@dataclass(frozen=True, slots=True)
class _Item:
    """One list item: its value in each part, and the spans that show this item and no other one of the part."""

    found: tuple[Found, ...]
    views: tuple[Spans, ...]

    def is_same(self, other: _Item) -> bool:
        return any(_is_same_place(mine, its) for mine in self.views for its in other.views)

    def may_be_same(self, other: _Item) -> bool:
        """Return whether the values are equal and no place in the text decides."""
        is_told = self.views and other.views
        return not is_told and any(mine[1] == its[1] for mine in self.found for its in other.found)


@dataclass(slots=True)
class _Merger:
    """Joins values and carries each one's confidence and evidence to its new place."""

    parts: list[Part]
    results: list[ExtractionResult]
    confidence: dict[str, float] = field(default_factory=dict)
    evidence: dict[str, Evidence] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    # The half-open range of the leaves below each pointer, by part.
    places: dict[int, dict[str, Span]] = field(default_factory=dict)

    def join(self, found: list[Found], pointer: str) -> Any:
        filled = [each for each in found if each[1] is not None] or found
        kinds = {_name_kind(value) for _, value, _ in filled}
        if len(kinds) > 1:
            kind = _name_kind(max(filled, key=self._rank)[1])
            filled = [each for each in filled if _name_kind(each[1]) is kind]
        if isinstance(filled[0][1], dict):
            names = dict.fromkeys(name for _, value, _ in filled for name in value)
            return {name: self.join(_inner(filled, name), f"{pointer}/{escape_pointer(name)}") for name in names}
        if isinstance(filled[0][1], list):
            items = self._chain(filled, pointer)
            return [self.join(list(item), f"{pointer}/{index}") for index, item in enumerate(items)]
        best = self._choose(filled)
        self._adopt(best, pointer)
        return best[1]

    def _choose(self, filled: list[Found]) -> Found:
        """The surest; where it may be cut off by its part's edge, one that holds all of it."""
        best = max(filled, key=self._rank)
        span = self._find_span(best[0], best[2])
        part = self.parts[best[0]]
        if span is None or (span[0] > part.start and span[1] < part.end - EDGE_CHARS):
            return best
        wider = [
            each
            for each in filled
            if (other := self._find_span(each[0], each[2])) is not None
            and other != span
            and other[0] <= span[0]
            and span[1] <= other[1]
        ]
        return max(wider, key=self._rank, default=best)

    def _rank(self, each: Found) -> tuple[bool, float]:
        """Return whether the text shows the value, and its confidence; for a container, the mean of its scalars."""
        index, value, pointer = each
        result = self.results[index]
        if not isinstance(value, dict | list):
            is_shown = self._find_span(index, pointer) is not None
            return is_shown and value != "", result.confidence.get(pointer, 0.0)
        leaves = self._leaves_under(index, pointer)
        shown = sum(self._find_span(index, leaf.pointer) is not None for leaf in leaves)
        sure = [result.confidence[leaf.pointer] for leaf in leaves if leaf.pointer in result.confidence]
        return 2 * shown > len(leaves), sum(sure) / len(sure) if sure else 0.0

    def _leaves_under(self, index: int, pointer: str) -> list[Leaf]:
        """The scalars of a part's value, in order."""
        if index not in self.places:
            # Those of a value follow each other.
            places = self.places[index] = {}
            for number, leaf in enumerate(self.results[index].leaves):
                steps = leaf.pointer.split("/")
                for depth in range(1, len(steps) + 1):
                    first, _ = places.setdefault("/".join(steps[:depth]), (number, number))
                    places["/".join(steps[:depth])] = (first, number + 1)
        begin, end = self.places[index].get(pointer, (0, 0))
        return list(self.results[index].leaves[begin:end])

    def _find_span(self, index: int, pointer: str) -> Span | None:
        """Return the span that shows a part's value, as offsets in the whole text."""
        evidence = self.results[index].evidence.get(pointer)
        if evidence is None or evidence.match == "none":
            return None
        shift = self.parts[index].start
        return evidence.start + shift, evidence.end + shift

    def _adopt(self, each: Found, pointer: str) -> None:
        index, _, old = each
        result, span = self.results[index], self._find_span(index, old)
        if old in result.confidence:
            self.confidence[pointer] = result.confidence[old]
        if old in result.evidence:
            evidence = result.evidence[old]
            self.evidence[pointer] = replace(evidence, start=span[0], end=span[1]) if span else evidence

    def _chain(self, found: list[Found], pointer: str) -> list[tuple[Found, ...]]:
        """Return the items of all parts in order. Items that two parts read at the same place are merged."""
        if len(found) == 1:
            index, values, at = found[0]
            return [((index, value, f"{at}/{place}"),) for place, value in enumerate(values)]
        items: list[_Item] = []
        before = 0
        for index, values, at in found:
            new = self._list_items(index, values, at)
            begin = self.parts[index].start
            near = [number for number, item in enumerate(items) if _reach(item) > begin]
            same = _match_places(items, new, near)
            if items and begin < self.parts[before].end:
                ends = [number for number, item in enumerate(items) if item.found[-1][0] == before]
                if equal := _match_values(items, new, ends, same):
                    same |= equal
                    self._note_unsure(pointer, len(equal), before, index)
            items = _weave(items, new, same)
            before = index
        return [item.found for item in items]

    def _list_items(self, index: int, values: list[Any], pointer: str) -> list[_Item]:
        """The items of one part; a place that shows several of them identifies none of them."""
        depth = len(split_pointer(pointer))
        views: list[Spans] = [{} for _ in values]
        for leaf in self._leaves_under(index, pointer):
            span = self._find_span(index, leaf.pointer)
            if span is not None:
                place, *steps = leaf.path[depth:]
                names = tuple(step for step in steps if isinstance(step, str))
                views[int(place)].setdefault(names, set()).add(span)
        counts = Counter((names, span) for view in views for names, spans in view.items() for span in spans)
        items = []
        for place, (value, view) in enumerate(zip(values, views, strict=True)):
            own = {names: {span for span in spans if counts[names, span] == 1} for names, spans in view.items()}
            own = {names: spans for names, spans in own.items() if spans}
            items.append(_Item(((index, value, f"{pointer}/{place}"),), (own,) if own else ()))
        return items

    def _note_unsure(self, pointer: str, count: int, before: int, index: int) -> None:
        items = "1 item is" if count == 1 else f"{count} items are"
        self.notes.append(
            f"{pointer or '/'}: {items} equal in parts {before + 1} and {index + 1}, without a place in the text to "
            "tell whether it is the same; kept once"
        )


def _name_kind(value: Any) -> type:
    return type(value) if isinstance(value, dict | list) else str


def _inner(found: list[Found], name: str) -> list[Found]:
    step = escape_pointer(name)
    return [(index, value[name], f"{pointer}/{step}") for index, value, pointer in found if name in value]


def _reach(item: _Item) -> int:
    """Return the largest end of the spans that show an item."""
    return max((end for view in item.views for spans in view.values() for _, end in spans), default=0)


def _is_same_place(one: Spans, other: Spans) -> bool:
    """Return whether most of the items' text is shared. Some may differ: a value may occur at two places."""
    balance = 0
    for names in one.keys() & other.keys():
        size = max(end - start for start, end in (*one[names], *other[names]))
        meet = any(a < end and start < b for a, b in one[names] for start, end in other[names])
        balance += size if meet else -size
    return balance > 0


def _match_places(items: list[_Item], new: list[_Item], near: list[int]) -> dict[int, int]:
    """Match each new item by position with one of the items near the overlap of the parts."""
    same: dict[int, int] = {}
    for place, each in enumerate(new):
        number = next((n for n in near if items[n].is_same(each)), None)
        if number is not None:
            near = [n for n in near if n != number]
            same[place] = number
    return same


def _match_values(items: list[_Item], new: list[_Item], ends: list[int], same: dict[int, int]) -> dict[int, int]:
    """Match items without spans by value: the end of one part against the start of the next.

    Args:
        ends: numbers of the previous part's items, in order.
        same: existing matches, which must not be contradicted.
    """
    taken = set(same.values())
    for size in range(min(len(ends), len(new)), 0, -1):
        equal = {place: number for place, number in enumerate(ends[-size:]) if same.get(place) != number}
        if all(
            place not in same and number not in taken and items[number].may_be_same(new[place])
            for place, number in equal.items()
        ):
            return equal
    return {}


def _weave(items: list[_Item], new: list[_Item], same: dict[int, int]) -> list[_Item]:
    """The items with the new ones: the same joined, the others before the one that follows them, or at the end."""
    joined = list(items)
    inserted: dict[int, list[_Item]] = {}
    waiting: list[_Item] = []
    for place, each in enumerate(new):
        if place not in same:
            waiting.append(each)
            continue
        number = same[place]
        joined[number] = _Item(joined[number].found + each.found, joined[number].views + each.views)
        inserted.setdefault(number, []).extend(waiting)
        waiting = []
    return [each for number, item in enumerate(joined) for each in (*inserted.get(number, ()), item)] + waiting
