"""StepChanges: new rows and blocks of a step being planned. StepRecord: a step until its last result."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

import numpy as np

from engine.core.actor_messages import NewRow
from engine.core.request import Request
from engine.core.request_table import RequestTable
from engine.spec.draft_record import Draft


class Batch:
    """Parallel lists and arrays over R requests. Immutable: steps with the same requests share one."""

    __slots__ = ("appends", "handles", "requests", "rows", "slots")

    def __init__(
        self, requests: list[Request], handles: list[int], appends: list[Callable[[int], None]],
        slots: np.ndarray, rows: np.ndarray,
    ) -> None:
        self.requests = requests
        self.handles = handles
        self.appends = appends  # token_ids.append of each
        self.slots = slots  # [R] int64
        self.rows = rows  # [R] int64

    @staticmethod
    def make_empty() -> Batch:
        nothing = np.zeros(0, dtype=np.int64)
        return Batch([], [], [], nothing, nothing)

    def add(self, request: Request) -> Batch:
        """Return the batch with one more request, ordered by queue key."""
        at = bisect(self.requests, request.queue_key, key=lambda other: other.queue_key)
        return Batch(
            [*self.requests[:at], request, *self.requests[at:]],
            [*self.handles[:at], request.handle, *self.handles[at:]],
            [*self.appends[:at], request.token_ids.append, *self.appends[at:]],
            np.concatenate((self.slots[:at], (request.slot,), self.slots[at:])),
            np.concatenate((self.rows[:at], (request.row,), self.rows[at:])),
        )

    def select(self, is_kept: np.ndarray) -> Batch:
        kept = is_kept.tolist()
        return Batch(
            list(compress(self.requests, kept)), list(compress(self.handles, kept)),
            list(compress(self.appends, kept)), self.slots[is_kept], self.rows[is_kept],
        )


# Prompt tokens of one step with logprobs. Each costs as much as a sampled token: logits of the whole vocabulary.
MAX_SCORED_TOKENS = 64


@dataclass(slots=True)
class StepChanges:
    """New rows and blocks of the step being planned, and its remaining limits.

    Attributes:
        admission_room: known tokens of requests that may still be admitted; the last request may exceed it.
        score_room: prompt tokens with logprobs that may still be scheduled.
    """

    admission_room: int
    new_rows: list[NewRow] = field(default_factory=list)
    new_blocks: list[tuple[int, list[int]]] = field(default_factory=list)
    drafts: dict[int, Draft] = field(default_factory=dict)  # by slot
    score_room: int = MAX_SCORED_TOKENS

    def limit_scoring(self, request: Request, count: int) -> int:
        """Return how many of its next `count` tokens a request may compute: prompt logprobs take several steps."""
        if request.num_computed_tokens >= request.table.score_end[request.slot]:
            return count
        count = min(count, self.score_room)
        self.score_room -= count
        return count

    def add_row(self, request: Request) -> None:
        self.admission_room -= request.num_tokens
        params = request.params
        if params.prompt_logprobs is not None and not request.wants_prompt_logprobs:
            params = replace(params, prompt_logprobs=None)  # sent before a preemption
        self.new_rows.append(
            NewRow(
                row=request.row,
                token_ids=np.array(request.token_ids, dtype=np.int64),
                num_prompt_tokens=request.num_prompt_tokens,
                block_ids=list(request.block_ids),
                params=params,
                seed=request.seed,
                bad_word_ids=request.bad_word_ids,
                num_cached_tokens=request.num_computed_tokens,
                adapter="" if request.adapter is None else request.adapter.digest,
                images=request.images,
                snapshot=request.snapshot,
            )
        )

    def drop_row(self, row: int) -> bool:
        """Drop a new row that was preempted before its first step. Returns False if the row is not new."""
        num_before = len(self.new_rows)
        self.new_rows = [new for new in self.new_rows if new.row != row]
        return len(self.new_rows) < num_before


@dataclass(slots=True)
class StepRecord:
    """One step in flight. Arrays are parallel to the rows of the plan."""

    step_id: int
    batch: Batch
    counts: np.ndarray  # scheduled tokens
    num_preemptions: np.ndarray  # when planned; a higher value later means that the run was discarded
    num_samples: np.ndarray
    gated: np.ndarray  # indices whose tokens need masks and have not arrived
    drafts: dict[int, Draft]  # by slot
    is_waiting: bool = False  # some rows draft, so that the step was planned after the answer of the last one
    is_answered: bool = False

    @property
    def is_decode(self) -> bool:
        """Whether the step computes no prompt, so that its time depends on its number of tokens alone."""
        return bool((self.counts == self.num_samples).all())

    def match(self, indices: np.ndarray) -> Batch:
        if len(indices) == len(self.counts):
            return self.batch
        is_answered = np.zeros(len(self.counts), dtype=bool)
        is_answered[indices] = True
        return self.batch.select(is_answered)

    def take_back_samples(self, table: RequestTable, indices: Sequence[int] | np.ndarray) -> None:
        """Undo the planned samples of these rows: no token will arrive for them."""
        slots, num_samples = self.batch.slots[indices], self.num_samples[indices]
        table.num_in_flight[slots] -= num_samples
        table.num_planned[slots] -= num_samples

    def take_back_runs(self, table: RequestTable, skipped: Sequence[int]) -> None:
        """Undo the runs of rows that were skipped, so that they are planned again unless preempted meanwhile."""
        self.take_back_samples(table, skipped)
        self.drop_gated(np.array(skipped))
        self._uncompute(table, np.array(skipped), self.counts[skipped])

    def drop_gated(self, indices: np.ndarray) -> None:
        """Remove rows from `gated`: their tokens have arrived, or will not."""
        self.gated = self.gated[~np.isin(self.gated, indices)]

    def settle_samples(self, table: RequestTable, indices: np.ndarray, counts: np.ndarray) -> None:
        """Record how many tokens arrived for these rows. Undo what was computed after a rejected draft."""
        slots, num_samples = self.batch.slots, self.num_samples
        if len(indices) < len(slots):
            slots, num_samples = slots[indices], num_samples[indices]
        table.num_in_flight[slots] -= num_samples
        if self.drafts:
            num_missing = num_samples - counts
            table.num_planned[slots] -= num_missing
            self._uncompute(table, indices, num_missing)

    def _uncompute(self, table: RequestTable, indices: np.ndarray, counts: np.ndarray) -> None:
        slots = self.batch.slots[indices]
        is_same = table.num_preemptions[slots] == self.num_preemptions[indices]
        table.num_computed[slots] -= np.where(is_same, counts, 0)
