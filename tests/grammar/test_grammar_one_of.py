"""`oneOf` whose branches overlap: what two of them take is left out before it is begun, and nothing else is."""

import json
import random

import pytest

from grammar import GrammarSpec, InvalidGrammar
from tests.grammar.vocabularies import CLOSED, check_verdicts, check_walks, walk

NULL, TEXT = {"type": "null"}, {"type": "string"}
TEXT_OR_NULL, NUMBER_OR_NULL = {"type": ["string", "null"]}, {"type": ["number", "null"]}


def make_object(value, required=()):
    return {**CLOSED, "properties": {"v": value, "w": {"type": "boolean"}}, "required": list(required)}


# No value satisfies exactly one branch.
NOTHINGS = [
    [NULL, NULL],
    [NULL, NULL, {"const": None}],
    [{"type": "boolean"}, {"enum": [True, False]}],
    [{"const": "a"}, {"enum": ["a"]}],
    [TEXT, TEXT],
    [{"enum": [1, 2]}, {"enum": [2, 1]}],
]


@pytest.mark.parametrize("branches", NOTHINGS, ids=json.dumps)
def test_a_property_that_two_equal_branches_leave_nothing_stays_away(merged_compiler, branches):
    schema = make_object({"oneOf": branches})
    compiled = merged_compiler.compile(GrammarSpec.json_schema(schema))
    for seed in range(30):
        text = walk(compiled.matcher(), merged_compiler.vocabulary, random.Random(seed), num_free=10)
        assert json.loads(text) in ({}, {"w": True}, {"w": False})


@pytest.mark.parametrize("branches", NOTHINGS, ids=json.dumps)
@pytest.mark.parametrize("wrap", [lambda value: make_object(value, ["v"]), lambda value: value])
def test_what_two_equal_branches_leave_nothing_is_refused_where_it_is_required(byte_compiler, branches, wrap):
    with pytest.raises(InvalidGrammar, match="no text satisfies the schema: nothing is left by 'oneOf'"):
        byte_compiler.compile(GrammarSpec.json_schema(wrap({"oneOf": branches})))


OVERLAPPING = [
    [TEXT_OR_NULL, NUMBER_OR_NULL],
    [{"anyOf": [TEXT, NULL]}, {"anyOf": [NULL, {"type": "boolean"}]}],
    [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}],
    [{"enum": ["a", 1, None]}, TEXT_OR_NULL],
    [{"enum": ["a", "2020-01-01", "1.2.3.4"]}, {"type": "string", "format": "ipv4"}],
    [{"type": "boolean"}, {"const": True}],
]


@pytest.mark.parametrize("branches", OVERLAPPING, ids=json.dumps)
def test_what_two_branches_take_is_never_begun(merged_compiler, byte_compiler, branches):
    schema = make_object({"oneOf": branches}, ["v"])
    check_walks(merged_compiler, schema, num_walks=60, num_free=8)
    values = (None, True, False, 1, 2.5, "", "a", "b", "c", "ab", "2020-01-01", "1.2.3.4")
    check_verdicts(byte_compiler, schema, [json.dumps({"v": value}) for value in values])


# What stands beside the overlapping part keeps the branches apart, and no engine enforces it.
@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (
            {"type": "integer", "minimum": 0, "maximum": 10,
             "oneOf": [{"multipleOf": 2, "not": {"const": 4}}, {"multipleOf": 4}]},
            range(11),
        ),
        ({"oneOf": [{"enum": ["a", "b"], "not": {"const": "a"}}, {"enum": ["a", "b"]}]}, ["a", "b"]),
        ({"oneOf": [{"enum": ["a", "b"]}, {"type": "string", "pattern": "^(?!a)"}]}, ["a", "b", "c"]),
        (
            {"type": "object", "properties": {"a": {}, "b": {}},
             "oneOf": [{"required": ["a"], "not": {"minProperties": 2}}, {"required": ["b"]}]},
            [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {}],
        ),
    ],
)  # fmt: skip
def test_what_was_left_to_the_checks_still_tells_branches_apart(byte_compiler, schema, values):
    check_verdicts(byte_compiler, schema, map(json.dumps, values))
