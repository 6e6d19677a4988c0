"""RequestQueue: who is admitted next, under both policies."""

from __future__ import annotations

import pytest

from engine.config import SchedulingPolicy
from engine.core.request_queue import RequestQueue
from engine.core.request_table import RequestTable
from engine.request import Request
from tests.engine.core import harness

AGEING_S = 10.0


def make_queue(policy: SchedulingPolicy = "fcfs") -> RequestQueue:
    return RequestQueue(policy, AGEING_S)


def make_request(name: str, arrival: float = 0.0, priority: int = 0) -> Request:
    message = harness.make_request(name, [1, 2, 3], arrival=arrival, priority=priority)
    return Request(message, RequestTable(1), max_model_len=96, eos_token_ids=frozenset())


def drain(queue: RequestQueue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


def test_fcfs_goes_by_arrival_and_ignores_priority() -> None:
    queue = make_queue()
    queue.push(make_request("second", arrival=2.0, priority=-5))
    queue.push(make_request("first", arrival=1.0, priority=5))
    assert drain(queue) == ["first", "second"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_equal_requests_keep_their_order(policy: SchedulingPolicy) -> None:
    queue = make_queue(policy)
    for number in range(20):
        queue.push(make_request(f"{number}"))
    assert drain(queue) == [f"{number}" for number in range(20)]


def test_a_lower_priority_number_goes_first() -> None:
    queue = make_queue("priority")
    for name, priority in (("later", 1), ("soon", -1), ("middle", 0)):
        queue.push(make_request(name, priority=priority))
    assert drain(queue) == ["soon", "middle", "later"]


def test_age_lets_an_old_request_pass_a_newer_one_of_better_priority() -> None:
    queue = make_queue("priority")
    queue.push(make_request("new and important", arrival=3 * AGEING_S + 1, priority=0))
    queue.push(make_request("old", arrival=0.0, priority=3))
    assert drain(queue) == ["old", "new and important"]


def test_one_ageing_period_is_worth_one_step_of_priority() -> None:
    queue = make_queue("priority")
    queue.push(make_request("old", arrival=0.0, priority=1))
    queue.push(make_request("just before", arrival=AGEING_S - 0.1, priority=0))
    queue.push(make_request("just after", arrival=AGEING_S + 0.1, priority=0))
    assert drain(queue) == ["just before", "old", "just after"]


def test_nobody_starves_under_a_stream_of_important_requests() -> None:
    """Only those that came within four ageing periods pass it, however many keep coming."""
    queue = make_queue("priority")
    queue.push(make_request("humble", arrival=0.0, priority=4))
    passed = []
    for second in range(1000):
        for name in ("one", "another"):
            queue.push(make_request(f"{name} {second}", arrival=float(second), priority=0))
        if (served := queue.pop()).request_id == "humble":
            break
        passed.append(served.arrival_time)
    assert served.request_id == "humble"
    assert max(passed) <= 4 * AGEING_S


def test_a_preempted_request_returns_to_the_front() -> None:
    queue = make_queue()
    first, second, third = (make_request(name, arrival) for name, arrival in (("a", 1), ("b", 2), ("c", 3)))
    for request in (first, second, third):
        queue.push(request)
    preempted = queue.pop()
    queue.push(preempted)
    assert drain(queue) == ["a", "b", "c"]


def test_a_removed_request_never_comes() -> None:
    queue = make_queue()
    requests = [make_request(name) for name in "abc"]
    for request in requests:
        queue.push(request)
    queue.remove(requests[0])
    assert "a" not in queue
    assert len(queue) == 2
    assert drain(queue) == ["b", "c"]


def test_a_name_used_again_after_a_removal_is_the_new_request() -> None:
    queue = make_queue()
    old, new = make_request("same"), make_request("same", arrival=9.0)
    queue.push(old)
    queue.remove(old)
    queue.push(new)
    assert queue.pop() is new
    assert queue.peek() is None


def test_requests_that_are_gone_are_let_go_however_long_the_head_waits() -> None:
    queue = make_queue()
    queue.push(make_request("head"))
    for number in range(200):
        request = make_request(f"gone {number}", arrival=1.0)
        queue.push(request)
        queue.remove(request)
    assert len(queue._heap) < 50
    assert drain(queue) == ["head"]
