"""Walks over the masks of schemas with residual checks: finished texts are valid, and caches change no mask."""

import json
import math
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from grammar import (
    GrammarError,
    GrammarSpec,
    InvalidGrammar,
    SchemaValidator,
    UnsupportedGrammar,
)
from grammar.match.residual import ResidualMatcher
from tests.effort import choose_count
from tests.grammar.schemas import SCHEMAS
from tests.grammar.vocabularies import SETTINGS, allowed_tokens, check_walks, choose, walk


def find_at(schema: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        schema = schema[int(key)] if isinstance(schema, list) else schema[key]
    return schema


def is_finite(value: Any) -> bool:
    """Return whether all numbers fit a double: JSON has 1e999, Python reads infinity."""
    if isinstance(value, dict | list):
        return all(map(is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def make_spec(schema: Any, **options: Any) -> GrammarSpec | None:
    try:
        return GrammarSpec.json_schema(schema, **options)
    except InvalidGrammar:
        return None


@pytest.mark.parametrize(
    "options",
    [{"whitespace": "spaced"}, {"property_order": "any", "whitespace": "compact"}, {"whitespace": "any"}],
    ids=lambda options: "-".join(options.values()),
)
@settings(SETTINGS, max_examples=choose_count(60, 150))
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_what_a_schema_allows_is_valid_and_what_it_refuses_is_named(merged_compiler, options, schema, seed):
    spec = make_spec(schema, **options)
    if spec is None:
        return event("malformed")
    try:
        compiled = merged_compiler.compile(spec)
    except UnsupportedGrammar as refusal:
        assert "backend" in options or refusal.keyword in find_at(schema, refusal.pointer), refusal
        return event(f"refused: {refusal.keyword}")
    except InvalidGrammar as error:
        assert re.search("no (?:text|value) satisfies|first token|cannot be compiled", str(error))
        return event("contradiction")
    event(compiled.backend)
    # Not every random schema has guides for all its checks: a repeated name, say, counts once for `minProperties`.
    text = walk(compiled.matcher(), merged_compiler.vocabulary, random.Random(seed), 25, may_end_dead=True)
    if text is None or not is_finite(value := json.loads(text)):
        return event("unfinished or infinite")
    assert SchemaValidator(schema).first_error(value) is None, (text, compiled.backend)
    return None


TEXT = {"type": "string"}
NAMES = ["a", "ab", "abc", "an", "the", "name", "in", "on", "é"]
# The characters of the names, so that walks come close to them.
PIECES = {b"a", b"b", b"c", b"in", b"on", b"the", b"name", b'"', b", ", b'", "', b": "}
CHECKED = {
    "excluded values": {"items": {"not": {"enum": NAMES}}},
    "excluded beside a pattern": {"items": {"type": "string", "pattern": "^[a-n]{1,4}$", "not": {"enum": NAMES}}},
    "a condition": {
        "properties": {"kind": {"enum": ["in", "on"]}, "a": TEXT}, "required": ["kind", "a"],
        "additionalProperties": False, "if": {"properties": {"kind": {"const": "in"}}},
        "then": {"properties": {"a": {"enum": NAMES}}}, "else": {"properties": {"a": {"not": {"enum": NAMES}}}},
    },
    "a length under a condition": {
        "properties": {"kind": TEXT, "a": TEXT}, "required": ["kind", "a"], "additionalProperties": False,
        "if": {"properties": {"kind": {"minLength": 2}}}, "then": {"properties": {"a": {"maxLength": 2}}},
    },
    "distinct strings": {"items": {"enum": NAMES}, "uniqueItems": True, "minItems": 2},
    "distinct values": {"uniqueItems": True, "maxItems": 4},
    "containing": {"items": {"enum": NAMES}, "contains": {"const": "the"}, "maxContains": 1},
    "names in a list": {
        "propertyNames": {"$ref": "#/$defs/name"}, "additionalProperties": TEXT,
        "$defs": {"name": {"enum": NAMES}},
    },
    "names not in a list": {"propertyNames": {"not": {"enum": NAMES}}, "maxProperties": 3},
}
# A walk may end dead here: the check comes when nothing can be added.
DEAD_ENDS = {"excluded beside a pattern", "a length under a condition", "Handwritten---notnames9"}
# Walks seldom reach the place at which the check applies.
STARTS = {"a condition": b'{"kind": "on", "a": "'}
# Without a type most walks would be over with a number.
CHECKED = {
    name: {"type": "object" if {"properties", "propertyNames"} & schema.keys() else "array", **schema}
    for name, schema in CHECKED.items()
}
DATA = Path(__file__).parents[2].parent / "shared" / "data" / "maskbench_dev.jsonl"


@cache
def read_cases():
    return [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]


def is_checked(compiled):
    return any(entry.enforced_by == "residual" for entry in compiled.plan)


@pytest.mark.parametrize("name", CHECKED)
def test_masks_along_a_walk_are_those_of_a_matcher_that_tries_every_token(merged_compiler, name):
    vocabulary = merged_compiler.vocabulary
    compiled = merged_compiler.compile(GrammarSpec.json_schema(CHECKED[name]))
    assert is_checked(compiled)
    num_cleared = 0
    for seed in range(choose_count(8, 12)):
        rng = random.Random(seed)
        matcher, reference = compiled.matcher(), compiled.matcher()
        assert isinstance(matcher, ResidualMatcher)
        for byte in STARTS.get(name, b""):
            assert matcher.accept_token(byte) and reference.accept_token(byte)
        for step in range(40):
            allowed = allowed_tokens(matcher, vocabulary)
            accepted = []
            for token_id in allowed_tokens(reference.inner, vocabulary):
                if reference.accept_token(token_id):
                    accepted.append(token_id)
                    reference.rollback(1)
            # A mask may leave out what takes too many checks, never let in what is refused.
            assert set(allowed) <= set(accepted)
            left_out = set(accepted) - set(allowed) if len(accepted) <= 40 else set()
            assert all(leads_nowhere(reference, token_id, vocabulary) for token_id in left_out)
            assert len(allowed) + len(left_out) >= min(len(accepted), 40)
            num_cleared += len(allowed_tokens(reference.inner, vocabulary)) - len(allowed)
            if not allowed:
                break
            near = [token_id for token_id in allowed if vocabulary.token_bytes[token_id] in PIECES]
            is_near = near and rng.random() < 0.7
            token_id = rng.choice(near) if is_near else choose(allowed, vocabulary, rng, is_free=step < 25)
            assert matcher.accept_token(token_id) and reference.accept_token(token_id)
            if matcher.is_terminated():
                break
    assert num_cleared, "no check ever had anything to say"


def leads_nowhere(matcher, token_id, vocabulary):
    """Whether nothing is allowed after a token that is accepted."""
    assert matcher.accept_token(token_id)
    allowed = allowed_tokens(matcher, vocabulary)
    matcher.rollback(1)
    return not allowed


@pytest.mark.parametrize("name", CHECKED)
def test_a_walk_through_residual_checks_ends_in_a_valid_text(merged_compiler, name):
    assert check_walks(merged_compiler, CHECKED[name], 12, 30, may_end_dead=name in DEAD_ENDS) > 2


@pytest.mark.skipif(not DATA.exists(), reason="the development part of MaskBench is not beside the repository")
@settings(SETTINGS, max_examples=choose_count(100, 250))
@given(number=st.integers(0, 396), seed=st.integers(0, 2**32))
def test_a_walk_over_a_schema_of_maskbench_meets_no_dead_end_and_ends_valid(merged_compiler, number, seed):
    case = read_cases()[number]
    try:
        compiled = merged_compiler.compile(GrammarSpec.json_schema(case["schema"]))
    except GrammarError:
        return event("refused")
    matcher = compiled.matcher()
    may_end_dead = case["name"] in DEAD_ENDS
    text = walk(matcher, merged_compiler.vocabulary, random.Random(seed), 40, may_end_dead)
    if text is None:
        assert matcher.error is None or may_end_dead, (case["name"], matcher.error)
        return event("unfinished")
    if not is_finite(value := json.loads(text)):
        return event("a number too large for a double")
    assert SchemaValidator(case["schema"]).first_error(value) is None, (case["name"], text)
    return event("checked" if is_checked(compiled) else "plain")
