"""RequestTable: the counters of all requests in arrays, so that a step costs a few array operations."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np


class SlotPool:
    """Slots 0 to size - 1. A released slot may have to wait for a step to end before it is free."""

    def __init__(self, size: int) -> None:
        self.size = 0
        self.free: list[int] = []
        self.draining: deque[tuple[int, int]] = deque()  # (step that must end first, slot), oldest step first
        self.extend(size)

    def extend(self, size: int) -> None:
        self.free += range(size - 1, self.size - 1, -1)
        self.size = size

    def take(self) -> int:
        return self.free.pop()

    def release(self, slot: int, after_step: int | None = None) -> None:
        """Free a slot, at once or when the step `after_step` has ended."""
        if after_step is None:
            self.free.append(slot)
        else:
            self.draining.append((after_step, slot))

    def drain(self, oldest_step: int) -> list[int]:
        """Free and return the slots that waited for steps before `oldest_step`."""
        ready = []
        while self.draining and self.draining[0][0] < oldest_step:
            ready.append(self.draining.popleft()[1])
        self.free += ready
        return ready


_FIELDS = (
    "num_computed", "num_planned", "num_in_flight", "num_kv_slots", "max_num_tokens", "num_scheduled",
    "num_preemptions", "needs_detail", "has_grammar", "score_end", "waits", "wake_at", "num_stop_ids",
)  # fmt: skip
MAX_STOP_IDS = 8  # of a request, in the table
NO_TOKEN = -(2**31)


class RequestTable:
    """Arrays indexed by `request.slot`. A request keeps its slot from arrival to end.

    num_computed     tokens whose KV is in the cache, including those of steps in flight
    num_planned      known tokens, plus tokens whose sampling is in flight
    num_in_flight    tokens whose sampling is in flight
    num_kv_slots     tokens that fit into the request's blocks
    max_num_tokens   length at which the request ends
    num_scheduled    tokens it computes in the step being planned
    num_preemptions  how often it was preempted; runs planned before the last preemption are void
    needs_detail     its next token needs a Detail, or may end the request
    has_grammar      its tokens need masks
    waits            1: it drafts, so its next step is planned after the answer of the last one; 2: and after the
                     grammar thread's answer; 0: its steps overlap
    wake_at          number of planned tokens at which a request that does not draft looks for drafts again
    num_stop_ids     stop tokens beside the model's end tokens; they are in stop_ids [slots, MAX_STOP_IDS]
    score_end        runs that start before this position return prompt logprobs; 0: none needed
    """

    def __init__(self, num_slots: int) -> None:
        self.slots = SlotPool(0)
        self.stop_ids = np.full((0, MAX_STOP_IDS), NO_TOKEN)
        self._data = np.zeros((len(_FIELDS), 0), dtype=np.int64)
        self._grow(num_slots)

    def take(self) -> int:
        if not self.slots.free:
            self._grow(2 * self.slots.size)
        slot = self.slots.take()
        self._data[:, slot] = 0
        return slot

    def set_stop_ids(self, slot: int, token_ids: Sequence[int]) -> None:
        self.num_stop_ids[slot] = len(token_ids)
        self.stop_ids[slot] = [*token_ids, *[NO_TOKEN] * (MAX_STOP_IDS - len(token_ids))]

    def find_stops(self, slots: np.ndarray, token_ids: np.ndarray) -> np.ndarray | None:
        """Return which of the tokens end their requests; None if no request has stop tokens."""
        if not self.num_stop_ids[slots].any():
            return None
        found: np.ndarray = (self.stop_ids[slots] == token_ids[:, None]).any(axis=1)
        found &= self.num_stop_ids[slots] > 0
        return found

    def _grow(self, num_slots: int) -> None:
        data = np.zeros((len(_FIELDS), num_slots), dtype=np.int64)
        data[:, : self.slots.size] = self._data
        self.slots.extend(num_slots)
        self._data = data
        stop_ids = np.full((num_slots, MAX_STOP_IDS), NO_TOKEN)
        stop_ids[: len(self.stop_ids)] = self.stop_ids
        self.stop_ids = stop_ids
        self.num_computed, self.num_planned, self.num_in_flight, self.num_kv_slots = data[:4]
        self.max_num_tokens, self.num_scheduled, self.num_preemptions = data[4:7]
        self.needs_detail, self.has_grammar, self.score_end, self.waits, self.wake_at = data[7:12]
        self.num_stop_ids = data[12]
