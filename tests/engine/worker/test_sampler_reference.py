"""Edits of logits one at a time, any combination against the reference, and the distribution of the draws.

Distributions are compared by chi-square over 20,000 draws at different positions.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.actor_messages import NO_TOKEN_LEFT
from engine.sampling_params import SamplingParams
from tests.chi_square import compute_p_value
from tests.engine.worker.sampler_cases import (
    EOS,
    GREEDY,
    Case,
    add_case,
    edit_reference,
    make_logits,
    make_sampler,
    pack_mask,
    rank_reference,
    sample,
    sample_alone,
)
from tests.kernels import sampling_reference

# Each test is a right sampler's failure with this probability, once, when its fixed seed was chosen.
ALPHA = 1e-4
NUM_ROWS = 500
NUM_STEPS = 40
MASK = np.arange(60) % 3 > 0

PARAMS = {
    "temperature 1": SamplingParams(),
    "temperature 0.5": SamplingParams(temperature=0.5),
    "temperature 2": SamplingParams(temperature=2.0),
    "top_k": SamplingParams(top_k=7),
    "top_p": SamplingParams(top_p=0.7),
    "top_p of top_k": SamplingParams(top_k=12, top_p=0.6),
    "min_p": SamplingParams(min_p=0.1),
    "all filters": SamplingParams(temperature=1.3, top_k=30, top_p=0.9, min_p=0.05),
    "logit_bias": SamplingParams(logit_bias={4: 3.0, 5: -3.0, 59: 2.0}),
    "penalties": SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.7),
    "allowed_token_ids": SamplingParams(allowed_token_ids=(3, 9, 27, 44)),
}


def test_penalties_follow_the_tokens_sampled_since() -> None:
    case = Case(replace(GREEDY, frequency_penalty=1.0))
    sampler, logits = make_sampler([case], 3), torch.tensor([[3.0, 2.5, 0.4]])
    drawn = [int(sample(sampler, logits, [case]).token_ids[0]) for _ in range(6)]
    assert drawn == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("output", "is_forbidden"),
    [([], False), ([5], False), ([5, 6], True), ([6], False), ([5, 6, 6], False), ([9, 5, 6], True)],
)
def test_last_token_of_a_bad_word_is_forbidden_after_the_rest(output: list[int], is_forbidden: bool) -> None:
    logits = torch.zeros(10)
    logits[7] = 9.0
    case = Case(GREEDY, prompt=[5, 6], output=output, bad_words=[[5, 6, 7], [6, 6, 8]])
    assert (sample_alone(case, logits) != 7) == is_forbidden


def test_bad_words_follow_the_tokens_sampled_since() -> None:
    """The second request comes later, and its longer words make the kept tails grow."""
    first, second = Case(GREEDY, bad_words=[[1, 1]]), Case(GREEDY, bad_words=[[1, 1, 1, 1], [2, 1, 2]])
    sampler, logits = make_sampler([first, Case(GREEDY)], 3), torch.tensor([[0.0, 2.0, 1.0]])
    drawn = [sample(sampler, logits, [first]).token_ids.tolist()]
    add_case(sampler.state, 1, second)
    drawn += [sample(sampler, logits.repeat(2, 1), [first, second]).token_ids.tolist() for _ in range(6)]
    assert [tokens[0] for tokens in drawn] == [1, 2, 1, 2, 1, 2, 1]
    assert [tokens[1] for tokens in drawn[1:]] == [1, 1, 1, 2, 1, 1]


def test_a_row_of_many_words_comes_and_goes_beside_one_of_few() -> None:
    """It widens what is kept of all rows; its slot is taken over by a row of one word."""
    few, many = Case(GREEDY, bad_words=[[2, 1]]), Case(GREEDY, bad_words=[[2] * 9 + [1], [1, 2], [0, 0], [3]])
    sampler, logits = make_sampler([few, many], 4), torch.tensor([[0.0, 2.0, 1.0, 9.0], [0.0, 2.0, 1.0, 9.0]])
    assert sample(sampler, logits, [few, many]).token_ids.tolist() == [3, 1]
    assert sample(sampler, logits, [few, many]).token_ids.tolist() == [3, 1]
    one = Case(GREEDY, bad_words=[[3]])
    add_case(sampler.state, 1, one)
    assert [sample(sampler, logits, [few, one]).token_ids.tolist() for _ in range(2)] == [[3, 1]] * 2


def test_a_step_sends_nothing_of_the_words_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(GREEDY, bad_words=[[word % 9, 9, word % 8, word % 7] for word in range(100)])
    sampler = make_sampler([case], 10)
    sent: list[int] = []
    original = torch.from_numpy

    def note(array: np.ndarray) -> torch.Tensor:
        sent.append(array.size)
        return original(array)

    monkeypatch.setattr(torch, "from_numpy", note)
    sample(sampler, make_logits(1, 10), [case])
    assert sent
    assert max(sent) <= 2


def test_min_tokens_gives_way_where_the_grammar_only_ends() -> None:
    logits, params = make_logits(1, 40)[0], replace(GREEDY, min_tokens=3)
    ended = np.arange(40) == EOS
    assert sample_alone(Case(params, mask=ended), logits) == EOS
    assert sample_alone(Case(params, mask=ended | (np.arange(40) == 9)), logits) == 9
    assert sample_alone(Case(replace(params, allowed_token_ids=(EOS,))), logits) == NO_TOKEN_LEFT


NUMBERS = st.sampled_from([0.0, 0.0, -1.3, 0.4, 2.0])
TOKENS = st.integers(0, 11)


@st.composite
def make_cases(draw: st.DrawFn) -> Case:
    """Requests that combine any parameters over 12 tokens."""
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        top_k=draw(st.integers(0, 14)),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.5, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        presence_penalty=draw(NUMBERS),
        frequency_penalty=draw(NUMBERS),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.7])),
        logit_bias=draw(st.dictionaries(TOKENS, st.sampled_from([-100.0, -2.0, 3.5]), max_size=3)),
        allowed_token_ids=draw(st.none() | st.lists(TOKENS, min_size=1, max_size=8).map(tuple)),
        min_tokens=draw(st.integers(0, 4)),
        stop_token_ids=draw(st.lists(TOKENS, max_size=2).map(tuple)),
        ignore_eos=draw(st.booleans()),
    )
    return Case(
        params,
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        prompt=draw(st.lists(TOKENS, min_size=1, max_size=5)),
        output=draw(st.lists(st.integers(0, 3), max_size=6)),
        bad_words=draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=3)),
        mask=draw(st.none() | st.lists(st.booleans(), min_size=12, max_size=12).map(np.array)),
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(make_cases(), min_size=1, max_size=6), st.integers(0, 2**31))
def test_any_combination_equals_the_reference(cases: list[Case], logits_seed: int) -> None:
    """The fast noise is float32: where the reference's two best scores are closer, either may win."""
    logits = make_logits(len(cases), 12, seed=logits_seed)
    drawn = sample(make_sampler(cases, 12), logits, cases).token_ids.tolist()
    for case, row, token_id in zip(cases, logits, drawn, strict=True):
        ranked = rank_reference(case, row)
        near_best = {token for score, token in ranked if score > ranked[0][0] - 1e-4}
        assert token_id in (near_best or {NO_TOKEN_LEFT})


@settings(max_examples=50, deadline=None)
@given(make_cases(), st.integers(0, 2**31))
def test_edited_logits_have_the_bits_of_the_reference(case: Case, logits_seed: int) -> None:
    """Sampling overwrites the logits it was given with the edited ones."""
    logits = make_logits(1, 12, seed=logits_seed)
    edited = logits.clone()
    sampler = make_sampler([case], 12)
    case_without_mask = replace(case, mask=None)
    sampler.sample(edited, np.zeros(1, int), np.array([case.position]))
    np.testing.assert_array_equal(edited[0].numpy(), edit_reference(case_without_mask, logits[0]))


def count_draws(case: Case, logits: torch.Tensor, steps: int = NUM_STEPS) -> np.ndarray:
    """How often each token was drawn in `steps` x 500 draws; the requests' histories are held still."""
    sampler = make_sampler([case] * NUM_ROWS, len(logits))
    sampler.state.append = lambda rows, token_ids: None  # type: ignore[method-assign]
    rows = np.arange(NUM_ROWS)
    masks = None if case.mask is None else np.tile(pack_mask(case.mask), (NUM_ROWS, 1))
    counts = np.zeros(len(logits), np.int64)
    for step in range(steps):
        positions = step * NUM_ROWS + rows
        drawn = sampler.sample(logits.repeat(NUM_ROWS, 1), rows, positions, masks).token_ids
        counts += np.bincount(drawn.numpy(), minlength=len(logits))
    return counts


def expect(case: Case, logits: torch.Tensor) -> np.ndarray:
    params = case.params
    return sampling_reference.compute_probabilities(
        edit_reference(case, logits), params.temperature, params.top_k, params.top_p, params.min_p
    )


# Each kind with a mask or without; `make soak` draws with both.
@pytest.mark.parametrize(
    ("name", "mask"),
    [
        pytest.param(
            name, mask, id=f"{name}-{'free' if mask is None else 'masked'}",
            marks=[pytest.mark.soak] * ((number + (mask is None)) % 2),
        )
        for number, name in enumerate(PARAMS) for mask in (None, MASK)
    ],
)
def test_draws_follow_the_exact_distribution(name: str, mask: np.ndarray | None) -> None:
    logits = make_logits(1, 60, seed=4)[0]
    case = Case(PARAMS[name], seed=77, output=[4, 4, 8, 16], mask=mask)
    assert compute_p_value(count_draws(case, logits), expect(case, logits)) > ALPHA


def test_different_seeds_at_one_position_follow_the_distribution() -> None:
    logits = make_logits(1, 60, seed=5)[0]
    sampler = make_sampler([Case(SamplingParams(), seed=seed) for seed in range(5000)], 60)
    drawn = sampler.sample(logits.repeat(5000, 1), np.arange(5000), np.full(5000, 3)).token_ids
    counts = np.bincount(drawn.numpy(), minlength=60)
    assert compute_p_value(counts, expect(Case(SamplingParams()), logits)) > ALPHA


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(top_k=1500)])
def test_draws_over_a_large_vocabulary_follow_the_distribution(params: SamplingParams) -> None:
    """2,048 tokens take the candidate and the sort paths; tokens are pooled into hundredths of the mass."""
    logits = make_logits(1, 2048, seed=6)[0]
    probabilities = expect(Case(params), logits)
    counts = count_draws(Case(params, seed=78), logits, steps=4)
    assert not counts[probabilities == 0].any()
    order = np.argsort(-probabilities, kind="stable")
    groups = np.minimum((np.cumsum(probabilities[order]) * 100).astype(int), 99)
    pooled = [np.bincount(groups, weights=values[order], minlength=100) for values in (counts, probabilities)]
    assert compute_p_value(pooled[0], pooled[1]) > ALPHA


def test_successive_draws_of_one_request_are_independent() -> None:
    """A row's draw depends on its seed and position alone, so rows may stand for the steps."""
    sampler = make_sampler([Case(SamplingParams(), seed=79)] * 4000, 8)
    drawn = sampler.sample(torch.zeros(4000, 8), np.arange(4000), np.arange(4000)).token_ids.tolist()
    pairs = np.bincount(np.array(drawn[:-1]) * 8 + drawn[1:], minlength=64)
    assert compute_p_value(pairs, np.full(64, 1 / 64)) > ALPHA
