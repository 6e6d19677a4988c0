"""Vocabularies and walks that the grammar tests share."""

import itertools
import json
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from grammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarSpec,
    Matcher,
    SchemaValidator,
    UnsupportedGrammar,
    Vocabulary,
    allocate_bitmask,
)

# Settings of property tests: the same examples in each run, without a deadline.
SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}
BYTES = [bytes([byte]) for byte in range(256)]
EOS, EOS_2, SPECIAL, PADDING = 256, 257, 258, 259

_WORDS = [
    *("the", "of", "and", "name", "age", "value", "true", "false", "null", "abc", "date", "yes", "no"),
    *("in", "on", "at", "er", "ing", "tion"),
]
_JSON = [
    *('{"', '": ', '", "', '"}', "[]", "{}", '":', '","', "}, {", '": "', '"]', "], [", "}}", "]}", "\\n"),
    *('\\"', '\\""', 'a\\"b"'),
]
_MULTI_BYTE = ["é", "à", "日本", "語", "ß", "😀", "—", "č", "日"]
# Halves of characters, as byte-level BPE has them.
_PARTIAL = [b"\xc3", b"\xe6\x97", b"\xf0\x9f\x98", b"\xa5\xe6", b"\x97\xa5"]
_NUMBERS = [f"{number:02d}" for number in range(100)]
_NUMBERS += ["000", "1.5", "-1", "e+", "2024-", ":00", "0.", "100"]


def make_byte_vocabulary() -> Vocabulary:
    """Return all bytes, two EOS tokens, one special token and one of padding."""
    return Vocabulary([*BYTES, b"<eos>", b"<eos2>", b"", b""], [EOS, EOS_2])


def make_merged_vocabulary() -> Vocabulary:
    """Return the byte vocabulary with a few hundred merges, repeated and partial tokens among them."""
    pairs = ["".join(pair) for pair in itertools.product("aeiost ", "nrstl,")]
    words = [*_WORDS, *(" " + word for word in _WORDS), *_JSON, *_MULTI_BYTE, *_NUMBERS, *pairs, "ab", "ab"]
    merges = [word.encode() for word in words] + _PARTIAL
    return Vocabulary([*BYTES, b"<eos>", b"<eos2>", b"", b"", *merges, b""], [EOS, EOS_2])


def allowed_tokens(matcher: Matcher, vocabulary: Vocabulary) -> list[int]:
    """Return the ids whose bit is set, bits beyond the vocabulary included."""
    bitmask = allocate_bitmask(1, vocabulary.size)
    matcher.fill_next_token_bitmask(bitmask)
    return np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist()


def check_mask(matcher: Matcher, vocabulary: Vocabulary) -> set[int]:
    """The matcher accepts exactly the tokens that its mask allows, which are returned."""
    allowed = set(allowed_tokens(matcher, vocabulary))
    for token_id in (*range(-1, vocabulary.size + 2), 10**9):
        assert matcher.accept_token(token_id) == (token_id in allowed), token_id
        if token_id in allowed:
            matcher.rollback(1)
    return allowed


def accepts(matcher: Matcher, vocabulary: Vocabulary, text: str | bytes) -> bool:
    """Feed a text byte by byte: is every byte allowed by mask and matcher, and the end complete?"""
    for byte in text.encode() if isinstance(text, str) else text:
        if not matcher.accept_token(byte):
            return False
    return matcher.is_completed()


def check_texts(
    compiler: GrammarCompiler, spec: GrammarSpec | Any, good: Iterable[str] = (), bad: Iterable[str] = ()
) -> CompiledGrammar:
    """A spec, or the JSON schema of one, accepts some texts and not others."""
    if not isinstance(spec, GrammarSpec):
        spec = GrammarSpec.json_schema(spec)
    compiled = compiler.compile(spec)
    for text, expected in [*((text, True) for text in good), *((text, False) for text in bad)]:
        assert accepts(compiled.matcher(), compiler.vocabulary, text) == expected, text
    return compiled


def check_refusal(
    compiler: GrammarCompiler, spec: GrammarSpec | Any, pointer: str, keyword: str, message: str | None = None
) -> None:
    """A spec, or the JSON schema of one, is refused for a keyword at its place."""
    with pytest.raises(UnsupportedGrammar, match=message) as refusal:
        compiler.compile(spec if isinstance(spec, GrammarSpec) else GrammarSpec.json_schema(spec))
    assert (refusal.value.pointer, refusal.value.keyword) == (pointer, keyword) and refusal.value.reason


def check_verdicts(compiler: GrammarCompiler, schema: Any, texts: Iterable[str], **options: Any) -> None:
    """A schema accepts exactly those of some texts that the validator takes for valid."""
    compiled = compiler.compile(GrammarSpec.json_schema(schema, **options))
    validator = SchemaValidator(schema)
    for text in texts:
        expected = validator.is_valid(json.loads(text))
        assert accepts(compiled.matcher(), compiler.vocabulary, text) == expected, text


def walk(
    matcher: Matcher, vocabulary: Vocabulary, rng: random.Random, num_free: int = 40,
    may_end_dead: bool = False,
) -> bytes | None:
    """Write a text by random allowed tokens, after `num_free` of them straight to the end.

    Returns None when the end was not reached within 600 more tokens, and with `may_end_dead` where checks left no
    way to it.
    """
    text = b""
    for step in range(num_free + 600):
        allowed = allowed_tokens(matcher, vocabulary)
        if (may_end_dead and not allowed and (matcher.error or "").startswith("dead end: no continuation satisfies")):
            return None
        assert allowed, f"dead end after {text!r}: {matcher.error}"
        token_id = choose(allowed, vocabulary, rng, is_free=step < num_free)
        assert matcher.accept_token(token_id), f"mask allows {token_id} after {text!r}, the matcher does not"
        if matcher.is_terminated():
            return text
        text += vocabulary.token_bytes[token_id]
    return None


def check_walks(
    compiler: GrammarCompiler, schema: dict[str, Any], num_walks: int, num_free: int,
    may_end_dead: bool = False,
) -> int:
    """Write random texts under a schema: none ends dead, some reach their end, and those are valid; how many do."""
    compiled, validator = compiler.compile(GrammarSpec.json_schema(schema)), SchemaValidator(schema)
    texts = [
        walk(compiled.matcher(), compiler.vocabulary, random.Random(seed), num_free, may_end_dead)
        for seed in range(num_walks)
    ]
    written = [text for text in texts if text is not None]
    assert written
    for text in written:
        assert validator.is_valid(json.loads(text)), text
    return len(written)


def choose(allowed: list[int], vocabulary: Vocabulary, rng: random.Random, is_free: bool) -> int:
    """Pick a token: any, or one that leads to the end."""
    if is_free:
        # Structure is rare among hundreds of letters; half of the choices go to it.
        structure = [token_id for token_id in allowed if vocabulary.token_bytes[token_id][:1] in b'{}[]",:']
        return rng.choice(structure if structure and rng.random() < 0.5 else allowed)
    # The quote first: inside a string the brackets are letters.
    for ending in (*vocabulary.eos_token_ids, *b'"}]'):
        if ending in allowed:
            return ending
    return rng.choice(allowed)
