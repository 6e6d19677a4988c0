"""RequestTable: the counters of all requests in arrays, so that a step costs a few array operations."""

from __future__ import annotations

import numpy as np

from engine.core.slot_pool import SlotPool

_FIELDS = (
    "num_computed", "num_planned", "num_in_flight", "num_kv_slots", "max_num_tokens", "num_scheduled",
    "num_preemptions", "needs_detail", "has_grammar", "score_end", "waits", "wake_at",
)  # fmt: skip


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
    score_end        runs that start before this position return prompt logprobs; 0: none needed
    """

    def __init__(self, num_slots: int) -> None:
        self.slots = SlotPool(0)
        self._data = np.zeros((len(_FIELDS), 0), dtype=np.int64)
        self._grow(num_slots)

    def take(self) -> int:
        """Return a free slot with all counters 0."""
        if not self.slots.num_free:
            self._grow(2 * self.slots.size)
        slot = self.slots.take()
        self._data[:, slot] = 0
        return slot

    def _grow(self, num_slots: int) -> None:
        data = np.zeros((len(_FIELDS), num_slots), dtype=np.int64)
        data[:, : self.slots.size] = self._data
        self.slots.extend(num_slots)
        self._data = data
        self.num_computed, self.num_planned, self.num_in_flight, self.num_kv_slots = data[:4]
        self.max_num_tokens, self.num_scheduled, self.num_preemptions = data[4:7]
        self.needs_detail, self.has_grammar, self.score_end, self.waits, self.wake_at = data[7:]
