"""Scheduler: how requests end, wherever they are, and what late masks do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.messages import NO_TOKEN_LEFT, AddRequest, GrammarBroken, RunStep, SampleGate, StepDone
from engine.outputs import FinishReason
from tests.engine.core.harness import MAX_MODEL_LEN, SchedulerHarness, find_prompt, make_request


def finish_of(house: SchedulerHarness, name: str) -> tuple[FinishReason | None, int | str | None]:
    (last,) = house.ended[name]
    return last.finish_reason, last.stop_reason


def is_all_free(house: SchedulerHarness) -> bool:
    return house.kv_cache.pool.num_free == house.kv_cache.pool.num_usable


def run_alone(request: AddRequest) -> SchedulerHarness:
    house = SchedulerHarness()
    house.add(request)
    house.run()
    assert is_all_free(house)
    return house


def test_max_tokens_ends_with_length() -> None:
    prompt, answer = find_prompt(30, ends=False)
    house = run_alone(make_request("a", prompt, max_tokens=7))
    assert house.outputs["a"] == answer[:7]
    assert finish_of(house, "a") == ("length", None)


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_the_model_length_ends_with_length(max_tokens: int | None) -> None:
    prompt = list(range(MAX_MODEL_LEN - 3))
    house = run_alone(make_request("a", prompt, max_tokens, ignore_eos=True))  # type: ignore[arg-type]
    assert len(house.outputs["a"]) == 3
    assert finish_of(house, "a") == ("length", None)


def test_eos_ends_with_stop_and_no_stop_reason() -> None:
    prompt, answer = find_prompt(30, ends=True)
    house = run_alone(make_request("a", prompt, max_tokens=40))
    assert house.outputs["a"] == answer
    assert finish_of(house, "a") == ("stop", None)


def test_ignore_eos_goes_on() -> None:
    prompt, answer = find_prompt(30, ends=True)
    house = run_alone(make_request("a", prompt, max_tokens=40, ignore_eos=True))
    assert house.outputs["a"][: len(answer)] == answer
    assert (len(house.outputs["a"]), finish_of(house, "a")) == (40, ("length", None))


def test_a_grammar_still_ends_by_eos_when_eos_is_ignored() -> None:
    """Its matcher is over then: there is nothing left to write."""
    prompt, answer = find_prompt(30, ends=True)
    house = run_alone(make_request("a", prompt, max_tokens=40, ignore_eos=True, gated=True))
    assert house.outputs["a"] == answer


def test_a_stop_token_ends_with_itself_as_the_reason() -> None:
    prompt, answer = find_prompt(30, ends=False)
    house = run_alone(make_request("a", prompt, max_tokens=30, stop_token_ids=[answer[3]]))
    assert house.outputs["a"] == answer[: answer.index(answer[3]) + 1]
    assert finish_of(house, "a") == ("stop", answer[3])


def test_a_stop_token_on_the_last_place_is_a_stop() -> None:
    prompt, answer = find_prompt(30, ends=False)
    place = answer.index(answer[3])
    house = run_alone(make_request("a", prompt, max_tokens=place + 1, stop_token_ids=[answer[3]]))
    assert finish_of(house, "a") == ("stop", answer[3])


def test_a_token_that_could_not_be_sampled_ends_only_its_request() -> None:
    house = SchedulerHarness(max_num_batched_tokens=64)
    prompt, answer = find_prompt(30, ends=False)
    house.add_together(*(make_request(name, prompt, max_tokens=5) for name in ("broken", "healthy")))
    house.work()
    done = house.to_scheduler.popleft()
    house.to_scheduler.append(StepDone(done.step_id, done.indices, [-1, done.token_ids[1]], done.is_last))
    house.run()
    assert finish_of(house, "broken") == ("error", None)
    assert "no token could be sampled" in (house.ended["broken"][0].error or "")
    assert house.outputs["healthy"] == answer[:5]
    assert is_all_free(house)


def test_constraints_that_leave_no_token_are_a_dead_end_of_their_request_alone() -> None:
    house = SchedulerHarness(max_num_batched_tokens=64)
    prompt = list(range(30))
    house.add(make_request("stuck", prompt, 5, gated=True, bad_words=("x",), allowed_token_ids=(3,)))
    house.fill()
    while not (house.to_scheduler and len(house.to_scheduler[-1].indices)):
        house.work()
    done = house.to_scheduler.pop()
    house.to_scheduler.append(StepDone(done.step_id, done.indices, [NO_TOKEN_LEFT], done.is_last))
    house.run()
    assert finish_of(house, "stuck") == ("dead_end", None)
    expected = "after 0 tokens of output no token satisfies grammar and allowed_token_ids and bad_words"
    assert house.ended["stuck"][0].error == expected
    house.add(make_request("after", prompt, 2))
    house.run()
    assert house.ended["after"][0].num_cached_tokens == 28, "its KV is sound"


@pytest.mark.parametrize("is_preempted", [False, True])
def test_what_a_failed_row_computed_or_found_is_not_cached(is_preempted: bool) -> None:
    """Its KV may be what failed; whoever found it there would fail as well."""
    house = SchedulerHarness(max_num_batched_tokens=64)
    prompt = list(range(30))
    for name in ("first", "broken", "after"):
        house.add(make_request(name, prompt, max_tokens=2))
        if name == "broken":
            house.work()
            done = house.to_scheduler.popleft()
            house.to_scheduler.append(StepDone(done.step_id, done.indices, [-1], done.is_last))
            if is_preempted:
                house.scheduler.ledger.preempt(house.scheduler.ledger.running[0], done.step_id)
        house.run()
    assert [house.ended[name][0].num_cached_tokens for name in ("broken", "after")] == [28, 0]


# Aborts, at every place a request can be


def stop_waiting(house: SchedulerHarness) -> None:
    """Behind four others."""
    prompt, _ = find_prompt(30, ends=False)
    house.add_together(*(make_request(f"other {n}", prompt, 30, arrival=-1.0) for n in range(4)))
    house.add(make_request("a", prompt, 30))
    assert "a" in house.scheduler.ledger.waiting


def stop_in_prefill(house: SchedulerHarness) -> None:
    house.add(make_request("a", list(range(90)), 5))
    house.work()
    house.answer()
    assert house.scheduler.ledger.running[0].num_computed_tokens < 90


def stop_in_decode(house: SchedulerHarness) -> None:
    house.add(make_request("a", find_prompt(30, ends=False)[0], 30))
    for _ in range(5):
        house.work()
        house.answer()
    assert len(house.outputs["a"]) == 5


def stop_in_flight(house: SchedulerHarness) -> None:
    stop_in_decode(house)
    house.work()
    assert house.to_scheduler
    assert house.to_worker


def stop_at_the_gate(house: SchedulerHarness) -> None:
    house.add(make_request("a", find_prompt(30, ends=False)[0], 30, gated=True))
    house.work()
    assert house.worker.parked


def stop_preempted(house: SchedulerHarness) -> None:
    stop_in_decode(house)
    house.scheduler.ledger.preempt(house.scheduler.ledger.running[0], house.scheduler.num_steps - 1)
    house.check()


PLACES = [stop_waiting, stop_in_prefill, stop_in_decode, stop_in_flight, stop_at_the_gate, stop_preempted]


@pytest.mark.parametrize("stop", PLACES, ids=lambda each: each.__name__)
def test_an_abort_frees_the_blocks_at_once_and_ends_once(stop: Callable[[SchedulerHarness], None]) -> None:
    house = SchedulerHarness()
    stop(house)
    house.abort("a")
    house.check()
    assert finish_of(house, "a") == ("abort", None)
    assert "a" not in house.scheduler
    assert not [request for request in house.scheduler.ledger.running if request.request_id == "a"]
    house.abort("a")
    house.run()
    assert len(house.ended["a"]) == 1
    assert is_all_free(house)


@pytest.mark.parametrize("stop", PLACES, ids=lambda each: each.__name__)
def test_after_an_abort_the_same_name_can_come_again(stop: Callable[[SchedulerHarness], None]) -> None:
    house = SchedulerHarness()
    stop(house)
    house.abort("a")
    prompt, answer = find_prompt(30, ends=False)
    house.add(make_request("a", prompt, 6))
    house.run()
    assert house.outputs["a"] == answer[:6]
    assert len(house.ended["a"]) == 2


def test_an_unknown_name_is_ignored() -> None:
    assert SchedulerHarness().scheduler.abort(["nobody"]) == []


def test_an_abort_carries_the_reason_it_is_given() -> None:
    house = SchedulerHarness()
    house.add(make_request("a", find_prompt(30, ends=False)[0], 30))
    (ended,) = house.scheduler.abort(["a"], "error", "the grammar broke")
    assert (ended.finish_reason, ended.error, ended.token_ids) == ("error", "the grammar broke", [])


# Masks


def make_gated_house() -> SchedulerHarness:
    """One request with a grammar beside a plain one; nothing has run yet."""
    house = SchedulerHarness(max_num_batched_tokens=64)
    prompt, _ = find_prompt(30, ends=False)
    house.add_together(make_request("gated", prompt, 10, gated=True), make_request("plain", prompt, 10))
    return house


def test_plain_rows_go_on_while_a_mask_is_late() -> None:
    house = make_gated_house()
    while "plain" not in house.ended:
        assert house.work() or house.answer(), "it waits for somebody else's mask"
    assert len(house.outputs["plain"]) == 10
    assert house.outputs["gated"] == []
    assert finish_of(house, "plain") == ("length", None)


def test_a_row_whose_mask_is_late_is_skipped_and_caught_up() -> None:
    house = make_gated_house()
    house.work()
    house.work()
    assert house.to_scheduler[-1].skipped == (0,)
    house.run()
    assert house.outputs["gated"] == house.outputs["plain"] == find_prompt(30, ends=False)[1][:10]


def test_a_skipped_row_is_not_counted_as_computed() -> None:
    house = make_gated_house()
    (request, _) = house.scheduler.ledger.running
    house.work()
    house.work()
    house.answer()
    planned = request.num_computed_tokens
    house.answer()
    assert request.num_computed_tokens <= planned
    assert request.num_in_flight <= 2


def test_masks_are_ordered_only_when_all_tokens_before_are_known() -> None:
    house = make_gated_house()
    assert [order.step_id for order in house.to_grammar] == [0]
    assert sum(isinstance(message, RunStep) for message in house.to_worker) == 2
    house.work()
    house.fill()
    while not isinstance(house.to_worker[0], SampleGate):
        house.work()
    assert house.scheduler.order_masks() is None


def test_a_gated_request_that_ends_gets_no_mask() -> None:
    house = make_gated_house()
    house.abort("gated")
    house.run()
    assert house.num_accepted["gated"] == 0
    assert house.outputs["plain"] == find_prompt(30, ends=False)[1][:10]


def test_accepted_tokens_reach_the_matcher_once_and_in_number() -> None:
    house = make_gated_house()
    house.run()
    assert house.num_accepted["gated"] == 9, "all but the last, which ended the request"
    assert house.num_accepted["plain"] == 0


def test_a_row_is_not_given_away_while_its_sample_is_parked() -> None:
    house = SchedulerHarness(max_num_seqs=1)
    prompt, answer = find_prompt(30, ends=False)
    house.add(make_request("gated", prompt, 10, gated=True))
    house.work()
    house.abort("gated")
    house.add(make_request("next", prompt, 4))
    assert house.scheduler.ledger.running == []
    house.run()
    assert house.outputs["next"] == answer[:4]


def test_a_broken_matcher_does_not_end_a_later_request_of_its_name() -> None:
    house = make_gated_house()
    name = next(iter(house.scheduler.ledger.requests))
    house.plan()
    late = GrammarBroken(house.scheduler.num_steps - 1, name, "a limit was hit", "dead_end")
    house.abort(name)
    house.add(make_request(name, find_prompt(30, ends=False)[0], gated=True))
    assert house.scheduler.end_broken(late) == []
    report = GrammarBroken(house.scheduler.num_steps, name, "a limit was hit", "dead_end")
    (ended,) = house.scheduler.end_broken(report)
    assert (ended.finish_reason, ended.error) == ("dead_end", "a limit was hit")
    assert house.scheduler.end_broken(report) == []
