"""The reasoning gate: any text up to a mark, then what a grammar of any kind allows."""

import random
from dataclasses import replace

import pytest

from grammar import GrammarCompiler, GrammarSpec, InvalidGrammar, Matcher, Reasoning, Vocabulary
from tests.grammar.vocabularies import BYTES, accepts, allowed_tokens, check_mask

OPEN, CLOSE = "<think>", "</think>"
# Two end tokens, the marks as special tokens, and tokens that cross the marks.
EOS, OPEN_ID, CLOSE_ID = 256, 257, 258
CROSSING = ["</", "think", ">\n", ">\n\n", ">{", "x</think>", "</think>\n\n", "</think>{", "\n\n", "<t", "hink>", "{}"]
VOCABULARY = Vocabulary(
    [*BYTES, b"<eos>", b"", b"", *(text.encode() for text in CROSSING)], [EOS],
    {OPEN: OPEN_ID, CLOSE: CLOSE_ID},
)
SPECS = {
    "json_schema": (GrammarSpec.json_schema({"type": "object", "maxProperties": 0}), "{}", "[]"),
    "regex": (GrammarSpec.regex("ab+"), "abb", "b"),
    "choice": (GrammarSpec.choice(["yes", "no"]), "yes", "maybe"),
    "lark": (GrammarSpec.lark('start: "x" /[0-9]/'), "x1", "y"),
    "csv": (GrammarSpec.csv({"n": ["a", "b"]}, has_header=False), "a", "c"),
    "xml": (GrammarSpec.xml({"name": "a", "text": "integer"}), "<a>1</a>", "<b"),
    "checked": (GrammarSpec.json_schema({"type": "array", "uniqueItems": True}), "[1, 2]", "[1, 1]"),
}


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(VOCABULARY)


def make_matcher(compiler: GrammarCompiler, kind: str, reasoning: Reasoning) -> Matcher:
    return compiler.compile(replace(SPECS[kind][0], reasoning=reasoning)).matcher()


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("is_open", [True, False])
def test_the_grammar_begins_after_the_reasoning(compiler, kind, is_open):
    _, right, wrong = SPECS[kind]
    gate = Reasoning(None if is_open else OPEN, CLOSE, allows_breaks=True)
    start = "" if is_open else OPEN
    for text, is_right in [
        (f"{start}so < it {{ is</thi {CLOSE}{right}", True), (f"{start}{CLOSE}\n\n{right}", True),
        (f"{start}{CLOSE}\n{right}", True), (f"{start}{CLOSE}\n\n\n{right}", False),
        (f"{start}so{CLOSE}{wrong}", False), (f"{start}so {right}", False), (right, not is_open),
    ]:
        assert accepts(make_matcher(compiler, kind, gate), VOCABULARY, text) == is_right, text


def test_without_breaks_the_value_follows_the_mark(compiler):
    gate = Reasoning(None, CLOSE, allows_breaks=False)
    assert accepts(make_matcher(compiler, "regex", gate), VOCABULARY, f"x{CLOSE}ab")
    assert not accepts(make_matcher(compiler, "regex", gate), VOCABULARY, f"x{CLOSE}\nab")


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("allows_breaks", [True, False])
def test_masks_tell_what_is_accepted_on_the_whole_way(compiler, is_open, allows_breaks):
    matcher = make_matcher(compiler, "json_schema", Reasoning(None if is_open else OPEN, CLOSE, allows_breaks))
    for token_id in [*([] if is_open else b"<think>"), *b"a </thin", ord("k"), ord(">"), *b"{", ord("}")]:
        allowed = check_mask(matcher, VOCABULARY)
        assert token_id in allowed
        assert (EOS in allowed) is matcher.is_completed()
        assert matcher.accept_token(token_id)
    assert check_mask(matcher, VOCABULARY) == {EOS}
    assert matcher.accept_token(EOS) and matcher.is_terminated()


def test_special_tokens_are_the_marks_and_no_other_may_be_written(compiler):
    matcher = make_matcher(compiler, "regex", Reasoning(OPEN, CLOSE, allows_breaks=True))
    assert {OPEN_ID, ord("<"), ord("a")} < set(allowed_tokens(matcher, VOCABULARY))
    assert matcher.accept_token(OPEN_ID)
    assert not matcher.accept_token(OPEN_ID) and not matcher.accept_token(EOS)
    assert matcher.accept_token(CLOSE_ID) and not matcher.is_completed()
    assert all(map(matcher.accept_token, [*b"\nab", EOS]))


def test_only_line_breaks_share_a_token_with_the_end(compiler):
    gate = Reasoning(None, CLOSE, allows_breaks=True)
    ids = {text: 259 + index for index, text in enumerate(CROSSING)}
    for before, right, wrong in [(b"", "</think>\n\n", "</think>{"), (b"</think", ">\n\n", ">{")]:
        matcher = make_matcher(compiler, "json_schema", gate)
        assert all(map(matcher.accept_token, before))
        allowed = allowed_tokens(matcher, VOCABULARY)
        assert ids[right] in allowed and ids[wrong] not in allowed
        assert not matcher.accept_token(ids[wrong])
        assert matcher.accept_token(ids[right]) and not matcher.accept_token(ord("\n"))
        assert matcher.accept_token(ids["{}"]) and matcher.is_completed()


@pytest.mark.parametrize("seed", range(4))
def test_rollback_leads_back_over_every_border(compiler, seed):
    gate = Reasoning(OPEN, CLOSE, allows_breaks=True)
    ids = [*b"<think>a</think>\n[1, 2]", EOS]
    rng, position = random.Random(seed), 0
    matcher = make_matcher(compiler, "checked", gate)
    masks: dict[int, list[int]] = {}
    for _ in range(200):
        known = masks.setdefault(position, allowed_tokens(matcher, VOCABULARY))
        assert allowed_tokens(matcher, VOCABULARY) == known
        if position < len(ids) and rng.random() < 0.6:
            assert matcher.accept_token(ids[position])
            position += 1
        else:
            count = rng.randint(0, position)
            matcher.rollback(count)
            position -= count
    with pytest.raises(ValueError, match="roll back"):
        matcher.rollback(position + 1)


def test_an_empty_mark_is_invalid():
    with pytest.raises(InvalidGrammar, match="not empty"):
        Reasoning(None, "", allows_breaks=True)
