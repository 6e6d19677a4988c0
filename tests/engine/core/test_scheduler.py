"""Scheduler: who computes what in a step, how requests end, and what overlap costs."""

import msgspec
import numpy as np
import pytest

from engine.core.actor_messages import StepPlan
from engine.messages import ImagePart
from tests.engine.core.harness import MAX_MODEL_LEN, SchedulerHarness, find_prompt, make_request

WIDE = 64  # a budget that takes any prompt here whole


def make_prompt(length: int, first: int = 0) -> list[int]:
    return [(first + number) % 90 for number in range(length)]


LASTING, LONG_ANSWER = find_prompt(20, ends=False)


def pending_plans(house: SchedulerHarness) -> list[StepPlan]:
    return [message for message in house.to_worker if isinstance(message, StepPlan)]


def turn(house: SchedulerHarness) -> StepPlan:
    """One step there and back; returns what was run."""
    plan = pending_plans(house)[0]
    house.work()
    house.answer()
    return plan


def test_a_long_prefill_costs_the_running_ones_no_step() -> None:
    house = SchedulerHarness(max_num_batched_tokens=8)
    for name in ("a", "b"):
        house.add(make_request(name, LASTING, max_tokens=20))
    for _ in range(4):
        turn(house)
    house.add(make_request("long", make_prompt(60, 30), max_tokens=1))
    plans = [turn(house) for _ in range(10)]
    decoding = [plan.num_scheduled_tokens.tolist()[:2] for plan in plans]
    assert decoding == [[1, 1]] * 10
    assert all(plan.num_tokens <= 8 for plan in plans)
    assert [plan.num_tokens for plan in plans].count(8) >= 8


def test_a_long_prefill_costs_those_behind_it_no_step() -> None:
    house = SchedulerHarness(max_num_batched_tokens=8)
    house.add(make_request("long", make_prompt(90, 30), max_tokens=1))
    house.add(make_request("short", LASTING, max_tokens=20))
    for _ in range(4):
        turn(house)
    assert house.outputs["short"], "its prompt did not wait for the long one"
    lengths = []
    for _ in range(6):
        turn(house)
        lengths.append(len(house.outputs["short"]))
    assert lengths == list(range(lengths[0], lengths[0] + 6))
    assert not house.outputs["long"], "the long prompt is still being computed"


def test_a_prefill_leaves_no_budget_to_one_that_lacks_blocks() -> None:
    """Half of each step would be lost for as long as the prefill takes."""
    house = SchedulerHarness(num_blocks=1 + 30, max_num_batched_tokens=16)
    house.add_together(
        make_request("long", make_prompt(90), max_tokens=1),
        make_request("waiting", make_prompt(40, 30), max_tokens=1, arrival=1.0),
    )
    assert [turn(house).num_tokens for _ in range(5)] == [16] * 5
    house.run()
    assert len(house.ended) == 2


def test_without_chunks_a_prompt_comes_whole_or_not_at_all() -> None:
    house = SchedulerHarness(max_num_batched_tokens=MAX_MODEL_LEN, enable_chunked_prefill=False)
    house.add(make_request("first", make_prompt(60), max_tokens=2))
    house.add(make_request("second", make_prompt(60, 30), max_tokens=2))
    house.add(make_request("third", make_prompt(60, 60), max_tokens=2))
    while house.to_worker:
        plan = turn(house)
        assert set(plan.num_scheduled_tokens.tolist()) <= {60, 1}
    assert len(house.ended) == 3


@pytest.mark.parametrize("num_others", [0, 1, 3])
def test_a_step_computes_an_image_whole_whose_tokens_attend_to_each_other(num_others: int) -> None:
    """Beside prompts that compete for the budget, and rows that decode."""
    house = SchedulerHarness(max_num_batched_tokens=12, max_num_seqs=4, max_steps_in_flight=1)
    spans = [(3, 12), (12, 20), (29, 38)]
    images = [ImagePart(b"x", np.arange(*span), [1, 1], is_whole=True) for span in spans]
    for number in range(num_others):
        house.add(make_request(f"other-{number}", make_prompt(30 + number, 7), max_tokens=9))
    request = msgspec.structs.replace(make_request("images", make_prompt(45), max_tokens=2), images=images)
    house.add(request)
    bounds = set()
    while house.to_worker:
        running = house.scheduler.state.running
        bounds |= {each.num_computed_tokens for each in running if each.request_id == "images"}
        assert turn(house).num_tokens <= 12
    assert len(house.ended) == 1 + num_others
    assert len(bounds) > 4 and not [bound for bound in bounds for first, end in spans if first < bound < end]


def test_an_admission_put_off_for_the_budget_leaves_the_cache_alone() -> None:
    """The attempt must neither evict cached prefixes nor count as a look-up."""
    whole = {"max_num_batched_tokens": MAX_MODEL_LEN, "enable_chunked_prefill": False}
    house = SchedulerHarness(32, max_steps_in_flight=1, **whole)
    house.add(make_request("cached", make_prompt(30), max_tokens=1))
    house.run()
    num_cached = len(house.kv_cache.pool.by_hash)
    house.add_together(
        make_request("first", make_prompt(20, 30), max_tokens=1),
        make_request("too much now", make_prompt(90, 50), max_tokens=1, arrival=1.0),
    )
    assert house.kv_cache.num_queried_tokens == 30 + 20
    assert len(house.kv_cache.pool.by_hash) == num_cached + 5


def test_admission_reserves_the_whole_prompt() -> None:
    """Room for 3 of 10 prompts, outputs within their last block: nobody is ever preempted."""
    house = SchedulerHarness(num_blocks=1 + 3 * 6, caching=False, max_num_seqs=10, max_num_batched_tokens=8)
    for number in range(10):
        house.add(make_request(f"{number}", make_prompt(21, number * 7), max_tokens=3))
    most = 0
    while house.to_worker:
        turn(house)
        most = max(most, len(house.scheduler.state.running))
    assert (most, house.scheduler.state.num_preemptions, len(house.ended)) == (3, 0, 10)


@pytest.mark.parametrize(("policy", "priorities"), [("fcfs", (0, 0, 0)), ("priority", (1, 5, 9))])
def test_the_last_in_the_queues_order_is_preempted_and_comes_back_first_with_its_tokens(
    policy: str, priorities: tuple[int, ...]
) -> None:
    """Room for two requests of 5 + 7 tokens; the third block of one comes at the cost of the other."""
    house = SchedulerHarness(num_blocks=1 + 5, caching=False, policy=policy, max_num_batched_tokens=WIDE)
    for number, name in enumerate(("first", "last", "waiting")):
        priority, arrival = priorities[number], float(number)
        house.add(make_request(name, LASTING, max_tokens=12, priority=priority, arrival=arrival))
    while not house.scheduler.state.num_preemptions:
        turn(house)
    assert [request.request_id for request in house.scheduler.state.running] == ["first"]
    head = house.scheduler.state.waiting.peek()
    assert head is not None and head.request_id == "last"
    assert 0 < len(house.outputs["last"]) < 12
    house.run()
    assert house.outputs == dict.fromkeys(("first", "last", "waiting"), LONG_ANSWER[:12])
    assert (len(house.ended), house.ended["last"][0].num_preemptions) == (3, 1)


def fill_slots(house: SchedulerHarness, count: int) -> None:
    for number in range(count):
        house.add(make_request(f"low {number}", LASTING, 20, priority=5, arrival=float(number)))
    for _ in range(3):
        turn(house)


@pytest.mark.parametrize(
    ("policy", "priority", "displaces"), [("priority", 0, True), ("priority", 5, False), ("fcfs", -9, False)]
)
def test_only_an_important_arrival_takes_a_slot_and_within_one_step(
    policy: str, priority: int, displaces: bool
) -> None:
    house = SchedulerHarness(policy=policy, max_num_seqs=2, max_num_batched_tokens=WIDE)
    fill_slots(house, 2)
    house.add(make_request("urgent", make_prompt(9), priority=priority, arrival=5.0))
    turn(house)
    running = ["urgent", "low 0"] if displaces else ["low 0", "low 1"]
    assert [request.request_id for request in house.scheduler.state.running] == running
    house.run()
    assert (len(house.ended), house.scheduler.state.num_preemptions) == (3, displaces)


def test_an_important_arrival_displaces_one_request_also_while_masks_are_on_their_way() -> None:
    """A victim's row is free only when its parked sample is over; nobody else pays for that wait."""
    house = SchedulerHarness(policy="priority", max_num_seqs=4, max_num_batched_tokens=WIDE)
    lows = [make_request(f"low {number}", LASTING, 20, priority=5, gated=True) for number in range(4)]
    house.add_together(*lows)
    house.add(make_request("urgent", make_prompt(9), priority=0, arrival=5.0))
    house.run()
    assert house.scheduler.state.num_preemptions == 1
    assert len(house.ended) == 5


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ends", [True, False])
def test_only_an_unforeseen_end_costs_a_token_for_each_step_that_was_planned_ahead(ends: bool, depth: int) -> None:
    """An end by length is foreseen."""
    prompt, answer = find_prompt(20, ends=ends)
    house = SchedulerHarness(caching=False, max_steps_in_flight=depth)
    house.add(make_request("a", prompt, max_tokens=20))
    house.run()
    assert house.outputs["a"] == answer
    assert house.worker.num_computed_tokens == len(prompt) + len(answer) - 1 + (depth - 1) * ends


def add_urgent(house: SchedulerHarness, count: int, num_tokens: int) -> list[StepPlan]:
    """Requests better than all that run come together; returns the steps in which they are admitted."""
    prompts = [make_prompt(num_tokens, 7 * number) for number in range(count)]
    urgent = [make_request(f"urgent {number}", prompts[number], 2, arrival=9.0) for number in range(count)]
    house.add_together(*urgent)
    plans = []
    while "urgent 0" not in house.ended:
        plans.append(turn(house))
    house.run()
    assert len(house.ended) == 4 + count
    return [plan for plan in plans if plan.new_rows]


def test_nobody_gives_way_to_a_request_that_the_step_has_no_tokens_for() -> None:
    house = SchedulerHarness(200, policy="priority", max_num_batched_tokens=16)
    fill_slots(house, 4)
    first = add_urgent(house, 2, 40)[0]
    assert first.num_scheduled_tokens.tolist() == [13, 1, 1, 1]
    assert first.num_samples.tolist() == [0, 1, 1, 1]


def test_nobody_gives_way_to_a_request_that_does_not_fit_even_then() -> None:
    house = SchedulerHarness(
        num_blocks=31, caching=False, policy="priority", max_num_seqs=8, max_num_batched_tokens=WIDE
    )
    house.add(make_request("best", make_prompt(60), max_tokens=30))
    for number in range(3):
        house.add(make_request(f"low {number}", [5] * 12, 40, priority=9, arrival=0.1 * number))
    while len(house.scheduler.state.running) < 4:
        turn(house)
    house.add(make_request("big", make_prompt(80), max_tokens=4, priority=5, arrival=1.0))
    for _ in range(2):
        turn(house)
    assert house.scheduler.state.num_preemptions == 0
    house.run()
    assert len(house.ended) == 5


def test_long_prompts_that_are_cached_are_admitted_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.core.scheduler.MAX_ADMITTED_TOKENS", 100)
    house = SchedulerHarness(num_blocks=200, max_num_seqs=16, max_num_batched_tokens=WIDE)
    prompt = make_prompt(60)
    house.add(make_request("first", prompt))
    house.run()
    house.add_together(*(make_request(f"again {number}", prompt) for number in range(8)))
    assert [len(plan.new_rows) for plan in pending_plans(house)] == [2, 2]
    house.run()
    assert len(house.ended) == 9
