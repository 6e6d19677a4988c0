"""Numbers that 64 bits or a double do not hold never get to llguidance, which ends the process over some of them."""

import re
from contextlib import suppress

import pytest

from grammar import GrammarSpec, InvalidGrammar, UnsupportedGrammar
from grammar.backends import llguidance_backend
from tests.grammar.vocabularies import check_texts

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
WIDE = [2**63, -(2**63) - 1, 2**64, -(10**40), 10**400, -(10**400), 1e300]
# Around a schema with a number that 64 bits do not hold; in the last ones guides repeat it.
AROUND_WIDE = [
    lambda part: {"type": "integer", **part},
    lambda part: {"oneOf": [{"type": "integer", **part}, {"type": ["integer", "null"], "maximum": 0}]},
    lambda part: {"type": "array", "contains": part, "maxItems": 3},
    lambda part: {"type": "array", "items": {"type": "integer", **part}, "uniqueItems": True},
    lambda part: {
        "properties": {"a": {"type": ["integer", "null"]}},
        "if": {"properties": {"a": part}},
        "then": False,
    },
    lambda part: {"properties": {"a": {}, "b": {}}, "dependentSchemas": {"b": {"properties": {"a": part}}}},
    lambda part: {"patternProperties": {"^a(?=b)": part}, "additionalProperties": False},
    lambda part: {"type": "integer", "not": part},
]


@pytest.mark.parametrize("around", AROUND_WIDE)
@pytest.mark.parametrize("keyword", ["minimum", "exclusiveMaximum", "multipleOf", "const", "enum"])
def test_no_number_beyond_64_bits_gets_to_llguidance(byte_compiler, monkeypatch, around, keyword):
    texts = []
    make_grammar = llguidance_backend.make_grammar
    monkeypatch.setattr(
        llguidance_backend, "make_grammar", lambda spec: texts.append(spec.text) or make_grammar(spec)
    )
    for number in WIDE:
        schema = around({keyword: [number] if keyword == "enum" else number})
        for order in ("schema", "any"):
            # What is refused never gets there; a negative step is malformed.
            with suppress(UnsupportedGrammar, InvalidGrammar):
                byte_compiler.compile(GrammarSpec.json_schema(schema, property_order=order))
    numbers = [abs(float(digits)) for text in texts for digits in NUMBER.findall(text)]
    assert all(number < 2**63 for number in numbers)


@pytest.mark.parametrize("number", [10**400, -(10**400)])
def test_an_annotation_may_hold_a_number_beyond_doubles(byte_compiler, number):
    for rest in ({}, {"not": {"const": 1}}):
        schema = {"type": "integer", **rest, "default": number, "examples": [2, {"a": [number]}]}
        plan = check_texts(byte_compiler, schema, ["2"], ['"x"']).plan
        assert {("", "default", "annotation"), ("", "examples", "annotation")} <= set(plan)
