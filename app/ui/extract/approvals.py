"""Approved records in the store, and the accuracy of the model that they show.

An approval holds the record, its text, the digest of the schema, the name of the model and the number of values that
were approved unseen. For each other value that the model wrote it holds the field, the confidence (null where the
schema allowed one value only) and whether the approved record kept the value.
"""

from __future__ import annotations

import hashlib
import html
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.extraction import Schema
from app.extraction.evaluate import find_threshold
from app.extraction.json_spans import Path
from app.store import Connection, objects
from app.store.objects import Json
from app.ui.extract.shown import Shown

MIN_APPROVED = 10
SHARE_RIGHT = 0.99
MAX_EXAMPLES = 3
MAX_APPROVALS, MAX_BYTES = 500, 20_000_000  # of one owner
Field = tuple[str, str]  # its name and the share of right values, for people


@dataclass(frozen=True, slots=True)
class Trust:
    """The accuracy of one model under one schema, measured on approved records.

    Attributes:
        num_records: the approved records in which a person looked at a value.
        num_values: the values that the model wrote and a person looked at, also where the schema allowed only one.
        num_right: how many of these the approved records kept.
        num_unseen: the values that were approved unseen; they do not count.
        sure_from: the least confidence above which SHARE_RIGHT of the values were right; None if there is none, or
            with fewer than MIN_APPROVED records.
        num_sure: the values of at least that confidence, and those where the schema allowed only one.
        num_sure_right: how many of these the approved records kept.
        fields: each field with its share of right values; the field that was wrong most often comes first.
    """

    num_records: int
    num_right: int
    num_values: int
    num_unseen: int
    sure_from: float | None
    num_sure: int
    num_sure_right: int
    fields: tuple[Field, ...]


def put_approval(db: Connection, owner: str, shown: Shown) -> None:
    """Keep an approved record; it replaces one of the same text and schema that the same model read.

    Raises StoreFull: there is no room.
    """
    kept = {shown.origin.get(leaf.pointer) for leaf in shown.result.leaves if leaf.pointer not in shown.by_hand}
    unseen = {shown.origin[pointer] for pointer in shown.unseen if pointer in shown.origin}
    looked_at = [
        [name_field(leaf.path), shown.drafted.confidence.get(leaf.pointer), leaf.pointer in kept]
        for leaf in shown.drafted.leaves
        if leaf.pointer not in unseen
    ]
    body = {
        "record": shown.result.record, "text": shown.text, "schema": make_digest(shown.schema), "model": shown.model,
        "looked_at": looked_at, "num_unseen": len(unseen),
    }
    objects.put(db, owner, "approval", f"approval-{shown.key}-{make_digest(shown.model)}", body)
    objects.keep_latest(db, owner, "approval", MAX_APPROVALS, MAX_BYTES)


def approve(db: Connection, owner: str, shown: Shown) -> Trust | None:
    """Keep an approved record, and return how often the model was right in all approved records of its schema."""
    put_approval(db, owner, shown)
    return read_trust(db, owner, shown.schema, shown.model)


def get_approved(db: Connection, owner: str, shown: Shown) -> Json | None:
    """Return the latest approval of the same text and schema, whichever model read it."""
    found = objects.find(db, owner, "approval", text=f'"schema":"{make_digest(shown.schema)}"')
    return next((each.body for each in found if each.id.startswith(f"approval-{shown.key}")), None)


def find_approvals(db: Connection, owner: str, schema: Schema, model: str | None = None) -> list[Json]:
    """Return the approvals with a schema, and a model if one is given, the latest first."""
    found = objects.find(db, owner, "approval", text=f'"schema":"{make_digest(schema)}"')
    return [each.body for each in found if model in (None, each.body["model"])]


def read_trust(db: Connection, owner: str, schema: Schema, model: str) -> Trust | None:
    """Return the accuracy that the approved records show; None without any."""
    approvals = [each for each in find_approvals(db, owner, schema, model) if "looked_at" in each]
    if not approvals:
        return None
    values = [value for each in approvals for value in each["looked_at"]]
    num_records = sum(bool(each["looked_at"]) for each in approvals)
    pairs = [(sure, float(is_right)) for _, sure, is_right in values if sure is not None]
    sure_from = find_threshold(pairs, SHARE_RIGHT) if num_records >= MIN_APPROVED else None
    sures = [is_right for _, sure, is_right in values if sure_from is not None and (sure is None or sure >= sure_from)]
    totals, rights = Counter(name for name, *_ in values), Counter(name for name, _, is_right in values if is_right)
    ordered = sorted(totals, key=lambda name: rights[name] / totals[name])
    return Trust(
        num_records, rights.total(), totals.total(), sum(each["num_unseen"] for each in approvals), sure_from,
        len(sures), sum(sures),
        tuple((name, f"{rights[name]} of {totals[name]}") for name in ordered),
    )


def render_trust(trust: Trust | None) -> str:
    """Return in one sentence which values may pass unseen, with a table of the fields, as HTML."""
    if trust is None or trust.num_records < MIN_APPROVED:
        num_records = trust.num_records if trust is not None else 0
        words = (
            f"<b>Check and approve {MIN_APPROVED} records of this schema</b> to learn which values need no check; "
            f"{num_records} so far."
        )
    elif trust.sure_from is None:
        words = (
            f"<b>Look at every value</b>: in the {trust.num_records} records that you checked, {trust.num_right} of "
            f"{trust.num_values} were right, and the model was not surer of these."
        )
    else:
        words = (
            f"<b>Unmarked values may pass unseen</b>: of {trust.num_sure} as sure as these, {trust.num_sure_right} "
            f"were right in the {trust.num_records} records that you checked."
        )
    if trust is None:
        return f'<p class="trust-line">{words}</p>'
    rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{share}</td></tr>" for name, share in trust.fields)
    heads = '<tr><th scope="col">Field</th><th scope="col">Right as written</th></tr>'
    unseen = (
        f"<p>{trust.num_unseen} values that were approved but not opened do not count.</p>" if trust.num_unseen else ""
    )
    return (
        f"<details class='calibration trust-line'><summary>{words}</summary>"
        f"<table><thead>{heads}</thead><tbody>{rows}</tbody></table>{unseen}</details>"
    )


def render_examples(approvals: Sequence[Json]) -> list[str]:
    """Return the latest approved records as lines of the examples that the model reads first."""
    pairs = ({"text": each["text"], "record": each["record"]} for each in approvals)
    return list(dict.fromkeys(json.dumps(each, ensure_ascii=False) for each in pairs))[:MAX_EXAMPLES]


def name_field(path: Path) -> str:
    """Return one name for a field in all items of a list."""
    return " › ".join(step for step in path if isinstance(step, str)) or "the record"


def make_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
