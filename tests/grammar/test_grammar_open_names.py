"""Names that a schema does not list: a listed name cannot be written again in another spelling."""

import itertools
import json

import pytest

from grammar import GrammarSpec, SchemaValidator, UnsupportedGrammar
from tests.grammar.vocabularies import accepts, check_refusal, check_texts, check_verdicts

INTEGER = {"type": "integer"}
OPEN = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
PATTERNS = {"type": "object", "properties": {"a": INTEGER}, "patternProperties": {"^x": INTEGER}}
ESCAPED = [
    (OPEN, r'{"a": 1, "\u0061": "x"}'),
    ({**OPEN, "additionalProperties": INTEGER, "properties": {"a": {"maximum": 5}}}, r'{"a": 1, "\u0061": 7}'),
    ({**OPEN, "properties": {"a": INTEGER, "b": False}}, r'{"a": 1, "\u0062": 2}'),
    ({"type": "object", "properties": {"é\n": INTEGER}}, r'{"\u00e9\n": "x"}'),
    ({"type": "object", "properties": {"n\n": INTEGER}}, r'{"n\u000a": "x"}'),
    ({"type": "object", "properties": {"/": INTEGER}}, r'{"\/": "x"}'),
    ({"type": "object", "properties": {"😀": INTEGER}}, r'{"\ud83d\ude00": "x"}'),
    ({"type": "object", "properties": {"\x01": INTEGER}}, r'{"\u0001": 1, "\u0001": "x"}'),
    (PATTERNS, r'{"\u0061": "s"}'),
    (PATTERNS, r'{"\u0078y": "s"}'),
    ({**PATTERNS, "additionalProperties": {"type": "string"}}, r'{"x\u0078": "s"}'),
    ({"patternProperties": {"^x": INTEGER}, "additionalProperties": {"type": "string"}, "type": "object"},
     r'{"\u0078": "s"}'),
    ({"allOf": [{"type": "object", "properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}}]},
     r'{"\u0062": "s"}'),
    ({"type": "object", "required": ["n"], "properties": {"n": {"$ref": "#/$defs/n"}}, "$defs": {"n": OPEN}},
     r'{"n": {"a": 1, "\u0061": "x"}}'),
    ({"anyOf": [{"type": "null"}, {"type": "object", "required": ["a"], "properties": {"a": INTEGER}}]},
     r'{"a": 1, "\u0061": "x"}'),
    ({**OPEN, "not": {"required": ["z"]}}, r'{"a": 1, "\u007a": 1}'),
    ({**OPEN, "propertyNames": {"maxLength": 1}}, r'{"a": 1, "\u0061": "x"}'),
    ({**OPEN, "unevaluatedProperties": {"type": "string"}}, r'{"a": 1, "\u0061": "x"}'),
]  # fmt: skip


@pytest.mark.parametrize("order", ["schema", "any"])
@pytest.mark.parametrize(("schema", "text"), ESCAPED)
def test_a_name_is_not_written_again_with_an_escape(byte_compiler, schema, text, order):
    assert not SchemaValidator(schema).is_valid(json.loads(text))
    try:
        compiled = byte_compiler.compile(GrammarSpec.json_schema(schema, property_order=order))
    except UnsupportedGrammar:
        assert order == "any"
        return
    assert not accepts(compiled.matcher(), byte_compiler.vocabulary, text)


@pytest.mark.parametrize("order", ["schema", "any"])
@pytest.mark.parametrize(
    "name", ["b", "", "é", "aa", "A", 'q"q', "b\\u0061", "\n\t\r\b\f", "a\n", "日本", "/"]
)
def test_other_names_are_written_with_their_short_escapes(byte_compiler, name, order):
    text = json.dumps({"a": 1, name: {"b": "\n"}}, ensure_ascii=False)
    check_texts(byte_compiler, GrammarSpec.json_schema(OPEN, property_order=order), [text])


def test_control_characters_are_written_where_no_name_is_open(byte_compiler):
    closed = {**OPEN, "properties": {"a": {"const": "x\x1b"}}, "additionalProperties": False}
    check_texts(byte_compiler, closed, [r'{"a": "x\u001b"}'])
    check_texts(byte_compiler, {"type": "string"}, [r'"\u001b"'])


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("const", "x\x1b"),
        ("enum", ["a", {"b": ["\x7f"]}]),
        ("pattern", r"^\x1b\["),
        ("pattern", "^[\\u0000-\\u0007]$"),
    ],
)
def test_what_needs_a_long_escape_beside_open_names_is_refused(byte_compiler, keyword, value):
    schema = {**OPEN, "properties": {"a": INTEGER, "b/c": {keyword: value}}}
    check_refusal(byte_compiler, schema, "/properties/b~1c", keyword, "control character")


@pytest.mark.parametrize("pattern", [r"^[^\x00-\x1f]*$", r"^[\x00a]$", r"^\t$", r"^[\x00-é]$"])
def test_a_pattern_that_can_do_without_control_characters_is_kept(byte_compiler, pattern):
    schema = {**OPEN, "properties": {"a": INTEGER, "b": {"type": "string", "pattern": pattern}}}
    check_texts(byte_compiler, schema, [json.dumps({"a": 1, "b": "\t" if pattern == r"^\t$" else "a"})])


MEMBERS = {
    "properties": {"b": {}},
    "patternProperties": {"^a": {"type": "integer"}},
    "additionalProperties": False,
}
BRANCHING = [
    {"allOf": [{"properties": {"ab": {}}}]},
    {"anyOf": [{"properties": {"ab": {}}}, {"required": ["b"]}]},
    {"$ref": "#/$defs/x"},
]


@pytest.mark.parametrize("branching", BRANCHING, ids=json.dumps)
def test_the_order_of_keywords_does_not_decide_which_names_are_open(byte_compiler, branching):
    """llguidance reads the keywords before and behind `allOf` as two schemas, one with names that the other has not."""
    schema = {**MEMBERS, **branching}
    for keywords in itertools.permutations(schema):
        ordered = {keyword: schema[keyword] for keyword in keywords}
        ordered |= {"type": "object", "$defs": {"x": {"properties": {"ab": {}}}}}
        texts = ["{}", '{"a": 1}', '{"b": "x", "ac": 2}', '{"a": "x"}', '{"ab": "x"}', '{"c": 1}']
        check_verdicts(byte_compiler, ordered, texts)
