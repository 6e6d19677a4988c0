"""Checks across fields: asked for by the schema or suggested by names, and the flags that follow."""

import json
from typing import Any

import pytest

from app.extraction.checks import run_checks
from app.extraction.flags import LEAST_SURE, NOT_FOUND, REPEATED, SHARED, UNSURE, find_flags
from app.extraction.grounding import find_evidence
from app.extraction.json_spans import scan
from grammar import InvalidGrammar

LINES = [{"quantity": 2, "unit_price": 5.5}, {"quantity": 1, "unit_price": 9}]


@pytest.mark.parametrize(
    ("check", "record", "holds"),
    [
        ({"sum": ["/a/*/x", "/b"], "equals": "/c"}, {"a": [{"x": 1}, {"x": 2}], "b": 3, "c": 6}, True),
        ({"sum": ["/a/*/x", "/b"], "equals": "/c"}, {"a": [{"x": 1}, {"x": 2}], "b": 3, "c": 5}, False),
        ({"sum_of_products": ["/l/*/quantity", "/l/*/unit_price"], "equals": "/t"}, {"l": LINES, "t": 20}, True),
        ({"sum_of_products": ["/l/*/quantity", "/l/*/unit_price"], "equals": "/t"}, {"l": LINES, "t": 21}, False),
        ({"order": ["/a", "/b"]}, {"a": "2026-01-02", "b": "2026-01-02"}, True),
        ({"order": ["/a", "/b"]}, {"a": "18:30", "b": "09:00"}, False),
        ({"order": ["/a", "/b"]}, {"a": 1, "b": None}, None),
        ({"order": ["/a", "/b"]}, {"a": "9:00", "b": "10:00"}, None),
        ({"order": ["/a", "/b"]}, {"a": "28 May 2026", "b": "12 June 2026"}, True),
        ({"order": ["/a", "/b"]}, {"a": "1. Juli 2026", "b": "2026-06-12"}, False),
        ({"order": ["/a", "/b"]}, {"a": "03/04/2026", "b": "2026-03-20"}, True),  # 4 March
        ({"order": ["/a", "/b"]}, {"a": "9,5 %", "b": "10 %"}, True),
        ({"order": ["/a", "/b"]}, {"a": "2026-03-12T10:00", "b": "2026-03-12T09:00"}, False),
        ({"sum": ["/a/*"], "equals": "/b"}, {"a": ["1.200,50", "(200,00)"], "b": 1000.5}, True),
        ({"sum": ["/a/*"], "equals": "/b"}, {"a": ["1.200", "1"], "b": 1201}, None),
        ({"sum": ["/a/*"], "equals": "/b"}, {"a": [], "b": 0}, None),
    ],
)
def test_a_check_of_the_schema_holds_fails_or_misses_a_value(check: Any, record: Any, holds: bool | None) -> None:
    assert [found.holds for found in run_checks({"x-checks": [check]}, record)] == ([] if holds is None else [holds])


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"salary_min": 5, "salary_max": 4}, ["salary_min (5) is not before salary_max (4)"]),
        ({"stay": {"startDate": "2026-02-01", "endDate": "2026-01-01"}}, ["startDate (2026-02-01) is not before"]),
        ({"total": 28, "lines": LINES}, ["total is 28, but the lines come to 20"]),
        ({"total": 25, "lines": LINES}, ["total is 25, but the lines come to 20"]),  # nothing here says why
        ({"total": 25, "lines": LINES, "vat": 3.8}, ["total is 25, but the lines come to 20, and vat cannot"]),
        ({"total": 23.8, "lines": LINES, "vat": 3.8, "discount": 2}, []),
        ({"subtotal": 20, "total": 26, "lines": LINES, "tax_rate": 0.19, "shippingCost": "6.00"}, []),
        ({"total": 25.99, "lines": LINES, "taxes": [{"rate": 19, "amount": 3.99}], "discount": "10 %", "fee": 4}, []),
        ({"total": 16, "lines": [line | {"discount": 2} for line in LINES], "tax_total": 9}, []),
        ({"total": 19, "lines": LINES}, ["total is 19, but the lines come to 20"]),
        ({"start": 5, "bend": 4, "minimum": 9, "max": 1}, []),
    ],
)
def test_names_suggest_checks_where_the_schema_has_none(record: Any, messages: list[str]) -> None:
    failed = [check.message for check in run_checks({}, record) if not check.holds]
    assert len(failed) == len(messages) and all(map(str.startswith, failed, messages))
    assert run_checks({"x-checks": []}, record) == ()


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("Net 20.00\nVAT 25 %   5.00\nTotal 25.00", True), ("Net 20.00\nTotal 25.00\nShips 5.00", False),
        ("plus VAT at 25%", True), ("VAT 19 %  3.80\nshipping: EUR 1.20", True), ("VAT 19 %  3.80", False),
        ("discount 5.00", False),
    ],
)
def test_a_tax_that_only_the_text_names_explains_a_total(text: str, holds: bool) -> None:
    (check,) = run_checks({}, {"total": 25, "lines": LINES}, text)
    assert check.holds == holds


@pytest.mark.parametrize("wrong", [5, [5], [{"sum": ["/a"]}], [{"order": "/a"}], [{"order": ["a"]}], [{"x": ["/a"]}]])
def test_malformed_checks_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidGrammar, match="x-checks"):
        run_checks({"x-checks": wrong}, {})


def flags_of(record: str, text: str, confidence: dict[str, float], schema: Any = None) -> dict[str, tuple[str, ...]]:
    leaves = scan(record + " ").leaves
    return find_flags(schema or {}, leaves, confidence, find_evidence(leaves, text), text=text)


def test_a_chosen_value_need_not_be_in_the_text_but_the_model_has_to_be_sure() -> None:
    schema = {"properties": {"mood": {"enum": ["good", "bad"]}, "paid": {"type": "boolean"}}}
    record = '{"mood": "good", "paid": true}'
    assert flags_of(record, "x", {"/mood": 0.96, "/paid": 0.96}, schema) == {}
    assert flags_of(record, "x", {"/mood": 0.9, "/paid": 0.9}, schema) == {"/mood": (UNSURE,), "/paid": (UNSURE,)}


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        ("3 wrenches at 89.90 EUR", (f"{NOT_FOUND}, but EUR is",)), ("At €89.90", (f"{NOT_FOUND}, but EUR is",)),
        ("89.90 EUR, or $99", ()), ("99 US dollars, not euros", ()), ("89.90", ()), ("EUROPA GmbH, 89.90", ()),
    ],
)
def test_a_choice_that_is_not_in_the_text_is_flagged_if_another_one_is(text: str, reasons: tuple[str, ...]) -> None:
    schema = {"properties": {"currency": {"enum": ["USD", "EUR", "SEK"]}}}
    assert flags_of('{"currency": "USD"}', text, {"/currency": 1.0}, schema).get("/currency", ()) == reasons


def test_an_unsure_choice_is_flagged_also_without_measurements() -> None:
    leaves = scan('{"mood": "good", "a": 1, "b": 1, "c": 1} ').leaves
    schema = {"properties": {"mood": {"enum": ["good", "bad"]}}}
    sure = {"/mood": 0.84, "/a": 0.2, "/b": 0.3, "/c": 0.9}
    assert find_flags(schema, leaves, sure, {}, sure_from=None)["/mood"] == (UNSURE,)


def test_without_measurements_the_least_sure_third_is_flagged_and_never_what_is_certain() -> None:
    leaves = scan('{"a": true, "b": true, "c": true, "d": true} ').leaves
    sure = {"/a": 0.6, "/b": 0.4, "/c": 0.7, "/d": 1.0}
    assert find_flags({}, leaves, sure, {}, sure_from=None) == {"/a": (LEAST_SURE,), "/b": (LEAST_SURE,)}
    many = {f"/{number}": number / 100 for number in range(60)}
    leaves = scan(json.dumps(dict.fromkeys((pointer[1:] for pointer in many), True)) + " ").leaves
    assert list(find_flags({}, leaves, many, {}, sure_from=None)) == list(many)[:5]
    certain = dict.fromkeys(sure, 0.999)
    assert find_flags({}, leaves, certain, {}, sure_from=None) == {}


def test_what_the_text_does_not_show_and_two_fields_with_one_place_are_flagged() -> None:
    found = flags_of('{"a": "Ada", "b": 7}', "Bob", {"/a": 1.0, "/b": 1.0})
    assert found == {"/a": (NOT_FOUND,), "/b": (NOT_FOUND,)}
    found = flags_of('{"place": "Bonn am Rhein", "officer": "Bonn", "other": "Ada"}', "Ada, Bonn am Rhein", {})
    assert found == {"/place": (SHARED,), "/officer": (SHARED,)}


OFF = "total is 35, but the lines come to 30"
DOUBTED = {"/l/0/quantity": (UNSURE,), "/l/0/price": (UNSURE,)}


@pytest.mark.parametrize(
    ("text", "quantity", "total", "flagged"),
    [
        # The product shows that numbers of which the model was unsure are right.
        ("on 2 May: 3 lamps at 10.00 EUR each, total 30.00 EUR", 3, 30, {}),
        # The total has a place of its own, although the price is the same number, and the price is not the day.
        ("on 10 May 2026: 1 lamps at 10.00 EUR each, total 10.00 EUR", 1, 10, {}),
        # One place for two numbers shows neither, and nor does a sum that does not hold.
        ("1 lamps, 10.00 EUR", 1, 10, DOUBTED | {"/total": (UNSURE, SHARED), "/l/0/price": (UNSURE, SHARED)}),
        ("3 lamps at 10 EUR, total 35 EUR", 3, 35, DOUBTED | {"/total": (OFF, UNSURE)}),
    ],
)
def test_numbers_that_a_sum_and_the_text_show_are_not_flagged(
    text: str, quantity: int, total: int, flagged: dict[str, tuple[str, ...]]
) -> None:
    record = {"date": "2026-05-10", "total": total, "l": [{"quantity": quantity, "price": 10}]}
    leaves = scan(json.dumps(record) + " ").leaves[1 if "2026" not in text else 0 :]
    sure = {leaf.pointer: 0.97 for leaf in leaves if leaf.pointer != "/date"}
    assert find_flags({}, leaves, sure, find_evidence(leaves, text), run_checks({}, record)) == flagged


@pytest.mark.parametrize(
    ("record", "text", "flagged"),
    [
        ({"l": [{"n": "Tea", "q": 2}] * 3}, "Tea 2, Milk 3", ["/l/1/n", "/l/1/q", "/l/2/n", "/l/2/q"]),
        ({"l": [{"n": "Tea", "q": 2}] * 2}, "Tea 2, Tea 2", []), ({"l": ["Tea", "Cake", "Cake"]}, "Tea", ["/l/2"]),
        ({"l": ["Tea", "Cake", "Tea", "Cake"]}, "Tea, Cake", ["/l/2", "/l/3"]),
        ({"l": [2, 2, 2]}, "2 and 2", ["/l/2"]), ({"l": [True, True]}, "yes and yes", []),
        ({"a": ["Tea"], "b": ["Tea"]}, "Tea", []),
    ],
)
def test_an_item_that_the_model_repeats_is_flagged(record: Any, text: str, flagged: list[str]) -> None:
    leaves = scan(json.dumps(record) + " ").leaves
    flags = find_flags({}, leaves, {}, find_evidence(leaves, text))
    assert [pointer for pointer, reasons in flags.items() if REPEATED in reasons] == flagged
