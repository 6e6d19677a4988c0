"""RequestTable: the counters of all requests in arrays, so that a step costs a few array operations, not a loop."""

from __future__ import annotations

import numpy as np

from engine.core.slot_pool import SlotPool

_FIELDS = (
    "num_computed", "num_planned", "num_in_flight", "num_places", "max_num_tokens", "num_scheduled", "num_preemptions",
    "is_watched", "has_grammar", "score_end",
)  # fmt: skip


class RequestTable:
    """`table.num_computed[request.slot]` and so on; a request keeps its slot from its arrival until it is forgotten.

    num_computed     tokens whose KV is in the cache, those of steps in flight included
    num_planned      tokens that are known or in flight; num_computed chases it
    num_in_flight    sampled tokens that have not come back yet
    num_places       tokens that the request's blocks have room for
    max_num_tokens   where its length ends it
    num_scheduled    tokens it computes in the step that is being planned
    num_preemptions  how often it was; a run planned before the last one was taken back
    is_watched       its next token has more to tell than its id, or may end it
    has_grammar      its tokens need masks
    score_end        runs that start before it tell log-probabilities of the prompt; 0: none are wanted any more
    """

    def __init__(self, num_slots: int) -> None:
        self.slots = SlotPool(0)
        self._data = np.zeros((len(_FIELDS), 0), dtype=np.int64)
        self._grow(num_slots)

    def take(self) -> int:
        """A slot whose counters are all 0."""
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
        self.num_computed, self.num_planned, self.num_in_flight, self.num_places = data[:4]
        self.max_num_tokens, self.num_scheduled, self.num_preemptions = data[4:7]
        self.is_watched, self.has_grammar, self.score_end = data[7:]
