"""Grounded dates and amounts are those of the text, in every spelling that people use."""

from typing import Any

import pytest

from app.extraction.candidates import MAX_CANDIDATES, bind_amounts
from app.extraction.verbatim import mark_grounded
from grammar import SchemaValidator

NUMBER: dict[str, Any] = {"type": "number"}
DATE: dict[str, Any] = {"type": "string", "format": "date"}


AMOUNTS: list[tuple[str, list[Any]]] = [
    ("2 pens at 3.20, sum 6.40", [2, 3.2, 6.4]), ("CHF 1'250.50", [1250.5]), ("1.234,50 EUR", [1234.5]),
    ("1,234", [1.234, 1234]), ("62k to 75 k", [62, 62000, 75, 75000]),
    ("fifteen hours, 4 EUR", [4, 15]), ("drei Stunden, 4 EUR", [4, 3]), ("(about 4)", [4, -4]),
    ("less 4, 100 Soll", [4, -4, 100, -100]), ("minus five, 7", [7, -7, 5, -5]), ("one of 4 due once", [4]),
    ("it was -4.5 degrees, 2019-20", [4.5, -4.5, 2019, 20]), ("7 30 4", [7, 30, 4]),
    ("5 300.50", [5300.5, 5, 300.5]), ("none", []), ("12.50, key " + "9" * 400 + ", 4", [12.5, 4]),
    ("9" * 307 + "k", [int("9" * 307)]),
]
# in digits, words and stars, and what can be counted
INTEGERS: list[tuple[str, list[Any]]] = [
    ("40 chairs and two tables", [40, 2, 0, 1]), ("★★★★ from me", [4, 0, 1, 2]),
    ("we took a lamp, 3 pens, ink and glue", [3, 1, 0, 2, 4]), ("1.5 l", []), ("twenty-five of 30", []),
    ("veinticinco de 30", []), ("30 стульев и пять столов", []),
    ("12 March 2026", [12, 2026, 3, 0, 1, 2]),
]
DATES: list[tuple[str, list[Any]]] = [
    ("due 03/04/2026, made 9 April 2025", ["2026-04-03", "2026-03-04", "2025-04-09"])
]


@pytest.mark.parametrize(
    ("kind", "text", "values"),
    [*(("numbers", *each) for each in AMOUNTS), *(("integers", *each) for each in INTEGERS), ("dates", *DATES[0])],
)
def test_values_are_read_in_every_common_spelling(kind: str, text: str, values: list[Any]) -> None:
    place = {"dates": DATE, "numbers": NUMBER, "integers": {"type": "integer"}}[kind].copy()
    bind_amounts({"properties": {"a": place}}, text)
    found = place.get("enum", [])
    assert (found if kind != "integers" else (set(found), found[:1])) == (
        values if kind != "integers" else (set(values), values[:1])
    )


def test_dates_and_amounts_may_only_be_those_of_the_text() -> None:
    schema = {"properties": {"day": dict(DATE), "sum": dict(NUMBER), "list": {"items": dict(NUMBER)}}}
    bind_amounts(schema, "9 April 2025: 12.50")
    assert schema["properties"]["day"] == {"type": "string", "enum": ["2025-04-09"]}
    assert schema["properties"]["sum"]["enum"] == schema["properties"]["list"]["items"]["enum"]
    assert 12.5 in schema["properties"]["sum"]["enum"]
    schema = {"properties": {"sum": dict(NUMBER), "day": {**DATE, "pattern": "^2025"}}}
    marked = mark_grounded(schema, "7.5, issued 2023-05-01").schema["properties"]
    assert 7.5 in marked["sum"]["enum"] and marked["day"] == {**DATE, "pattern": "^2025"}
    assert schema["properties"]["sum"] == NUMBER  # the given one stays


@pytest.mark.parametrize(
    "text",
    [
        "no figures here", " ".join(map(str, range(MAX_CANDIDATES + 1))),
        "Total: fifty dollars. Invoice 7781", "twenty five US dollars for 3 pens", "$1.2 million, 15%",
        "EUR 3.5m and 12 pens", "3,5 Mrd und 2", "version 1.2.3, 9 pens", "fünfhundert Euro, Rechnung 12",
        "金额三百元 3", "12 plus ¾", "1,5 tys. zł", "1.5 MM USD", "1,5 TEUR", "2 dozen eggs", "two dozen, 5",
        "99 cents", "99p", "12€50", "5-1/4", "125 bps", "12,5 v.H.", "100:50 kr", "5 below zero",
        "treize personnes, 4 EUR", "1234 .56",
    ],
)
def test_a_text_that_offers_none_or_too_many_or_unread_ones_binds_nothing_and_says_so(text: str) -> None:
    schema = {"properties": {"sum": dict(NUMBER)}}
    is_bound, notes = bind_amounts(schema, text)
    assert schema["properties"]["sum"] == NUMBER and not is_bound
    assert len(notes) == 1 and notes[0].startswith("numbers are not limited to those of the text: ")


@pytest.mark.parametrize(
    "text",
    ["05.03.24, signed 1 March 2019", "due 5 Mar '24 or 2024-05-01", "3/4/25, 2019-03-01", "2026-02-12, due 12 March"],
)
def test_a_date_that_cannot_be_read_for_sure_leaves_all_dates_open(text: str) -> None:
    schema = {"properties": {"day": {"type": "string", "format": "date"}}}
    bind_amounts(schema, text)
    assert schema["properties"]["day"] == {"type": "string", "format": "date"}


@pytest.mark.parametrize(
    "settled", [{"type": "integer"}, {**NUMBER, "enum": [1]}, {**NUMBER, "maximum": 3}, {"type": ["number", "string"]}]
)
def test_what_is_settled_or_no_plain_amount_stays(settled: dict[str, Any]) -> None:
    schema = {"properties": {"value": dict(settled)}}
    bind_amounts(schema, "7.5")
    assert schema["properties"]["value"] == settled


@pytest.mark.parametrize(
    ("field", "choices"),
    [
        ({"type": ["number", "null"]}, [12.5, None]), ({"type": ["null", "number"]}, [12.5, None]),
        ({"type": ["string", "null"], "format": "date"}, ["2025-04-09", None]), ({"type": ["number"]}, [12.5]),
    ],
)
def test_what_may_be_null_is_bound_as_well_and_stays_nullable(field: dict[str, Any], choices: list[Any]) -> None:
    schema = {"type": "object", "properties": {"a": field}}
    bind_amounts(schema, "2025-04-09: 12.50")
    assert schema["properties"]["a"].get("enum", [])[-len(choices) :] == choices
    validator = SchemaValidator(schema)
    assert all(validator.is_valid({"a": choice}) for choice in choices)
    assert not validator.is_valid({"a": 13.5}) and not validator.is_valid({"a": "2025-04-10"})


@pytest.mark.parametrize("kinds", [["integer", "null"], ["null"]])
def test_a_nullable_place_for_no_amount_stays_open(kinds: list[str]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": kinds}}}
    bind_amounts(schema, "12.50")
    assert "enum" not in schema["properties"]["a"]


@pytest.mark.parametrize(
    ("more", "days"),
    [
        ({"pattern": "^2024"}, ["2024-01-09"]), ({"allOf": [{"pattern": "^2024"}]}, ["2024-01-09"]),
        ({"not": {"$ref": "#/$defs/old"}}, ["2024-01-09"]), ({"maxLength": 10}, ["2023-05-01", "2024-01-09"]),
    ],
)
def test_only_what_the_schema_accepts_is_offered(more: dict[str, Any], days: list[str]) -> None:
    schema = {"properties": {"day": DATE | more}, "$defs": {"old": {"pattern": "^2023"}}}
    bind_amounts(schema, "issued 2023-05-01, booked 2024-01-09")
    assert schema["properties"]["day"]["enum"] == days


@pytest.mark.parametrize("identifier", ["person.schema.json", "http://e.com/person.schema.json", "urn:a:b"])
def test_a_schema_may_have_a_name_of_its_own(identifier: str) -> None:
    place = {"type": "number", "not": {"$ref": "#/$defs/low"}}
    schema = {"$id": identifier, "properties": {"sum": place}, "$defs": {"low": {"maximum": 5}}}
    assert mark_grounded(schema, "cost 12.50 and 3").schema["properties"]["sum"]["enum"] == [12.5]


@pytest.mark.parametrize(
    ("more", "is_bound"),
    [
        ({}, True), ({"minimum": 1}, True), ({"exclusiveMinimum": 0, "multipleOf": 2}, True),
        ({"minimum": -(2**53), "maximum": 2**53}, True), ({"minimum": 0, "exclusiveMinimum": True}, True),
        ({"minimum": 1, "maximum": 5}, False), ({"minimum": 1, "exclusiveMaximum": 11}, False),
    ],
)
def test_an_integer_is_bound_to_the_text_unless_it_is_on_a_scale(more: dict[str, Any], is_bound: bool) -> None:
    schema: dict[str, Any] = {"properties": {"n": {"type": "integer", **more}}}
    if more.get("exclusiveMinimum") is True:
        schema["$schema"] = "http://json-schema.org/draft-04/schema#"
    bind_amounts(schema, "120 cars")
    assert (120 in schema["properties"]["n"].get("enum", ())) is is_bound


def test_fields_of_any_name_are_bound_to_the_text() -> None:
    schema = {"properties": {"größe": {"type": "number"}, "a b": {"type": "number"}}, "patternProperties": {
        r"^x_\d+$": {"type": "number"}}}
    marked = mark_grounded(schema, "cost 12.50").schema
    fields = [*marked["properties"].values(), *marked["patternProperties"].values()]
    assert [field["enum"] for field in fields] == [[12.5]] * 3
