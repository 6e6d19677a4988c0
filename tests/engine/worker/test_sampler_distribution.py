"""Draws have the distribution the parameters ask for: chi-square over 20,000 draws at different positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.sampling_params import SamplingParams
from kernels import sampling_reference
from tests.chi_square import compute_p_value
from tests.engine.worker.sampler_cases import Case, edit_reference, make_logits, make_sampler, pack_mask

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


def count_draws(case: Case, logits: torch.Tensor, steps: int = NUM_STEPS) -> np.ndarray:
    """How often each token was drawn in `steps` x 500 draws; the requests' histories are held still."""
    sampler = make_sampler([case] * NUM_ROWS, len(logits))
    sampler.state.append = lambda rows, token_ids: None  # type: ignore[method-assign]
    rows = np.arange(NUM_ROWS)
    masks = None if case.mask is None else np.tile(pack_mask(case.mask), (NUM_ROWS, 1))
    counts = np.zeros(len(logits), np.int64)
    for step in range(steps):
        positions = step * NUM_ROWS + rows
        drawn = sampler.sample(logits.repeat(NUM_ROWS, 1), rows, positions, masks, rows).token_ids
        counts += np.bincount(drawn.numpy(), minlength=len(logits))
    return counts


def expect(case: Case, logits: torch.Tensor) -> np.ndarray:
    params = case.params
    return sampling_reference.compute_probabilities(
        edit_reference(case, logits), params.temperature, params.top_k, params.top_p, params.min_p
    )


@pytest.mark.parametrize("mask", [None, MASK], ids=["free", "masked"])
@pytest.mark.parametrize("name", PARAMS)
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
