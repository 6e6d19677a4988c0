"""`if` about a bound or about what cannot be there: what follows of other properties holds before they are written."""

import itertools
import json

import pytest

from grammar import GrammarSpec, InvalidGrammar
from tests.grammar.vocabularies import CLOSED, check_texts, check_verdicts, check_walks

INTEGER, NULL = {"type": "integer"}, {"type": "null"}
AGES = [
    {"type": ["integer", "null"]},
    {"anyOf": [INTEGER, NULL]},
    {"anyOf": [{"$ref": "#/$defs/age"}, NULL]},
    {"type": ["integer", "string", "null"]},
    INTEGER,
]
CONDITIONS = [
    {"minimum": 18},
    {"exclusiveMaximum": 18},
    {"minimum": 18, "maximum": 30},
    {"type": "number", "minimum": 18},
    {"type": ["number", "null"], "maximum": 18},
    {"not": {"minimum": 18}},
    {"not": {"type": "number", "minimum": 18}},
]


def make_schema(age, condition):
    return {
        **CLOSED,
        "properties": {"age": age, "guardian": {"type": ["string", "null"]}},
        "required": ["age", "guardian"],
        "if": {"properties": {"age": condition}},
        "then": {"properties": {"guardian": {"type": "string"}}},
        "else": {"properties": {"guardian": NULL}},
        "$defs": {"age": {"type": "integer", "minimum": 0}},
    }


@pytest.mark.parametrize("age", AGES, ids=json.dumps)
@pytest.mark.parametrize("condition", CONDITIONS, ids=json.dumps)
def test_a_bound_on_what_may_be_null_meets_no_dead_end(merged_compiler, byte_compiler, age, condition):
    schema = make_schema(age, condition)
    check_walks(merged_compiler, schema, num_walks=40, num_free=15)
    pairs = itertools.product((None, -1, 0, 17, 18, 19, 30, 31, 1000, "x"), (None, "x"))
    check_verdicts(byte_compiler, schema, [json.dumps({"age": age, "guardian": name}) for age, name in pairs])


@pytest.mark.parametrize("age", AGES[:2], ids=json.dumps)
@pytest.mark.parametrize("kind", ["integer", ["integer", "null"]])
def test_a_bound_on_integers_alone_guides_where_all_numbers_are_whole(merged_compiler, age, kind):
    check_walks(merged_compiler, make_schema(age, {"type": kind, "minimum": 18}), num_walks=40, num_free=15)


def test_a_bound_on_integers_alone_says_nothing_of_fractions(byte_compiler):
    schema = make_schema({"type": ["number", "null"]}, {"type": "integer", "minimum": 18})
    texts = ['{"age": 18.5, "guardian": null}', '{"age": 18, "guardian": "x"}']
    check_texts(byte_compiler, schema, texts)
    check_verdicts(byte_compiler, schema, texts)


PROPERTIES = {"b": {"type": "boolean"}, "c": {"type": ["integer", "null"]}}
X_IS_1 = {"properties": {"x": {"const": 1}}}
# About x, which the object may not have.
ABOUT_ABSENT = [
    {"dependentRequired": {"b": ["x"]}},
    {"dependentSchemas": {"b": {"required": ["x"]}}},
    {"if": {"required": ["b"]}, "then": {"required": ["x"]}},
    {"if": {"required": ["x"]}, "else": {"required": ["b"]}},
    {"if": X_IS_1, "then": {"required": ["b"]}},
    {"if": {**X_IS_1, "required": ["x"]}, "then": False, "else": {"required": ["c"]}},
    {"not": {"not": {"required": ["b"]}}},
]


@pytest.mark.parametrize("keywords", ABOUT_ABSENT, ids=json.dumps)
def test_what_is_said_of_a_property_that_cannot_be_there_guides(merged_compiler, byte_compiler, keywords):
    schema = {"type": "object", "properties": PROPERTIES, "additionalProperties": False, **keywords}
    check_walks(merged_compiler, schema, num_walks=30, num_free=15)
    texts = ["{}", '{"b": true}', '{"c": 1}', '{"b": false, "c": null}', '{"x": 1}', '{"b": true, "x": 1}']
    check_verdicts(byte_compiler, schema, texts)


def test_what_nothing_satisfies_beside_a_property_that_cannot_be_there_is_refused(byte_compiler):
    schema = {**CLOSED, "properties": PROPERTIES, "if": X_IS_1, "then": {"required": ["x"]}}
    with pytest.raises(InvalidGrammar, match="nothing is left by 'if', 'then' at #"):
        byte_compiler.compile(GrammarSpec.json_schema(schema))
