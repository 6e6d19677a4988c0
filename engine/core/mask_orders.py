"""MaskOrders: what the executor tells the grammar thread, without a way through the event loop.

    StepPlan ─▶ add: each gated row waits for the tokens of its earlier steps
    StepDone ─▶ take: tokens for the matchers; rows that wait for none of them any more get their masks
"""

from __future__ import annotations

from collections import deque
from operator import attrgetter

import numpy as np

from engine.core.actor_messages import FillMasks, MaskTarget, StepDone, StepPlan

NO_STEP = -1  # of an order that has tokens only
_get_index = attrgetter("index")


class MaskOrders:
    """Pairs the gated rows of steps with the tokens before them. Synchronous; one owner."""

    def __init__(self) -> None:
        # Step -> index of a gated row -> handle, for rows without a token.
        self._gated: dict[int, dict[int, int]] = {}
        # Handle -> its rows, by step in order. The first row's masks are ordered, the others wait for its token.
        self._rows: dict[int, deque[tuple[int, MaskTarget]]] = {}
        self._accepted: list[tuple[int, int]] = []  # (handle, token id)
        self._ready: dict[int, list[MaskTarget]] = {}  # by step

    def add(self, plan: StepPlan) -> None:
        """Note the gated rows of a step that will be launched."""
        if not plan.gated_handles:
            return
        indices = np.flatnonzero(plan.is_gated).tolist()
        self._gated[plan.step_id] = dict(zip(indices, plan.gated_handles, strict=True))
        ends = np.cumsum(np.maximum(plan.num_samples - 1, 0))
        drafts = np.split(plan.draft_token_ids, ends[:-1]) if len(plan.draft_token_ids) else None
        for index, handle in zip(indices, plan.gated_handles, strict=True):
            target = MaskTarget(index, handle, [] if drafts is None else drafts[index].tolist())
            rows = self._rows.setdefault(handle, deque())
            rows.append((plan.step_id, target))
            if len(rows) == 1:
                self._ready.setdefault(plan.step_id, []).append(target)

    def take(self, done: StepDone) -> None:
        """Take the tokens of a step; rows without one were skipped, or their completions have ended."""
        gated = self._gated.get(done.step_id)
        if gated is None:
            return
        token_ids, end, over = done.token_ids.tolist(), 0, list(done.skipped)
        for index, count in zip(done.indices.tolist(), done.counts.tolist(), strict=True):
            end += count
            if (handle := gated.get(index)) is not None:
                self._accepted += [(handle, token_id) for token_id in token_ids[end - count : end]]
                over.append(index)
        if done.is_last:
            over = list(gated)
            del self._gated[done.step_id]
        for index in over:
            if (handle := gated.pop(index, None)) is not None:
                self._remove(done.step_id, handle)

    def flush(self) -> list[FillMasks]:
        """Return the orders that the grammar thread has not got, with the tokens in the first one."""
        if not self._ready and not self._accepted:
            return []
        ready, self._ready = self._ready or {NO_STEP: []}, {}
        orders = []
        for step_id, targets in ready.items():
            orders.append(FillMasks(step_id, self._accepted, sorted(targets, key=_get_index)))
            self._accepted = []
        return orders

    def _remove(self, step_id: int, handle: int) -> None:
        rows = self._rows[handle]
        if rows[0][0] != step_id:
            self._rows[handle] = deque(row for row in rows if row[0] != step_id)
            return
        rows.popleft()
        if rows:
            self._ready.setdefault(rows[0][0], []).append(rows[0][1])
        else:
            del self._rows[handle]
