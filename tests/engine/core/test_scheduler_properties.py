"""Any order of add, abort, step and answer: blocks add up, every request ends once, with the right tokens.

The arrays against a loop: what each running request gets in a step is what walking through them one by one gives.
"""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.core.actor_messages import StepPlan
from engine.core.scheduler import MAX_IN_FLIGHT, Scheduler
from tests.engine.core.fake_worker import RandomProposer, reference_output
from tests.engine.core.harness import MAX_MODEL_LEN, SchedulerHarness, make_request


def make_prompt(chance: random.Random, stems: list[list[int]], longest: int = 12) -> list[int]:
    """Prompts share stems, so that prefixes hit, and differ in their ends."""
    stem = chance.choice(stems)
    tail = [chance.randrange(90) for _ in range(chance.randrange(1, longest))]
    return (stem[: chance.randrange(len(stem) + 1)] + tail)[: MAX_MODEL_LEN - 1]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    has_drafts=st.booleans(),
    has_slow_masks=st.booleans(),
    num_blocks=st.sampled_from([26, 40, 200]),
    caching=st.booleans(),
    windows=st.sampled_from([(None,), (None,), (1,), (4,), (9,), (30,), (None, 1), (None, 9), (30, 4, 4)]),
    longest=st.sampled_from([12, MAX_MODEL_LEN]),
    num_states=st.sampled_from([0, 3, 12]),
    config=st.fixed_dictionaries(
        {
            "max_num_batched_tokens": st.sampled_from([5, 16, 64]), "policy": st.sampled_from(["fcfs", "priority"]),
            "max_steps_in_flight": st.sampled_from([1, 2]), "max_num_seqs": st.sampled_from([1, 2, 4]),
            "num_stages": st.sampled_from([1, 1, 2]), "context_cost": st.sampled_from([0.0, 0.1]),
            "max_loras": st.sampled_from([0, 0, 1, 2]),
        }
    ),
)
@example(  # a row shares a block that a row behind it writes in the same step
    seed=9751322, has_drafts=False, has_slow_masks=False, num_blocks=26, caching=True, windows=(4,), longest=12,
    num_states=0,
    config={"max_num_batched_tokens": 5, "policy": "priority", "max_steps_in_flight": 1, "max_num_seqs": 4},
)  # fmt: skip
def test_any_order_of_events_keeps_blocks_and_tokens_right(
    seed: int,
    has_drafts: bool,
    has_slow_masks: bool,
    num_blocks: int,
    caching: bool,
    windows: tuple[int | None, *tuple[int, ...]],
    longest: int,
    num_states: int,
    config: dict[str, object],
) -> None:
    chance = random.Random(seed)
    window, *narrower = windows
    proposer = RandomProposer(chance, window) if has_drafts else None
    house = SchedulerHarness(
        num_blocks, caching=caching, proposer=proposer, window=window, has_slow_masks=has_slow_masks,
        narrower=narrower, num_states=num_states, **config,
    )  # fmt: skip
    stems = [chance.choices(range(90), k=40) for _ in range(2)]
    requests, expected, aborted = {}, {}, set()
    for number in range(chance.randrange(1, 14)):
        name = f"r{number}"
        house.now += chance.random() * 5
        prompt, length = make_prompt(chance, stems, longest), chance.randrange(1, 30)
        gated, priority, salt = chance.random() < 0.4, chance.randrange(3), chance.choice([None, None, "a"])
        whole = reference_output(prompt, length, MAX_MODEL_LEN, window)
        stop = chance.choice(whole) if chance.random() < 0.3 else None
        if stop is not None:
            whole = whole[: whole.index(stop) + 1]
        stems.append([*prompt, *whole])  # some prompts continue an answer
        num_before = chance.randrange(len(whole)) if chance.random() < 0.3 else 0
        expected[name] = whole[num_before:]
        requests[name] = make_request(
            name, prompt, length, gated=gated, priority=priority, arrival=house.now, salt=salt,
            generated=whole[:num_before], stop_token_ids=[] if stop is None else [stop],
            logprobs=chance.choice([None, None, 0]),
            adapter=chance.choice(["", "x", "y", "z"]) if config.get("max_loras") else "",
        )  # fmt: skip
        house.add(requests[name])
        for _ in range(chance.randrange(12)):
            chance.choice([house.work, house.work, house.fill, house.answer, house.load_adapter])()
            house.check()
        if chance.random() < 0.2:
            victim = chance.choice(list(requests))
            if victim not in house.ended:
                aborted.add(victim)
            house.abort(victim)
            house.check()
    house.run(chance)
    house.check()
    assert house.kv_cache.pool.num_free == house.kv_cache.pool.num_usable
    drafts = house.kv_cache.draft_states
    assert (0 if drafts is None else drafts.num_free) == num_states
    assert {name: len(ends) for name, ends in house.ended.items()} == dict.fromkeys(requests, 1)
    for name, request in requests.items():
        got = house.outputs[name]
        assert got == (expected[name][: len(got)] if name in aborted else expected[name]), name
        assert house.scored[name] == ([] if request.params.logprobs is None else got)


def test_hundreds_of_requests_with_drafts_leave_no_block_behind() -> None:
    """The answers of grammars come late as well, some when their request is gone."""
    chance = random.Random(7)
    proposer = RandomProposer(chance, None)
    house = SchedulerHarness(60, proposer=proposer, narrower=[10, 10], max_num_seqs=16, max_num_batched_tokens=64)
    stems = [chance.choices(range(90), k=40) for _ in range(5)]
    for number in range(400):
        prompt, length = make_prompt(chance, stems), chance.randrange(1, 12)
        house.add(make_request(f"r{number}", prompt, length, gated=number % 5 == 0))
        for _ in range(6):
            chance.choice([house.work, house.fill, house.answer, house.answer_drafts])()
        if chance.random() < 0.3:
            house.abort(f"r{chance.randrange(number + 1)}")
    house.run(chance, limit=10**6)
    assert house.kv_cache.pool.num_free == house.kv_cache.pool.num_usable
    assert [len(ends) for ends in house.ended.values()] == [1] * 400
    assert house.scheduler.state.num_preemptions > 0
    assert house.worker.num_kept_drafts > 200


def walk_running(scheduler: Scheduler) -> dict[int, tuple[int, int, bool]]:
    """Row -> (start, number of tokens, whether one is sampled), as long as there is room for everybody."""
    steps = scheduler._steps
    # a free row makes chunks smaller
    scheduler.state.drain(next(iter(steps), scheduler.state.num_steps))
    budget = scheduler.config.max_num_batched_tokens
    expected = {}
    for index, request in enumerate(scheduler.state.running):
        num_known = len(request.token_ids) + request.num_in_flight
        count = num_known - request.num_computed_tokens
        if count <= 0 or request.num_in_flight >= MAX_IN_FLIGHT or num_known >= request.max_num_tokens:
            continue
        if budget <= 0:
            break
        if count > 1:
            rest = budget - (len(scheduler.state.running) - index - 1)
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
        self._ask()
        while True:
            expected, num_preemptions = walk_running(self.scheduler), self.scheduler.state.num_preemptions
            plan = self.scheduler.schedule()
            if plan is None:
                return
            if self.scheduler.state.num_preemptions == num_preemptions:
                self._compare(plan, expected)
            self._send(plan)

    def _compare(self, plan: StepPlan, expected: dict[int, tuple[int, int, bool]]) -> None:
        runs = zip(
            plan.starts.tolist(),
            plan.num_scheduled_tokens.tolist(),
            (plan.num_samples > 0).tolist(),
            strict=True,
        )
        new_rows = {new.row for new in plan.new_rows}
        got = {row: run for row, run in zip(plan.rows.tolist(), runs, strict=True) if row not in new_rows}
        assert got == expected
        self.num_compared += len(got)


@pytest.mark.parametrize("seed", range(12))
def test_any_history_is_planned_as_by_the_slow_walk(seed: int) -> None:
    chance = random.Random(seed)
    house = WatchedHarness(
        chance.choice([26, 40, 300]),
        max_num_seqs=chance.choice([2, 4, 12]),
        max_num_batched_tokens=chance.choice([3, 12, 16, 64]),
        max_steps_in_flight=chance.choice([1, 2]),
    )
    for number in range(chance.randrange(4, 30)):
        length = chance.randrange(1, chance.choice([6, MAX_MODEL_LEN - 1]))
        prompt = chance.choices(range(90), k=length)
        stop = {"stop_token_ids": [chance.randrange(90)]} if chance.random() < 0.3 else {}
        name, gated = f"r{number}", chance.random() < 0.3
        house.add(make_request(name, prompt, chance.randrange(1, 40), gated=gated, **stop))
        for _ in range(chance.randrange(20)):
            chance.choice([house.work, house.work, house.fill, house.answer])()
        if chance.random() < 0.2:
            house.abort(f"r{chance.randrange(number + 1)}")
    house.run(chance)
    assert house.num_compared > 20
