"""ModelRunner: which rows of a step are computed, sampled, parked or skipped. The model counts upwards."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.core.actor_messages import NO_TOKEN_LEFT, NewRow, StepDone, StepMasks
from engine.device.device_link import PendingStep
from engine.sampling_params import SamplingParams
from engine.worker.input_batch import InputBatch
from engine.worker.model_runner import MASK_TIMEOUT_S, ModelRunner
from engine.worker.sampling.state import SamplingState
from grammar import allocate_bitmask
from kernels import torch as torch_ops
from tests.engine.worker import plans
from tests.engine.worker.plans import GREEDY, make_plan

VOCAB = 40


class CountingModel:
    """After token t comes t + 1; the second best is t + 2."""

    ops = torch_ops.make_ops()

    def __init__(self) -> None:
        self.seen: list[list[int]] = []  # input ids of every forward

    def __call__(self, input_ids: Tensor, *_: object) -> Tensor:
        self.seen.append(input_ids.tolist())
        return input_ids[:, None].float()

    def compute_logits(self, hidden: Tensor, *_: object) -> Tensor:
        tokens = hidden[:, 0].long()
        logits = torch.zeros(len(tokens), VOCAB)
        for score, ahead in ((10.0, 1), (9.0, 2)):
            logits[torch.arange(len(tokens)), (tokens + ahead) % VOCAB] = score
        return logits


def make_runner() -> tuple[ModelRunner, CountingModel]:
    device = torch.device("cpu")
    model: Any = CountingModel()
    state = SamplingState(8, VOCAB, device)
    return ModelRunner(model, [], InputBatch(8, 32, 4, device), state, (0,)), model


def make_new_row(row: int, tokens: list[int], params: SamplingParams = GREEDY) -> NewRow:
    return plans.make_new_row(row, tokens, range(1 + 8 * row, 9 + 8 * row), params)


def make_masks(step_id: int, *allowed: tuple[int, list[int]], ended: Sequence[int] = ()) -> StepMasks:
    """(Index of the row in the step, allowed tokens) of each position; those of a row one after another."""
    bitmask = allocate_bitmask(len(allowed), VOCAB)
    bitmask[:] = 0
    for row, (_, tokens) in zip(bitmask.view(np.uint32), allowed, strict=True):
        for token in tokens:
            row[token // 32] |= np.uint32(1 << token % 32)
    counts = Counter(index for index, _ in allowed)
    indices = np.array(list(counts), dtype=np.int64)
    return StepMasks(step_id, indices, np.array(list(counts.values()), dtype=np.int64), bitmask, list(ended))


def read_runs(done: StepDone | PendingStep | None) -> dict[int, list[int]]:
    """Index -> tokens."""
    assert isinstance(done, StepDone)
    tokens = np.split(done.token_ids, np.cumsum(done.counts)[:-1])
    return {index: ids.tolist() for index, ids in zip(done.indices.tolist(), tokens, strict=True)}


def read(done: StepDone | PendingStep | None) -> tuple[dict[int, int], list[int], bool]:
    """Index -> token, the indices that were skipped, and whether the step is complete; no row has drafts."""
    assert isinstance(done, StepDone)
    assert done.counts.tolist() == [1] * len(done.indices)
    tokens = dict(zip(done.indices.tolist(), done.token_ids.tolist(), strict=True))
    return tokens, done.skipped, done.is_last


def test_a_step_samples_one_token_for_each_row_that_asks() -> None:
    runner, _ = make_runner()
    new = [make_new_row(0, [5, 6]), make_new_row(1, [9, 8, 7])]
    assert read(runner.execute(make_plan([(1, 0, 3), (0, 0, 2)], new=new))) == ({0: 8, 1: 7}, [], True)


def test_a_chunk_of_a_prompt_samples_nothing_and_the_next_step_reads_what_the_last_one_sampled() -> None:
    runner, model = make_runner()
    done = runner.execute(make_plan([(0, 0, 2)], new=[make_new_row(0, [5, 6, 7, 8])], unsampled=[0]))
    assert read(done) == ({}, [], True)
    assert read(runner.execute(make_plan([(0, 2, 2)], 1)))[0] == {0: 9}
    assert read(runner.execute(make_plan([(0, 4, 1)], 2)))[0] == {0: 10}
    assert model.seen == [[5, 6], [7, 8], [9]]


def test_a_step_of_gated_rows_answers_only_at_the_gate() -> None:
    runner, _ = make_runner()
    assert runner.execute(make_plan([(0, 0, 1)], new=[make_new_row(0, [5])], gated=[0])) is None
    plan = make_plan([(0, 1, 1)], 1)
    assert runner.get_mask_timeout(plan) == math.inf
    assert read(runner.sample_gated(make_masks(0, (0, [6, 7])))) == ({0: 6}, [], True)
    assert runner.get_mask_timeout(plan) == 0


def test_a_step_whose_masks_have_arrived_answers_at_once() -> None:
    runner, _ = make_runner()
    asked: list[tuple[int, list[int]]] = []

    def take_masks(step_id: int, indices: np.ndarray) -> StepMasks:
        asked.append((step_id, indices.tolist()))
        return make_masks(step_id, (0, [7, 30]), (1, [12]))

    runner.take_masks = take_masks
    new = [make_new_row(0, [5]), make_new_row(1, [9])]
    assert read(runner.execute(make_plan([(0, 0, 1), (1, 0, 1)], new=new, gated=[0, 1]))) == ({0: 7, 1: 12}, [], True)
    assert asked == [(0, [0, 1])] and not runner.parked_rows


def make_mixed_runner() -> tuple[ModelRunner, CountingModel]:
    """Step 0 is done: rows 0 and 2 are parked, row 1 is plain and answered before the gate."""
    runner, model = make_runner()
    new = [make_new_row(row, [5 * row + 5]) for row in range(3)]
    done = runner.execute(make_plan([(row, 0, 1) for row in range(3)], new=new, gated=[0, 2]))
    assert read(done) == ({1: 11}, [], False)
    return runner, model


@pytest.mark.parametrize(
    ("allowed", "ended", "tokens"),
    [
        ([(0, [6]), (2, [17, 30])], [], {0: 6, 2: 17}), ([(2, [16])], [0], {2: 16}), ([], [0, 2], {}),
        ([(0, []), (2, [16])], [], {0: NO_TOKEN_LEFT, 2: 16}),
    ],
)
def test_masks_sample_their_rows_and_close_the_step(
    allowed: list[tuple[int, list[int]]], ended: list[int], tokens: dict[int, int]
) -> None:
    runner, _ = make_mixed_runner()
    plan = make_plan([(0, 1, 1), (2, 1, 1)], 1)
    assert runner.sample_gated(make_masks(7, (0, [1]))) is None, "that step parked nothing"
    assert runner.get_mask_timeout(plan) == math.inf
    assert read(runner.sample_gated(make_masks(0, *allowed, ended=ended))) == (tokens, [], True)
    assert runner.get_mask_timeout(plan) == 0


def test_a_slow_mask_keeps_its_own_row_only() -> None:
    """The step after it waits a moment, later ones do not."""
    runner, _ = make_mixed_runner()
    assert read(runner.sample_gated(make_masks(0, (2, [16])))) == ({2: 16}, [], False)
    plan = make_plan([(0, 1, 1), (2, 1, 1)], 1)
    assert runner.get_mask_timeout(plan) == MASK_TIMEOUT_S
    assert read(runner.execute(plan)) == ({1: 17}, [0], True)
    assert runner.get_mask_timeout(make_plan([(0, 1, 1), (2, 2, 1)], 2)) == 0
    assert read(runner.sample_gated(make_masks(0, (0, [7])))) == ({0: 7}, [], True)


def test_a_row_whose_last_mask_was_late_is_not_waited_for_until_one_is_in_time() -> None:
    runner, _ = make_mixed_runner()
    runner.sample_gated(make_masks(0, (2, [16])))
    runner.execute(make_plan([(0, 1, 1), (2, 1, 1)], 1))
    runner.sample_gated(make_masks(0, (0, [7])))
    for step_id, timeout_s in ((2, 0), (3, MASK_TIMEOUT_S)):
        both = make_plan([(0, step_id - 1, 1), (2, step_id, 1)], step_id, gated=[0])
        runner.execute(both)
        assert runner.get_mask_timeout(both) == timeout_s
        runner.sample_gated(make_masks(step_id, (0, [8])))


def test_a_parked_row_is_skipped_and_the_others_go_on() -> None:
    runner, model = make_mixed_runner()
    done = runner.execute(make_plan([(0, 1, 1), (1, 1, 1), (2, 1, 1)], 1, gated=[0, 2]))
    assert read(done) == ({1: 12}, [0, 2], True)
    assert model.seen[-1] == [11]


def test_a_skipped_row_is_caught_up_after_its_gate() -> None:
    runner, _ = make_mixed_runner()
    runner.execute(make_plan([(0, 1, 1), (1, 1, 1)], 1, gated=[0]))
    runner.sample_gated(make_masks(0, (0, [7]), (2, [16])))
    runner.execute(make_plan([(0, 1, 1)], 2, gated=[0]))
    assert read(runner.sample_gated(make_masks(2, (0, [8, 9]))))[0] == {0: 8}


def test_the_mask_of_a_row_that_was_skipped_is_left_alone() -> None:
    runner, _ = make_mixed_runner()
    done = runner.execute(make_plan([(0, 1, 1), (1, 1, 1)], 1, gated=[0, 1]))
    assert read(done) == ({}, [0], False)
    assert read(runner.sample_gated(make_masks(1, (0, [3]), (1, [13])))) == ({1: 13}, [], True)


def test_a_step_of_parked_rows_only_runs_no_forward() -> None:
    runner, model = make_mixed_runner()
    plan = make_plan([(0, 1, 1), (2, 1, 1)], 1, gated=[0, 2])
    assert read(runner.execute(plan)) == ({}, [0, 1], True)
    assert len(model.seen) == 1


def make_drafting_runner() -> tuple[ModelRunner, CountingModel]:
    """Step 0 is done: each of three rows has a prompt of two tokens, and has sampled the next one."""
    runner, model = make_runner()
    new = [make_new_row(row, [5 * row + 5, 5 * row + 6]) for row in range(3)]
    done = runner.execute(make_plan([(row, 0, 2) for row in range(3)], new=new))
    assert read(done)[0] == {0: 7, 1: 12, 2: 17}
    return runner, model


def test_right_drafts_count_and_what_stands_behind_a_wrong_one_is_overwritten() -> None:
    runner, model = make_drafting_runner()
    drafts = {0: [8, 9], 1: [13, 30], 2: [30, 31]}
    done = runner.execute(make_plan([(row, 2, 3) for row in range(3)], 1, drafts=drafts))
    assert read_runs(done) == {0: [8, 9, 10], 1: [13, 14], 2: [18]}
    assert model.seen[-1] == [7, 8, 9, 12, 13, 30, 17, 30, 31]
    done = runner.execute(make_plan([(0, 5, 1), (1, 4, 1), (2, 3, 2)], 2, drafts={2: [19]}))
    assert read_runs(done) == {0: [11], 1: [15], 2: [19, 20]}
    assert model.seen[-1] == [10, 14, 18, 19]


def test_rows_with_drafts_and_masks_are_sampled_under_a_mask_for_each_position() -> None:
    runner, _ = make_drafting_runner()
    plan = make_plan([(0, 2, 3), (1, 2, 2), (2, 2, 1)], 1, gated=[0, 2], drafts={0: [9, 10], 1: [13]})
    assert read_runs(runner.execute(plan)) == {1: [13, 14]}
    masks = make_masks(1, (0, [9]), (0, [10, 11]), (0, [11, 12]), (2, [19]))
    assert read_runs(runner.sample_gated(masks)) == {0: [9, 10, 11], 2: [19]}


def test_drafts_of_a_gated_row_that_has_ended_are_dropped_with_it() -> None:
    runner, _ = make_drafting_runner()
    plan = make_plan([(0, 2, 3), (1, 2, 2)], 1, gated=[0, 1], drafts={0: [8, 9], 1: [14]})
    assert runner.execute(plan) is None
    assert read_runs(runner.sample_gated(make_masks(1, (1, [14]), (1, [15])))) == {1: [14, 15]}


def test_a_parked_row_is_skipped_beside_rows_with_drafts() -> None:
    runner, model = make_drafting_runner()
    assert runner.execute(make_plan([(0, 2, 1)], 1, gated=[0])) is None
    done = runner.execute(make_plan([(0, 3, 1), (1, 2, 2), (2, 2, 3)], 2, drafts={1: [13], 2: [18, 30]}))
    assert isinstance(done, StepDone)
    assert (read_runs(done), done.skipped) == ({1: [13, 14], 2: [18, 19]}, [0])
    assert model.seen[-1] == [12, 13, 17, 18, 30]


def test_a_row_with_drafts_scores_each_token_that_counts() -> None:
    runner, _ = make_runner()
    asking = SamplingParams(temperature=0, logprobs=1)
    runner.execute(make_plan([(0, 0, 1), (1, 0, 1)], new=[make_new_row(0, [5]), make_new_row(1, [20], asking)]))
    done = runner.execute(make_plan([(0, 1, 2), (1, 1, 4)], 1, drafts={0: [7], 1: [22, 9, 10]}))
    assert isinstance(done, StepDone)
    assert read_runs(done) == {0: [7, 8], 1: [22, 23]}
    assert [entry.token.token_id for entry in done.logprobs[1]] == [22, 23]
    assert list(done.logprobs) == [1]


def test_prompt_logprobs_of_a_row_are_of_its_own_tokens_that_follow() -> None:
    runner, _ = make_runner()
    asking = SamplingParams(temperature=0, prompt_logprobs=1)
    new = [make_new_row(0, [20, 21]), make_new_row(1, [5, 6, 9], asking)]
    done = runner.execute(make_plan([(0, 0, 2), (1, 0, 3)], new=new))
    assert isinstance(done, StepDone)
    tokens = [entry.token for entry in done.prompt_logprobs[1]]
    assert tokens[0].rank == 1
    assert [token.token_id for token in tokens] == [6, 9]
    assert done.prompt_logprobs[1][1].top[0].token_id == 7
