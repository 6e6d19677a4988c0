"""FusedHead: which steps it takes, and that their tokens are those drawn from logits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.messages import NewRow, StepDone
from engine.model import DecoderModel, load_model
from engine.sampling_params import SamplingParams
from engine.worker.fused_head import FusedHead
from engine.worker.input_batch import InputBatch
from engine.worker.kv_cache import allocate_kv_cache
from engine.worker.model_runner import ModelRunner
from engine.worker.sampling.state import SamplingState
from kernels import torch as torch_ops
from kernels.ops import MAX_HEAD_ROWS
from tests.engine.model.drive import VOCAB_SIZE, make_prompt, make_transformers_model, save
from tests.engine.worker.plans import make_new_row, make_plan
from tests.kernels import reference
from tests.kernels.reference import lm_head_sample

CPU = torch.device("cpu")
KINDS = [
    {"temperature": 0}, {"temperature": 0.8}, {"temperature": 1.3, "top_k": 1}, {"top_k": 5}, {"top_p": 0.9},
    {"min_p": 0.1}, {"temperature": 0, "logprobs": 1}, {"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}},
    {"min_tokens": 3},
]  # fmt: skip
PLAIN, OTHERS = [[SamplingParams(max_tokens=20, **kind) for kind in each] for each in (KINDS[:3], KINDS[3:])]


class Counter:
    """`lm_head_sample` that counts the rows it was given."""

    def __init__(self) -> None:
        self.num_rows = 0

    def __call__(self, hidden: Tensor, *rest: Tensor) -> Tensor:
        self.num_rows += len(hidden)
        return lm_head_sample(hidden, *rest)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_transformers_model("qwen3"), tmp_path_factory.mktemp("model"))


def load(folder: Path, op: Callable[..., Tensor] | None) -> DecoderModel:
    return load_model(folder, ops=replace(torch_ops.make_ops(), lm_head_sample=op))


def make_state(*params: SamplingParams) -> SamplingState:
    state = SamplingState(max(1, len(params)), VOCAB_SIZE, CPU)
    for row, each in enumerate(params):
        state.add(row, each, row, [1, 2], [], eos_token_ids=[0], bad_word_ids=())
    return state


def run(model: DecoderModel, params: list[SamplingParams], *, is_gathered: bool) -> list[list[int]]:
    """Prefill one request for each of the params, then decode them all four times."""
    runner, new = make_runner(model, params, is_gathered=is_gathered)
    num_rows = len(params)
    tokens = []
    for number in range(5):
        runs = [(row, 2 + row + number, 1) if number else (row, 0, 3 + row) for row in range(num_rows)]
        done = runner.execute(make_plan(runs, number, new=[] if number else new))
        assert isinstance(done, StepDone)
        tokens.append(done.token_ids.tolist())
    return tokens


def make_runner(
    model: DecoderModel, params: list[SamplingParams], *, is_gathered: bool
) -> tuple[ModelRunner, list[NewRow]]:
    num_rows = len(params)
    batch = InputBatch(num_rows, 64, 8, CPU, gather=reference.gather_inputs if is_gathered else None)
    caches = allocate_kv_cache(model.kv_specs(), 8 * num_rows + 1, 8, torch.float32, CPU)
    runner = ModelRunner(model, caches, batch, SamplingState(num_rows, VOCAB_SIZE, CPU), (0,))
    new = [
        make_new_row(row, make_prompt(3 + row, row), range(1 + 8 * row, 9 + 8 * row), params[row])
        for row in range(num_rows)
    ]
    return runner, new


@pytest.mark.parametrize("others", [0, 7])
def test_tokens_are_the_same_with_every_way_on_and_off(folder: Path, others: int) -> None:
    params = PLAIN * 3 + OTHERS[:others]
    counter = Counter()
    plain = run(load(folder, None), params, is_gathered=False)
    assert run(load(folder, counter), params, is_gathered=True) == plain
    assert counter.num_rows == (0 if others else 5 * len(params))


@pytest.mark.parametrize(("params", "is_taken"), [(PLAIN, True), (PLAIN * 7, False), (PLAIN + OTHERS, False)])
@pytest.mark.parametrize("is_gathered", [False, True])
def test_drafts_change_no_token(
    folder: Path, params: list[SamplingParams], is_taken: bool, is_gathered: bool
) -> None:
    """Three drafts for each row: the first ones are right, as many as its number says. Many make a large batch."""
    num_rows = len(params)
    steps = np.array(run(load(folder, None), params, is_gathered=False)).T.tolist()
    counter = Counter()
    runner, new = make_runner(load(folder, counter), params, is_gathered=is_gathered)
    runner.execute(make_plan([(row, 0, 3 + row) for row in range(num_rows)], new=new))
    counter.num_rows = 0
    drafts = {
        row: [(token + (at >= row % 4)) % VOCAB_SIZE for at, token in enumerate(tokens[1:4])]
        for row, tokens in enumerate(steps)
    }
    done = runner.execute(make_plan([(row, 3 + row, 4) for row in range(num_rows)], 1, drafts=drafts))
    assert isinstance(done, StepDone)
    assert done.counts.tolist() == [1 + row % 4 for row in range(num_rows)]
    assert done.token_ids.tolist() == [
        token for row, tokens in enumerate(steps) for token in tokens[1 : 2 + row % 4]
    ]
    assert counter.num_rows == 4 * num_rows * is_taken


def test_only_plain_rows_of_a_small_batch_are_taken(folder: Path) -> None:
    state = make_state(*PLAIN, *OTHERS)
    head = FusedHead(load(folder, lm_head_sample), state)
    assert [head.takes(np.array([row])) for row in range(10)] == [True] * 3 + [False] * 7
    assert head.takes(np.arange(3)) and not head.takes(np.arange(4)) and not head.takes(np.arange(0))
    same_row = np.zeros(MAX_HEAD_ROWS + 1, np.int64)
    assert head.takes(same_row[1:]) and not head.takes(same_row)


def test_ops_that_cannot_and_weights_that_are_packed_go_through_their_logits(folder: Path) -> None:
    state = make_state(PLAIN[0])
    assert not FusedHead(load(folder, None), state).takes(np.arange(1))
    ops = replace(torch_ops.make_ops(), lm_head_sample=lm_head_sample)
    assert not FusedHead(load_model(folder, ops=ops, quantization="int8"), state).takes(np.arange(1))


def test_a_row_whose_hidden_state_is_broken_gives_no_token(folder: Path) -> None:
    model = load(folder, lm_head_sample)
    hidden = torch.ones(2, model.config.hidden_size)
    hidden[1, 0] = torch.nan
    head = FusedHead(model, make_state(PLAIN[1], PLAIN[1]))
    tokens = head.sample(hidden, np.arange(2), np.array([5, 5])).token_ids.tolist()
    assert tokens[0] >= 0 and tokens[1] == -1
