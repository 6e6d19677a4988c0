"""Approved records: what they say of the model, and that they set the bound from which on values are not marked."""

from dataclasses import replace
from typing import Any

import pytest

from app.extraction import ExtractionResult
from app.extraction.bounds import BoundedSchema
from app.extraction.extractor import make_again
from app.extraction.flags import LEAST_SURE, UNSURE
from app.store import Store
from app.ui.extract.approvals import (
    MIN_APPROVED,
    approve,
    find_approvals,
    read_trust,
    render_examples,
    render_trust,
)
from app.ui.extract.shown import Shown

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}, "ages": {"type": "array"}}}

SEEN = ["/name", "/ages/0", "/ages/1"]


def draft(number: int, confidence: dict[str, float], schema: dict[str, Any] = SCHEMA) -> Shown:
    """A record as the model wrote it, of a text of its own."""
    record, text = {"name": "Ada", "ages": [36, 37]}, f"{number}: Ada, 36, 37"
    result = ExtractionResult("", record, "", True, (), "stop", confidence, {}, (), BoundedSchema(schema))
    return Shown(make_again(schema, text, result, record), text, schema, "a-model")


async def approve_many(store: Store, count: int, wrong_below: float) -> None:
    """Approve records whose names have a confidence from .5 on; the names below a bound are corrected first."""
    for number in range(count):
        sure = 0.5 + number / count / 2
        shown = draft(number, {"/name": sure, "/ages/0": 0.99})
        edits = {"/name": "Bob"} if sure < wrong_below else {}
        await store.run(approve, "me", shown.act({"action": "approve", "edits": edits, "seen": SEEN}))


@pytest.mark.parametrize(
    ("count", "wrong_below", "sure_from"), [(MIN_APPROVED - 1, 0.7, None), (20, 0.7, 0.7), (20, 2.0, 0.99)]
)
async def test_ten_records_say_from_which_confidence_on_values_are_right(
    count: int, wrong_below: float, sure_from: float | None
) -> None:
    store = Store()
    await approve_many(store, count, wrong_below)
    trust = await store.run(read_trust, "me", SCHEMA, "a-model")
    assert trust is not None and trust.num_records == count and trust.num_values == 3 * count
    assert trust.sure_from == (None if sure_from is None else pytest.approx(sure_from))
    num_wrong = sum(0.5 + number / count / 2 < wrong_below for number in range(count))
    assert trust.num_right == 3 * count - num_wrong
    assert trust.fields == (("name", f"{count - num_wrong} of {count}"), ("ages", f"{2 * count} of {2 * count}"))
    words = render_trust(trust)
    if sure_from is None:
        assert "10 records of this schema" in words and "; 9 so far." in words and "%" not in words
    else:
        num_sure = sum(sure_from <= 0.5 + number / count / 2 for number in range(count)) + 2 * count
        words_sure = f"of {num_sure} as sure as these, {num_sure} were right in the {count} records"
        assert f"<b>Unmarked values may pass unseen</b>: {words_sure} that you checked." in words
    # Of another person, model or schema nothing is known.
    others = [("you", SCHEMA, "a-model"), ("me", SCHEMA, "b-model"), ("me", {}, "a-model")]
    assert [await store.run(read_trust, *each) for each in others] == [None] * 3
    assert "; 0 so far." in render_trust(None)


async def test_a_record_approved_again_counts_once_and_a_removed_item_was_wrong() -> None:
    store, shown = Store(), draft(0, {})
    await store.run(approve, "me", shown.act({"action": "approve"}))
    changed = shown.act({"action": "remove", "pointer": "/ages/0"})
    trust = await store.run(approve, "me", changed.act({"action": "approve", "seen": SEEN}))
    assert trust is not None and (trust.num_records, trust.num_right) == (1, 2)
    assert trust.fields == (("ages", "1 of 2"), ("name", "1 of 1"))
    # The same text read by another model counts for that model, and is one example.
    again = replace(changed, model="b-model").act({"action": "approve", "seen": SEEN})
    assert await store.run(approve, "me", again) == trust == await store.run(read_trust, "me", SCHEMA, "a-model")
    (line,) = render_examples(await store.run(find_approvals, "me", SCHEMA))
    assert line == '{"text": "0: Ada, 36, 37", "record": {"name": "Ada", "ages": [37]}}'


async def test_values_that_nobody_looked_at_say_nothing_of_the_model() -> None:
    store = Store()
    for number in range(2 * MIN_APPROVED):
        trust = await store.run(approve, "me", draft(number, {"/name": 0.9}).act({"action": "approve"}))
    assert trust is not None and (trust.num_records, trust.num_values, trust.sure_from) == (0, 0, None)
    seen = draft(0, {}).act({"action": "approve", "seen": ["/ages/0"], "edits": {"/name": "Bob"}})
    trust = await store.run(approve, "me", seen)
    assert trust is not None and (trust.num_records, trust.num_right, trust.num_values) == (1, 1, 2)
    assert f"{6 * MIN_APPROVED - 2} values that were approved but not opened do not count" in render_trust(trust)


def test_the_bound_of_the_approved_records_takes_the_place_of_the_ranking() -> None:
    sure = {"/name": 0.8, "/ages/0": 0.5, "/ages/1": 0.9}
    ranked = draft(0, sure).result
    record = ranked.record
    for bound, flags in ((None, {"/ages/0": (LEAST_SURE,)}), (0.7, {"/ages/0": (UNSURE,)}), (0.4, {})):
        measured = ExtractionResult(
            "", record, "", True, (), "stop", sure, {}, (), BoundedSchema(SCHEMA), sure_from=bound
        )
        assert make_again(SCHEMA, "0: Ada, 36, 37", measured, record).flags == flags
