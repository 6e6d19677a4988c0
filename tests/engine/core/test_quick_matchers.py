"""Quick matchers: tokens are checked after they are drawn, and no text changes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.config_fields import DEMO_MODEL
from engine.core.quick_matchers import OpenMatcher, QuickMatchers, is_drawn_alike
from engine.worker.sampling.sampler import Sampler
from grammar import GrammarCompiler, GrammarSpec, Matcher
from grammar.backend import NUM_QUICK
from tests.grammar.vocabularies import EOS, make_byte_vocabulary

SCHEMA = {
    "type": "array", "minItems": 2, "maxItems": 3,
    "items": {
        "type": "object", "properties": {"name": {"type": "string", "maxLength": 6}, "count": {"type": "integer"}},
        "required": ["name", "count"], "additionalProperties": False,
    },
}  # fmt: skip


def make_matcher(num_quick: int = NUM_QUICK) -> Matcher:
    matcher = GrammarCompiler(make_byte_vocabulary()).compile(GrammarSpec.regex("ab+")).matcher()
    matcher.usage.num_quick = num_quick
    return matcher


@pytest.mark.parametrize(
    ("changes", "is_alike"),
    [
        ({}, True), ({"temperature": 0.0, "top_p": 0.5}, True), ({"top_k": 1, "min_p": 0.5}, True),
        ({"top_p": 0.9}, False), ({"top_k": 40}, False), ({"min_p": 0.1}, False), ({"logprobs": 0}, False),
        ({"min_tokens": 2}, False), ({"bad_words": ["a"]}, False), ({"logit_bias": {3: 1.0}}, False),
        ({"allowed_token_ids": [3]}, False), ({"presence_penalty": 1.0}, False), ({"frequency_penalty": 1.0}, False),
        ({"repetition_penalty": 1.1}, False),
    ],
)  # fmt: skip
def test_only_draws_that_no_mask_changes_are_checked_afterwards(changes: dict[str, object], is_alike: bool) -> None:
    assert is_drawn_alike(SamplingParams(**changes)) == is_alike  # type: ignore[arg-type]


def test_a_program_is_quick_after_a_row_of_quick_masks() -> None:
    matcher = make_matcher(NUM_QUICK - 1)
    assert not matcher.is_quick()
    matcher.usage.note_mask(0.0001)
    assert matcher.is_quick()
    matcher.usage.note_mask(0.01)
    assert not matcher.is_quick()


def test_a_matcher_whose_program_is_slow_moves_to_the_grammar_thread() -> None:
    quick, matcher = QuickMatchers(), make_matcher()
    quick.open(1, matcher)
    quick.open(2, make_matcher())
    assert not quick.accept(1, ord("b"), ord("b")), "the text begins with a"
    assert not quick.accept(1, ord("a"), ord("b")), "the likeliest token is forbidden"
    quick.fill([1])
    matcher.usage.note_mask(0.01)
    quick.take(1, ord("a"))
    assert quick.take_given_up() == [OpenMatcher(1, matcher)] and quick.take_given_up() == []
    assert quick.drop([1, 2]) == [1] and quick.drop([1, 2]) == []
    assert matcher.accept_token(ord("b")), "it has taken the first token"


def test_a_token_that_the_matcher_refuses_after_all_is_passed_on() -> None:
    quick, matcher = QuickMatchers(), make_matcher()
    quick.open(1, matcher)
    quick.take(1, -2)
    assert quick.take_given_up() == []
    quick.take(1, EOS)
    assert quick.take_given_up() == [OpenMatcher(1, matcher, [EOS])]


@pytest.mark.skipif(not (Path(DEMO_MODEL) / "model.safetensors").exists(), reason="the demo model has no weights")
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_checked_rows_have_the_same_texts_as_masked_ones(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Some rows are plain, and some need a mask before the draw."""
    grammar = GrammarSpec.json_schema(SCHEMA)
    params = [
        SamplingParams(
            max_tokens=40, temperature=temperature, seed=seed, ignore_eos=seed % 2 == 0,
            grammar=None if seed % 4 == 3 else grammar, top_k=5 if seed % 4 == 2 else 0,
        )
        for seed in range(8)
    ]  # fmt: skip
    num_masked = [0]  # rows, by run; the start comes first
    sample = Sampler.sample

    def count(self: Sampler, logits, rows, positions, bitmask=None, is_right=None):  # type: ignore[no-untyped-def]
        num_masked[-1] += 0 if bitmask is None else len(rows)
        return sample(self, logits, rows, positions, bitmask, is_right)

    monkeypatch.setattr(Sampler, "sample", count)
    opened: list[OpenMatcher] = []
    monkeypatch.setattr("engine.core.quick_matchers.QuickMatchers.open", note(opened, QuickMatchers.open))
    texts = []
    with LLM(max_num_seqs=8, max_model_len=256) as llm:
        for _ in range(3):
            num_masked.append(0)
            outputs = llm.generate(["The animals are: "] * 8, params, use_tqdm=False)
            texts.append([(each.outputs[0].token_ids, each.outputs[0].finish_reason) for each in outputs])
    assert texts[0] == texts[1] == texts[2]
    assert len(opened) >= 4, "the first requests have shown that the grammar is quick"
    assert num_masked[3] < num_masked[1]


def note(opened: list[OpenMatcher], function: Callable[..., None]) -> Callable[..., None]:
    def noted(self: QuickMatchers, handle: int, matcher: Matcher) -> None:
        opened.append(OpenMatcher(handle, matcher))
        function(self, handle, matcher)

    return noted
