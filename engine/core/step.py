"""StepChanges and StepRecord: what a step tells the worker beside its runs, and what is remembered until it is over."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.core.roster import Roster
from engine.messages import NewRow
from engine.request import Request


@dataclass(slots=True)
class StepChanges:
    """Rows and blocks that are new with the step being planned."""

    new_rows: list[NewRow] = field(default_factory=list)
    new_blocks: list[tuple[int, list[int]]] = field(default_factory=list)

    def add_row(self, request: Request) -> None:
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


@dataclass(slots=True)
class StepRecord:
    """One step in flight. Arrays run beside the rows of the plan."""

    step_id: int
    roster: Roster
    counts: np.ndarray  # scheduled tokens
    num_preemptions: np.ndarray  # when planned: a later value means the run was taken back
    is_sampled: np.ndarray
    gated: list[int]  # indices whose token needs a mask and has not come
    is_answered: bool = False
    has_masks_ordered: bool = False
