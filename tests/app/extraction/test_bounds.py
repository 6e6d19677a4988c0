"""Limits are added where they make a schema stricter, listed, and nowhere else."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from app.extraction import Bound, Limits, add_bounds
from app.extraction.schema_check import SchemaChecker

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


def test_pointers_escape_property_names() -> None:
    schema = {"properties": {"a/b~c": TEXT}}
    assert add_bounds(schema, LIMITS).added == (Bound("/properties/a~1b~0c", "maxLength", 80),)


@pytest.mark.parametrize("path", sorted(SCHEMAS.glob("*.json")), ids=lambda path: path.stem)
def test_every_example_schema_is_enforced_with_and_without_limits(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    checker = SchemaChecker()
    assert checker.check(text).num_enforced > 0
    assert checker.check(json.dumps(add_bounds(json.loads(text), Limits()).schema)).num_enforced > 0
