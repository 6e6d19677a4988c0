"""MockWorker: its made-up tokens are the same however a request is scheduled."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from engine import EngineConfig
from engine.core.actor_messages import NewRow, StepDone, StepPlan
from engine.sampling_params import SamplingParams
from engine.worker.mock_worker import MockWorker
from tests.engine.worker.plans import make_plan

PROMPT = np.zeros(9, dtype=np.int64)


@pytest.fixture
def worker(make_config: Callable[..., EngineConfig]) -> MockWorker:
    worker = MockWorker(make_config(mock_step_ms=0.0))
    worker.load()
    return worker


def make_row(row: int, seed: int) -> NewRow:
    return NewRow(row, PROMPT, len(PROMPT), [], SamplingParams(), seed, ())


def run(worker: MockWorker, plan: StepPlan) -> list[int]:
    done: StepDone = worker.execute(plan)
    return np.asarray(done.token_ids).tolist()


def generate(worker: MockWorker, row: int, seed: Any, chunk: int) -> list[int]:
    """Three tokens of a request; its prompt comes in chunks."""
    bounds = [*range(0, 9, chunk), 9, 10, 11]
    steps = [(row, start, end - start) for start, end in pairwise(bounds)]
    tokens = []
    for number, step in enumerate(steps):
        plan = make_plan(
            [step],
            number,
            new=[make_row(row, seed)] if not number else [],
            unsampled=[row] if sum(step[1:]) < 9 else [],
        )
        tokens += run(worker, plan)
    return tokens


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_a_token_depends_on_the_seed_and_the_position_alone(worker: MockWorker, seed: int) -> None:
    assert len(tokens := generate(worker, 0, seed, 9)) == 3
    assert tokens == generate(worker, 5, seed, 4)
    assert tokens != generate(worker, 0, seed + 1, 9)


def test_rows_of_a_step_have_their_own_seeds(worker: MockWorker) -> None:
    plan = make_plan([(row, 0, 9) for row in (3, 1)], new=[make_row(3, 8), make_row(1, 2)])
    assert run(worker, plan) == [generate(worker, 0, seed, 9)[0] for seed in (8, 2)]
