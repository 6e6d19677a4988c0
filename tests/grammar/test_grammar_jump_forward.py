"""Jump-forward and drafts: what is forced is found, and what was tried leaves no trace."""

import random

import pytest

from grammar import GrammarSpec, JumpForward, allocate_bitmask, fill_draft_bitmask
from tests.grammar.vocabularies import EOS, allowed_tokens, choose

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["date", "dates"]},
        "tags": {"type": "array", "items": {"const": "the name"}, "uniqueItems": True, "maxItems": 1},
    },
    "required": ["name", "kind", "tags"],
    "additionalProperties": False,
}
SPECS = {
    "json": GrammarSpec.json_schema(RECORD, "compact"),
    "grounded": GrammarSpec.json_schema(
        {"type": "array", "items": {"type": "string", "x-grounded": True}, "minItems": 2},
        source="the date of",
    ),
    "regex": GrammarSpec.regex("(abc|abd)the name[0-9]日本"),
    "choice": GrammarSpec.choice(["in the name of", "in the date"]),
    "ebnf": GrammarSpec.ebnf('root ::= "the " ("name" | "nave") " of"'),
}


@pytest.fixture
def jump(merged_compiler):
    """A jump-forward whose tokenizer takes the longest token."""
    ids = {
        token: i for i, token in reversed(list(enumerate(merged_compiler.vocabulary.token_bytes))) if token
    }

    def encode(text):
        found = []
        while text:
            length = next(n for n in range(min(len(text), 20), 0, -1) if text[:n] in ids)
            found.append(ids[text[:length]])
            text = text[length:]
        return found

    return JumpForward(merged_compiler.vocabulary, encode)


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
def test_exactly_the_bytes_without_a_choice_are_forced(merged_compiler, jump, name):
    vocabulary = merged_compiler.vocabulary
    compiled = merged_compiler.compile(SPECS[name])
    num_forced = 0
    for seed in range(15):
        rng = random.Random(seed)
        matcher = compiled.matcher()
        for _ in range(40):
            before = allowed_tokens(matcher, vocabulary)
            forced = jump.find_text(matcher)
            num_forced += len(forced)
            assert forced == find_forced_bytes(matcher, vocabulary)
            assert allowed_tokens(matcher, vocabulary) == before
            if not before or not matcher.accept_token(choose(before, vocabulary, rng, is_free=True)):
                break
            if matcher.is_terminated():
                break
    assert num_forced > 20


@pytest.mark.parametrize("name", SPECS)
def test_forced_tokens_spell_forced_text_and_no_allowed_token_reaches_over_their_end(
    merged_compiler, jump, name
):
    vocabulary = merged_compiler.vocabulary
    matcher = merged_compiler.compile(SPECS[name]).matcher()
    rng = random.Random(3)
    num_found = 0
    for _ in range(60):
        forced, found = jump.find_text(matcher), jump.find_tokens(matcher)
        position = 0
        for token_id in found:
            longest = max(len(vocabulary.token_bytes[i]) for i in allowed_tokens(matcher, vocabulary))
            assert longest <= len(forced) - position
            assert forced.startswith(vocabulary.token_bytes[token_id], position)
            assert matcher.accept_token(token_id)
            position += len(vocabulary.token_bytes[token_id])
        num_found += len(found)
        assert matcher.accept_token(
            choose(allowed_tokens(matcher, vocabulary), vocabulary, rng, is_free=False)
        )
        if matcher.is_terminated():
            break
    assert num_found


def test_the_quote_of_a_string_is_left_to_the_model(merged_compiler, jump):
    vocabulary = merged_compiler.vocabulary
    matcher = merged_compiler.compile(SPECS["json"]).matcher()
    assert jump.find_text(matcher) == b'{"name":"'
    # `","` would begin with the quote too and go on with an empty name, so the quote is no token of its own yet.
    assert b"".join(vocabulary.token_bytes[i] for i in jump.find_tokens(matcher)) == b'{"name":'


def test_nothing_is_forced_at_the_end_of_a_text(merged_compiler, jump):
    matcher = merged_compiler.compile(GrammarSpec.choice(["ab", "abc"])).matcher()
    assert matcher.accept_token(ord("a")) and matcher.accept_token(ord("b"))
    assert jump.find_tokens(matcher) == []
    assert matcher.accept_token(EOS) and jump.find_tokens(matcher) == []


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
        # What a model drafts may well be refused; what comes after that is not looked at.
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


def test_drafts_that_do_not_fit_the_matchers_are_refused(merged_compiler):
    matcher = merged_compiler.compile(SPECS["choice"]).matcher()
    with pytest.raises(ValueError, match="1 matchers, 2 drafts and 1 rows"):
        fill_draft_bitmask([matcher], [[1], [2]], [0], allocate_bitmask(4, merged_compiler.vocabulary.size))
