"""ModelRunner: which rows of a step are computed, sampled, parked or skipped. The model counts upwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.messages import NO_TOKEN_LEFT, NewRow, SampleGate, StepDone, StepPlan
from engine.sampling_params import SamplingParams
from engine.worker.input_batch import InputBatch
from engine.worker.model_runner import ModelRunner
from engine.worker.sampling.state import SamplingState
from grammar import allocate_bitmask
from kernels import torch_ops

VOCAB = 40
GREEDY = SamplingParams(temperature=0, max_tokens=10)


class CountingModel:
    """After token t comes t + 1; the second best is t + 2."""

    ops = torch_ops.make_ops()

    def __init__(self) -> None:
        self.seen: list[list[int]] = []  # input ids of every forward

    def __call__(self, input_ids: Tensor, *_: object) -> Tensor:
        self.seen.append(input_ids.tolist())
        return input_ids[:, None].float()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        tokens = hidden[:, 0].long()
        logits = torch.zeros(len(tokens), VOCAB)
        logits[torch.arange(len(tokens)), (tokens + 1) % VOCAB] = 10.0
        logits[torch.arange(len(tokens)), (tokens + 2) % VOCAB] = 9.0
        return logits


def make_runner() -> tuple[ModelRunner, CountingModel]:
    device = torch.device("cpu")
    model: Any = CountingModel()
    state = SamplingState(8, VOCAB, device)
    return ModelRunner(model, [], InputBatch(8, 32, 4, device), state, (0,)), model


def make_new_row(row: int, tokens: list[int], params: SamplingParams = GREEDY) -> NewRow:
    ids = np.array(tokens, dtype=np.int64)
    return NewRow(row, ids, len(tokens), list(range(1 + 8 * row, 9 + 8 * row)), params, 0, ())


def make_plan(
    step_id: int, runs: Sequence[tuple[int, int, int]], *, new: Sequence[NewRow] = (), gated: Sequence[int] = (),
    unsampled: Sequence[int] = (),
) -> StepPlan:  # fmt: skip
    """`runs` are (row, start, count); `gated` and `unsampled` are rows."""
    rows, starts, counts = (np.array(each, dtype=np.int64) for each in zip(*runs, strict=True))
    return StepPlan(
        step_id, [], list(new), [], rows, starts, counts, ~np.isin(rows, unsampled), np.isin(rows, gated)
    )


def make_gate(step_id: int, allowed: dict[int, list[int]]) -> SampleGate:
    """Index of the row in the step -> allowed tokens."""
    bitmask = allocate_bitmask(len(allowed), VOCAB)
    bitmask[:] = 0
    for row, tokens in zip(bitmask.view(np.uint32), allowed.values(), strict=True):
        for token in tokens:
            row[token // 32] |= np.uint32(1 << token % 32)
    return SampleGate(step_id, np.array(list(allowed), dtype=np.int64), bitmask)


def answers(done: StepDone | None) -> dict[int, int]:
    assert done is not None
    return dict(zip(done.indices, done.token_ids, strict=True))


def test_a_step_samples_one_token_for_each_row_that_asks() -> None:
    runner, _ = make_runner()
    new = [make_new_row(0, [5, 6]), make_new_row(1, [9, 8, 7])]
    done = runner.execute(make_plan(0, [(1, 0, 3), (0, 0, 2)], new=new))
    assert done is not None
    assert (answers(done), done.is_last, done.skipped) == ({0: 8, 1: 7}, True, ())


def test_a_chunk_of_a_prompt_samples_nothing() -> None:
    runner, _ = make_runner()
    done = runner.execute(make_plan(0, [(0, 0, 2)], new=[make_new_row(0, [5, 6, 7, 8])], unsampled=[0]))
    assert done is not None
    assert (done.indices, done.is_last) == ([], True)
    assert answers(runner.execute(make_plan(1, [(0, 2, 2)]))) == {0: 9}


def test_the_next_step_reads_what_the_last_one_sampled() -> None:
    runner, model = make_runner()
    runner.execute(make_plan(0, [(0, 0, 2)], new=[make_new_row(0, [5, 6])]))
    assert answers(runner.execute(make_plan(1, [(0, 2, 1)]))) == {0: 8}
    assert model.seen == [[5, 6], [7]]


def test_a_step_of_gated_rows_answers_only_at_the_gate() -> None:
    runner, _ = make_runner()
    assert runner.execute(make_plan(0, [(0, 0, 1)], new=[make_new_row(0, [5])], gated=[0])) is None
    assert runner.has_parked
    done = runner.sample_gated(make_gate(0, {0: [6, 7]}))
    assert done is not None
    assert (answers(done), done.is_last, runner.has_parked) == ({0: 6}, True, False)


def make_mixed_runner() -> tuple[ModelRunner, CountingModel, StepDone | None]:
    """Step 0 is done: rows 0 and 2 are parked, row 1 is plain."""
    runner, model = make_runner()
    new = [make_new_row(row, [5 * row + 5]) for row in range(3)]
    runs = [(row, 0, 1) for row in range(3)]
    return runner, model, runner.execute(make_plan(0, runs, new=new, gated=[0, 2]))


def test_plain_rows_are_answered_before_the_gate() -> None:
    _, _, done = make_mixed_runner()
    assert done is not None
    assert (answers(done), done.is_last) == ({1: 11}, False)


def test_a_gate_samples_under_the_masks_in_any_order() -> None:
    runner, _, _ = make_mixed_runner()
    assert answers(runner.sample_gated(make_gate(0, {2: [17, 30], 0: [6]}))) == {2: 17, 0: 6}


def test_a_row_without_a_mask_has_ended() -> None:
    runner, _, _ = make_mixed_runner()
    done = runner.sample_gated(make_gate(0, {2: [16]}))
    assert done is not None
    assert (answers(done), done.is_last, runner.has_parked) == ({2: 16}, True, False)


def test_a_gate_without_any_mask_closes_the_step() -> None:
    runner, _, _ = make_mixed_runner()
    done = runner.sample_gated(make_gate(0, {}))
    assert done is not None
    assert (done.indices, done.is_last, runner.has_parked) == ([], True, False)


def test_a_gate_for_a_step_that_parked_nothing_is_ignored() -> None:
    runner, _, _ = make_mixed_runner()
    assert runner.sample_gated(make_gate(7, {0: [1]})) is None
    assert runner.has_parked


def test_a_mask_that_allows_nothing_is_reported_as_such() -> None:
    runner, _, _ = make_mixed_runner()
    assert answers(runner.sample_gated(make_gate(0, {0: [], 2: [16]}))) == {0: NO_TOKEN_LEFT, 2: 16}


def test_a_parked_row_is_skipped_and_the_others_go_on() -> None:
    runner, model, _ = make_mixed_runner()
    done = runner.execute(make_plan(1, [(0, 1, 1), (1, 1, 1), (2, 1, 1)], gated=[0, 2]))
    assert done is not None
    assert (answers(done), done.skipped, done.is_last) == ({1: 12}, (0, 2), True)
    assert model.seen[-1] == [11]


def test_a_skipped_row_is_caught_up_after_its_gate() -> None:
    runner, _, _ = make_mixed_runner()
    runner.execute(make_plan(1, [(0, 1, 1), (1, 1, 1)], gated=[0]))
    runner.sample_gated(make_gate(0, {0: [7], 2: [16]}))
    runner.execute(make_plan(2, [(0, 1, 1)], gated=[0]))
    assert answers(runner.sample_gated(make_gate(2, {0: [8, 9]}))) == {0: 8}


def test_a_step_of_parked_rows_only_runs_no_forward() -> None:
    runner, model, _ = make_mixed_runner()
    plan = make_plan(1, [(0, 1, 1), (2, 1, 1)], gated=[0, 2])
    assert not runner.can_run(plan)
    done = runner.execute(plan)
    assert done is not None
    assert (done.indices, done.skipped, done.is_last) == ([], (0, 1), True)
    assert len(model.seen) == 1


def test_a_step_with_a_free_row_can_run() -> None:
    runner, _, _ = make_mixed_runner()
    assert runner.can_run(make_plan(1, [(0, 1, 1), (1, 1, 1)]))


def test_logprobs_stand_beside_the_rows_that_asked() -> None:
    runner, _ = make_runner()
    asking = SamplingParams(temperature=0, logprobs=2)
    done = runner.execute(
        make_plan(0, [(0, 0, 1), (1, 0, 1)], new=[make_new_row(0, [5]), make_new_row(1, [9], asking)])
    )
    assert done is not None
    assert list(done.logprobs) == [1]
    assert [entry.token_id for entry in done.logprobs[1].top] == [10, 11]


def test_prompt_logprobs_are_of_the_tokens_that_follow() -> None:
    runner, _ = make_runner()
    asking = SamplingParams(temperature=0, prompt_logprobs=1)
    done = runner.execute(make_plan(0, [(0, 0, 3)], new=[make_new_row(0, [5, 6, 9], asking)]))
    assert done is not None
    found = [(entry.token.token_id, entry.token.rank) for entry in done.prompt_logprobs[0]]
    assert found[0] == (6, 1)
    assert [token for token, _ in found] == [6, 9]
    assert done.prompt_logprobs[0][1].top[0].token_id == 7
