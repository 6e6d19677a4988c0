"""Arrays of distinct elements drawn from few values: no walk over the masks ends nowhere."""

import json
import tracemalloc
from random import Random

import numpy as np
import pytest

from grammar import GrammarCompiler, GrammarSpec, InvalidGrammar, SchemaValidator, Vocabulary
from tests.grammar.vocabularies import CLOSED

PIECES = [b"true", b"false", b'"red"', b'"blue"', b", ", b'["', b'", "', b'",', b"1.0", b", 1"]
NUMBERS = [str(number).encode() for number in range(10, 130)]
TOKENS = [*(bytes([byte]) for byte in range(256)), *NUMBERS, *PIECES, b"<eos>"]
EOS = len(TOKENS) - 1
ITEMS = [
    {"enum": [1, 2, 3]},
    {"enum": [10, 20, 105]},
    {"enum": ["red", "blue", "re"]},
    {"enum": [None, True, 1, "a"]},
    {"type": "integer", "minimum": 0, "maximum": 12},
    {"type": "boolean"},
]
PAIR = {**CLOSED, "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
PARTS = [
    PAIR,
    {**CLOSED, "properties": {"n": PAIR}, "required": ["n"]},
    {"type": "array", "prefixItems": [{"enum": [1, 12]}], "minItems": 1, "items": False},
    {"enum": [{"a": 1}, {"a": 2}, [1], [1, 2]]},
    {"anyOf": [{"const": 1}, {"const": 12}, {"const": "red"}]},
    {"oneOf": [{"const": "red", "title": "Red"}, {"enum": ["blue", "re"]}, {"type": "null"}]},
    {"anyOf": [PAIR, {"type": "boolean"}]},
    {"type": "string", "anyOf": [{"const": "a"}, {"anyOf": [{"const": "b"}, {"const": 3}]}]},
]


@pytest.fixture(scope="module")
def compiler():
    compiler = GrammarCompiler(Vocabulary(TOKENS, [EOS]), num_threads=1)
    yield compiler
    compiler.close()


@pytest.mark.parametrize("items", ITEMS, ids=json.dumps)
@pytest.mark.parametrize("bounds", [{}, {"minItems": 2}, {"minItems": 2, "maxItems": 2}], ids=json.dumps)
def test_no_walk_through_few_distinct_values_ends_nowhere(compiler, items, bounds):
    schema = {"type": "array", "items": items, "uniqueItems": True, **bounds}
    compiled = compiler.compile(GrammarSpec.json_schema(schema))
    num_full = 0
    for seed in range(25):
        text = walk(compiled.matcher(), Random(seed))
        assert SchemaValidator(schema).is_valid(json.loads(text)), text
        num_full += len(json.loads(text)) == len(items.get("enum", [True, False]))
    assert num_full or "maxItems" in bounds or "minimum" in items, "no walk used all the values"


@pytest.mark.parametrize("items", PARTS, ids=json.dumps)
def test_no_walk_through_distinct_objects_of_few_values_ends_nowhere(compiler, items):
    schema = {"type": "array", "items": items, "uniqueItems": True, "minItems": 2}
    compiled = compiler.compile(GrammarSpec.json_schema(schema))
    for seed in range(12):
        text = walk(compiled.matcher(), Random(seed))
        assert SchemaValidator(schema).is_valid(json.loads(text)), text


def test_more_distinct_objects_than_there_are_cannot_be_asked_for(compiler):
    schema = {"type": "array", "items": PAIR, "uniqueItems": True, "minItems": 3}
    with pytest.raises(InvalidGrammar, match="no text satisfies"):
        compiler.compile(GrammarSpec.json_schema(schema))


def test_what_begins_like_another_element_may_still_become_a_third(compiler):
    matcher = compiler.compile(
        GrammarSpec.json_schema({"type": "array", "items": {"enum": [1, 12]}, "uniqueItems": True})
    ).matcher()
    for byte in b"[1, ":
        assert matcher.accept_token(byte)
    assert ord("1") in list_allowed(matcher)
    assert matcher.accept_token(ord("1"))
    assert list_allowed(matcher) == [ord("2")]


def test_what_is_remembered_of_tokens_does_not_grow_with_the_text(compiler):
    array = {"type": "array", "items": {"enum": [1, 2, 3, 12]}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"t": {"type": "string"}, "a": array}, "required": ["t", "a"]}
    matcher = compiler.compile(GrammarSpec.json_schema(schema)).matcher()
    for byte in b'{"t": "%b", "a": [1, ' % (b"x" * 20_000):
        assert matcher.accept_token(byte)
    tracemalloc.start()
    try:
        assert ord("1") in list_allowed(matcher)
        num_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert num_bytes < 10_000


def list_allowed(matcher):
    row = np.zeros((1, -(-len(TOKENS) // 32)), np.int32)
    matcher.fill_next_token_bitmask(row, 0)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: len(TOKENS)]).tolist()


def walk(matcher, rng):
    """Take allowed tokens at random up to the end; the text."""
    text = b""
    for _ in range(200):
        token_id = rng.choice(list_allowed(matcher) or [-1])
        assert token_id >= 0, f"nothing is allowed after {text!r}: {matcher.error}"
        assert matcher.accept_token(token_id)
        if token_id == EOS:
            return text
        text += TOKENS[token_id]
    raise AssertionError(f"no end in sight: {text!r}")
