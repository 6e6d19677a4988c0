"""A snapshot says where every request is and who owns which block, and holds nothing of the engine."""

import dataclasses

import pytest

from engine import EngineSnapshot
from engine.snapshot import take_snapshot
from tests.engine.core.harness import SchedulerHarness, make_request


def look(house: SchedulerHarness) -> EngineSnapshot:
    return take_snapshot(house.scheduler, house.kv_cache.pool, house.kv_cache.block_size)


def prompt(length: int, first: int = 0) -> list[int]:
    return [first + number for number in range(length)]


def test_running_requests_come_first_and_waiting_ones_in_their_order() -> None:
    house = SchedulerHarness(max_num_seqs=1)
    for name in ("first", "second", "third"):
        house.add(make_request(name, prompt(6), max_tokens=40))
    views = look(house).requests
    assert [view.request_id for view in views] == ["first", "second", "third"]
    assert [view.phase for view in views[1:]] == ["queued", "queued"]


def test_a_prompt_that_is_computed_in_chunks_is_prefill_until_it_is_known() -> None:
    house = SchedulerHarness(max_num_batched_tokens=16, max_steps_in_flight=1)
    house.add(make_request("long", prompt(40), max_tokens=9))
    view = look(house).requests[0]
    assert (view.phase, view.num_computed_tokens, view.num_prompt_tokens) == ("prefill", 16, 40)
    for _ in range(3):
        house.work()
        house.answer()
    assert look(house).requests[0].phase == "decode"


def test_a_request_that_lost_its_blocks_is_preempted_and_owns_none() -> None:
    house = SchedulerHarness(num_blocks=9, caching=False)
    house.add(make_request("kept", prompt(12), max_tokens=20))
    house.add(make_request("lost", prompt(12, 40), max_tokens=20))
    while not house.scheduler.ledger.num_preemptions:
        house.work()
        house.answer()
    views = {view.request_id: view for view in look(house).requests}
    assert views["lost"].phase == "preempted" and views["lost"].block_ids == ()
    assert views["lost"].num_preemptions == 1 and views["kept"].phase == "decode"


def test_blocks_are_those_of_the_pool() -> None:
    house = SchedulerHarness()
    house.add(make_request("a", prompt(9), max_tokens=3))
    house.add(make_request("b", prompt(9), max_tokens=3))
    snapshot = look(house)
    owned = {block_id for view in snapshot.requests for block_id in view.block_ids}
    assert owned == set(house.kv_cache.pool.owned_ids()) and 0 not in owned
    assert len(snapshot.cached_block_ids) == house.kv_cache.pool.num_cached > 0
    house.run()
    assert look(house).requests == ()


def test_a_snapshot_stays_as_it_was() -> None:
    house = SchedulerHarness()
    house.add(make_request("a", prompt(9), max_tokens=20))
    snapshot = look(house)
    before = dataclasses.asdict(snapshot)
    house.run()
    assert dataclasses.asdict(snapshot) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot.num_blocks = 3  # type: ignore[misc]


def test_without_blocks_everything_else_is_the_same() -> None:
    house = SchedulerHarness()
    house.add(make_request("a", prompt(9), max_tokens=20))
    whole, light = look(house), take_snapshot(house.scheduler, house.kv_cache.pool, 4, with_blocks=False)
    (view,), (slim,) = whole.requests, light.requests
    assert slim == dataclasses.replace(view, block_ids=(), age_s=slim.age_s) and light.cached_block_ids == ()
