"""The matcher contract, the same for every backend."""

import random

import numpy as np
import pytest

from grammar import GrammarSpec, allocate_bitmask, fill_bitmask
from tests.grammar.vocabularies import CLOSED, EOS, EOS_2, PADDING, SPECIAL, allowed_tokens, walk

OBJECT = {**CLOSED, "properties": {"é": {"type": "string"}}, "required": ["é"]}
TAG = {
    "type": "tag",
    "begin": "<t>",
    "content": {"type": "json_schema", "json_schema": OBJECT},
    "end": "</t>",
}
UNIQUE = TAG | {"content": {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}}
CASES = {
    "llguidance": (GrammarSpec.json_schema(OBJECT), '{"é": "日本 {"}'),
    "llguidance regex": (GrammarSpec.regex("a(bc)?|日本+", backend="llguidance"), "日本本"),
    "llguidance choice": (GrammarSpec.choice(["a", "abc", "日"], backend="llguidance"), "abc"),
    "outlines_core": (GrammarSpec.regex(r"[0-9]+(\.[0-9]+)?|日本+"), "日本本"),
    "outlines_core choice": (GrammarSpec.choice(["a", "abc", "日"]), "abc"),
    "xgrammar": (GrammarSpec.ebnf('root ::= item ("," item)*\nitem ::= [a-z]+ | "日本"'), "ab,日本,c"),
    "xgrammar schema": (GrammarSpec.json_schema(OBJECT, backend="xgrammar"), '{"é": "日本 {"}'),
    "llguidance any order": (GrammarSpec.json_schema(OBJECT, property_order="any"), '{"é": "日本 {"}'),
    "llguidance residual": (GrammarSpec.json_schema({"type": "array", "uniqueItems": True}), '["日", 1]'),
    "llguidance grounded": (
        GrammarSpec.json_schema({"type": "string", "x-grounded": True}, source='The "日本" house'),
        '"The \\"日本\\""',
    ),
    "llguidance xml": (
        GrammarSpec.xml({"name": "a", "children": [{"name": "é", "text": "string"}]}),
        "<a><é>日&amp;</é></a>",
    ),
    "llguidance csv": (GrammarSpec.csv({"a": "string", "n": "integer"}), 'a,n\n"日,",1'),
    "structural_tag": (
        GrammarSpec.structural_tag({"format": {"type": "triggered_tags", "triggers": ["<t"], "tags": [TAG]}}),
        'é <t>{"é": "日本 {"}</t>日',
    ),
    "structural_tag with residual checks": (GrammarSpec.structural_tag({"format": UNIQUE}), "<t>[1, 2]</t>"),
}


@pytest.fixture(params=CASES)
def case(request, merged_compiler):
    spec, text = CASES[request.param]
    compiled = merged_compiler.compile(spec)
    assert compiled.backend == request.param.split()[0]
    return merged_compiler.vocabulary, compiled, text.encode()


def test_a_sentence_is_allowed_byte_by_byte_and_ends_with_any_eos_where_it_is_complete(case):
    vocabulary, compiled, text = case
    for eos in (EOS, EOS_2):
        matcher = compiled.matcher()
        for byte in text:
            allowed = allowed_tokens(matcher, vocabulary)
            assert byte in allowed
            assert (EOS in allowed) == (EOS_2 in allowed) == matcher.is_completed()
            assert matcher.accept_token(byte)
        assert matcher.is_completed() and not matcher.is_terminated()
        assert {EOS, EOS_2} <= set(allowed_tokens(matcher, vocabulary))
        assert matcher.accept_token(eos)
        assert matcher.is_terminated()


def test_mask_and_accept_agree_on_every_token(case):
    vocabulary, compiled, text = case
    matcher = compiled.matcher()
    for byte in text:
        allowed = set(allowed_tokens(matcher, vocabulary))
        assert not {SPECIAL, PADDING, vocabulary.size - 1} & allowed and max(allowed) < vocabulary.size
        for token_id in (*range(-1, vocabulary.size + 2), 10**9):
            assert matcher.accept_token(token_id) == (token_id in allowed), token_id
            if token_id in allowed:
                matcher.rollback(1)
        assert matcher.accept_token(byte)


def test_after_eos_only_eos_is_allowed_and_nothing_is_accepted(case):
    vocabulary, compiled, text = case
    matcher = compiled.matcher()
    assert all(matcher.accept_token(token_id) for token_id in (*text, EOS))
    assert allowed_tokens(matcher, vocabulary) == [EOS, EOS_2]
    assert not matcher.accept_token(EOS)
    assert not matcher.accept_token(text[0])
    assert matcher.is_terminated()


def test_rollback_equals_replay(case):
    vocabulary, compiled, text = case
    tokens = [*text, EOS]
    for num_back in range(len(tokens) + 1):
        matcher, replayed = compiled.matcher(), compiled.matcher()
        assert all(matcher.accept_token(token_id) for token_id in tokens)
        matcher.rollback(num_back)
        for token_id in tokens[: len(tokens) - num_back]:
            assert replayed.accept_token(token_id)
        assert allowed_tokens(matcher, vocabulary) == allowed_tokens(replayed, vocabulary)
        assert matcher.is_completed() == replayed.is_completed()
        assert matcher.is_terminated() == replayed.is_terminated()
        assert all(matcher.accept_token(token_id) for token_id in tokens[len(tokens) - num_back :])


def test_rolling_back_more_than_was_accepted_is_an_error_that_changes_nothing(case):
    vocabulary, compiled, text = case
    matcher = compiled.matcher()
    assert matcher.accept_token(text[0])
    before = allowed_tokens(matcher, vocabulary)
    for num_tokens in (2, -1):
        with pytest.raises(ValueError, match="roll back"):
            matcher.rollback(num_tokens)
    assert allowed_tokens(matcher, vocabulary) == before


def test_matchers_of_one_grammar_are_independent(case):
    vocabulary, compiled, text = case
    first, second = compiled.matcher(), compiled.matcher()
    start = allowed_tokens(second, vocabulary)
    assert all(first.accept_token(byte) for byte in text)
    assert allowed_tokens(second, vocabulary) == start == allowed_tokens(compiled.matcher(), vocabulary)


def test_random_walks_never_meet_a_dead_end(case):
    vocabulary, compiled, _ = case
    for seed in range(10):
        walk(compiled.matcher(), vocabulary, random.Random(seed), num_free=15)


def test_a_bitmask_of_another_shape_is_refused(case):
    vocabulary, compiled, _ = case
    matcher = compiled.matcher()
    for bad in (
        np.zeros((1, vocabulary.num_words + 1), np.int32),
        np.zeros((1, vocabulary.num_words), np.int64),
        np.zeros((2, 2 * vocabulary.num_words), np.int32)[:, ::2],
    ):
        with pytest.raises(ValueError, match="bitmask"):
            matcher.fill_next_token_bitmask(bad)
    with pytest.raises(ValueError, match="rows"):
        matcher.fill_next_token_bitmask(allocate_bitmask(2, vocabulary.size), 2)


def test_a_batch_fill_over_mixed_backends_equals_single_fills(merged_compiler):
    vocabulary, rng = merged_compiler.vocabulary, random.Random(7)
    matchers = []
    for spec, text in CASES.values():
        tokens = [*text.encode(), EOS]
        for length in (0, 1, 3, len(tokens) - 1, len(tokens)):
            matchers.append(merged_compiler.compile(spec).matcher())
            assert all(matchers[-1].accept_token(token_id) for token_id in tokens[:length])
    rng.shuffle(matchers)
    rows = rng.sample(range(len(matchers) + 5), len(matchers))
    batch = np.full((len(matchers) + 5, vocabulary.num_words), 12345, np.int32)
    fill_bitmask(matchers, rows, batch)
    for matcher, row in zip(matchers, rows, strict=True):
        single = allocate_bitmask(1, vocabulary.size)
        matcher.fill_next_token_bitmask(single)
        assert (batch[row] == single[0]).all()
    untouched = set(range(len(batch))) - set(rows)
    assert (batch[sorted(untouched)] == 12345).all()


def test_a_batch_fill_of_nothing_is_allowed():
    bitmask = np.full((2, 1), 12345, np.int32)
    fill_bitmask([], [], bitmask)
    assert (bitmask == 12345).all()


def test_a_batch_fill_needs_a_row_for_each_matcher(merged_compiler):
    matcher = merged_compiler.compile(GrammarSpec.json_object()).matcher()
    with pytest.raises(ValueError, match="rows"):
        fill_bitmask([matcher], [], allocate_bitmask(1, merged_compiler.vocabulary.size))
