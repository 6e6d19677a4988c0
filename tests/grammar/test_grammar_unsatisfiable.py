"""Definitions and places that nothing satisfies: closed where they may stay away, named where they may not."""

import pytest

from grammar import GrammarSpec, InvalidGrammar, UnsupportedGrammar
from tests.grammar.vocabularies import check_texts

INTEGER = {"type": "integer"}
# Nothing satisfies N; A and B contradict each other.
NOTHINGS = [
    False,
    {"enum": []},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"type": "string", "minLength": 3, "maxLength": 1},
    {"$ref": "#/$defs/F"},
    {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
    {"type": "object", "properties": {"f": {"$ref": "#/$defs/F"}}, "required": ["f"]},
]
OTHERS = {"F": False, "A": {"type": "string"}, "B": {"type": "integer"}}
REF = {"$ref": "#/$defs/N"}
# With {"$ref": "#/$defs/N"} or N itself at the place of REF.
AROUND = [
    ({"type": "object", "properties": {"a": INTEGER, "x": REF}}, '{"a": 1}', '{"a": 1, "x": 1}'),
    ({"type": "object", "properties": {"a": INTEGER}, "additionalProperties": REF}, '{"a": 1}', '{"a": 1, "x": 1}'),
    ({"type": "array", "items": REF}, "[]", "[1]"),
    ({"anyOf": [REF, {"type": "object", "properties": {"a": INTEGER}}]}, '{"a": 1}', '{"a": "x"}'),
    ({"type": "object", "properties": {"x": {"anyOf": [REF, {"type": "string"}]}}}, '{"x": "s"}', '{"x": 1}'),
    ({"type": "object", "properties": {"x": {"not": {"const": "t"}, "anyOf": [REF, {"type": "string"}]}}},
     '{"x": "s"}', '{"x": "t"}'),
]  # fmt: skip


def put(schema, nothing):
    """Put a schema in the place of REF."""
    if isinstance(schema, list):
        return [put(each, nothing) for each in schema]
    if schema == REF or not isinstance(schema, dict):
        return nothing if schema == REF else schema
    return {name: put(each, nothing) for name, each in schema.items()}


@pytest.mark.parametrize("order", ["schema", "any"])
@pytest.mark.parametrize("is_inline", [False, True])
@pytest.mark.parametrize("nothing", NOTHINGS, ids=str)
@pytest.mark.parametrize(("around", "good", "bad"), AROUND)
def test_what_nothing_satisfies_may_stay_away(byte_compiler, around, good, bad, nothing, is_inline, order):
    schema = {**put(around, nothing if is_inline else REF), "$defs": {"N": nothing, **OTHERS}}
    spec = GrammarSpec.json_schema(schema, property_order=order)
    if order == "any" and is_inline and nothing is NOTHINGS[-1]:
        with pytest.raises(UnsupportedGrammar, match="a required property is forbidden"):
            byte_compiler.compile(spec)
        return
    check_texts(byte_compiler, spec, [good], [bad])


def test_a_definition_that_refers_to_itself_is_not_taken_for_unsatisfiable(byte_compiler):
    node = {"type": "object", "properties": {"n": {"$ref": "#/$defs/T"}, "x": REF}}
    schema = {"$ref": "#/$defs/T", "$defs": {"T": node, "N": {"enum": []}}}
    check_texts(byte_compiler, schema, ['{"n": {"n": {}}}'])


@pytest.mark.parametrize("name", ["const", "enum", "properties", "$defs"])
def test_a_property_may_have_the_name_of_a_keyword(byte_compiler, name):
    schema = {"properties": {name: REF, "b": INTEGER}, "$defs": {"N": {"allOf": [INTEGER, {"type": "null"}]}}}
    check_texts(byte_compiler, schema, ['{"b": 1}'], [f'{{"{name}": 1}}'])


# Nothing satisfies N, which is an integer and a D; something satisfies D, or only an N that it needs would.
@pytest.mark.parametrize(
    "others",
    [
        {"D": {"type": "object", "required": ["a"], "properties": {"b": {"$ref": "#/$defs/D"}}}},
        {"D": {"type": "object", "required": ["a"], "properties": {"a": REF}}},
        {"D": {"$ref": "#/$defs/E"}, "E": {"type": "object", "properties": {"e": {"$ref": "#/$defs/E"}}}},
        {"D": {"type": "object", "properties": {"a": REF, "d": {"$ref": "#/$defs/D"}}}},
    ],
)
@pytest.mark.parametrize("ref", ["#/$defs/N", "#n"])
def test_definitions_that_wait_for_each_other_are_decided(byte_compiler, others, ref):
    nothing = {"$anchor": "n", "type": "integer", "$ref": "#/$defs/D"}
    schema = {"type": "object", "properties": {"x": {"$ref": ref}}, "$defs": {"N": nothing, **others}}
    check_texts(byte_compiler, schema, ["{}"], ['{"x": 1}'])


@pytest.mark.parametrize(
    ("schema", "pointer", "keyword"),
    [
        ({"$ref": "#/$defs/N", "$defs": {"N": {"enum": []}}}, "", "$ref"),
        ({"type": "object", "properties": {"x": REF}, "required": ["x"], "$defs": {"N": False}}, "", "required"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, "", "minLength"),
        ({"type": "array", "minItems": 1, "items": {"enum": []}}, "", "items"),
        ({"anyOf": [{"type": "integer", "minimum": 5, "maximum": 2}]}, "/anyOf/0", "minimum"),
        ({"allOf": [{"allOf": [{"type": "integer"}, {"type": "null"}]}]}, "/allOf/0", "allOf"),
    ],
)  # fmt: skip
def test_a_contradiction_is_named_with_its_place(byte_compiler, schema, pointer, keyword):
    with pytest.raises(InvalidGrammar, match="no text satisfies the schema: ") as refusal:
        byte_compiler.compile(GrammarSpec.json_schema(schema))
    assert refusal.value.pointer == pointer
    assert f"'{keyword}' at {pointer or '#'}: " in str(refusal.value)
