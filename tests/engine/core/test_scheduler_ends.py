"""Scheduler: how requests end, wherever they are, and what late masks do."""

from collections.abc import Callable

import msgspec
import pytest

from engine.core.actor_messages import BROKEN_LOGITS, NO_TOKEN_LEFT, StepDone
from engine.messages import AddRequest
from engine.outputs import FinishReason
from tests.engine.core.fake_worker import make_array
from tests.engine.core.harness import MAX_MODEL_LEN, SchedulerHarness, find_prompt, make_request


def finish_of(house: SchedulerHarness, name: str) -> tuple[FinishReason | None, int | str | None]:
    (last,) = house.ended[name]
    return last.finish_reason, last.stop_reason


def replace_tokens(done: StepDone, *token_ids: int) -> StepDone:
    return msgspec.structs.replace(done, token_ids=make_array(token_ids))


def run_alone(request: AddRequest) -> SchedulerHarness:
    house = SchedulerHarness()
    house.add(request)
    house.run()
    assert not house.kv_cache.pool.owned_ids()
    return house


LASTING, LONG_ANSWER = find_prompt(30, ends=False)


@pytest.mark.parametrize(("ignored", "gated"), [(False, False), (True, True), (True, False)])
def test_eos_ends_with_stop_unless_it_is_ignored_without_a_grammar(ignored: bool, gated: bool) -> None:
    """The matcher is over then: there is nothing left to write."""
    prompt, answer = find_prompt(30, ends=True)
    house = run_alone(make_request("a", prompt, max_tokens=40, ignore_eos=ignored, gated=gated))
    if ignored and not gated:
        assert house.outputs["a"][: len(answer)] == answer
        assert (len(house.outputs["a"]), finish_of(house, "a")) == (40, ("length", None))
    else:
        assert (house.outputs["a"], finish_of(house, "a")) == (answer, ("stop", None))


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_the_model_length_ends_with_length(max_tokens: int | None) -> None:
    prompt = list(range(MAX_MODEL_LEN - 3))
    house = run_alone(make_request("a", prompt, max_tokens, ignore_eos=True))  # type: ignore[arg-type]
    assert len(house.outputs["a"]) == 3
    assert finish_of(house, "a") == ("length", None)


@pytest.mark.parametrize("room", [0, 20])
def test_a_stop_token_ends_with_itself_as_the_reason(room: int) -> None:
    """Also on the last place."""
    stop = LONG_ANSWER[3]
    place = LONG_ANSWER.index(stop) + 1
    house = run_alone(make_request("a", LASTING, max_tokens=place + room, stop_token_ids=[stop]))
    assert (house.outputs["a"], finish_of(house, "a")) == (LONG_ANSWER[:place], ("stop", stop))


def test_a_token_that_could_not_be_sampled_ends_only_its_request() -> None:
    house = SchedulerHarness(max_num_batched_tokens=64)
    house.add_together(*(make_request(name, LASTING, max_tokens=5) for name in ("broken", "healthy")))
    house.work()
    done = house.to_scheduler.popleft()
    house.to_scheduler.append(replace_tokens(done, BROKEN_LOGITS, done.token_ids[1]))
    house.run()
    assert finish_of(house, "broken") == ("error", None)
    assert "no token could be sampled" in (house.ended["broken"][0].error or "")
    assert house.outputs["healthy"] == LONG_ANSWER[:5]
    assert not house.kv_cache.pool.owned_ids()


def test_constraints_that_leave_no_token_are_a_dead_end_of_their_request_alone() -> None:
    house = SchedulerHarness(max_num_batched_tokens=64)
    prompt = list(range(30))
    house.add(make_request("stuck", prompt, 5, gated=True, bad_words=("x",), allowed_token_ids=(3,)))
    house.work()
    house.fill()
    while not (house.to_scheduler and len(house.to_scheduler[-1].indices)):
        house.work()
    done = house.to_scheduler.pop()
    house.to_scheduler.append(replace_tokens(done, NO_TOKEN_LEFT))
    house.run()
    assert finish_of(house, "stuck") == ("dead_end", None)
    expected = "after 0 tokens of output no token satisfies grammar and allowed_token_ids and bad_words"
    assert house.ended["stuck"][0].error == expected
    assert house.scheduler.state.dead_ends == {"no_token": 1}
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
            house.to_scheduler.append(replace_tokens(done, BROKEN_LOGITS))
            if is_preempted:
                house.scheduler.state.preempt(house.scheduler.state.running[0])
        house.run()
    assert [house.ended[name][0].num_cached_tokens for name in ("broken", "after")] == [28, 0]


def test_the_tokens_before_a_failed_one_are_not_cached() -> None:
    """Blocks of generated tokens enter the prefix cache when their request ends."""
    house = SchedulerHarness(max_num_batched_tokens=64)
    house.add(make_request("broken", LASTING, max_tokens=20))
    while house.scheduler.state.num_steps < 10:
        house.work()
        house.answer()
    house.work()
    done = house.to_scheduler.popleft()
    house.to_scheduler.appendleft(replace_tokens(done, BROKEN_LOGITS))
    house.run()
    assert len(house.kv_cache.pool.by_hash) == 0


# Aborts, at every place a request can be


def stop_waiting(house: SchedulerHarness) -> None:
    """Behind four others."""
    house.add_together(*(make_request(f"other {n}", LASTING, 30, arrival=-1.0) for n in range(4)))
    house.add(make_request("a", LASTING, 30))
    assert house.handles["a"] in house.scheduler.state.waiting


def stop_in_prefill(house: SchedulerHarness) -> None:
    house.add(make_request("a", list(range(90)), 5))
    house.work()
    house.answer()
    assert house.scheduler.state.running[0].num_computed_tokens < 90


def stop_in_decode(house: SchedulerHarness) -> None:
    house.add(make_request("a", LASTING, 30))
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
    house.add(make_request("a", LASTING, 30, gated=True))
    house.work()
    assert house.worker.parked


def stop_preempted(house: SchedulerHarness) -> None:
    stop_in_decode(house)
    house.scheduler.state.preempt(house.scheduler.state.running[0])
    house.check()


PLACES = [stop_waiting, stop_in_prefill, stop_in_decode, stop_in_flight, stop_at_the_gate, stop_preempted]


@pytest.mark.parametrize("stop", PLACES, ids=lambda each: each.__name__)
def test_an_abort_frees_blocks_and_name_at_once_and_ends_once(stop: Callable[[SchedulerHarness], None]) -> None:
    house = SchedulerHarness()
    stop(house)
    house.abort("a")
    house.check()
    assert finish_of(house, "a") == ("abort", None)
    assert house.handles["a"] not in house.scheduler
    assert not [request for request in house.scheduler.state.running if request.request_id == "a"]
    house.abort("a")
    house.add(make_request("a", LASTING, 6))
    house.run()
    assert house.outputs["a"] == LONG_ANSWER[:6]
    assert [ended.finish_reason for ended in house.ended["a"]] == ["abort", "length"]
    assert not house.kv_cache.pool.owned_ids()


@pytest.fixture
def house() -> SchedulerHarness:
    """One request with a grammar beside a plain one; nothing has run yet."""
    house = SchedulerHarness(max_num_batched_tokens=64)
    house.add_together(make_request("gated", LASTING, 10, gated=True), make_request("plain", LASTING, 10))
    return house


# Masks


def test_plain_rows_go_on_while_a_mask_is_late(house: SchedulerHarness) -> None:
    while "plain" not in house.ended:
        assert house.work() or house.answer(), "it waits for somebody else's mask"
    assert len(house.outputs["plain"]) == 10
    assert house.outputs["gated"] == []
    assert finish_of(house, "plain") == ("length", None)


def test_a_row_whose_mask_is_late_is_skipped_and_caught_up(house: SchedulerHarness) -> None:
    """Each token reaches its matcher once."""
    house.work()
    house.work()
    assert house.to_scheduler[-1].skipped == [0]
    house.run()
    assert house.outputs["gated"] == house.outputs["plain"] == LONG_ANSWER[:10]
    assert [house.num_accepted[house.handles[name]] for name in ("gated", "plain")] == [10, 0]


def test_a_row_is_not_given_away_while_its_sample_is_parked() -> None:
    house = SchedulerHarness(max_num_seqs=1)
    house.add(make_request("gated", LASTING, 10, gated=True))
    house.work()
    house.abort("gated")
    house.add(make_request("next", LASTING, 4))
    assert house.scheduler.state.running == []
    house.run()
    assert house.outputs["next"] == LONG_ANSWER[:4]


def test_a_failed_matcher_does_not_end_a_later_request_of_its_name(house: SchedulerHarness) -> None:
    report = ("dead_end", "a limit was hit")
    late = house.handles["gated"]
    house.abort("gated")
    house.add(make_request("gated", LASTING, gated=True))
    assert house.scheduler.abort([late], *report).details == []
    (ended,) = house.scheduler.abort([house.handles["gated"]], *report).details
    assert (ended.finish_reason, ended.error) == report
    assert house.scheduler.abort([house.handles["gated"]], *report).details == []
