"""Any order of add, abort, step and answer: blocks add up, every request ends once, with the right tokens."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.core.fake_worker import reference_output
from tests.engine.core.harness import MAX_MODEL_LEN, SchedulerHarness, make_request


def make_prompt(chance: random.Random, stems: list[list[int]], longest: int = 12) -> list[int]:
    """Prompts share stems, so that prefixes hit, and differ in their ends."""
    stem = chance.choice(stems)
    tail = [chance.randrange(90) for _ in range(chance.randrange(1, longest))]
    return (stem[: chance.randrange(len(stem) + 1)] + tail)[: MAX_MODEL_LEN - 1]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.sampled_from([26, 40, 200]),
    budget=st.sampled_from([5, 16, 64]),
    policy=st.sampled_from(["fcfs", "priority"]),
    depth=st.sampled_from([1, 2]),
    caching=st.booleans(),
    num_seats=st.sampled_from([1, 2, 4]),
    longest=st.sampled_from([12, MAX_MODEL_LEN]),
)
def test_any_order_of_events_keeps_blocks_and_tokens_right(
    seed: int,
    num_blocks: int,
    budget: int,
    policy: str,
    depth: int,
    caching: bool,
    num_seats: int,
    longest: int,
) -> None:
    chance = random.Random(seed)
    house = SchedulerHarness(
        num_blocks,
        caching=caching,
        max_num_seqs=num_seats,
        max_num_batched_tokens=budget,
        policy=policy,
        max_steps_in_flight=depth,
    )
    stems = [[chance.randrange(90) for _ in range(40)] for _ in range(2)]
    requests = {}
    aborted = set()
    for number in range(chance.randrange(1, 14)):
        name = f"r{number}"
        house.now += chance.random() * 5
        request = make_request(
            name,
            make_prompt(chance, stems, longest),
            chance.randrange(1, 30),
            gated=chance.random() < 0.4,
            priority=chance.randrange(3),
            arrival=house.now,
            salt=chance.choice([None, None, "a"]),
        )
        requests[name] = request
        house.add(request)
        for _ in range(chance.randrange(12)):
            chance.choice([house.work, house.work, house.fill, house.answer])()
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
    assert {name: len(ends) for name, ends in house.ended.items()} == dict.fromkeys(requests, 1)
    for name, request in requests.items():
        expected = reference_output(request.prompt_token_ids, request.params.max_tokens or 0, MAX_MODEL_LEN)
        got = house.outputs[name]
        assert got == (expected[: len(got)] if name in aborted else expected), name


def test_two_thousand_random_requests_leave_no_block_behind() -> None:
    chance = random.Random(7)
    house = SchedulerHarness(60, max_num_seqs=16, max_num_batched_tokens=64)
    stems = [[chance.randrange(90) for _ in range(40)] for _ in range(5)]
    for number in range(2000):
        house.add(
            make_request(
                f"r{number}", make_prompt(chance, stems), chance.randrange(1, 12), gated=number % 5 == 0
            )
        )
        for _ in range(6):
            chance.choice([house.work, house.fill, house.answer])()
        if chance.random() < 0.3:
            house.abort(f"r{chance.randrange(number + 1)}")
    house.run(chance, limit=10**6)
    assert house.kv_cache.pool.num_free == house.kv_cache.pool.num_usable
    assert len(house.ended) == 2000
    assert all(len(ends) == 1 for ends in house.ended.values())
    assert house.scheduler.ledger.num_preemptions > 0
