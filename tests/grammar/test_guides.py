"""Keywords left to residual checks add guides, so that texts do not run into dead ends."""

import itertools
import json

import pytest

from grammar import GrammarSpec
from tests.grammar.vocabularies import CLOSED, allowed_tokens, check_texts, check_verdicts, check_walks

PASSWORD = "^(?=.*[0-9])(?=.*[A-Z])[A-Za-z0-9]{4,8}$"
ODD_ONES = [{"multipleOf": 3}, {"multipleOf": 5}]


def make_object(properties, required=(), **others):
    return {**CLOSED, "properties": properties, "required": list(required), **others}


GUIDED = {
    "one of a few integers excluded": {"type": "integer", "minimum": 1, "maximum": 12, "not": {"const": 7}},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 9, "not": {"enum": [1, 8]}},
    "zero excluded": {"type": "integer", "not": {"const": 0}},
    "zero excluded beside null": {"type": ["integer", "null"], "not": {"const": 0}},
    "excluded in a long range": {"type": "integer", "minimum": 1, "maximum": 1000, "not": {"enum": [100, 500]}},
    "one of two steps": {"type": "integer", "minimum": 0, "maximum": 30, "oneOf": ODD_ONES},
    "one of two steps below a bound": {"type": "integer", "maximum": 30, "oneOf": ODD_ONES},
    "steps of typed branches": {"maximum": 30, "oneOf": [{"type": "integer", **branch} for branch in ODD_ONES]},
    "steps under a condition": {
        "type": "integer", "minimum": 1, "maximum": 40,
        "if": {"minimum": 10}, "then": {"multipleOf": 10}, "else": {"multipleOf": 3},
    },
    "a bound decides on another property": make_object(
        {"age": {"type": "integer"}, "guardian": {"type": ["string", "null"]}}, ["age", "guardian"],
        **{"if": {"properties": {"age": {"maximum": 17}}}, "then": {"properties": {"guardian": {"type": "string"}}}},
    ),
    "another value than null decides on another property": make_object(
        {"end": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "reason": {"type": ["string", "null"]}}, ["end"],
        **{"if": {"properties": {"end": {"not": {"const": None}}}}, "then": {"required": ["reason"]}},
    ),
    "a choice or null decides on another property": make_object(
        {"status": {"enum": ["paid", "open", None]}, "paid": {"type": ["integer", "null"]}}, ["status", "paid"],
        **{"if": {"properties": {"status": {"const": "paid"}}}, "then": {"properties": {"paid": {"type": "integer"}}}},
    ),
    "null excluded in a property": make_object(
        {"a": {"type": ["integer", "null"]}, "b": {}},
        **{"not": {"properties": {"a": {"const": None}}, "required": ["a"]}},
    ),
    "the presence of a property types another": make_object(
        {"a": {"type": "null"}, "b": {}},
        dependentSchemas={"a": {"properties": {"b": {"type": "integer"}}, "required": ["b"]}},
    ),
    "look-ahead": make_object({"p": {"type": "string", "pattern": PASSWORD}}, ["p"]),
}  # fmt: skip


@pytest.mark.parametrize("name", GUIDED)
def test_a_walk_through_a_guided_schema_meets_no_dead_end(merged_compiler, name):
    compiled = merged_compiler.compile(GrammarSpec.json_schema(GUIDED[name]))
    assert any(entry.enforced_by == "residual" for entry in compiled.plan)
    assert check_walks(merged_compiler, GUIDED[name], num_walks=12, num_free=30) > 9


VALID_AND_NOT = {
    "zero excluded": ["-1", "1", "70", "-66", "10000", "-100000"],
    "one of two steps below a bound": ["30", "15", "-15", "3", "5", "-99", "-100", "-500"],
    "excluded in a long range": ["1", "99", "100", "101", "500", "1000", "1001"],
    "a bound decides on another property": [
        '{"age": 17, "guardian": null}', '{"age": 18, "guardian": null}', '{"age": 17, "guardian": "x"}'],
    "another value than null decides on another property": [
        '{"end": null}', '{"end": "x"}', '{"end": "x", "reason": null}'],
    "a choice or null decides on another property": [
        '{"status": null, "paid": null}', '{"status": "paid", "paid": null}', '{"status": "paid", "paid": 1}',
        '{"status": "open", "paid": null}'],
    "null excluded in a property": ["{}", '{"a": null}', '{"a": 1, "b": null}', '{"b": null}'],
    "the presence of a property types another": [
        "{}", '{"b": "x"}', '{"a": null, "b": 1}', '{"a": null, "b": "x"}', '{"a": null}'],
    "look-ahead": ['{"p": "Ab3c"}', '{"p": "3BCD"}', '{"p": "abc3"}', '{"p": "ABCD"}', '{"p": "A3"}'],
}  # fmt: skip


@pytest.mark.parametrize(("name", "texts"), VALID_AND_NOT.items())
def test_guides_leave_out_nothing_valid(byte_compiler, name, texts):
    check_verdicts(byte_compiler, GUIDED[name], texts)


def test_distinct_decimals_are_counted_as_they_are_written(byte_compiler):
    items = {"type": "number", "minimum": 0.1, "maximum": 0.3, "multipleOf": 0.1}
    schema = {"type": "array", "items": items, "uniqueItems": True}
    check_verdicts(byte_compiler, schema, ["[0.1, 0.2, 0.3]", "[0.1, 0.1]", "[0.2, 0.3, 0.1, 0.2]"])


def feed(compiler, schema, text):
    """Return a matcher behind as much of a text as is accepted, and how much that is."""
    matcher = compiler.compile(GrammarSpec.json_schema(schema)).matcher()
    for place, byte in enumerate(text.encode()):
        if not allowed_tokens(matcher, compiler.vocabulary) or not matcher.accept_token(byte):
            return matcher, place
    return matcher, len(text)


@pytest.mark.parametrize(
    ("pattern", "text", "num_accepted"),
    [
        (PASSWORD, "! no password", 0), (PASSWORD, "Abcdefgh", 7), (r"\bfo{2}\b|-", "foo", 3),
        (r"^(['a])b{2}\1$", "abba", 4), (r"^(?:(?=a)a|b)$", "c", 0), (r"^\(?(?!\))[(?=!]{2}(?<=\?)$", "(??", 3),
    ],
)
def test_the_classes_and_lengths_of_a_pattern_hold_beside_look_around(byte_compiler, pattern, text, num_accepted):
    assert feed(byte_compiler, {"type": "string", "pattern": pattern}, f'"{text}')[1] == num_accepted + 1


@pytest.mark.parametrize(
    ("schema", "starts"),
    [
        ({"not": {"type": "string"}}, "-0123456789[fnt{"), ({"not": {"type": ["object", "array"]}}, '"-0123456789fnt'),
        ({"not": {"anyOf": [{"type": "array"}, {"type": "number"}, {"const": 1}]}}, '"fnt{'),
        ({"not": {"type": "integer"}}, '"-0123456789[fnt{'),
        ({"type": ["string", "integer"], "not": {"type": "string"}}, "-0123456789"),
        ({"type": ["string", "integer"], "not": {"type": "number"}}, '"'), ({"not": {"required": ["a"]}}, "{"),
        ({"not": {"type": ["string", "null"], "minLength": 2}}, '"-0123456789[ft{'),
        ({"not": {"type": "string", "const": "a"}}, '"-0123456789[fnt{'),
    ],
)
@pytest.mark.parametrize("start", ["", '{"v": '])
def test_no_value_of_an_excluded_type_begins(byte_compiler, schema, starts, start):
    if start:
        schema = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
    matcher, _ = feed(byte_compiler, schema, start)
    assert "".join(map(chr, sorted(allowed_tokens(matcher, byte_compiler.vocabulary)))) == starts


@pytest.mark.parametrize("value", [{"not": {}}, {"not": True}, {"type": "string", "not": {"type": "string"}}])
def test_a_property_of_which_no_type_is_left_stays_away(byte_compiler, value):
    schema = {"type": "object", "properties": {"v": value, "w": {"type": "null"}}}
    assert feed(byte_compiler, schema, '{"v": 1}')[1] == 3
    assert feed(byte_compiler, schema, '{"w": null}')[1] == 11


@pytest.mark.parametrize(
    ("listed", "condition"),
    [
        (["a", "bb"], {"enum": ["a", "bb"], "minLength": 2}), (["a", "b"], {"const": "a", "pattern": "b"}),
        (["a", "b"], {"const": "a", "type": "integer"}),
        (["a", "b"], {"enum": ["a", "b"], "type": ["integer", "null"]}),
        (["a", "b"], {"enum": ["a", 1], "type": "string"}), (["a", "b"], {"const": "a", "enum": ["b"]}),
    ],
)
def test_a_condition_on_a_listed_value_guides_by_all_its_keywords(byte_compiler, listed, condition):
    schema = make_object({"k": {"enum": listed}, "v": {"type": "null"}}, ["k"], then={"required": ["v"]})
    schema["if"] = {"properties": {"k": condition}}
    check_verdicts(byte_compiler, schema, [json.dumps({"k": value}) for value in listed])


INTEGER, NULL = {"type": "integer"}, {"type": "null"}
AGES = [{"type": ["integer", "null"]}, {"anyOf": [{"$ref": "#/$defs/age"}, NULL]}, INTEGER]
CONDITIONS = [
    {"exclusiveMaximum": 18}, {"minimum": 18, "maximum": 30}, {"type": ["number", "null"], "maximum": 18},
    {"not": {"type": "number", "minimum": 18}},
]


def make_condition(age, condition):
    people = {"age": age, "guardian": {"type": ["string", "null"]}}
    branches = {"then": {"properties": {"guardian": {"type": "string"}}}, "else": {"properties": {"guardian": NULL}}}
    schema = make_object(people, ["age", "guardian"], **branches, **{"if": {"properties": {"age": condition}}})
    return {**schema, "$defs": {"age": {"type": "integer", "minimum": 0}}}


@pytest.mark.parametrize("age", AGES, ids=json.dumps)
@pytest.mark.parametrize("condition", CONDITIONS, ids=json.dumps)
def test_a_bound_on_what_may_be_null_meets_no_dead_end(merged_compiler, byte_compiler, age, condition):
    schema = make_condition(age, condition)
    check_walks(merged_compiler, schema, num_walks=12, num_free=15)
    pairs = itertools.product((None, -1, 0, 17, 18, 19, 30, 31, 1000, "x"), (None, "x"))
    check_verdicts(byte_compiler, schema, [json.dumps({"age": age, "guardian": name}) for age, name in pairs])


def test_a_bound_on_integers_alone_says_nothing_of_fractions(byte_compiler):
    schema = make_condition({"type": ["number", "null"]}, {"type": "integer", "minimum": 18})
    texts = ['{"age": 18.5, "guardian": null}', '{"age": 18, "guardian": "x"}']
    check_texts(byte_compiler, schema, texts)


PROPERTIES = {"b": {"type": "boolean"}, "c": {"type": ["integer", "null"]}}
X_IS_1 = {"properties": {"x": {"const": 1}}}
# About x, which the object may not have.
ABOUT_ABSENT = [
    {"dependentRequired": {"b": ["x"]}}, {"dependentSchemas": {"b": {"required": ["x"]}}},
    {"if": {"required": ["b"]}, "then": {"required": ["x"]}}, {"if": {"required": ["x"]}, "else": {"required": ["b"]}},
    {"if": X_IS_1, "then": {"required": ["b"]}},
    {"if": {**X_IS_1, "required": ["x"]}, "then": False, "else": {"required": ["c"]}},
]


@pytest.mark.parametrize("keywords", ABOUT_ABSENT, ids=json.dumps)
def test_keywords_of_an_impossible_property_guide(merged_compiler, byte_compiler, keywords):
    schema = {"type": "object", "properties": PROPERTIES, "additionalProperties": False, **keywords}
    check_walks(merged_compiler, schema, num_walks=12, num_free=15)
    texts = ["{}", '{"b": true}', '{"c": 1}', '{"b": false, "c": null}', '{"x": 1}', '{"b": true, "x": 1}']
    check_verdicts(byte_compiler, schema, texts)


NULL, TEXT = {"type": "null"}, {"type": "string"}
TEXT_OR_NULL, NUMBER_OR_NULL = {"type": ["string", "null"]}, {"type": ["number", "null"]}


def make_choice(value, required=()):
    return make_object({"v": value, "w": {"type": "boolean"}}, required)


OVERLAPPING = [
    [TEXT_OR_NULL, NUMBER_OR_NULL], [{"anyOf": [TEXT, NULL]}, {"anyOf": [NULL, {"type": "boolean"}]}],
    [{"enum": ["a", 1, None]}, TEXT_OR_NULL],
    [{"enum": ["a", "2020-01-01", "1.2.3.4"]}, {"type": "string", "format": "ipv4"}],
    [{"type": "boolean"}, {"const": True}],
]


@pytest.mark.parametrize("branches", OVERLAPPING, ids=json.dumps)
def test_what_two_branches_take_is_never_begun(merged_compiler, byte_compiler, branches):
    schema = make_choice({"oneOf": branches}, ["v"])
    check_walks(merged_compiler, schema, num_walks=20, num_free=8)
    values = (None, True, False, 1, 2.5, "", "a", "b", "c", "ab", "2020-01-01", "1.2.3.4")
    check_verdicts(byte_compiler, schema, [json.dumps({"v": value}) for value in values])


def test_keywords_left_to_the_checks_still_distinguish_branches(byte_compiler):
    branches = [{"multipleOf": 2, "not": {"const": 4}}, {"multipleOf": 4}]
    check_verdicts(
        byte_compiler, {"type": "integer", "minimum": 0, "maximum": 10, "oneOf": branches},
        map(str, range(11)),
    )
    branches = [{"enum": ["a", "b"]}, {"type": "string", "pattern": "^(?!a)"}]
    check_verdicts(byte_compiler, {"oneOf": branches}, ['"a"', '"b"', '"c"'])


@pytest.mark.parametrize("order", ["schema", "any"])
@pytest.mark.parametrize(("keyword", "demand"), [("dependentSchemas", {"type": "null"}), ("dependentRequired", ["b"])])
def test_a_dependency_demands_nothing_of_what_is_no_object(byte_compiler, keyword, demand, order):
    schema = {"properties": {"b": {}}, keyword: {"b": demand}}
    check_verdicts(byte_compiler, schema, ["[1]", '""', "1", "null", "{}", '{"b": 1}'], property_order=order)
