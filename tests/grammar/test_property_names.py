"""Properties in any order, and names that a schema does not list."""

import itertools
import json
import random

import pytest

from grammar import GrammarSpec, InvalidGrammar, SchemaValidator, UnsupportedGrammar
from tests.grammar.vocabularies import (
    CLOSED,
    accepts,
    allowed_tokens,
    check_refusal,
    check_texts,
    check_verdicts,
)

POINT = {**CLOSED, "properties": {"u": {"type": "integer"}, "v": {"$ref": "#/$defs/p"}}, "required": ["u"]}
POINTS = {"type": "array", "items": {"$ref": "#/$defs/p"}}
NESTED = {
    **CLOSED,
    "properties": {
        "a": {"type": "integer", "minimum": 0}, "b": {"type": ["string", "null"], "maxLength": 3},
        "c": {**CLOSED, "properties": {"x": {"type": "null"}, "y": POINTS}},
    },
    "required": ["a", "c"],
    "$defs": {"p": POINT},
}
VALUES = [("a", 1), ("b", "é"), ("c", {"y": [{"v": {"u": 1}, "u": 2}, {"u": 3}], "x": None})]
SEPARATORS = {"spaced": (", ", ": "), "compact": (",", ":"), "any": (" ,\n", " : ")}


OBJECT, BOTH, NULL = {"type": "object"}, {"a": {}, "b": {}}, {"type": "null"}
PAIR = {**CLOSED, "properties": {"a": {"type": "integer"}, "b": {}}}
ONE_NULLS = {"type": "array", "items": {**CLOSED, "properties": {"a": NULL, "b": NULL}}, "maxItems": 1}


def any_order(schema, whitespace="spaced"):
    return GrammarSpec.json_schema(schema, whitespace, property_order="any")


def write(pairs, whitespace="spaced"):
    return json.dumps(dict(pairs), ensure_ascii=False, separators=SEPARATORS[whitespace])


@pytest.mark.parametrize("whitespace", SEPARATORS)
def test_every_order_of_every_subset_is_accepted_exactly_when_valid(byte_compiler, whitespace):
    compiled = byte_compiler.compile(any_order(NESTED, whitespace))
    validator = SchemaValidator(NESTED)
    for length in range(4):
        for pairs in itertools.permutations(VALUES, length):
            text = write(pairs, whitespace)
            expected = validator.is_valid(dict(pairs))
            assert accepts(compiled.matcher(), byte_compiler.vocabulary, text) == expected, text


def test_what_is_wrong_in_one_order_is_wrong_in_all(byte_compiler):
    wrong = [
        *('{"a": 1, "a": 1, "c": {}}', '{"c": {}, "a": -1}', '{"c": {}, "a": 1, "d": 1}'),
        *('{"c": {"x": 1}, "a": 1}', '{"b": "long", "c": {}, "a": 1}', '{"c": {}, "a": 1,}'),
        *('{, "c": {}, "a": 1}', '{"c": {"y": [{"v": {}, "u": 1}]}, "a": 1}'),
    ]
    check_texts(byte_compiler, any_order(NESTED), bad=wrong)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"a": {}, "b": {"type": "integer"}}},
         ['{"b": 1, "a": 1}', '{"z": [], "b": 1, "q\\n": 1}', "{}", "null", "[3]"],
         ['{"b": "x"}', '{"b": 1, "b": "x"}']),
        ({"type": ["object", "null"], "required": ["a", "b"]}, ['{"b": 1, "x": 2, "a": 1}', "null"], ['{"b": 1}', "3"]),
        ({"type": "object", "properties": {"a": True, "b": False}},
         ['{"z": 1, "a": 1}'], ['{"b": 1}', '{"z": 1, "b": 1}']),
        ({"anyOf": [{"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"]}, {"type": "null"}]},
         ['{"b": 1, "a": 1}', "null"], ['{"b": 1}', "1"]),
        ({"type": "array", "minItems": 1, "maxItems": 2, "items": {"type": "object", "required": ["a", "b"]}},
         ['[{"b": 1, "a": 2}, {"a": 1, "b": 2}]'],
         ["[]", '[{"b": 1}]', '[{"b": 1, "a": 2}' + ', {"a": 1, "b": 2}' * 2 + "]"]),
        ({"type": "object", "properties": {'a"b': {}, "é\n": {}}, "required": ['a"b', "é\n"]},
         ['{"é\\n": 1, "a\\"b": 2}'], ['{"é\\n": 1}']),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, ['{"b": 1, "a": 2}'], ['{"b": "x"}']),
        ({"enum": [{"a": "x", "b": {"c": "y", "d": "z"}}, "w"]},
         ['{"b": {"d": "z", "c": "y"}, "a": "x"}', '"w"'], ['{"b": "y"}', '{"b": {"d": "z"}, "a": "x"}']),
        (ONE_NULLS, ['[{"b": null, "a": null}]', "[]"], ["[{}, {}]"]),
        (ONE_NULLS | {"minItems": 1}, ['[{"b": null, "a": null}]'], ["[{}, {}]", "[]"]),
        # With residual checks.
        ({**OBJECT, "properties": BOTH, "minProperties": 1}, ['{"b": 1, "a": 1}'], ["{}"]),
        ({"type": "array", "uniqueItems": True, "items": {**OBJECT, "properties": BOTH}},
         ['[{"b": 1, "a": 2}, {"a": 1}]'], ['[{"b": 1, "a": 2}, {"a": 2, "b": 1}]']),
        ({**OBJECT, "properties": BOTH, "dependentRequired": {"a": ["b"]}}, ['{"b": 1, "a": 2}'], ['{"a": 2}']),
    ],
)  # fmt: skip
def test_schemas_of_many_shapes(byte_compiler, schema, good, bad):
    check_texts(byte_compiler, any_order(schema), good, bad)


def test_sixty_names_take_no_longer_than_a_few(byte_compiler):
    names = [f"n{i}" for i in range(60)]
    properties = {name: {"type": "integer"} for name in names}
    compiled = byte_compiler.compile(any_order({**CLOSED, "properties": properties, "required": names[1:]}))
    assert compiled.program.size_bytes < 2**20
    random.Random(1).shuffle(names)
    for left_out in (None, "n0", "n7"):
        text = write([(name, 1) for name in names if name != left_out])
        assert accepts(compiled.matcher(), byte_compiler.vocabulary, text) == (left_out != "n7")


def test_all_names_that_are_left_may_come_next(merged_compiler):
    matcher = merged_compiler.compile(any_order(NESTED, "compact")).matcher()
    vocabulary = merged_compiler.vocabulary
    assert all(matcher.accept_token(byte) for byte in b'{"b":null,"')
    assert set(allowed_tokens(matcher, vocabulary)) & {*b"abcd}"} == {*b"ac"}


MANY = {"properties": {f"n{i}": {"type": "integer"} for i in range(80)}, "required": [f"n{i}" for i in range(70)]}
# What is beside properties: a valid text in another order than the schema's, and an invalid one.
EITHER = [{"required": ["a"]}, {"required": ["b"]}]
BESIDE = [
    ({**PAIR, "allOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"b": 1, "a": 1}', '{"b": 1}'),
    ({"const": [{"a": "x", "b": "y"}]}, '[{"b": "y", "a": "x"}]', '[{"b": "y"}]'),
    ({"type": "array", "prefixItems": [{"required": ["a", "b"]}]}, '[{"b": 1, "a": 2}, 3]', '[{"b": 1}]'),
    ({"type": "array", "prefixItems": [PAIR, {"type": "null"}], "items": False, "minItems": 1},
     '[{"b": 1, "a": 1}]', '[{"b": 1, "a": 1}, null, 1]'),
    ({**PAIR, "oneOf": EITHER}, '{"b": 1}', '{"b": 1, "a": 1}'),
    ({**PAIR, "anyOf": [{}, {"required": ["b"]}], "oneOf": EITHER}, '{"b": 1}', '{"b": 1, "a": 1}'),
    ({**PAIR, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"b": 1, "a": 1}', "{}"),
    ({**PAIR, "patternProperties": {"^x": {"type": "null"}}}, '{"x": null, "b": 1, "a": 1}', '{"x": 1, "a": 1}'),
    ({**PAIR, "minProperties": 2}, '{"b": 1, "a": 1}', '{"b": 1}'),
    ({"allOf": [{"properties": {"a": {"type": "integer"}, "b": {}}}, {"properties": {"a": {"maximum": 3}}}]},
     '{"b": 1, "a": 2}', '{"b": 1, "a": 5}'),

]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), BESIDE, ids=str)
def test_what_stands_beside_properties_in_any_order_still_counts(byte_compiler, schema, good, bad):
    check_verdicts(byte_compiler, schema, [good, bad], property_order="any")
    check_texts(byte_compiler, any_order(schema), [good], [bad])


def test_more_names_than_a_rule_has_bits_are_checked(byte_compiler):
    values = [(f"n{i}", 1) for i in range(79, -1, -1)]
    good, bad = write(values), [write(values[15:]), write(values[:-1])]
    check_texts(
        byte_compiler, any_order(MANY), [good],
        [text for text in bad if "n69" not in text or 'n0"' not in text],
    )


@pytest.mark.parametrize(("least", "most"), [(2, 0), (3, 1)])
def test_an_array_with_no_number_of_items_is_impossible(byte_compiler, least, most):
    pair = {"properties": {"a": {}, "b": {}}}
    items = {"type": "array", "items": pair, "minItems": least, "maxItems": most}
    with pytest.raises(InvalidGrammar, match="no text satisfies the schema"):
        byte_compiler.compile(any_order(items))
    around = any_order({"properties": {"x": items, "y": {}}, "type": "object"})
    bad = [f'{{"x": {text}}}' for text in ("[]", "[{}]", "[{}, {}, {}]")]
    check_texts(byte_compiler, around, ['{"y": []}'], bad)
    check_texts(byte_compiler, any_order({**items, "type": ["array", "string"]}), ['"a"'], ["[]"])


INTEGER = {"type": "integer"}
OPEN = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
PATTERNED = {"type": "object", "properties": {"a": INTEGER}, "patternProperties": {"^x": INTEGER}}
ESCAPED = [
    (OPEN, r'{"a": 1, "\u0061": "x"}'),
    ({**OPEN, "properties": {"a": INTEGER, "b": False}}, r'{"a": 1, "\u0062": 2}'),
    ({"type": "object", "properties": {"/": INTEGER}}, r'{"\/": "x"}'),
    ({"type": "object", "properties": {"😀": INTEGER}}, r'{"\ud83d\ude00": "x"}'),
    ({"type": "object", "properties": {"\x01": INTEGER}}, r'{"\u0001": 1, "\u0001": "x"}'),
    (PATTERNED, r'{"\u0078y": "s"}'),
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
@pytest.mark.parametrize("name", ["b", "", "é", "aa", "A", 'q"q', "b\\u0061", "\n\t\r\b\f", "a\n", "日本", "/"])
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
        ("const", "x\x1b"), ("enum", ["a", {"b": ["\x7f"]}]), ("pattern", r"^\x1b\["),
        ("pattern", "^[\\u0000-\\u0007]$"),
    ],
)
def test_what_needs_a_long_escape_beside_open_names_is_refused(byte_compiler, keyword, value):
    schema = {**OPEN, "properties": {"a": INTEGER, "b/c": {keyword: value}}}
    check_refusal(byte_compiler, schema, "/properties/b~1c", keyword, "uXXXX escape")


@pytest.mark.parametrize("pattern", [r"^[^\x00-\x1f]*$", r"^[\x00a]$", r"^\t$", r"^[\x00-é]$"])
def test_a_pattern_that_can_do_without_control_characters_is_kept(byte_compiler, pattern):
    schema = {**OPEN, "properties": {"a": INTEGER, "b": {"type": "string", "pattern": pattern}}}
    check_texts(byte_compiler, schema, [json.dumps({"a": 1, "b": "\t" if pattern == r"^\t$" else "a"})])


MEMBERS = {"properties": {"b": {}}, "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False}
BRANCHING = [
    {"allOf": [{"properties": {"ab": {}}}]}, {"anyOf": [{"properties": {"ab": {}}}, {"required": ["b"]}]},
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


def test_a_value_that_nothing_satisfies_is_never_begun_in_any_order(byte_compiler):
    impossible = {"type": "object", "properties": {"a": False, "b": {}}, "required": ["a"]}
    forced = {"type": "array", "prefixItems": [impossible], "minItems": 1}
    schema = {"anyOf": [forced, {"type": "object", "properties": {"a": {}, "b": forced}}]}
    compiled = check_texts(byte_compiler, GrammarSpec.json_schema(schema, property_order="any"), ["{}", '{"a": 1}'])
    assert allowed_tokens(compiled.matcher(), byte_compiler.vocabulary) == [ord("{")]
    matcher = compiled.matcher()
    assert all(map(matcher.accept_token, b'{"b')) and not matcher.accept_token(ord('"'))
