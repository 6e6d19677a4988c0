"""Numbers that a model would write without end are ended; those that a schema wants long are written whole."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from grammar import (
    GrammarCompiler,
    GrammarSpec,
    Matcher,
    Vocabulary,
    allocate_bitmask,
    fill_draft_bitmask,
    is_set,
)
from tests.grammar.vocabularies import BYTES, allowed_tokens

VOCABULARY = Vocabulary([*BYTES, b"11", b"1e", b".0", b""], (259,))
COMPILER = GrammarCompiler(VOCABULARY)


def make_matcher(schema: dict[str, Any], text: bytes = b"") -> Matcher:
    matcher = COMPILER.compile(GrammarSpec.json_schema(schema)).matcher()
    assert all(matcher.accept_token(byte) for byte in text)
    return matcher


def write(matcher: Matcher, wishes: Sequence[int], most: int = 400) -> bytes:
    """Take the first of the wishes that is allowed, and where none is the first token that is."""
    text = b""
    for _ in range(most):
        allowed = allowed_tokens(matcher, VOCABULARY)
        token = next((each for each in wishes if each in allowed), allowed[0])
        assert matcher.accept_token(token)
        if matcher.is_terminated():
            break
        text += VOCABULARY.token_bytes[token]
    return text


@pytest.mark.parametrize("kind", ["number", "integer"])
@pytest.mark.parametrize("wish", [b"1", b"0", b"."], ids=str)
@pytest.mark.parametrize("is_nested", [False, True])
def test_digits_without_end_are_ended(kind: str, wish: bytes, is_nested: bool) -> None:
    schema: dict[str, Any] = {"type": kind}
    if is_nested:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 2}
    text = write(make_matcher(schema), [256, wish[0], ord("1"), 259, ord("]")])
    number = json.loads(text)
    assert len(text) < 60 and abs(number[0] if is_nested else number) < 1e30


def test_an_exponent_stays_finite() -> None:
    assert json.loads(write(make_matcher({"type": "number"}), [257, ord("9"), 259])) == 1e99


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "pattern": "^[0-9]{60}$"}, b'"' + b"1" * 60 + b'"'),
        ({"enum": ["1" * 80]}, b'"' + b"1" * 80 + b'"'),
    ],
)
def test_what_the_schema_wants_long_is_written(schema: dict[str, Any], text: bytes) -> None:
    assert write(make_matcher(schema), [256, ord("1"), 259]) == text


def test_a_number_beyond_all_bounds_may_be_as_long_as_it_must() -> None:
    text = write(make_matcher({"type": "integer", "minimum": 10**30}), [ord("1"), 259], 60)
    assert len(text) > 30


def test_masks_after_drafts_end_numbers_too() -> None:
    draft = [256] * 14
    bitmask = allocate_bitmask(len(draft) + 1, VOCABULARY.size)
    fill_draft_bitmask([make_matcher({"type": "number"})], [draft], [0], bitmask)
    for place in range(len(draft) + 1):
        matcher = make_matcher({"type": "number"})
        assert all(matcher.accept_token(token) for token in draft[:place])
        single = allocate_bitmask(1, VOCABULARY.size)
        matcher.fill_next_token_bitmask(single)
        assert (bitmask[place] == single[0]).all()
    assert not is_set(bitmask[-1], ord("1"))
