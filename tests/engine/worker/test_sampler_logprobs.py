"""Log-probabilities: of the raw distribution and under the mask, with ranks, for the rows that ask."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.outputs import Logprob, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.worker.sampling.logprobs import compute_prompt_logprobs
from kernels.sampling_reference import compute_logprobs
from tests.engine.worker.sampler_cases import Case, make_logits, make_sampler, sample

VOCAB = 300


def sample_logprobs(cases: list[Case], logits: torch.Tensor) -> tuple[list[int], dict[int, TokenLogprobs]]:
    result = sample(make_sampler(cases, logits.shape[1]), logits, cases)
    assert result.logprobs is not None
    return result.token_ids.tolist(), result.logprobs.to_lists()


def check_entry(entry: Logprob, token_id: int, logits: torch.Tensor, mask: np.ndarray | None) -> None:
    order = np.argsort(-logits.numpy(), kind="stable").tolist()
    assert (entry.token_id, entry.rank) == (token_id, order.index(token_id) + 1)
    assert entry.logprob == pytest.approx(compute_logprobs(logits.numpy())[token_id], abs=1e-5)
    if mask is None:
        assert entry.masked_logprob is None
    else:
        expected = compute_logprobs(logits.numpy(), mask)[token_id]
        assert entry.masked_logprob == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("mask", [None, np.arange(VOCAB) % 4 == 1], ids=["free", "masked"])
def test_logprobs_are_of_the_distribution_before_all_steps(num_top: int, mask: np.ndarray | None) -> None:
    params = SamplingParams(temperature=0.3, repetition_penalty=3.0, logit_bias={9: 50.0}, logprobs=num_top)
    logits = make_logits(1, VOCAB)
    token_ids, found = sample_logprobs([Case(params, mask=mask)], logits)
    assert token_ids == [9]
    check_entry(found[0].token, 9, logits[0], mask)
    best = np.argsort(-logits[0].numpy(), kind="stable")[:num_top].tolist()
    assert len(found[0].top) == num_top
    for entry, token_id in zip(found[0].top, best, strict=True):
        check_entry(entry, token_id, logits[0], mask)


def test_only_rows_that_ask_are_answered_each_with_its_own_count() -> None:
    counts = [None, 3, None, 0, 20, None]
    masks = [None, None, np.arange(VOCAB) > 9, np.arange(VOCAB) > 9, np.arange(VOCAB) > 99, None]
    cases = [Case(SamplingParams(logprobs=n), mask=m) for n, m in zip(counts, masks, strict=True)]
    logits = make_logits(6, VOCAB)
    token_ids, found = sample_logprobs(cases, logits)
    assert sorted(found) == [1, 3, 4]
    for place, entry in found.items():
        assert len(entry.top) == counts[place]
        check_entry(entry.token, token_ids[place], logits[place], masks[place])


def test_equal_tokens_rank_by_id() -> None:
    case = Case(SamplingParams(temperature=0, logprobs=3, allowed_token_ids=(7,)))
    _, found = sample_logprobs([case], torch.zeros(1, 10))
    assert found[0].token.rank == 8
    assert [entry.token_id for entry in found[0].top] == [0, 1, 2]


def test_forbidden_alternative_has_no_masked_probability() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    _, found = sample_logprobs([Case(SamplingParams(logprobs=1), mask=np.arange(3) > 0)], logits)
    assert found[0].top[0].token_id == 0
    assert found[0].top[0].masked_logprob == -np.inf


def test_logprobs_of_a_row_have_the_same_bits_in_any_batch() -> None:
    masks = [np.arange(2777) > i if i % 2 else None for i in range(40)]
    cases = [Case(SamplingParams(logprobs=4), seed=i, mask=mask) for i, mask in enumerate(masks)]
    logits = make_logits(40, 2777)
    _, together = sample_logprobs(cases, logits)
    for place, case in enumerate(cases):
        assert sample_logprobs([case], logits[place : place + 1])[1][0] == together[place]


def test_alternatives_are_no_more_than_the_vocabulary() -> None:
    _, found = sample_logprobs([Case(SamplingParams(logprobs=20))], torch.zeros(1, 5))
    assert len(found[0].top) == 5


def test_packed_words_on_the_host_give_the_same_lists() -> None:
    cases = [Case(SamplingParams(logprobs=2))]
    result = sample(make_sampler(cases, VOCAB), make_logits(1, VOCAB), cases).logprobs
    assert result is not None
    assert result.packed.dtype == torch.int32
    assert result.to_lists(result.packed.numpy()) == result.to_lists()


@pytest.mark.parametrize("num_top", [0, 2])
def test_prompt_logprobs_are_of_the_tokens_that_follow(num_top: int) -> None:
    logits = make_logits(400, VOCAB)
    next_ids = np.arange(400) % VOCAB
    found = compute_prompt_logprobs(logits, torch.from_numpy(next_ids), num_top).to_lists()
    assert len(found) == 400
    for place in (0, 1, 218, 219, 399):
        check_entry(found[place].token, int(next_ids[place]), logits[place], None)
        assert len(found[place].top) == num_top
