"""The arrays against a loop: what each running request gets in a step is what walking through them one by one gives."""

from __future__ import annotations

import random

import pytest

from engine.core.scheduler import MAX_IN_FLIGHT, Scheduler
from engine.messages import StepPlan
from tests.engine.core.harness import MAX_MODEL_LEN, SchedulerHarness, make_request


def walk_running(scheduler: Scheduler) -> dict[int, tuple[int, int, bool]]:
    """Row -> (start, number of tokens, whether one is sampled), as long as there is room for everybody."""
    steps = scheduler._steps
    scheduler.ledger.rows.drain(
        steps[0].step_id if steps else scheduler.num_steps
    )  # a free row makes chunks smaller
    budget = scheduler.config.max_num_batched_tokens
    expected = {}
    for index, request in enumerate(scheduler.ledger.running):
        num_known = len(request.token_ids) + request.num_in_flight
        count = num_known - request.num_computed_tokens
        if count <= 0 or request.num_in_flight >= MAX_IN_FLIGHT or num_known >= request.max_num_tokens:
            continue
        if budget <= 0:
            break
        if count > 1:
            rest = budget - (len(scheduler.ledger.running) - index - 1)
            if scheduler._can_admit():
                rest = min(rest, budget // 2)
            count = min(count, max(1, rest))
        budget -= count
        start = request.num_computed_tokens
        expected[request.row] = (start, count, start + count == num_known)
    return expected


class WatchedHarness(SchedulerHarness):
    """Compares every plan with the walk through the requests that ran before it was made."""

    num_compared = 0

    def plan(self) -> None:
        self._order_masks()
        while True:
            expected, num_preemptions = walk_running(self.scheduler), self.scheduler.ledger.num_preemptions
            plan = self.scheduler.schedule()
            if plan is None:
                return
            if self.scheduler.ledger.num_preemptions == num_preemptions:
                self._compare(plan, expected)
            self._send(plan)

    def _compare(self, plan: StepPlan, expected: dict[int, tuple[int, int, bool]]) -> None:
        runs = zip(
            plan.starts.tolist(), plan.num_scheduled_tokens.tolist(), plan.is_sampled.tolist(), strict=True
        )
        new_rows = {new.row for new in plan.new_rows}
        got = {row: run for row, run in zip(plan.rows.tolist(), runs, strict=True) if row not in new_rows}
        assert got == expected
        self.num_compared += len(got)


@pytest.mark.parametrize("seed", range(60))
def test_any_history_is_planned_as_the_walk_says(seed: int) -> None:
    chance = random.Random(seed)
    house = WatchedHarness(
        chance.choice([26, 40, 300]),
        max_num_seqs=chance.choice([2, 4, 12]),
        max_num_batched_tokens=chance.choice([3, 12, 16, 64]),
        max_steps_in_flight=chance.choice([1, 2]),
    )
    for number in range(chance.randrange(4, 30)):
        prompt = [
            chance.randrange(90) for _ in range(chance.randrange(1, chance.choice([6, MAX_MODEL_LEN - 1])))
        ]
        stop = {"stop_token_ids": [chance.randrange(90)]} if chance.random() < 0.3 else {}
        name, gated = f"r{number}", chance.random() < 0.3
        house.add(make_request(name, prompt, chance.randrange(1, 40), gated=gated, **stop))
        for _ in range(chance.randrange(20)):
            chance.choice([house.work, house.work, house.fill, house.answer])()
        if chance.random() < 0.2:
            house.abort(f"r{chance.randrange(number + 1)}")
    house.run(chance)
    assert house.num_compared > 20
