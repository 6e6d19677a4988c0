"""WaitingRequests: the requests that no replica holds, and where they may run.

A request that makes cores crash would take one replica after another with it. So requests that may have been running
when a core crashed are suspects. They run again in groups, one group in a replica, until each has a token. If the core
crashes then, the members of its group run again alone; one that crashes a core alone fails. Up to MAX_ALONE suspects
run alone from the start. Other requests run beside suspects where seats are left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from math import isqrt

from engine.core.request_queue import find_rank
from engine.front.entry import Entry
from engine.front.replica import Replica
from engine.front.router import Router

MAX_PLACED = 32  # requests that are placed in one turn of the event loop
# Waiting requests of a core that it may have started in steps of which the front has not heard.
NUM_UNHEARD = 16
NUM_BESIDE = 16  # completions of a core that tries suspects, before others are given to it
MAX_ALONE = 32  # a suspect takes some steps to try, and one in a group a further crash


class WaitingRequests:
    """Calls `place` for requests that may run. It gives them to one of `list_ready`, or returns them by `append`."""

    def __init__(self, replicas: Sequence[Replica], router: Router, place: Callable[[Entry], None]) -> None:
        self._replicas = replicas
        self._router = router
        self._place = place
        self._others: deque[Entry] = deque()
        self._groups: deque[list[Entry]] = deque()  # suspects that wait
        self._tried: dict[int, list[Entry]] = {}  # by replica, the group that runs there
        self._num_to_place = 0

    @property
    def has_suspects(self) -> bool:
        return bool(self._groups or self._tried)

    @property
    def max_context(self) -> int:
        """The longest context of the replicas; 0 if it is not known."""
        return max((each.max_model_len for each in self._replicas if each.state != "dead"), default=0)

    def list_ready(self, entry: Entry) -> list[Replica]:
        """Return the replicas that may get this request now. Their contexts may differ, see `max_model_len`."""
        ready = [each for each in self._replicas if each.state == "ready"]
        if entry.group is not None:
            begun = [index for index, group in self._tried.items() if group is entry.group]
            ready = [each for each in ready if (each.index in begun if begun else each.index not in self._tried)]
        elif self.has_suspects:  # the suspect needs a seat, and short steps
            seated = self._router.count_completions
            ready = [each for each in ready if seated(each.index) < min(NUM_BESIDE, each.max_num_seqs - 1)]
        return [each for each in ready if entry.min_context <= each.max_model_len]

    def note_sent(self, entry: Entry) -> None:
        """A replica has got this request."""
        if entry.group is not None:
            assert entry.replica is not None
            self._tried[entry.replica.index] = entry.group

    def append(self, entry: Entry) -> None:
        """Keep a request that has no replica now."""
        if entry.group is None:
            self._others.append(entry)
        else:
            entry.group.remove(entry)
            entry.group = [entry]
            self._groups.append(entry.group)

    def put_back(self, replica: Replica, entries: Sequence[Entry]) -> None:
        """Keep what a replica held, before all that waits, and place it."""
        if group := self._tried.pop(replica.index, None):
            self._groups.appendleft(group)
        self._others.extendleft(each for each in reversed(entries) if each.group is None)
        self.place_all()

    def blame(self, replica: Replica, held: Sequence[Entry]) -> Entry | None:
        """Suspect the requests that may have crashed a core. Returns the one that has, if that is certain."""
        group = self._tried.pop(replica.index, None)
        if group is not None and len(group) == 1:
            return group[0]
        suspects = list_suspects(replica, held) if group is None else group
        size = min(isqrt(len(suspects)), MAX_ALONE) if len(suspects) > MAX_ALONE else 1
        for end in range(len(suspects), 0, -size):
            members = suspects[max(0, end - size) : end]
            for entry in members:
                entry.group = members
            self._groups.appendleft(members)
        return None

    def acquit(self, entry: Entry) -> None:
        """A request has got a token or has ended, so it crashes no core."""
        if entry.group is not None:
            entry.group.remove(entry)
            entry.group = None
            self._tried = {index: group for index, group in self._tried.items() if group}
            self._try_suspects()

    def place_all(self) -> None:
        """Place what waits, as far as replicas are ready; of the suspects one group in each."""
        is_placing, self._num_to_place = self._num_to_place > 0, len(self._others)
        if not is_placing:
            self._place_some()
        self._try_suspects()

    def clear(self) -> None:
        self._others.clear()
        self._groups.clear()
        self._tried.clear()
        self._num_to_place = 0

    def _place_some(self) -> None:
        count = min(MAX_PLACED, self._num_to_place)
        self._num_to_place -= count
        for _ in range(count):
            if (entry := self._others.popleft()).open:
                self._place(entry)
        if self._num_to_place:
            asyncio.get_running_loop().call_soon(self._place_some)

    def _try_suspects(self) -> None:
        while self._groups and self._can_try(self._groups[0]):
            for entry in [*self._groups.popleft()]:
                self._place(entry)
        if self._others and not self.has_suspects and not self._num_to_place:
            self._num_to_place = len(self._others)
            asyncio.get_running_loop().call_soon(self._place_some)

    def _can_try(self, group: Sequence[Entry]) -> bool:
        """Whether its first request can be placed, or refused because it is too long."""
        return not group or bool(self.list_ready(group[0])) or 0 < self.max_context < group[0].min_context


def list_suspects(replica: Replica, held: Sequence[Entry]) -> list[Entry]:
    """Return all requests but those that certainly waited in the core's queue, behind the ones that ran."""
    if replica.ready is None:
        return [*held]
    policy = replica.ready.resolved.scheduler.policy
    suspects: list[Entry] = []
    waiting: list[Entry] = []
    for entry in held:
        message = entry.message
        # What needs no preparation is queued in the order in which it was sent, which is that of arrival.
        is_plain = policy == "fcfs" and message.params.grammar is None and not message.images
        has_waited = (entry.is_queued or is_plain) and not entry.has_started and message.adapter is None
        (waiting if has_waited else suspects).append(entry)
    waiting.sort(key=lambda each: find_rank(policy, each.message.priority, each.stream.times.arrival_time))
    num_seats = max(0, replica.max_num_seqs - sum(len(each.open) for each in suspects)) + NUM_UNHEARD
    return suspects + waiting[:num_seats]
