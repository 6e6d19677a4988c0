"""Drafts from a grammar: forced text in the tokenizer's own tokens, cut drafts, and limits that end no request."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import LLM, EngineConfig, RequestOutput, SamplingParams
from engine.core.actor_messages import (
    DraftTarget,
    FillMasks,
    FindDrafts,
    GrammarFailed,
    MaskTarget,
    StepMasks,
)
from engine.core.grammar_manager import GrammarManager
from engine.input.tokenizer import Tokenizer
from engine.spec.forced import ForcedDrafts
from grammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarSpec,
    Matcher,
    OuterMatcher,
    Vocabulary,
    fill_draft_bitmask,
)

SCHEMA = {
    "type": "object",
    "properties": {"identifier": {"type": "integer"}, "description": {"enum": ["some text", "another"]}},
    "required": ["identifier", "description"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(EngineConfig().model)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    size = tokenizer.vocab_size
    return GrammarCompiler(Vocabulary(tokenizer.token_bytes(size), [2], tokenizer.special_tokens(size)))


@pytest.fixture
def forced(tokenizer: Tokenizer, compiler: GrammarCompiler) -> ForcedDrafts:
    return ForcedDrafts(compiler.vocabulary, lambda text: tokenizer.encode(text, add_special_tokens=False))


def walk(matcher: Matcher, token_ids: list[int]) -> None:
    for token_id in token_ids:
        assert matcher.accept_token(token_id)


def test_forced_tokens_continue_the_canonical_text(
    tokenizer: Tokenizer, compiler: GrammarCompiler, forced: ForcedDrafts
) -> None:
    answer = json.dumps({"identifier": 7, "description": "another"})
    ids = tokenizer.encode(answer, add_special_tokens=False)
    matcher = compiler.compile(GrammarSpec.json_schema(SCHEMA)).matcher()
    num_forced = 0
    for done in range(len(ids)):
        found = forced.answer(matcher, DraftTarget(1, "", [], ids[max(0, done - 4) : done], 8))
        if found.token_ids:
            assert found.source == "forced"
            assert found.token_ids == ids[done : done + len(found.token_ids)]
            num_forced = max(num_forced, len(found.token_ids))
        walk(matcher, [ids[done]])
    assert num_forced >= 2


def test_the_last_forced_token_continues_into_what_is_allowed_next(
    tokenizer: Tokenizer, compiler: GrammarCompiler, forced: ForcedDrafts
) -> None:
    matcher = compiler.compile(GrammarSpec.regex('"name": ("[a-z]{1,9}"|null)')).matcher()
    merged = tokenizer.encode('"name": "', add_special_tokens=False)
    plain = tokenizer.encode('"name": ', add_special_tokens=False)
    assert merged[: len(plain)] != plain
    assert forced.answer(matcher, DraftTarget(1, "", [], [], 8)).token_ids == merged
    number = compiler.compile(GrammarSpec.regex('"name": [1-9]')).matcher()
    assert forced.answer(number, DraftTarget(1, "", [], [], 8)).token_ids == plain


def test_other_drafts_are_cut_where_the_grammar_forbids_them(
    tokenizer: Tokenizer, compiler: GrammarCompiler, forced: ForcedDrafts
) -> None:
    matcher = compiler.compile(GrammarSpec.regex("[a-z ]{1,40}[0-9]")).matcher()
    good = tokenizer.encode("some words", add_special_tokens=False)
    bad = tokenizer.encode("?", add_special_tokens=False)
    answer = forced.answer(matcher, DraftTarget(1, "ngram", [*good, *bad, *good], [], 8))
    assert (answer.source, answer.token_ids) == ("ngram", good)
    walk(matcher, good)  # the matcher is where it was


class Fragile(OuterMatcher):
    """A matcher that breaks at some token, as one does that meets its limits, until it is renewed."""

    is_renewable = True
    error: str | None = None

    def __init__(self, compiled: CompiledGrammar, poison: int) -> None:
        super().__init__(compiled.matcher())
        self._compiled, self._poison = compiled, poison
        self._taken: list[int] = []
        self._num_renewed_at = -1

    def renew(self) -> bool:
        if self._num_renewed_at == len(self._taken):
            return False
        self._num_renewed_at = len(self._taken)
        self.inner, self.error = self._compiled.matcher(), None
        return all(self.inner.accept_token(token_id) for token_id in self._taken)

    def _take(self, token_id: int) -> bool:
        if token_id == self._poison:
            self.error = "the limit was met"
        is_taken = self.error is None and self.inner.accept_token(token_id)
        self._taken += [token_id] * is_taken
        return is_taken

    def write_row(self, words: np.ndarray) -> None:
        if self.error is not None:
            words[:] = 0

    def _take_back(self, num_tokens: int) -> None:
        del self._taken[len(self._taken) - num_tokens :]
        self.inner.rollback(num_tokens)


def test_a_limit_that_a_draft_meets_ends_no_request(
    tokenizer: Tokenizer, compiler: GrammarCompiler, forced: ForcedDrafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.core.grammar_manager.SLOW_MASK_S", 60.0)  # on a busy machine, too
    compiled = compiler.compile(GrammarSpec.regex("[a-z ]{1,40}[0-9]"))
    start, good = (tokenizer.encode(text, add_special_tokens=False) for text in ("so", "me"))
    poison = tokenizer.encode("w", add_special_tokens=False)[0]

    fragile: Any = Fragile(compiled, poison)
    manager = GrammarManager(compiler.vocabulary.size)
    assert manager.open(1, fragile, start) == []

    def fill(order: FillMasks) -> tuple[StepMasks, list[GrammarFailed]]:
        masks, failed, begun = manager.fill(order)
        for apart in begun:
            apart.fill()
            masks, failed, _ = manager.finish(apart)
        return masks, failed

    masks, failed = fill(FillMasks(0, [], [MaskTarget(0, 1, [*good, poison])]))
    assert failed == []
    expected = compiled.matcher()
    walk(expected, start)
    right = np.zeros((1 + len(good), masks.bitmask.shape[1]), dtype=np.int32)
    fill_draft_bitmask([expected], [good], [0], right)
    assert (masks.bitmask[:-1] == right).all() and not masks.bitmask[-1].any()
    fill(FillMasks(1, [(1, good[0])], []))
    answers = manager.find_drafts(FindDrafts([DraftTarget(1, "ngram", [poison], [], 4)]), forced)
    assert answers == [DraftTarget(1, "", [])]
    masks, failed = fill(FillMasks(2, [], [MaskTarget(0, 1)]))
    assert failed == [] and masks.bitmask.any()
    # A limit that the request itself meets still ends it.
    _, failed = fill(FillMasks(3, [(1, poison)], [MaskTarget(0, 1)]))
    assert [each.finish_reason for each in failed] == ["dead_end"]


def count_sources(output: RequestOutput) -> Counter[str]:
    """How many tokens were accepted from the drafts of each source."""
    entries = output.outputs[0].logprobs or []
    return Counter(each.draft_source for each in entries if each.draft_source is not None)


def test_forced_drafts_are_accepted_in_an_extraction(make_llm: Callable[..., LLM]) -> None:
    prompt = list(range(20, 60))
    params = SamplingParams(max_tokens=60, seed=3, logprobs=0, grammar=GrammarSpec.json_schema(SCHEMA))
    with (make_llm() as plain, make_llm(speculative_config={"method": "forced", "adaptive": False}) as drafting):
        expected = plain.generate(prompt, params)[0]
        found = drafting.generate(prompt, params)[0]
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        num_drafted, num_accepted = found.metrics.drafts["forced"]
        assert num_accepted > 0
        assert [count_sources(each) for each in (found, expected)] == [{"forced": num_accepted}, {}]
        counts = drafting.stats().drafts["forced"]
        assert (counts.num_draft_tokens, sum(counts.accepted_per_position)) == (num_drafted, num_accepted)
        assert drafting.stats().num_steps < plain.stats().num_steps
