"""Residual checks: keywords that no engine enforces are checked where a value is complete."""

import json
import random

import pytest

from grammar import GrammarSpec, InvalidGrammar, PlanEntry, SchemaValidator, UnsupportedGrammar
from grammar.schema.keywords import join_pointer
from tests.effort import choose_count
from tests.grammar.vocabularies import CLOSED, EOS, allowed_tokens, check_texts, check_verdicts, walk

VALUES = [
    *(None, True, 0, 1, 2, 2.5, 12, "", "a", "b", "ab", [], [1], [1, 1], [1, "a"], [1, 2, 3], [[1], [1]]),
    *({}, {"a": 1}, {"b": 2}, {"a": 1, "b": 2}, {"a": "x", "b": None}, {"c": [1, 1]}, {"a": [1, 2]}),
]


def number_parts(part):
    return {"type": "object", "properties": {f"q{i}": part | {"title": str(i)} for i in range(24)}}


def feed(matcher, text):
    data = text.encode()
    for position, byte in enumerate(data):
        if not matcher.accept_token(byte):
            return data[position:].decode()
    return ""


@pytest.mark.parametrize(
    ("schema", "pointer", "keyword"),
    [
        ({"not": {"type": "null"}}, "", "not"),
        ({"properties": {"a/b": {"contains": {"const": 1}}}}, "/properties/a~1b", "contains"),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "", "if"),
        ({"allOf": [{"dependentRequired": {"a": ["b"]}}]}, "/allOf/0", "dependentRequired"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"propertyNames": {"maxLength": 3}}}}, "/$defs/x", "propertyNames"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {}}, "unevaluatedProperties": False}, "", "unevaluatedProperties"),
        ({"properties": {"p": {"type": "string", "pattern": "a(?=b)"}}}, "/properties/p", "pattern"),
        ({"patternProperties": {"a": {"type": "string"}, "b": {"type": "null"}}}, "", "patternProperties"),
        ({"minProperties": 2}, "", "minProperties"),
        ({"type": "number", "minimum": 2**53 + 1}, "", "minimum"),
        ({"items": {"exclusiveMinimum": 0, "maximum": 0.5}}, "/items", "exclusiveMinimum"),
        ({"minimum": -0.5, "allOf": [{"exclusiveMaximum": 0}]}, "/allOf/0", "exclusiveMaximum"),
    ],
)  # fmt: skip
def test_what_no_engine_enforces_is_left_to_residual_checks(byte_compiler, schema, pointer, keyword):
    plan = byte_compiler.compile(GrammarSpec.json_schema(schema)).plan
    assert PlanEntry(pointer, keyword, "residual") in plan


@pytest.mark.parametrize("whitespace", ["spaced", "compact"])
@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "null"}},
        {"not": {"enum": [1, "a", [], {"a": 1}]}},
        {"uniqueItems": True},
        {"items": {"uniqueItems": True}},
        {"additionalProperties": {"uniqueItems": True}},
        {"contains": {"const": 1}, "minContains": 1, "maxContains": 1},
        {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"maxProperties": 1}},
        {"dependentRequired": {"a": ["b"]}},
        {"dependencies": {"b": ["a"], "a": {"properties": {"a": {"type": "integer"}}}}},
        {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
        {"anyOf": [{"type": "string"}, {"type": "array", "uniqueItems": True}]},
        {"propertyNames": {"maxLength": 1, "not": {"const": "b"}}},
        {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
        {"patternProperties": {"a": {"type": "integer"}, "^a": {"minimum": 1}}, "additionalProperties": False},
        {"type": "string", "pattern": "^(?!b)"},
        {"properties": {"a": {}}, "additionalProperties": False, "maxProperties": 0, "not": {"const": 1}},
        {"items": [{"not": {"const": 0}}], "additionalItems": {"not": {"const": 1}}},
        {"$ref": "#/$defs/x", "$defs": {"x": {"items": {"$ref": "#/$defs/x"}, "not": {"const": 1}}}},
        {"properties": {"a": {"not": {"const": 1}}, "c": {"items": {"not": {"const": 1}}}}},
    ],
)  # fmt: skip
def test_what_is_accepted_is_what_is_valid(byte_compiler, schema, whitespace):
    separators = (", ", ": ") if whitespace == "spaced" else (",", ":")
    texts = [json.dumps(value, separators=separators) for value in VALUES]
    check_verdicts(byte_compiler, schema, texts, whitespace=whitespace)


@pytest.mark.parametrize(
    ("schema", "text", "rest"),
    [
        ({"properties": {"a": {"not": {"const": "x"}}}}, '{"a": "x"}', '"}'),
        ({"properties": {"a": {"not": {"const": 12}}}}, '{"a": 12}', "}"),
        ({"items": {"not": {"type": "null"}}}, "[1, null]", "null]"),
        ({"items": {"uniqueItems": True}}, "[[1, 2], [1, 1], 5]", "], 5]"),
        ({"uniqueItems": True}, '["a", "b", "a", 5]', '", 5]'),
        ({"uniqueItems": True}, '[{"a": 1, "b": 2}, {"b": 2, "a": 1.0}]', "}]"),
        ({"uniqueItems": True}, "[1, true, 1.0, 2]", ", 2]"),
        ({"propertyNames": {"maxLength": 1}}, '{"a": 1, "bc": 2}', '": 2}'),
        ({"propertyNames": {"enum": ["a", "abc"]}}, '{"abc": 1, "ab": 2}', '": 2}'),
        ({"properties": {"a": {"type": "object", "dependentRequired": {"x": ["y"]}}}}, '{"a": {"x": 1}}', "}}"),
        ({"anyOf": [{"items": {"not": {"const": "x"}}}]}, '["x"]', "]"),
        # Many branches that overlap, many counts.
        (number_parts({"oneOf": [{"type": "integer"}, {"minimum": 3}]}), '{"q20": 5}', "}"),
        (number_parts({"oneOf": [{"type": "integer"}, {"minimum": 3}]}), '{"q20": 1}', ""),
        (number_parts({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}), '{"q20": {}}', "}}"),
        # The last place is kept for what has to be there.
        ({"type": "array", "items": {"type": ["null", "boolean"]}, "contains": {"type": "null"}, "maxItems": 2},
         "[true, t", "t"),
        ({"type": "array", "contains": {"const": "b"}, "minContains": 2, "maxItems": 3}, '["b", 1, 2', "2"),
        ({**CLOSED, "properties": {"a": {}, "b": {}}, "maxProperties": 1}, '{"a": 1, ', ", "),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, '{"c', "c"),
    ],
)  # fmt: skip
def test_the_token_that_violates_is_refused_as_soon_as_it_completes_a_value(byte_compiler, schema, text, rest):
    matcher = byte_compiler.compile(GrammarSpec.json_schema(schema)).matcher()
    assert feed(matcher, text) == rest
    assert not rest or rest.encode()[0] not in allowed_tokens(matcher, byte_compiler.vocabulary)


def test_a_number_at_the_end_of_the_text_is_checked_at_eos(byte_compiler):
    schema = {"type": "integer", "not": {"const": 12}}
    matcher = byte_compiler.compile(GrammarSpec.json_schema(schema)).matcher()
    assert feed(matcher, "12") == ""
    assert EOS not in allowed_tokens(matcher, byte_compiler.vocabulary)
    assert not matcher.accept_token(EOS) and not matcher.is_completed()
    assert matcher.accept_token(ord("3")) and matcher.accept_token(EOS) and matcher.is_terminated()


@pytest.mark.parametrize(
    "schema, reason",
    [
        ({"type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "uniqueItems": True}, "minItems"),
        ({"type": "array", "items": {"type": "null"}, "contains": {"type": "string"}, "maxItems": 2}, ""),
        ({"type": "array", "contains": {"const": 1}, "minContains": 3, "maxItems": 2, "uniqueItems": True}, ""),
        ({"type": "object", "propertyNames": {"pattern": "^a"}, "required": ["a", "b"]}, ""),
        ({"type": "object", "propertyNames": {"type": "number"}, "minProperties": 1}, ""),
    ],
)  # fmt: skip
def test_what_nothing_can_satisfy_is_refused_and_does_not_end_in_a_dead_end(byte_compiler, schema, reason):
    with pytest.raises(InvalidGrammar, match=f"no (?:text|value) satisfies the schema.*{reason}"):
        byte_compiler.compile(GrammarSpec.json_schema(schema))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "multipleOf": 99991, "maximum": 10**6}, "199982", "199981"),
        ({"type": "number", "multipleOf": 9999.1}, "19998.2", "19998.1"),
        ({"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, str(9973 * 9967), "9973"),
    ],
)  # fmt: skip
def test_a_large_multiple_is_checked(byte_compiler, schema, good, bad):
    check_texts(byte_compiler, schema, [good], [bad])


@pytest.mark.parametrize("step", [0.01, 1e-5, 5, 1000, 10**6, 44100, 9973, 1.2345])
def test_an_ordinary_multiple_is_the_engines(byte_compiler, step):
    plan = byte_compiler.compile(GrammarSpec.json_schema({"type": "number", "multipleOf": step})).plan
    assert PlanEntry("", "multipleOf", "llguidance") in plan


@pytest.mark.parametrize("pattern", [r"(?<n>a)\k<n>", r"^\ud83d$", "^(?=b)?b|d", r"\a"])
def test_a_pattern_that_no_check_reads_is_refused_with_its_place(byte_compiler, pattern):
    for schema, pointer, keyword in (
        ({"properties": {"a/b": {"pattern": pattern}}}, "/properties/a~1b", "pattern"),
        ({"items": {"patternProperties": {pattern: {}}}}, "/items", "patternProperties"),
        ({"properties": {pattern: {"pattern": pattern}}}, join_pointer("/properties", pattern), "pattern"),
    ):
        with pytest.raises(UnsupportedGrammar) as refusal:
            byte_compiler.compile(GrammarSpec.json_schema(schema))
        assert (refusal.value.pointer, refusal.value.keyword) == (pointer, keyword)


def test_a_malformed_pattern_stays_invalid(byte_compiler):
    with pytest.raises(InvalidGrammar, match="regex"):
        byte_compiler.compile(GrammarSpec.json_schema({"type": "string", "pattern": "("}))


def test_a_dead_end_names_the_keyword(byte_compiler):
    # One of two names has to be found by chance.
    schema = {"type": "object", "maxProperties": 2, "not": {"propertyNames": {"not": {"pattern": "^a+$"}}}}
    matcher = byte_compiler.compile(GrammarSpec.json_schema({"properties": {"x/y": schema}})).matcher()
    assert feed(matcher, '{"x/y": {"b": true, "c": true}}') == "}}"
    assert matcher.error is None
    assert allowed_tokens(matcher, byte_compiler.vocabulary) == []
    assert matcher.error == "dead end: no continuation satisfies not, propertyNames at /properties/x~1y"
    matcher.rollback(1)
    assert matcher.error is None


ITEMS = [
    {"enum": [1, 2, 3]}, {"enum": [10, 20, 105]}, {"enum": ["red", "blue", "re"]},
    {"enum": [None, True, 1, "a"]}, {"type": "integer", "minimum": 0, "maximum": 12}, {"type": "boolean"},
]
PARTS = [
    {"anyOf": [{"const": 1}, {"const": 12}, {"const": "red"}]},
    {"oneOf": [{"const": "red", "title": "Red"}, {"enum": ["blue", "re"]}, {"type": "null"}]},
    {"type": "string", "anyOf": [{"const": "a"}, {"anyOf": [{"const": "b"}, {"const": 3}]}]},
]


@pytest.mark.parametrize("items", [*ITEMS, *PARTS], ids=json.dumps)
@pytest.mark.parametrize("bounds", [{}, {"minItems": 2}, {"minItems": 2, "maxItems": 2}, "all"], ids=json.dumps)
def test_no_walk_through_few_distinct_values_ends_nowhere(merged_compiler, items, bounds):
    if bounds == "all":
        bounds = {"minItems": len(items.get("enum", [True, False]))}
    schema = {"type": "array", "items": items, "uniqueItems": True, **bounds}
    compiled = merged_compiler.compile(GrammarSpec.json_schema(schema))
    for seed in range(choose_count(8, 25)):
        text = walk(compiled.matcher(), merged_compiler.vocabulary, random.Random(seed), num_free=200)
        assert SchemaValidator(schema).is_valid(json.loads(text)), text
