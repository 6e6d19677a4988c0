"""PlanBuilder and StepRecord: a step while it is put together, and what is remembered until it is answered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.messages import NewRow, StepPlan
from engine.request import Request


@dataclass(slots=True)
class StepRecord:
    """One step in flight. Lists run beside the rows of the plan."""

    step_id: int
    requests: list[Request]
    starts: list[int]  # position of the first token of each run
    counts: list[int]  # scheduled tokens
    fills_block: list[int]  # indices of the runs that reach the end of a block
    epochs: list[int]  # num_preemptions when planned: a later value means the run was taken back
    is_sampled: list[bool]
    gated: list[int]  # indices whose token needs a mask
    is_answered: bool = False
    has_masks_ordered: bool = False


class PlanBuilder:
    """Collects the rows of one step; `build` turns them into the message and the record."""

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.new_rows: list[NewRow] = []
        self.new_blocks: list[tuple[int, list[int]]] = []
        self.requests: list[Request] = []
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._is_sampled: list[bool] = []
        self._gated: list[int] = []

    def add_new_row(self, request: Request) -> None:
        self.new_rows.append(
            NewRow(
                row=request.row,
                token_ids=np.array(request.token_ids, dtype=np.int64),
                num_prompt_tokens=request.num_prompt_tokens,
                block_ids=list(request.block_ids),
                params=request.params,
                seed=request.seed,
                bad_word_ids=request.bad_word_ids,
            )
        )

    def add_run(self, request: Request, count: int) -> None:
        """Schedule the next `count` tokens of the request and advance it as if they were computed.

        A run that reaches the last token, known or in flight, samples a new one.
        """
        start = request.num_computed_tokens
        request.num_computed_tokens = end = start + count
        is_sampled = end == len(request.token_ids) + request.num_in_flight
        if is_sampled:
            request.num_in_flight += 1
            if request.has_grammar:
                self._gated.append(len(self.requests))
        self.requests.append(request)
        self._starts.append(start)
        self._counts.append(count)
        self._is_sampled.append(is_sampled)

    def build(self, removed_rows: list[int], block_size: int) -> tuple[StepPlan, StepRecord]:
        sampled = self._is_sampled
        starts, counts = np.array(self._starts, dtype=np.int64), np.array(self._counts, dtype=np.int64)
        fills_block = np.flatnonzero((starts + counts) // block_size > starts // block_size).tolist()
        gated = self._gated
        is_gated = np.zeros(len(sampled), dtype=bool)
        is_gated[gated] = True
        plan = StepPlan(
            step_id=self.step_id,
            removed_rows=removed_rows,
            new_rows=self.new_rows,
            new_blocks=self.new_blocks,
            rows=np.array([request.row for request in self.requests], dtype=np.int64),
            starts=starts,
            num_scheduled_tokens=counts,
            is_sampled=np.array(sampled, dtype=bool),
            is_gated=is_gated,
        )
        epochs = [request.num_preemptions for request in self.requests]
        record = StepRecord(
            self.step_id, self.requests, self._starts, self._counts, fills_block, epochs, sampled, gated
        )
        return plan, record
