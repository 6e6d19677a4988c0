"""Limits are added where they make a schema stricter, listed, and nowhere else."""

import copy
import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from app.extraction import Limits, add_bounds
from app.extraction.bounds import describe_added
from app.extraction.schema_check import SchemaChecker
from grammar import GrammarCompiler, GrammarSpec, SchemaValidator
from tests.grammar.vocabularies import make_byte_vocabulary

SCHEMAS = Path(__file__).resolve().parents[3] / "assets" / "schemas"
LIMITS = Limits(max_length=80, max_items=5)
TEXT = {"type": "string"}


def bounds_of(schema: dict[str, Any]) -> set[str]:
    return {f"{bound.pointer}:{bound.keyword}={bound.value}" for bound in add_bounds(schema, LIMITS).added}


LISTS = {"type": "object", "properties": {"a": TEXT, "b": {"type": "array", "items": TEXT}}}
USED = {"$defs": {"t": TEXT}, "properties": {"a": {"$ref": "#/$defs/t"}}}
ADDED: list[tuple[Any, set[str]]] = [
    (LISTS, {"/properties/a:maxLength=80", "/properties/b:maxItems=5", "/properties/b/items:maxLength=80"}),
    ({"allOf": [{"properties": {"a": TEXT}}, {"required": ["a"]}]}, {"/allOf/0/properties/a:maxLength=80"}),
    # a string that has a limit keeps it, and a limit never contradicts a minimum
    *((TEXT | limited, set()) for limited in (
        {"maxLength": 3}, {"enum": ["a"]}, {"const": "a"}, {"pattern": "a+"}, {"format": "date"}
    )),
    (TEXT | {"minLength": 100}, {":maxLength=100"}),
    # nullable in both spellings
    ({"type": ["string", "null"]}, {":maxLength=80"}), ({"anyOf": [TEXT, {"type": "null"}]}, {"/anyOf/0:maxLength=80"}),
    # nothing is added where narrowing a part may widen the whole, nor to a definition that is used there
    *(({"type": "object", keyword: TEXT}, set()) for keyword in ("not", "if", "contains")),
    ({"oneOf": [TEXT, TEXT | {"minLength": 9}]}, set()), (USED, {"/$defs/t:maxLength=80"}),
    (USED | {"not": {"$ref": "#/$defs/t"}}, set()),
    # where such a reference may lead anywhere nothing is touched
    ({"properties": {"a": TEXT}, "not": {"$ref": "#name"}}, set()),
    ({"properties": {"a": TEXT}, "not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$id": "urn:a"}}}, set()),
    ({"properties": {"id": TEXT}, "not": {"$ref": "#/$defs/b"}}, {"/properties/id:maxLength=80"}),
    ({"properties": {"a/b~c": TEXT}}, {"/properties/a~1b~0c:maxLength=80"}),
]


@pytest.mark.parametrize(("schema", "added"), ADDED)
def test_limits_are_added_where_they_make_a_schema_stricter(schema: dict[str, Any], added: set[str]) -> None:
    before = copy.deepcopy(schema)
    assert bounds_of(schema) == added and schema == before
    assert add_bounds(schema, None).schema is schema and add_bounds(schema, None).added == ()


@pytest.mark.parametrize(
    "ref", ["#/properties/a", "#/$defs/b", "#/properties/c/items", "#/components/t", "#/properties/x%20y"]
)
def test_what_a_reference_below_such_a_keyword_leads_to_is_left_alone(ref: str) -> None:
    places = {"a": TEXT, "c": {"type": "array", "items": TEXT}, "x y": TEXT, "n": {"not": {"$ref": ref}}}
    definitions = {"b": {"$ref": "#/properties/a"}}
    schema = {"properties": places, "$defs": definitions, "components": {"t": {"items": {"$ref": "#/$defs/b"}}}}
    free = "" if ref.endswith("items") else "x y" if "x" in ref else "a"
    left = {"/properties/c/items"} if not free else {f"/properties/{free}"}
    every = {"/properties/a:maxLength=80", "/properties/c:maxItems=5", "/properties/c/items:maxLength=80",
             "/properties/x y:maxLength=80"}
    assert bounds_of(schema) == {bound for bound in every if bound.partition(":")[0] not in left}


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
        {"type": "string", "allOf": [{"minLength": 300}]}, {"allOf": [{"type": "string"}, {"minLength": 300}]},
        {"allOf": [{"type": "string"}, {"pattern": "^a{300}$"}]},
        {"type": "string", "$ref": "#/$defs/p", "$defs": {"p": {"pattern": "^a{300}$"}}},
        {"type": "string", "minLength": 300.0}, {"type": "array", "minItems": 40.0},
        {"type": "array", "allOf": [{"minItems": 40}]},
        {"type": "array", "contains": {"const": "a"}, "minContains": 40},
    ],
)
def test_no_limit_contradicts_what_the_schema_asks_for(schema: dict[str, Any]) -> None:
    value = "a" * 300 if "array" not in json.dumps(schema) else ["a"] * 40
    assert SchemaValidator(schema).is_valid(value)
    assert SchemaValidator(add_bounds(schema, Limits()).schema).is_valid(value)
