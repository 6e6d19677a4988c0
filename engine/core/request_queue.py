"""RequestQueue: waiting requests, ordered by scheduling policy.

Both policies use one key, smallest first: fcfs the arrival time, priority `priority + arrival_time / AGEING_S`. All
requests age at the same rate, so their order never changes while they wait, and a heap with fixed keys suffices.
No request starves: AGEING_S seconds of waiting count as one level of priority. A preempted request keeps its key
and therefore returns to the front.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

from engine.config_fields import SchedulingPolicy
from engine.core.request import Request

SLACK = 16
AGEING_S = 10.0


class RequestQueue:
    """A heap of waiting requests. Removed requests stay in the heap until many are removed at once."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[float, float, int], Request]] = []
        self._members: dict[int, Request] = {}
        self._counter = itertools.count()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, handle: int) -> bool:
        return handle in self._members

    def push(self, request: Request) -> None:
        """Queue a new request, or a preempted one with its old key."""
        if request.queue_key[2] == 0:
            rank = find_rank(self._policy, request.priority, request.arrival_time)
            request.queue_key = (rank, request.arrival_time, next(self._counter) + 1)
        self._members[request.handle] = request
        heapq.heappush(self._heap, (request.queue_key, request))

    def peek(self) -> Request | None:
        while self._heap and not self._is_member(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        request = self.peek()
        assert request is not None, "pop from an empty queue"
        heapq.heappop(self._heap)
        del self._members[request.handle]
        return request

    def hold(self) -> None:
        """Take the first request out of the order; it stays a member until `restore` puts it back."""
        heapq.heappop(self._heap)

    def restore(self, requests: Iterable[Request]) -> None:
        """Put held requests back; those that were removed meanwhile are ignored."""
        for request in requests:
            if self._is_member(request):
                heapq.heappush(self._heap, (request.queue_key, request))

    def remove(self, request: Request) -> None:
        del self._members[request.handle]
        # Those that are gone keep their tokens while they stay in the heap.
        if len(self._heap) > 2 * len(self._members) + SLACK:
            self._heap = [entry for entry in self._heap if self._is_member(entry[1])]
            heapq.heapify(self._heap)

    def requests(self) -> list[Request]:
        return list(self._members.values())

    def _is_member(self, request: Request) -> bool:
        return self._members.get(request.handle) is request


def find_rank(policy: SchedulingPolicy, priority: int, arrival_time: float) -> float:
    """Return a number by which waiting requests are ordered, smallest first."""
    return arrival_time if policy == "fcfs" else priority + arrival_time / AGEING_S
