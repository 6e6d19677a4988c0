"""The sampler's promises: seeds, batches, order, resumption, masks, greedy, broken rows, log-probabilities."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.core.actor_messages import NO_TOKEN_LEFT
from engine.outputs import Logprob, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.worker.sampling.logprobs import compute_prompt_logprobs
from engine.worker.sampling.state import SamplingState
from tests.engine.worker.sampler_cases import (
    GREEDY,
    Case,
    add_case,
    make_logits,
    make_sampler,
    read_logprobs,
    sample,
    sample_alone,
)
from tests.kernels.sampling_reference import compute_logprobs

VOCAB = 1100

PARAMS = [
    GREEDY, SamplingParams(temperature=0.8), SamplingParams(temperature=1.2, min_p=0.02), SamplingParams(top_p=0.8),
    SamplingParams(top_k=7, top_p=0.9), SamplingParams(top_k=1050, top_p=0.99),
    SamplingParams(repetition_penalty=1.4, presence_penalty=0.4, frequency_penalty=-0.3),
    SamplingParams(logit_bias={5: 4.0, 9: -4.0}, min_tokens=9, stop_token_ids=(8,)),
    SamplingParams(temperature=0, allowed_token_ids=(3, 4, 5, 6), logprobs=2),
    SamplingParams(bad_words=("x",), frequency_penalty=0.5, logprobs=0),
]


def make_cases(count: int) -> list[Case]:
    """Requests of every kind, each with its own seed, prompt and output."""
    return [
        Case(
            PARAMS[i % len(PARAMS)],
            seed=1000 - i,
            prompt=range(i + 1),
            output=[3, i % 7, 3],
            bad_words=[[4], [3, 11], [5, 3, 12]] if PARAMS[i % len(PARAMS)].bad_words else (),
            mask=np.arange(VOCAB) % 3 > 0 if i % 5 == 0 else None,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("order_seed", [0, 1, 2])
def test_token_of_a_row_is_the_same_alone_and_in_any_batch(order_seed: int) -> None:
    cases, logits = make_cases(32), make_logits(32, VOCAB)
    alone = [sample_alone(case, row) for case, row in zip(cases, logits, strict=True)]
    order = np.random.default_rng(order_seed).permutation(32)
    rows = np.random.default_rng(order_seed + 9).permutation(40)[:32].tolist()
    shuffled = [cases[i] for i in order]
    sampler = make_sampler(shuffled, VOCAB, rows)
    drawn = sample(sampler, logits[torch.from_numpy(order)], shuffled, rows).token_ids
    assert drawn.tolist() == [alone[i] for i in order]


def test_seed_and_position_change_the_noise() -> None:
    logits = make_logits(1, VOCAB)[0]
    case = Case(SamplingParams(), seed=5)
    by_seed = {sample_alone(replace(case, seed=seed), logits) for seed in range(20)}
    by_position = {sample_alone(replace(case, prompt=range(size)), logits) for size in range(1, 21)}
    assert len(by_seed) > 5
    assert len(by_position) > 5


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1])
def test_seeds_count_modulo_two_to_the_64(seed: int) -> None:
    case = Case(SamplingParams(temperature=2.0), seed=seed)
    alone = sample_alone(case, make_logits(1, VOCAB)[0])
    assert alone == sample_alone(replace(case, seed=seed % 2**64), make_logits(1, VOCAB)[0])
    assert 0 <= alone < VOCAB


@pytest.mark.parametrize("stop_at", [0, 1, 5, 11])
def test_resumed_request_continues_as_if_never_preempted(stop_at: int) -> None:
    """Histories follow the tokens on the device; resumption rebuilds them on the host."""
    case = Case(
        SamplingParams(
            temperature=1.5, repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=0.5,
            min_tokens=8, bad_words=("x",),
        ),
        seed=3,
        bad_words=[[4], [2, 5], [6, 7, 8], [9, 9]],
    )  # fmt: skip
    steps = [make_logits(1, 12, seed=step) for step in range(12)]

    def run(resume_at: int | None) -> list[int]:
        sampler, output = make_sampler([case], 12), []
        for step, logits in enumerate(steps):
            if step == resume_at:
                sampler.state.remove(0)
                add_case(sampler.state, 0, replace(case, output=list(output)))
            now = replace(case, output=list(output))
            output.append(int(sample(sampler, logits, [now]).token_ids[0]))
        return output

    assert run(stop_at) == run(None)


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [30, 700, 31]] = 2.0
    assert sample_alone(Case(GREEDY), logits[0]) == 30


@pytest.mark.parametrize("params", [SamplingParams(temperature=1e-7), SamplingParams(top_k=1)])
def test_vanishing_temperature_and_top_1_are_greedy(params: SamplingParams) -> None:
    logits = make_logits(1, VOCAB)[0]
    assert sample_alone(Case(params), logits) == int(logits.argmax())


def test_a_mask_may_be_shorter_than_the_vocabulary() -> None:
    """The model's vocabulary is often padded beyond the tokenizer's, and padding is never allowed."""
    sampler = make_sampler([Case(GREEDY)], 100)
    logits = make_logits(1, 100)
    logits[0, 99] = 50.0
    mask = np.full((1, 3), -1, np.int32)
    assert int(sampler.sample(logits, np.arange(1), np.array([3]), mask).token_ids[0]) < 96


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_broken_row_fails_alone(bad: float) -> None:
    """Rows 0, 5, 10 and 15 have a mask, which forbids token 3."""
    cases, logits = make_cases(20), make_logits(20, VOCAB)
    expected = sample(make_sampler(cases, VOCAB), logits, cases).token_ids
    for row in range(20):
        broken = logits.clone()
        broken[row, 3 if np.isnan(bad) else slice(None)] = bad
        drawn = sample(make_sampler(cases, VOCAB), broken, cases).token_ids
        assert drawn.tolist() == [-1 if i == row else int(token) for i, token in enumerate(expected)]


def test_row_without_an_allowed_token_says_so() -> None:
    case = Case(SamplingParams(allowed_token_ids=(5,), logprobs=1), mask=np.arange(64) > 5)
    result = sample(make_sampler([case], 64), make_logits(1, 64), [case])
    assert result.token_ids.tolist() == [NO_TOKEN_LEFT]
    assert read_logprobs(result) == {}


def test_failed_token_leaves_no_trace_in_the_histories() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=2.0)
    case = Case(params, output=[1], bad_words=[[1, 2]])
    sampler, logits = make_sampler([case], 4), torch.tensor([[1.0, 0.0, 9.0, 0.0]])
    assert sample(sampler, torch.full((1, 4), torch.nan), [case]).token_ids.tolist() == [-1]
    assert sample(sampler, logits, [case]).token_ids.tolist() == [0]


def test_row_used_again_keeps_nothing_of_the_last_request() -> None:
    logits = make_logits(1, VOCAB)
    plain = Case(SamplingParams(), seed=8)
    for case in make_cases(10):
        sampler = make_sampler([case], VOCAB)
        sample(sampler, logits, [case])
        add_case(sampler.state, 0, plain)
        result = sample(sampler, logits, [plain])
        assert result.logprobs == []
        assert int(result.token_ids[0]) == sample_alone(plain, logits[0])


def test_penalty_memory_follows_the_need() -> None:
    state = SamplingState(256, VOCAB, torch.device("cpu"))
    add_case(state, 0, Case(SamplingParams()))
    assert state.counts._counts.numel() == 0
    for start in (100, 103):  # the second three take the place of the first
        for row in range(start, start + 3):
            state.remove(row - 3)
            add_case(state, row, Case(SamplingParams(presence_penalty=1.0)))
    assert state.counts._counts.shape == (4, VOCAB)


def sample_logprobs(cases: list[Case], logits: torch.Tensor) -> tuple[list[int], dict[int, TokenLogprobs]]:
    result = sample(make_sampler(cases, logits.shape[1]), logits, cases)
    return result.token_ids.tolist(), read_logprobs(result)


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


def test_logprobs_of_a_row_have_the_same_bits_in_any_batch() -> None:
    masks = [np.arange(2777) > i if i % 2 else None for i in range(40)]
    cases = [Case(SamplingParams(logprobs=4), seed=i, mask=mask) for i, mask in enumerate(masks)]
    logits = make_logits(40, 2777)
    _, together = sample_logprobs(cases, logits)
    for place, case in enumerate(cases):
        assert sample_logprobs([case], logits[place : place + 1])[1][0] == together[place]


@pytest.mark.parametrize("num_top", [0, 2])
def test_prompt_logprobs_are_of_the_tokens_that_follow(num_top: int) -> None:
    logits = make_logits(400, VOCAB)
    next_ids = np.arange(400) % VOCAB
    sampled = compute_prompt_logprobs(logits, torch.from_numpy(next_ids), num_top)
    found = sampled.to_lists(sampled.packed.numpy())
    assert len(found) == 400
    for place in (0, 1, 218, 219, 399):
        check_entry(found[place].token, int(next_ids[place]), logits[place], None)
        assert len(found[place].top) == num_top
