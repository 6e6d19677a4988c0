"""RequestQueue: who is admitted next, under both policies."""

from itertools import permutations

import pytest

from engine.config_fields import SchedulingPolicy
from engine.core.request import Request
from engine.core.request_queue import AGEING_S, RequestQueue
from tests.engine.core import harness


def make_request(name: str, arrival: float = 0.0, priority: int = 0) -> Request:
    message = harness.make_request(name, [1, 2, 3], arrival=arrival, priority=priority)
    return harness.make_record(message)


def drain(queue: RequestQueue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_equal_requests_keep_their_order(policy: SchedulingPolicy) -> None:
    queue = RequestQueue(policy)
    for number in range(20):
        queue.push(make_request(f"{number}"))
    assert drain(queue) == [f"{number}" for number in range(20)]


@pytest.mark.parametrize(
    ("policy", "requests"),
    [
        ("fcfs", {"first": (1.0, 5), "second": (2.0, -5)}),
        ("priority", {"soon": (0.0, -1), "middle": (0.0, 0), "later": (0.0, 1)}),
        ("priority", {"just before": (AGEING_S - 0.1, 0), "old": (0.0, 1), "just after": (AGEING_S + 0.1, 0)}),
        ("priority", {"very old": (0.0, 3), "new and important": (3 * AGEING_S + 1, 0)}),
    ],
)
def test_priority_counts_under_its_policy_and_one_ageing_period_is_worth_one_step_of_it(
    policy: SchedulingPolicy, requests: dict[str, tuple[float, int]]
) -> None:
    for names in permutations(requests):
        queue = RequestQueue(policy)
        for name in names:
            queue.push(make_request(name, *requests[name]))
        assert drain(queue) == list(requests)


def test_nobody_starves_under_a_stream_of_important_requests() -> None:
    """Only those that came within four ageing periods pass it, however many keep coming."""
    queue = RequestQueue("priority")
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


def test_a_preempted_request_returns_to_the_front_and_a_removed_one_never_comes() -> None:
    queue = RequestQueue("fcfs")
    requests = [make_request(name, arrival) for arrival, name in enumerate("abc")]
    for request in requests:
        queue.push(request)
    queue.push(queue.pop())
    queue.remove(requests[1])
    assert requests[1].handle not in queue and len(queue) == 2
    assert drain(queue) == ["a", "c"]


def test_a_name_used_again_after_a_removal_is_the_new_request() -> None:
    queue = RequestQueue("fcfs")
    old, new = make_request("same"), make_request("same", arrival=9.0)
    queue.push(old)
    queue.remove(old)
    queue.push(new)
    assert queue.pop() is new
    assert queue.peek() is None


def test_requests_that_are_gone_are_let_go_however_long_the_head_waits() -> None:
    queue = RequestQueue("fcfs")
    queue.push(make_request("head"))
    for number in range(200):
        request = make_request(f"gone {number}", arrival=1.0)
        queue.push(request)
        queue.remove(request)
    assert len(queue._heap) < 50
    assert drain(queue) == ["head"]
