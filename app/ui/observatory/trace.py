"""A trace of one request's masks: for each step, the tokens that the grammar allowed and the sampled one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from engine import Engine, Logprob, TokenLogprobs
from grammar import GrammarCompiler, GrammarSpec, Vocabulary, allocate_bitmask

NUM_TOP = 10
MAX_LISTED = 24

Step = dict[str, Any]


class Tracer:
    """Replays the tokens of a request against its grammar, with the engine's own vocabulary."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._compiler: GrammarCompiler | None = None

    def trace(
        self, spec: GrammarSpec, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> list[Step]:
        """Return one step per token; slow, so call it in a thread.

        Raises:
            GrammarError: the grammar cannot be used.
        """
        if self._compiler is None:
            self._compiler = self._make_compiler()
        vocab_size = self.engine.model_config.vocab_size
        matcher = self._compiler.compile(spec).matcher()
        bitmask = allocate_bitmask(1, vocab_size)
        steps = []
        for token_id, position in zip(token_ids, logprobs, strict=False):
            matcher.fill_next_token_bitmask(bitmask)
            allowed = list_allowed(bitmask[0], vocab_size)
            steps.append(self._describe(position, allowed, vocab_size))
            if not matcher.accept_token(token_id):
                break
        return steps

    def _make_compiler(self) -> GrammarCompiler:
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise RuntimeError("a trace needs a tokenizer")
        vocab_size = self.engine.model_config.vocab_size
        ends = [token_id for token_id in tokenizer.eos_token_ids if token_id < vocab_size]
        return GrammarCompiler(Vocabulary(tokenizer.token_bytes(vocab_size), ends))

    def _describe(self, position: TokenLogprobs, allowed: list[int], vocab_size: int) -> Step:
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None, "there is one once there is a compiler"
        is_allowed = set(allowed)
        step = describe_position(position)
        for each, top in zip(step["top"], position.top, strict=True):
            each["allowed"] = top.token_id in is_allowed
        listed = allowed[:MAX_LISTED]
        return step | {
            "num_allowed": len(allowed),
            "vocab_size": vocab_size,
            "allowed": [tokenizer.token_text(token_id) for token_id in listed],
            "is_forced": len(allowed) == 1,
        }


def list_allowed(words: Any, vocab_size: int) -> list[int]:
    """Return the token ids whose bit is set in one row of a bitmask."""
    return [
        32 * index + bit
        for index, word in enumerate(words.tolist())
        if word
        for bit in range(32)
        if word >> bit & 1 and 32 * index + bit < vocab_size
    ]


def describe_position(position: TokenLogprobs) -> Step:
    """Return the sampled token and its alternatives, with probabilities before and after the mask."""
    return {
        **_describe_token(position.token),
        "rank": position.token.rank,
        "source": position.draft_source,
        "top": [_describe_token(each) for each in position.top],
    }


def _describe_token(token: Logprob) -> Step:
    masked = token.masked_logprob
    return {
        "text": token.decoded_token,
        "p": _to_probability(token.logprob),
        "pm": None if masked is None else _to_probability(masked),
    }


def _to_probability(logprob: float) -> float:
    return round(math.exp(logprob), 5) if logprob > -math.inf else 0.0
