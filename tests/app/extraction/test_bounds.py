"""Limits are added where they make a schema stricter, listed, and nowhere else."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from app.extraction import Bound, Limits, add_bounds
from app.extraction.bounds import describe_added, explain_added
from app.extraction.forms import (
    ANY_DATE_PATTERN,
    ANY_TIME_PATTERN,
    DATE_PATTERN,
    TIME_PATTERN,
    find_form,
    has_other_years,
)
from app.extraction.schema_check import SchemaChecker
from grammar import SchemaValidator

SCHEMAS = Path(__file__).resolve().parents[3] / "assets" / "schemas"
LIMITS = Limits(max_length=80, max_items=5)
TEXT = {"type": "string"}


def bounds_of(schema: dict[str, Any]) -> set[str]:
    return {f"{bound.pointer}:{bound.keyword}={bound.value}" for bound in add_bounds(schema, LIMITS).added}


def test_open_strings_and_lists_get_limits() -> None:
    schema = {"type": "object", "properties": {"a": TEXT, "b": {"type": "array", "items": TEXT}}}
    assert bounds_of(schema) == {
        "/properties/a:maxLength=80",
        "/properties/b:maxItems=5",
        "/properties/b/items:maxLength=80",
    }


def test_fields_of_a_combined_object_get_limits_too() -> None:
    schema = {"allOf": [{"properties": {"a": TEXT}}, {"required": ["a"]}]}
    assert bounds_of(schema) == {"/allOf/0/properties/a:maxLength=80"}


def test_the_users_schema_is_not_changed() -> None:
    schema = {"type": "object", "properties": {"a": dict(TEXT)}}
    before = copy.deepcopy(schema)
    bounded = add_bounds(schema, LIMITS).schema
    assert schema == before and bounded["properties"]["a"]["maxLength"] == 80


def test_without_limits_the_schema_stays_as_it_is() -> None:
    assert add_bounds(TEXT, None).schema is TEXT and add_bounds(TEXT, None).added == ()


@pytest.mark.parametrize(
    "limited",
    [{"maxLength": 3}, {"enum": ["a"]}, {"const": "a"}, {"pattern": "a+"}, {"format": "date"}],
    ids=lambda limited: next(iter(limited)),
)
def test_a_string_that_has_a_limit_keeps_it(limited: dict[str, Any]) -> None:
    assert bounds_of({**TEXT, **limited}) == set()


def test_a_nullable_string_is_limited_in_both_spellings() -> None:
    assert bounds_of({"type": ["string", "null"]}) == {":maxLength=80"}
    assert bounds_of({"anyOf": [TEXT, {"type": "null"}]}) == {"/anyOf/0:maxLength=80"}


def test_a_limit_never_contradicts_a_minimum() -> None:
    assert bounds_of({**TEXT, "minLength": 100}) == {":maxLength=100"}


@pytest.mark.parametrize("keyword", ["not", "if", "contains"])
def test_nothing_is_added_where_narrowing_a_part_may_widen_the_whole(keyword: str) -> None:
    assert bounds_of({"type": "object", keyword: TEXT}) == set()
    assert bounds_of({"oneOf": [TEXT, {**TEXT, "minLength": 9}]}) == set()


def test_a_definition_used_below_such_a_keyword_is_left_alone() -> None:
    used_once = {"$defs": {"t": TEXT}, "properties": {"a": {"$ref": "#/$defs/t"}}}
    assert bounds_of(used_once) == {"/$defs/t:maxLength=80"}
    assert bounds_of({**used_once, "not": {"$ref": "#/$defs/t"}}) == set()


@pytest.mark.parametrize(
    "ref", ["#/properties/a", "#/$defs/b", "#/properties/c/items", "#/components/t", "#/properties/x%20y"]
)
def test_what_a_reference_below_such_a_keyword_leads_to_is_left_alone(ref: str) -> None:
    places = {"a": TEXT, "c": {"type": "array", "items": TEXT}, "x y": TEXT, "n": {"not": {"$ref": ref}}}
    definitions = {"b": {"$ref": "#/properties/a"}}
    schema = {
        "properties": places,
        "$defs": definitions,
        "components": {"t": {"items": {"$ref": "#/$defs/b"}}},
    }
    free = "" if ref.endswith("items") else "x y" if "x" in ref else "a"
    left = {"/properties/c/items"} if not free else {f"/properties/{free}"}
    every = {"/properties/a:maxLength=80", "/properties/c:maxItems=5", "/properties/c/items:maxLength=80",
             "/properties/x y:maxLength=80"}  # fmt: skip
    assert bounds_of(schema) == {bound for bound in every if bound.partition(":")[0] not in left}


@pytest.mark.parametrize(
    "more", [{"not": {"$ref": "#name"}}, {"not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$id": "urn:a"}}}]
)
def test_where_such_a_reference_may_lead_anywhere_nothing_is_touched(more: dict[str, Any]) -> None:
    assert bounds_of({"properties": {"a": TEXT}, **more}) == set()
    assert bounds_of({"properties": {"a": TEXT, "id": TEXT}, "not": {"$ref": "#/$defs/b"}}) != set()


@pytest.mark.parametrize("keyword", ["enum", "const"])
def test_values_that_are_listed_stay_possible(keyword: str) -> None:
    record = {"a": "x" * 300}
    schema = {"properties": {"a": TEXT}, keyword: [record] if keyword == "enum" else record}
    assert SchemaValidator(add_bounds(schema, LIMITS).schema).is_valid(record)


def test_pointers_escape_property_names() -> None:
    schema = {"properties": {"a/b~c": TEXT}}
    assert add_bounds(schema, LIMITS).added == (Bound("/properties/a~1b~0c", "maxLength", 80),)


@pytest.mark.parametrize("path", sorted(SCHEMAS.glob("*.json")), ids=lambda path: path.stem)
def test_every_example_schema_is_enforced_with_and_without_limits(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    checker = SchemaChecker()
    assert checker.check(text).num_enforced > 0
    assert checker.check(json.dumps(add_bounds(json.loads(text), Limits()).schema)).num_enforced > 0


@pytest.mark.parametrize(
    ("subschema", "pattern"),
    [
        ({**TEXT, "format": "date"}, DATE_PATTERN),
        ({**TEXT, "description": "Day, YYYY-MM-DD"}, DATE_PATTERN),
        ({**TEXT, "description": "24 hour HH:MM"}, TIME_PATTERN),
    ],
)
def test_dates_and_times_get_the_form_they_are_said_to_have(subschema: dict[str, Any], pattern: str) -> None:
    bounded = add_bounds({"properties": {"a": subschema}}, LIMITS)
    assert bounded.schema["properties"]["a"]["pattern"] == pattern
    assert bounded.patterns == (Bound("/properties/a", "pattern", pattern),) and bounded.added == ()


@pytest.mark.parametrize(
    "subschema",
    [
        TEXT,
        {**TEXT, "description": "HH:MM:SS"},
        {**TEXT, "description": "YYYY-MM-DD or HH:MM"},
        {**TEXT, "format": "date", "pattern": "^2026"},
        {**TEXT, "format": "time", "description": "HH:MM"},
        {"type": "integer", "description": "HH:MM"},
    ],
)
def test_what_has_a_form_already_or_none_gets_no_pattern(subschema: dict[str, Any]) -> None:
    assert add_bounds(subschema, LIMITS).patterns == ()


def test_patterns_of_dates_can_be_switched_off_alone() -> None:
    limits = Limits(plausible_times=False)
    assert add_bounds({**TEXT, "format": "date"}, limits).schema == {**TEXT, "format": "date"}


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (DATE_PATTERN, ["1999-12-31", "2026-02-09"], ["1252-01-01", "2026-13-01", "2026-00-10", "2026-1-1"]),
        (TIME_PATTERN, ["00:00", "23:59"], ["24:00", "9:30", "12:60"]),
    ],
)
def test_the_patterns_take_plausible_values_only(pattern: str, right: list[str], wrong: list[str]) -> None:
    assert all(re.search(pattern, text) for text in right)
    assert not any(re.search(pattern, text) for text in wrong)


@pytest.mark.parametrize(
    ("description", "form"),
    [
        ("HH:MM", "HH:MM"),
        ("HH:MM, 24 hours", "HH:MM"),
        ("Start time, 24 hour HH:MM", "HH:MM"),
        ("When the work starts, HH:MM", "HH:MM"),
        ("Begin (24h, HH:MM).", "HH:MM"),
        ("Date of birth (YYYY-MM-DD)", "YYYY-MM-DD"),
        ("due date as YYYY-MM-DD", "YYYY-MM-DD"),
        ("opening hours as HH:MM-HH:MM", None),
        ("due date as YYYY-MM-DD, or 'on receipt'", None),
        ("'on receipt' or the day, YYYY-MM-DD", None),
        ('the day, "open" if there is none, YYYY-MM-DD', None),
        ("period, YYYY-MM-DD/YYYY-MM-DD", None),
        ("day YYYY-MM-DD, HH:MM", None),
        ("duration, HH:MM", None),
        ("opening hours, HH:MM", None),
        ("Blank when missing, YYYY-MM-DD", None),
        ("N/A when missing: YYYY-MM-DD", None),
        ("null when absent, YYYY-MM-DD", None),
        ("Weekly total, HH:MM", None),
        ("Time spent, HH:MM", None),
        ("as HH:MM, " * 200 + "HH:MM", None),
    ],
)
def test_a_description_that_leaves_a_choice_asks_for_no_form(description: str, form: str | None) -> None:
    assert find_form(description) == form
    assert len(add_bounds({**TEXT, "description": description}, LIMITS).patterns) == (form is not None)


@pytest.mark.parametrize(
    ("text", "is_other"),
    [
        ("born on 10 December 1815 in London", True),
        ("10. Dezember 1815", True),
        ("December 10, 1815", True),
        ("10.12.1815", True),
        ("1815-12-10", True),
        ("due 3 May 2150", True),
        ("Signed 21. 10. 1805", True),
        ("Founded in 1842, rebuilt twice", True),
        ("valid until 2150", True),
        ("12/1815", True),
        ("1805, Oct 21", True),
        ("18.VI.1815", True),
        ("im Jahr 1789", True),
        ("1066年", True),
        ("3019-03-25", True),
        ("9 April 2026, room 125", False),
        ("2 Pens at 1,250.50, no. +1250", False),
        ("order A1250, 1250kg", False),
        ("2 Pens 1250.50", False),
        ("12815-12-10", False),
        ("", False),
    ],
)
def test_years_of_the_text_are_open(text: str, is_other: bool) -> None:
    assert has_other_years(text) is is_other
    date = add_bounds({**TEXT, "format": "date"}, LIMITS, text).schema
    described = add_bounds({**TEXT, "description": "YYYY-MM-DD"}, LIMITS, text).schema
    assert date.get("pattern") == (None if is_other else DATE_PATTERN)
    assert described["pattern"] == (ANY_DATE_PATTERN if is_other else DATE_PATTERN)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("for 36:30", ANY_TIME_PATTERN),
        ("26 h 15 min", ANY_TIME_PATTERN),
        ("24h00", ANY_TIME_PATTERN),
        ("at 12:36:30", TIME_PATTERN),
        ("at 12h36", TIME_PATTERN),
    ],
)
def test_hours_of_the_text_are_open(text: str, pattern: str) -> None:
    assert add_bounds({**TEXT, "description": "HH:MM"}, LIMITS, text).schema["pattern"] == pattern


def test_everything_that_was_added_is_said() -> None:
    day, start = {**TEXT, "format": "date"}, {**TEXT, "description": "HH:MM"}
    schema = {"properties": {"name": TEXT, "day": day, "due": day, "start": start}}
    bounds = add_bounds(schema, LIMITS)
    assert describe_added(bounds) == [
        "80 characters a text",
        "YYYY-MM-DD from 1900 to 2099 at /properties/day, /properties/due",
        "HH:MM from 00:00 to 23:59 at /properties/start",
    ]
    assert "hours after 23" in explain_added(bounds)
    assert explain_added(add_bounds(TEXT, LIMITS)) == "80 characters a text."
    assert explain_added(add_bounds(schema, None)) == ""


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/long", "$defs": {"long": {"type": "string", "minLength": 300}}},
        {"$ref": "#/$defs/t", "minLength": 300, "$defs": {"t": {"type": "string"}}},
        {"type": "string", "allOf": [{"minLength": 300}]},
        {"allOf": [{"type": "string"}, {"minLength": 300}]},
        {"allOf": [{"type": "string"}, {"pattern": "^a{300}$"}]},
        {"type": "string", "$ref": "#/$defs/p", "$defs": {"p": {"pattern": "^a{300}$"}}},
        {"type": "string", "minLength": 300.0},
        {"type": "array", "minItems": 40.0},
        {"type": "array", "allOf": [{"minItems": 40}]},
        {"type": "array", "contains": {"const": "a"}, "minContains": 40},
    ],
)
def test_no_limit_contradicts_what_the_schema_asks_for(schema: dict[str, Any]) -> None:
    value = "a" * 300 if "array" not in json.dumps(schema) else ["a"] * 40
    assert SchemaValidator(schema).is_valid(value)
    assert SchemaValidator(add_bounds(schema, Limits()).schema).is_valid(value)
