"""Limits are added where they make a schema stricter, listed, and nowhere else."""

import copy
import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from app.extraction import Bound, Limits, add_bounds
from app.extraction.bounds import describe_added
from app.extraction.schema_check import SchemaChecker
from grammar import GrammarCompiler, GrammarSpec, SchemaValidator
from tests.grammar.vocabularies import make_byte_vocabulary

SCHEMAS = Path(__file__).resolve().parents[3] / "assets" / "schemas"
LIMITS = Limits(max_length=80, max_items=5)
TEXT = {"type": "string"}


def bounds_of(schema: dict[str, Any]) -> set[str]:
    return {f"{bound.pointer}:{bound.keyword}={bound.value}" for bound in add_bounds(schema, LIMITS).added}


def test_open_strings_and_lists_get_limits() -> None:
    schema = {"type": "object", "properties": {"a": TEXT, "b": {"type": "array", "items": TEXT}}}
    assert bounds_of(schema) == {
        "/properties/a:maxLength=80", "/properties/b:maxItems=5", "/properties/b/items:maxLength=80"
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
             "/properties/x y:maxLength=80"}
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


DIGITS = [":decimals=10", ":digits=15"]


@pytest.mark.parametrize(
    ("schema", "text", "added"),
    [
        ({"type": "number"}, "", DIGITS), ({"type": ["integer", "null"]}, "", DIGITS[1:]),
        ({"type": "number", "minimum": 0}, "", DIGITS),
        ({"type": "number", "minimum": 0, "exclusiveMaximum": 1e-12}, "", []),
        ({"type": "number", "multipleOf": 0.01}, "", DIGITS[1:]),
        ({"type": "number", "minimum": 1e20}, "", DIGITS[:1]), ({"type": "number", "enum": [1]}, "", []),
        ({"type": "number"}, "12.50 EUR", DIGITS), ({"type": "number"}, "mass 6.02e23", DIGITS[:1]),
        ({"type": "number"}, "at 50.87959123456 N", DIGITS[1:]),
        ({"type": "integer"}, "card 4111 1111 1111 1111", []),
    ],
)
def test_a_number_is_limited_unless_the_schema_or_the_text_has_a_longer_one(
    schema: dict[str, Any], text: str, added: list[str]
) -> None:
    bounds = add_bounds(schema, LIMITS, text)
    assert sorted(f"{bound.pointer}:{bound.keyword}={bound.value}" for bound in bounds.added) == added


@pytest.mark.parametrize(
    ("number", "num_accepted"),
    [("1" * 400, 15), ("0." + "3" * 400, 12), ("-999999999999998.0000000001", 27), ("12.50", 5), ("1e999", 1)],
)
def test_a_limited_number_ends(number: str, num_accepted: int) -> None:
    schema = add_bounds({"type": "number"}, Limits()).schema
    compiler = GrammarCompiler(make_byte_vocabulary())
    matcher = compiler.compile(GrammarSpec.json_schema(schema, "spaced")).matcher()
    assert len([*takewhile(matcher.accept_token, number.encode())]) == num_accepted


def test_pointers_escape_property_names() -> None:
    schema = {"properties": {"a/b~c": TEXT}}
    assert add_bounds(schema, LIMITS).added == (Bound("/properties/a~1b~0c", "maxLength", 80),)


@pytest.mark.parametrize("path", sorted(SCHEMAS.glob("*.json")), ids=lambda path: path.stem)
def test_every_example_schema_is_enforced_with_and_without_limits(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    checker = SchemaChecker()
    assert checker.check(text).num_enforced > 0
    assert checker.check(json.dumps(add_bounds(json.loads(text), Limits()).schema)).num_enforced > 0


def test_everything_that_was_added_is_said() -> None:
    schema: dict[str, Any] = {"properties": {"name": TEXT, "all": {"type": "array", "items": TEXT}}}
    schema["properties"]["sum"] = {"type": "number"}
    assert describe_added(add_bounds(schema, LIMITS)) == [
        "80 characters a text", "5 items a list", "15 digits a number"
    ]
    assert describe_added(add_bounds(schema, None)) == []


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
