"""GrammarSpec: constructors validate and explain."""

import json

import pytest

from grammar import GrammarError, GrammarSpec, InvalidGrammar, UnsupportedGrammar


def test_specs_of_the_same_schema_are_equal_and_hashable():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert GrammarSpec.json_schema(schema) == GrammarSpec.json_schema(json.dumps(schema, indent=2))
    assert len({GrammarSpec.json_schema(schema), GrammarSpec.json_schema(schema, whitespace="any")}) == 2


def test_property_order_is_part_of_a_schema():
    forward = GrammarSpec.json_schema({"properties": {"a": {}, "b": {}}})
    assert forward != GrammarSpec.json_schema({"properties": {"b": {}, "a": {}}})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "not valid JSON: .*line 1 column 2"),
        ('{"minimum": NaN}', "NaN is not a JSON number"),
        ('{"minimum": 1e999}', "not a JSON value"),
        (
            '{"properties": {"a": {"maxLength": 3, "maxLength": 300}}}',
            "an object has the key 'maxLength' twice",
        ),
        ("[]", "an object or a boolean, not list"),
        ({"type": "strin"}, "malformed at /type"),
        ({"properties": {"a/b": {"minLength": -1}}}, "malformed at /properties/a~1b/minLength"),
        ({"type": {1, 2}}, "not a JSON value"),
        ({"title": "\ud800"}, "lone surrogate"),
        ({"title": "x" * 300_000}, "the limit is 262144 bytes"),
    ],
)
def test_a_malformed_schema_is_invalid_and_says_where(schema, message):
    with pytest.raises(InvalidGrammar, match=message):
        GrammarSpec.json_schema(schema)


@pytest.mark.parametrize("depth", [65, 5_000, 200_000])
def test_deep_nesting_is_refused_by_name_of_the_limit(depth):
    text = '{"items":' * depth + "{}" + "}" * depth
    with pytest.raises(InvalidGrammar, match=r"64 levels|262144 bytes"):
        GrammarSpec.json_schema(text)


def test_a_schema_that_contains_itself_is_invalid():
    schema = {}
    schema["items"] = schema
    with pytest.raises(InvalidGrammar):
        GrammarSpec.json_schema(schema)


def test_a_foreign_meta_schema_is_not_fetched():
    # Port 9 discards; a fetch would fail or hang instead of giving a spec.
    assert (
        GrammarSpec.json_schema({"$schema": "http://127.0.0.1:9/schema", "type": "null"}).kind
        == "json_schema"
    )


@pytest.mark.parametrize("choices", ["yes", [], [""], ["a", 1]])
def test_a_choice_is_a_list_of_strings(choices):
    with pytest.raises(InvalidGrammar, match="choice"):
        GrammarSpec.choice(choices)


def test_unknown_options_name_the_ones_there_are():
    with pytest.raises(InvalidGrammar, match="outlines_core"):
        GrammarSpec.regex("a", backend="guess")
    with pytest.raises(InvalidGrammar, match="compact"):
        GrammarSpec.json_object(whitespace="none")


@pytest.mark.parametrize("make", [GrammarSpec.regex, GrammarSpec.ebnf])
def test_empty_grammars_are_invalid(make):
    with pytest.raises(InvalidGrammar, match="not empty"):
        make("")


def test_errors_are_value_errors_and_unsupported_ones_carry_their_place():
    error = UnsupportedGrammar("/items", "not", "no")
    assert isinstance(error, GrammarError) and isinstance(error, ValueError)
    assert str(error) == "'not' at /items is not supported: no"
    assert (error.pointer, error.keyword, error.reason) == ("/items", "not", "no")
