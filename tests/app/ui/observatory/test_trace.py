"""A trace counts what the mask allowed by replaying it, against the slow way: trying every token."""

import string
from types import SimpleNamespace
from typing import Any

from app.ui.observatory.trace import Tracer, list_allowed
from engine import Logprob, TokenLogprobs
from grammar import GrammarCompiler, GrammarSpec, Vocabulary, allocate_bitmask

TOKENS = [*string.printable[:95], "true", ""]
EOS = len(TOKENS) - 1


class ByteTokenizer:
    """A token a character, one word, and an end."""

    eos_token_ids = (EOS,)

    def token_bytes(self, vocab_size: int) -> list[bytes]:
        return [token.encode() for token in TOKENS]

    def token_text(self, token_id: int) -> str:
        return TOKENS[token_id]


def make_tracer() -> Tracer:
    engine: Any = SimpleNamespace(
        tokenizer=ByteTokenizer(), model_config=SimpleNamespace(vocab_size=len(TOKENS))
    )
    return Tracer(engine)


def make_position(token_id: int) -> TokenLogprobs:
    rivals = tuple(
        Logprob(each, -1.0, rank, TOKENS[each], -0.5)
        for rank, each in enumerate((token_id, TOKENS.index("x")), 1)
    )
    return TokenLogprobs(Logprob(token_id, -0.25, 1, TOKENS[token_id], 0.0), rivals)


def test_allowed_tokens_are_those_the_matcher_would_accept() -> None:
    spec = GrammarSpec.regex("(yes|no|true)!?")
    vocabulary = Vocabulary([token.encode() for token in TOKENS], (EOS,))
    matcher = GrammarCompiler(vocabulary).compile(spec).matcher()
    bitmask = allocate_bitmask(1, len(TOKENS))
    matcher.fill_next_token_bitmask(bitmask)
    by_trial = []
    for token_id in range(len(TOKENS)):
        fresh = GrammarCompiler(vocabulary).compile(spec).matcher()
        if fresh.accept_token(token_id):
            by_trial.append(token_id)
    assert list_allowed(bitmask[0], len(TOKENS)) == by_trial
    assert [TOKENS[token_id] for token_id in by_trial] == ["n", "t", "y", "true"]


def test_every_step_has_its_mask_and_its_rivals() -> None:
    ids = [TOKENS.index(char) for char in "no"] + [EOS]
    steps = make_tracer().trace(
        GrammarSpec.regex("yes|no"), ids, [make_position(token_id) for token_id in ids]
    )
    assert [step["num_allowed"] for step in steps] == [2, 1, 1]
    assert [step["is_forced"] for step in steps] == [False, True, True]
    assert steps[0]["allowed"] == ["n", "y"] and steps[0]["vocab_size"] == len(TOKENS)
    assert [each["allowed"] for each in steps[0]["top"]] == [True, False]
    assert steps[0]["p"] == 0.7788 and steps[0]["pm"] == 1.0


def test_a_token_the_grammar_refuses_ends_the_trace() -> None:
    ids = [TOKENS.index("x"), TOKENS.index("n")]
    steps = make_tracer().trace(GrammarSpec.regex("no"), ids, [make_position(token_id) for token_id in ids])
    assert len(steps) == 1
