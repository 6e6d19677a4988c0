"""Shown: a record under review. Each action of the user makes a new one, with marks and sums computed again."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from app.extraction import Evidence, ExtractionResult, Schema
from app.extraction.bounds import BoundedSchema
from app.extraction.choices import Choice
from app.extraction.extractor import make_again
from app.extraction.flags import LOW_CONFIDENCE, NOT_FOUND
from app.extraction.json_spans import Leaf, Scalar, scan
from app.extraction.numbers import find_moved
from app.extraction.review import Change, EditError, apply_edits, change_items, compare, put_value
from app.extraction.schema_places import list_kinds, name_kind
from app.ui.extract.pages import Opened

FILL_IN = "fill in"
# A person changes these parts of a record.
REVIEWED = ("record", "origin", "empty", "checked", "seen", "approved")


class ChangedElsewhere(Exception):
    """Another page has changed the value of an action; `shown` is the newer record."""

    def __init__(self, shown: Shown) -> None:
        super().__init__("changed in another tab")
        self.shown = shown


@dataclass(frozen=True, slots=True)
class Shown:
    """A record with its text and schema, and the corrections and approvals of the user.

    Attributes:
        model: name of the model or adapter that read the text.
        drafted: the record as the model wrote it.
        choices: what the model weighed, by the pointer in `drafted`.
        origin: the pointer in `drafted` of each value that comes from there.
        by_hand: pointers of the values that the user typed.
        checked: pointers of the values that the user confirmed.
        seen: pointers of the values that the user clicked or came to with the keyboard.
        empty: pointers of the values of added items that nobody has typed yet.
        verified: the record that was approved before for the same text and schema.
        reading: an id of what the model read in one run; corrections keep it.
        other: another model, and its record of the same text and schema.
    """

    result: ExtractionResult
    text: str
    schema: Schema
    model: str
    opened: Opened | None = None
    choices: Mapping[str, Choice] = field(default_factory=dict)
    verified: Any = None
    drafted: Any = None  # an ExtractionResult; `result` by default
    origin: Mapping[str, str] = field(default_factory=dict)
    by_hand: frozenset[str] = frozenset()
    checked: frozenset[str] = frozenset()
    seen: frozenset[str] = frozenset()
    empty: frozenset[str] = frozenset()
    is_approved: bool = False
    before: Shown | None = None  # Undo restores it: the state before an item was removed, or the earlier record
    reading: str = ""
    other: tuple[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.drafted is None:
            object.__setattr__(self, "drafted", self.result)
            object.__setattr__(self, "origin", {leaf.pointer: leaf.pointer for leaf in self.result.leaves})

    @property
    def key(self) -> str:
        """Return the storage key of an approved record: equal for equal text and schema."""
        digest = self.opened.digest if self.opened else ""
        source = [self.text, digest] if digest else self.text
        both = json.dumps([self.schema, source], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(both.encode(errors="surrogatepass")).hexdigest()[:16]

    @property
    def changes(self) -> dict[str, Change]:
        """Return the differences from the record that was approved before, by pointer; empty without one."""
        return {} if self.verified is None else compare(self.result.record, self.verified)

    @property
    def differences(self) -> dict[str, Change]:
        """Return the fields in which another model's record differs, by pointer; "missing" ones are only there."""
        found = compare(self.result.record, self.other[1]) if self.other else {}
        return {pointer: change for pointer, change in found.items() if change.kind != "same"}

    @property
    def moved(self) -> dict[str, tuple[str, int | float]]:
        """Return the number of the text with the same digits as a value and another decimal separator."""
        reasons = self.reasons
        doubtful = {
            leaf.pointer: leaf.value for leaf in self.result.leaves
            if isinstance(leaf.value, int | float) and NOT_FOUND in reasons.get(leaf.pointer, ())
        }
        found, kinds = find_moved(doubtful.values(), self.text), {"number", "integer"}
        return {
            pointer: found[value] for pointer, value in doubtful.items()
            if value in found and name_kind(found[value][1]) in (list_kinds(self.schema, pointer) or kinds)
        }

    @property
    def reasons(self) -> dict[str, tuple[str, ...]]:
        """Return the reasons to check values, by pointer. The model's doubts do not count for a typed value."""
        failed = {check.message for check in self.result.checks if not check.holds}
        found = {
            pointer: tuple(why for why in reasons if pointer not in self.by_hand or why in failed)
            for pointer, reasons in self.result.flags.items()
        }
        for error in self.result.errors:
            pointer, _, why = error.partition(": ")
            if any(leaf.pointer == pointer for leaf in self.result.leaves):
                found[pointer] = (why, *found.get(pointer, ()))
        found |= dict.fromkeys(sorted(self.to_fill), (FILL_IN,))
        return {pointer: reasons for pointer, reasons in found.items() if reasons}

    @property
    def to_fill(self) -> frozenset[str]:
        """Return the pointers of the empty values that the user has not confirmed to be right as they are."""
        return self.empty - self.checked

    @property
    def to_check(self) -> list[str]:
        """Return the pointers of the values that the user still has to check; an approval covers only those seen."""
        done = self.checked | self.seen | self.by_hand if self.is_approved else self.checked
        return [pointer for pointer in self.reasons if pointer not in done]

    @property
    def unseen(self) -> list[str]:
        """Return the pointers of the values that the user neither looked at, nor typed, nor confirmed."""
        done = self.seen | self.checked | self.by_hand
        return [leaf.pointer for leaf in self.result.leaves if leaf.pointer not in done]

    def find_page(self, evidence: Evidence | None) -> int:
        """Return the page of a value in the opened PDF; 0 if there is none, or the text was edited."""
        if self.opened is None or evidence is None or evidence.match == "none":
            return 0
        source = self.opened.source
        return source.find_page(evidence.start) if source.text == self.text else 0

    def act(self, data: Mapping[str, Any]) -> Shown:
        """Return the record after what a person did: typed texts, and then an action on one value or on all."""
        seen = self.seen.union({leaf.pointer for leaf in self.result.leaves}.intersection(data.get("seen", ())))
        shown, pointer, action = replace(self, seen=seen), str(data.get("pointer") or ""), data.get("action")
        if edits := data.get("edits"):
            shown = shown.change(apply_edits(self.result.record, edits, self.schema))
            # A typed value counts as right, even if the model wrote the same.
            shown = replace(shown, checked=shown.checked.union(edits) - shown.by_hand - shown.empty)
        match action:
            case "check":
                return replace(shown, checked=shown.checked | {pointer}, before=None)
            case "undo":
                return shown.change(put_value(shown.result.record, pointer, shown.draft_of(pointer)))
            case "take" if pointer in shown.differences:
                return shown.change(put_value(shown.result.record, pointer, shown.differences[pointer].verified))
            case "use" if pointer in shown.moved:
                return shown.change(put_value(shown.result.record, pointer, shown.moved[pointer][1]))
            case "add" | "remove":
                changed = shown.change(*change_items(shown.result.record, pointer, action))
                return replace(changed, before=replace(shown, before=None)) if action == "remove" else changed
            case "bring back" if shown.before is not None:
                return shown.before
            case "approve":
                if not shown.result.valid or shown.to_fill:
                    errors = shown.result.errors or [f"{each}: {FILL_IN}" for each in sorted(shown.to_fill)]
                    raise EditError("; ".join(errors))
                return replace(shown, checked=shown.checked | shown.seen, is_approved=True)
        return shown

    def act_on(self, newer: Shown, data: Mapping[str, Any]) -> Shown:
        """Apply an action that was made on this record to `newer`, which another page has kept since.

        Raises ChangedElsewhere: a value that the action is about is another one there.
        """
        edits, place = data.get("edits") or {}, f"{data.get('pointer') or ''}/"
        here, there = (
            {leaf.pointer: leaf.value for leaf in each.result.leaves
             if leaf.pointer in edits or f"{leaf.pointer}/".startswith(place)}
            for each in (self, newer)
        )
        if here != there or self.origin != newer.origin:
            raise ChangedElsewhere(newer)
        is_same = self.result.record == newer.result.record
        return replace(newer, before=self.before if is_same else None).act(data)

    def draft_of(self, pointer: str) -> Scalar:
        for leaf in self.drafted.leaves:
            if leaf.pointer == self.origin.get(pointer):
                return leaf.value
        raise EditError(f"the model wrote no value for {pointer!r}")

    def change(self, record: Any, find_before: Callable[[str], str | None] = lambda pointer: pointer) -> Shown:
        leaves = scan(json.dumps(record) + " ").leaves
        before = {leaf.pointer: find_before(leaf.pointer) for leaf in leaves}
        added = {pointer for pointer, old in before.items() if old is None or old in self.empty}
        empty = frozenset(leaf.pointer for leaf in leaves if leaf.pointer in added and leaf.value in (None, ""))
        origin = {
            pointer: self.origin[old]
            for pointer, old in before.items()
            if old is not None and old in self.origin and pointer not in empty
        }
        changed = self.put(record, origin, empty)
        checked = frozenset(pointer for pointer, old in before.items() if old in self.checked)
        seen = frozenset(pointer for pointer, old in before.items() if old in self.seen)
        return replace(changed, checked=checked - changed.by_hand, seen=seen, is_approved=False, before=None)

    def put(self, record: Any, origin: Mapping[str, str], empty: frozenset[str]) -> Shown:
        """Return another record with all that follows from its values, whose places in the draft are known."""
        drafted = {leaf.pointer: leaf for leaf in self.drafted.leaves}
        by_hand = frozenset(
            leaf.pointer
            for leaf in scan(json.dumps(record) + " ").leaves
            if leaf.pointer not in empty and not _is_as(leaf, drafted.get(origin.get(leaf.pointer, "-")))
        )
        confidence = {
            pointer: self.drafted.confidence[old]
            for pointer, old in origin.items()
            if pointer not in by_hand and old in self.drafted.confidence
        }
        result = make_again(self.schema, self.text, replace(self.result, confidence=confidence), record)
        return replace(self, result=result, origin=origin, by_hand=by_hand, empty=empty)

    def take(self, kept: Mapping[str, Any]) -> Shown:
        """Return the record as it was dumped last, by this page or by another one."""
        mine = self.dump()
        shown = self
        if any(mine[name] != kept.get(name) for name in REVIEWED):
            # The places are stored, because added and removed items move the values. Older versions stored none.
            places = {leaf.pointer: leaf.pointer for leaf in self.drafted.leaves}
            shown = self.put(kept["record"], kept.get("origin", places), frozenset(kept.get("empty", ())))
        return replace(
            shown, checked=frozenset(kept["checked"]), seen=frozenset(kept.get("seen", ())),
            is_approved=kept["approved"], reading=kept.get("reading", ""),
            other=tuple(kept["other"]) if kept.get("other") else None,
        )

    def dump(self) -> dict[str, Any]:
        """Return it as JSON that `restore` reads."""
        draft = {"record": self.drafted.record, "confidence": self.drafted.confidence}
        return {
            "model": self.model, "source": self.result.source, "record": self.result.record,
            "finish_reason": self.result.finish_reason,
            "notes": list(self.result.notes), "sure_from": self.result.sure_from, "draft": draft,
            "origin": dict(self.origin),
            "choices": {pointer: asdict(choice) for pointer, choice in self.choices.items()},
            "checked": sorted(self.checked), "seen": sorted(self.seen), "empty": sorted(self.empty),
            "approved": self.is_approved, "reading": self.reading, "other": self.other,
        }


def restore(kept: Mapping[str, Any], text: str, schema: Schema) -> Shown:
    """Return a record that `dump` wrote, or that a row of a job has, without the opened file."""
    draft = kept.get("draft", kept)
    result = ExtractionResult(
        kept["source"], draft["record"], "", True, (), kept["finish_reason"], draft["confidence"], {}, (),
        BoundedSchema(schema), tuple(kept.get("notes", ())), sure_from=kept.get("sure_from", LOW_CONFIDENCE),
    )
    choices = {pointer: Choice(**each) for pointer, each in kept.get("choices", {}).items()}
    shown = Shown(make_again(schema, text, result, draft["record"]), text, schema, kept["model"], choices=choices)
    return shown.take(kept) if "draft" in kept else shown


def _is_as(leaf: Leaf, drafted: Leaf | None) -> bool:
    return drafted is not None and type(drafted.value) is type(leaf.value) and drafted.value == leaf.value


def digest(value: Any) -> str:
    """Return a short hash of a text or a schema, which review.js compares with what the page shows."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return str(zlib.adler32(text.replace("\r\n", "\n").replace("\r", "\n").encode(errors="replace")))
