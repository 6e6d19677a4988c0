"""The rewriting rules keep the set of valid instances."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar import GrammarError, GrammarSpec, SchemaValidator
from grammar.schema.dialect import DRAFT_2020
from grammar.schema.emit import write_for_validator
from grammar.schema.formats import EXACT_PATTERNS
from grammar.schema.reader import read_schema
from tests.effort import choose_count
from tests.grammar.schemas import SCHEMAS, VALUES
from tests.grammar.vocabularies import SETTINGS


def rewrite(schema):
    """Return a schema as it is read and written again."""
    spec = GrammarSpec.json_schema(schema)
    return write_for_validator(read_schema(spec.document, spec.text))


def are_equivalent_on(schema, instance):
    written = SchemaValidator(rewrite(schema), dialect=DRAFT_2020)
    return SchemaValidator(schema).is_valid(instance) == written.is_valid(instance)


@settings(SETTINGS, max_examples=150)
@given(schema=SCHEMAS, instances=st.lists(VALUES, min_size=8, max_size=8))
def test_a_random_schema_and_its_rewriting_agree_on_random_instances(schema, instances):
    try:
        rewrite(schema)
    except GrammarError:
        return
    for instance in instances:
        assert are_equivalent_on(schema, instance), (instance, rewrite(schema))


OBJECTS = [{}, {"a": 1}, {"ab": 1}, {"a": 1, "b": 2}, {"b": "x"}, {"a": None, "c": 0}, [], 5, "a"]
LISTS = [[], [1], [1, 1], [1, "a"], ["a", 1], [1, "a", None], [1, "a", 3], {}, "a"]
NUMBERS = [0, 1, 1.0, 2, 2.5, 3, 9, "1", None]


@pytest.mark.parametrize(
    ("schema", "instances"),
    [
        ({"minimum": 1, "exclusiveMinimum": True, "maximum": 3, "exclusiveMaximum": False}, NUMBERS),
        ({"items": [{"type": "integer"}], "additionalItems": {"type": "string"}}, LISTS),
        ({"items": {"type": "integer"}, "additionalItems": False}, LISTS),
        ({"items": [{"type": "integer"}], "prefixItems": [{"type": "null"}]}, LISTS),
        ({"maxItems": 1, "uniqueItems": True}, LISTS),
        ({"minItems": 2.0}, LISTS),
        ({"contains": {"type": "null"}, "minContains": 0}, LISTS),
        ({"contains": {"type": "string"}, "minContains": 0, "unevaluatedItems": False}, LISTS),
        ({"properties": {"a": {}}, "unevaluatedProperties": False}, OBJECTS),
        ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, OBJECTS),
        ({"dependencies": {"a": [], "b": {}}}, OBJECTS),
        ({"dependencies": {"a": ["b"]}}, OBJECTS),
        ({"type": "object", "enum": [{"a": 1}, 5, [], None]}, OBJECTS),
        ({"type": ["integer", "null"], "enum": [1.0, 2.5, None, "1"]}, NUMBERS),
        ({"type": "string", "minimum": 5, "items": False, "required": ["a"]}, ["", "a", 1, [], {}]),
        ({"then": False}, NUMBERS),
        ({"not": False, "if": {"type": "null"}}, NUMBERS),
        ({"format": "my-format"}, ["a", 1]),
    ],
)
def test_a_rule_keeps_the_valid_instances(schema, instances):
    for instance in instances:
        assert are_equivalent_on(schema, instance), (instance, rewrite(schema))


@pytest.mark.parametrize("name", EXACT_PATTERNS)
@settings(SETTINGS, max_examples=choose_count(15, 40))
@given(data=st.data())
def test_a_format_pattern_matches_only_valid_strings(name, data):
    text = data.draw(st.from_regex(EXACT_PATTERNS[name].removesuffix("$") + r"\Z"))
    assert SchemaValidator({"type": "string", "format": name}).is_valid(text)


def test_the_users_schema_is_not_changed(byte_compiler):
    schema = {"properties": {"a": {"items": [{"format": "x"}]}}, "anyOf": [{"minimum": 1, "exclusiveMinimum": True}]}
    before = copy.deepcopy(schema)
    spec = GrammarSpec.json_schema(schema)
    byte_compiler.compile(spec)
    assert schema == spec.document == before


@pytest.mark.parametrize(
    ("schema", "residual", "engine"),
    [
        ({"type": "string", "format": "email", "pattern": "^(?!x).*$"}, {("", "pattern")}, {("", "format")}),
        ({"type": "string", "pattern": "^x", "format": "email"}, set(), {("", "format"), ("", "pattern")}),
        (
            {"type": "string", "format": "date", "pattern": "^(?!x)", "allOf": [{"pattern": "(?!y)2"}]},
            {("", "pattern"), ("/allOf/0", "pattern")},
            {("", "format"), ("", "allOf")},
        ),
        (
            {"$ref": "#/$defs/s", "format": "date", "$defs": {"s": {"type": "string"}}}, set(),
            {("", "format"), ("", "$ref"), ("/$defs/s", "type")},
        ),
    ],
)
def test_the_plan_tells_a_format_from_the_pattern_beside_it(byte_compiler, schema, residual, engine):
    plan = byte_compiler.compile(GrammarSpec.json_schema(schema)).plan
    left = {(entry.pointer, entry.keyword) for entry in plan if entry.enforced_by == "residual"}
    assert left == residual
    rest = {(entry.pointer, entry.keyword) for entry in plan if entry.enforced_by == "llguidance"}
    assert rest - {("", "type")} == engine
    assert len(set(plan)) == len(plan)
