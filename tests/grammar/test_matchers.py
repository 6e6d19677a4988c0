"""The matcher contract, the same for every backend, with drafts and jumps ahead."""

import random

import numpy as np
import pytest

from grammar import GrammarSpec, StoppableMatcher, allocate_bitmask, fill_bitmask, fill_draft_bitmask
from tests.effort import choose_count
from tests.grammar.vocabularies import (
    CLOSED,
    EOS,
    EOS_2,
    PADDING,
    SPECIAL,
    allowed_tokens,
    check_mask,
    choose,
    walk,
)

OBJECT = {**CLOSED, "properties": {"é": {"type": "string"}}, "required": ["é"]}
TAG = {"type": "tag", "begin": "<t>", "content": {"type": "json_schema", "json_schema": OBJECT}, "end": "</t>"}
UNIQUE = TAG | {"content": {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}}
CASES = {
    "llguidance": (GrammarSpec.json_schema(OBJECT), '{"é": "日本 {"}'),
    "llguidance regex": (GrammarSpec.regex("a(bc)?|日本+", backend="llguidance"), "日本本"),
    "llguidance choice": (GrammarSpec.choice(["a", "abc", "日"], backend="llguidance"), "abc"),
    "outlines_core choice": (GrammarSpec.choice(["a", "abc", "日"]), "abc"),
    "llguidance ebnf": (GrammarSpec.ebnf('root ::= item ("," item)*\nitem ::= [a-z]+ | "日本"'), "ab,日本,c"),
    "xgrammar": (GrammarSpec.ebnf('root ::= item ("," item)*\nitem ::= [a-z]+ | "日本"', "xgrammar"), "ab,日本,c"),
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
        assert allowed_tokens(matcher, vocabulary) == [EOS, EOS_2]
        assert matcher.accept_token(EOS) and not matcher.accept_token(text[0])
        matcher.rollback(1)
        assert matcher.is_terminated()
        matcher.rollback(1)
        assert not matcher.is_terminated() and matcher.is_completed()


def test_mask_and_accept_agree_on_every_token(case):
    vocabulary, compiled, text = case
    matcher = compiled.matcher()
    for byte in text:
        allowed = check_mask(matcher, vocabulary)
        assert not {SPECIAL, PADDING, vocabulary.size - 1} & allowed and max(allowed) < vocabulary.size
        assert matcher.accept_token(byte)


def test_rollback_equals_replay(case):
    vocabulary, compiled, text = case
    tokens = [*text, EOS]
    for num_back in range(len(tokens) + 1):
        matcher, replayed = compiled.matcher(), compiled.matcher()
        assert all(matcher.accept_allowed(token_id) for token_id in tokens)
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


def test_random_walks_never_meet_a_dead_end(case):
    vocabulary, compiled, _ = case
    for seed in range(10):
        walk(compiled.matcher(), vocabulary, random.Random(seed), num_free=15)


def test_a_stop_token_is_allowed_exactly_where_a_text_may_end(case):
    vocabulary, compiled, text = case
    matcher, plain = StoppableMatcher(compiled.matcher(), [text[0], SPECIAL, EOS]), compiled.matcher()
    for byte in text:
        stops = {text[0], SPECIAL} if plain.is_completed() else set()
        assert check_mask(matcher, vocabulary) == check_mask(plain, vocabulary) - {text[0]} | stops
        # Where the text has a stop token, only the inner matcher goes on.
        assert (matcher.inner if byte == text[0] else matcher).accept_token(byte) and plain.accept_token(byte)


def test_a_bitmask_of_another_shape_is_refused(case):
    vocabulary, compiled, _ = case
    matcher = compiled.matcher()
    for bad in (
        np.zeros((1, vocabulary.num_words + 1), np.int32), np.zeros((1, vocabulary.num_words), np.int64),
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


def test_rows_and_drafts_that_do_not_fit_the_matchers_are_refused(merged_compiler):
    matcher = merged_compiler.compile(GrammarSpec.json_object()).matcher()
    with pytest.raises(ValueError, match="rows"):
        fill_bitmask([matcher], [], allocate_bitmask(1, merged_compiler.vocabulary.size))
    with pytest.raises(ValueError, match="1 matchers, 2 drafts and 1 rows"):
        fill_draft_bitmask([matcher], [[1], [2]], [0], allocate_bitmask(4, merged_compiler.vocabulary.size))


RECORD = {
    **CLOSED,
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["date", "dates"]},
        "tags": {"type": "array", "items": {"const": "the name"}, "uniqueItems": True, "maxItems": 1},
    },
    "required": ["name", "kind", "tags"],
}
SPECS = {
    "json": GrammarSpec.json_schema(RECORD, "compact"),
    "grounded": GrammarSpec.json_schema(
        {"type": "array", "items": {"x-grounded": True, "type": "string"}, "minItems": 2},
        source="the date of",
    ),
    "regex": GrammarSpec.regex("(abc|abd)the name[0-9]日本"),
    "choice": GrammarSpec.choice(["in the name of", "in the date"]),
    "ebnf": GrammarSpec.ebnf('root ::= "the " ("name" | "nave") " of"'),
}


def find_forced_bytes(matcher, vocabulary):
    """Take single bytes as long as there is only one: slow and obvious."""
    text = b""
    while True:
        firsts = {vocabulary.token_bytes[i][:1] for i in allowed_tokens(matcher, vocabulary)}
        if len(firsts) != 1 or firsts == {b""}:
            matcher.rollback(len(text))
            return text
        (byte,) = firsts
        assert matcher.accept_token(byte[0])
        text += byte


@pytest.mark.parametrize("name", SPECS)
def test_forced_text_is_a_beginning_of_the_bytes_without_a_choice(merged_compiler, name):
    vocabulary = merged_compiler.vocabulary
    compiled = merged_compiler.compile(SPECS[name])
    for seed in range(choose_count(6, 15)):
        rng = random.Random(seed)
        matcher = compiled.matcher()
        for _ in range(40):
            before = allowed_tokens(matcher, vocabulary)
            assert find_forced_bytes(matcher, vocabulary).startswith(matcher.forced_text())
            assert allowed_tokens(matcher, vocabulary) == before
            if not before or not matcher.accept_token(choose(before, vocabulary, rng, is_free=True)):
                break
            if matcher.is_terminated():
                break
        assert matcher.forced_text() == b"" or not matcher.is_terminated()


def test_fixed_parts_of_a_text_are_forced_as_far_as_they_go(merged_compiler):
    matcher = merged_compiler.compile(SPECS["json"]).matcher()
    assert matcher.forced_text() == b'{"name":"'


@pytest.mark.parametrize("name", SPECS)
def test_the_masks_of_a_draft_are_those_of_its_tokens_taken_one_by_one(merged_compiler, name):
    vocabulary = merged_compiler.vocabulary
    compiled = merged_compiler.compile(SPECS[name])
    rng = random.Random(5)
    matchers, drafts, expected = [], [], []
    for number in range(6):
        reference = compiled.matcher()
        masks, draft = [], []
        for _ in range(2 * number):
            masks.append(allowed_tokens(reference, vocabulary))
            draft.append(choose(masks[-1], vocabulary, rng, is_free=True))
            assert reference.accept_token(draft[-1])
            if reference.is_terminated():
                break
        masks.append(allowed_tokens(reference, vocabulary))
        # A draft may contain forbidden tokens; tokens after the first are ignored.
        wrong = next(i for i in range(vocabulary.size) if i not in masks[-1])
        matchers.append(compiled.matcher())
        drafts.append([*draft, wrong, ord("a")])
        expected.append(masks)
    rows = [sum(len(draft) + 1 for draft in drafts[:i]) for i in range(len(drafts))]
    bitmask = allocate_bitmask(rows[-1] + len(drafts[-1]) + 1, vocabulary.size)
    accepted = fill_draft_bitmask(matchers, drafts, rows, bitmask)
    assert accepted == [len(masks) - 1 for masks in expected]
    for matcher, row, masks in zip(matchers, rows, expected, strict=True):
        for position, mask in enumerate(masks):
            bits = bitmask[row + position]
            assert [i for i in range(vocabulary.size) if bits[i >> 5] >> (i & 31) & 1] == mask
        assert allowed_tokens(matcher, vocabulary) == allowed_tokens(compiled.matcher(), vocabulary)
