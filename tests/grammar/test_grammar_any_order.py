"""Properties in any order: every order of a valid instance, nothing else, and refusals with a place."""

import itertools
import json
import random
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar import GrammarSpec, InvalidGrammar, SchemaValidator, UnsupportedGrammar
from tests.grammar.vocabularies import (
    CLOSED,
    SETTINGS,
    accepts,
    allowed_tokens,
    check_refusal,
    check_texts,
    walk,
)

POINT = {**CLOSED, "properties": {"u": {"type": "integer"}, "v": {"$ref": "#/$defs/p"}}, "required": ["u"]}
POINTS = {"type": "array", "items": {"$ref": "#/$defs/p"}}
NESTED = {
    **CLOSED,
    "properties": {
        "a": {"type": "integer", "minimum": 0},
        "b": {"type": ["string", "null"], "maxLength": 3},
        "c": {**CLOSED, "properties": {"x": {"type": "null"}, "y": POINTS}},
    },
    "required": ["a", "c"],
    "$defs": {"p": POINT},
}
VALUES = [("a", 1), ("b", "é"), ("c", {"y": [{"v": {"u": 1}, "u": 2}, {"u": 3}], "x": None})]
SEPARATORS = {"spaced": (", ", ": "), "compact": (",", ":"), "any": (" ,\n", " : ")}


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
    ],
)  # fmt: skip
def test_schemas_of_many_shapes(byte_compiler, schema, good, bad):
    check_texts(byte_compiler, any_order(schema), good, bad)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, '{"b": 1, "a": 1}', "{}"),
        ({"type": "array", "uniqueItems": True, "items": {"type": "object", "properties": {"a": {}, "b": {}}}},
         '[{"b": 1, "a": 2}, {"a": 1}]', '[{"b": 1, "a": 2}, {"a": 2, "b": 1}]'),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
         '{"b": 1, "a": 2}', '{"a": 2}'),
    ],
)  # fmt: skip
def test_residual_checks_hold_in_any_order(byte_compiler, schema, good, bad):
    compiled = check_texts(byte_compiler, any_order(schema), [good], [bad])
    assert "residual" in {entry.enforced_by for entry in compiled.plan}


def schemas():
    scalar = st.sampled_from(
        [{"type": "integer"}, {"type": "string", "maxLength": 2}, {"enum": ["a", 1]}, {"type": "null"}]
    )

    def compose(inner):
        names = st.lists(st.sampled_from(["a", "b", "c", "d"]), unique=True, min_size=1, max_size=3)
        objects = names.flatmap(
            lambda found: st.builds(
                lambda values, required, extra: {
                    "type": "object", "properties": dict(zip(found, values, strict=False)),
                    "required": required, "additionalProperties": extra,
                },
                st.lists(inner, min_size=len(found), max_size=len(found)),
                st.lists(st.sampled_from(found), unique=True),
                st.sampled_from([False, {"type": "integer"}]),
            )
        )  # fmt: skip
        return objects | inner.map(lambda item: {"type": "array", "items": item, "maxItems": 2})

    return st.recursive(scalar, compose, max_leaves=4)


@settings(SETTINGS, max_examples=40)
@given(schema=schemas(), seed=st.integers(0, 99))
def test_random_texts_in_any_order_are_valid(merged_compiler, schema, seed):
    compiled = merged_compiler.compile(any_order(schema))
    text = walk(compiled.matcher(), merged_compiler.vocabulary, random.Random(seed), num_free=25)
    assert text is None or SchemaValidator(schema).is_valid(json.loads(text))


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


@pytest.mark.parametrize(
    ("schema", "pointer", "keyword"),
    [
        ({"properties": {str(i): {} for i in range(64)}}, "", "properties"),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "allOf": [{"required": ["a"]}, {"required": ["b"]}]},
         "", "allOf"),
        ({"const": [{"a": "x", "b": "y"}]}, "", "enum"),
        ({"type": "array", "prefixItems": [{"required": ["a", "b"]}]}, "", "prefixItems"),
    ],
)  # fmt: skip
def test_what_would_fix_an_order_is_refused_with_its_place(byte_compiler, schema, pointer, keyword):
    check_refusal(byte_compiler, any_order(schema), pointer, keyword, "property order any")


@pytest.mark.parametrize(("least", "most"), [(2, 0), (3, 1)])
def test_an_array_with_no_number_of_items_is_impossible(byte_compiler, least, most):
    pair = {"properties": {"a": {}, "b": {}}}
    items = {"type": "array", "items": pair, "minItems": least, "maxItems": most}
    with pytest.raises(InvalidGrammar, match="no text satisfies the schema: 'minItems' at #"):
        byte_compiler.compile(any_order(items))
    around = any_order({"properties": {"x": items, "y": {}}, "type": "object"})
    bad = [f'{{"x": {text}}}' for text in ("[]", "[{}]", "[{}, {}, {}]")]
    check_texts(byte_compiler, around, ['{"y": []}'], bad)
    check_texts(byte_compiler, any_order({**items, "type": ["array", "string"]}), ['"a"'], ["[]"])


@pytest.mark.parametrize("least", [0, 1])
def test_an_array_of_one_item_at_most(byte_compiler, least):
    items = {**CLOSED, "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}
    schema = {"type": "array", "items": items, "minItems": least, "maxItems": 1}
    good, bad = ['[{"b": null, "a": null}]'], ["[{}, {}]"]
    (bad if least else good).append("[]")
    check_texts(byte_compiler, any_order(schema), good, bad)


def test_xgrammar_is_not_asked_for_it(byte_compiler):
    schema = {**CLOSED, "properties": {"a": {"type": "null"}}}
    spec = GrammarSpec.json_schema(schema, backend="xgrammar", property_order="any")
    with pytest.raises(UnsupportedGrammar, match="in the order of the schema only"):
        byte_compiler.compile(spec)
    with pytest.raises(InvalidGrammar, match="choose schema or any"):
        GrammarSpec.json_schema(schema, property_order="sorted")


OVERLAP = [{"required": ["a"]}, {"properties": {"a": {"minimum": 3}}}]
PAIR = {**CLOSED, "properties": {"a": {"type": "integer"}, "b": {}}}


@pytest.mark.parametrize(
    ("schema", "pointer", "keyword"),
    [
        ({**PAIR, "oneOf": OVERLAP}, "", "oneOf"),
        ({**PAIR, "anyOf": [{}, {"required": ["b"]}], "oneOf": OVERLAP}, "", "anyOf"),
        ({"properties": {"x": {"oneOf": [{**PAIR, "allOf": OVERLAP}, {"type": "object"}]}}}, "/properties/x/oneOf/0",
         "allOf"),
        ({"type": "array", "items": [{**PAIR, "allOf": OVERLAP}], "additionalItems": {"not": {"const": 1}}}, "",
         "items"),
    ],
)  # fmt: skip
def test_a_refusal_beside_residual_checks_names_what_the_user_wrote(byte_compiler, schema, pointer, keyword):
    check_refusal(byte_compiler, any_order(schema), pointer, keyword, "property order any")


@pytest.mark.parametrize("name", ["a b", "Größe", "a%b", "a~b/c"])
@pytest.mark.parametrize("is_encoded", [False, True], ids=["as written", "encoded"])
def test_a_definition_of_any_name_is_in_any_order(byte_compiler, name, is_encoded):
    written = name.replace("~", "~0").replace("/", "~1").replace("%", "%25")
    reference = "#/$defs/" + (quote(written, "~%") if is_encoded else written)
    properties = {"u": {"type": "integer"}, "v": {"type": "null"}}
    point = {**CLOSED, "properties": properties, "required": ["u", "v"]}
    # what is read where the name is decoded once too often, or not at all
    others = {quote(name): {"type": "null"}, name + "x": {"type": "null"}}
    schema = {"type": "array", "items": {"$ref": reference}, "$defs": others | {name: point}}
    both = '[{"v": null, "u": 1}, {"u": 1, "v": null}]'
    check_texts(byte_compiler, any_order(schema), [both], ["[null]"])
