"""Messages between the actors of a core, as immutable as those of engine/messages.py.

    Opener ──AddRequest (images encoded, matchers ready)──▶ Scheduler
    Scheduler ──StepPlan──▶ Executor                  Scheduler ──FindDrafts, DropMatchers──▶ Grammar
    Executor ──FillMasks──▶ Grammar ──StepMasks──▶ Executor      Grammar ──GrammarReport──▶ Scheduler
    Executor ──StepDone──▶ Scheduler
    threads of adapters and of the store of blocks ──AdapterReady, BlocksAnswer──▶ Scheduler
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec
import numpy as np

from engine.messages import (
    AbortRequest,
    AddRequest,
    DropAdapter,
    ImagePart,
    ResetPrefixCache,
    Sleep,
    TakeSnapshot,
)
from engine.outputs import FinishReason, TokenLogprobs
from engine.sampling_params import SamplingParams

# Why a matcher failed: a limit of its engine, too much processor time, or a fault of ours.
FailureCause = Literal["limit", "slow", "fault"]
# Reported instead of a token id when none can be sampled.
BROKEN_LOGITS = -1  # the largest logit is not a number
NO_TOKEN_LEFT = -2  # the request's constraints forbid every token


class AdapterReady(msgspec.Struct, frozen=True):
    digest: str
    error: str | None = None  # why the adapter cannot be used


class NewRow(msgspec.Struct, frozen=True):
    """A completion that enters the batch, with everything the worker needs."""

    row: int
    token_ids: np.ndarray  # [num_tokens] int64: prompt, then tokens generated earlier
    num_prompt_tokens: int
    block_ids: list[int]  # for each block of tokens, one of each group of layers
    params: SamplingParams
    seed: int
    bad_word_ids: list[list[int]] = []
    num_cached_tokens: int = 0  # whose KV was found in the prefix cache
    adapter: str = ""  # digest; "": the base model
    images: list[ImagePart] = []
    snapshot: int = -1  # slot of the state after the cached tokens; -1: there is none


class StateSave(msgspec.Struct, frozen=True):
    """Keeps a row's state before the token at `position`, which is in the row's run of this step."""

    row: int
    position: int
    slot: int  # of the snapshots


class BlockMove(msgspec.Struct, frozen=True):
    """Copies a block between the KV cache and a slot of the host tier."""

    block_id: int  # from the number of blocks on, a part of a state, see StateTier
    slot: int
    key: bytes  # empty: only empty the slot
    is_load: bool  # from the slot to the block


class BlockCopy(msgspec.Struct, frozen=True):
    """Copies a block between a slot of the host tier and a store of several cores."""

    slot: int
    key: bytes
    unit_keys: list[bytes]  # of its units, in order


class BlocksAnswer(msgspec.Struct, frozen=True):
    """The store of several cores has answered. `take` processes that, and returns requests that may run."""

    take: Callable[[], Iterable[Any]]


class StepPlan(msgspec.Struct, frozen=True):
    """One step: R rows, each computing a run of tokens. Rows persist between steps; only changes are sent.

    The worker applies block_moves, removed_rows, new_rows and new_blocks in this order before the step, and block_saves
    after it.

    A run that reaches the last known token samples the next one. If drafts follow, a token is also sampled after each
    draft, and the tokens after the first rejected draft are dropped.
    """

    step_id: int
    removed_rows: list[int]
    new_rows: list[NewRow]
    new_blocks: list[tuple[int, list[int]]]  # (row, block ids appended to its block table)
    rows: np.ndarray  # [R] int64
    starts: np.ndarray  # [R] int64, position of the first token of the run
    num_scheduled_tokens: np.ndarray  # [R] int64, drafts included
    num_samples: np.ndarray  # [R] int64: 0, or 1 + number of drafts
    is_gated: np.ndarray  # [R] bool: sampling needs the grammar's masks (StepMasks)
    draft_token_ids: np.ndarray  # [sum of num_samples - 1] int64, row after row
    gated_handles: list[int] = []  # of the gated rows, in order
    num_wanted: np.ndarray | None = None  # [R] int64, drafts that the device proposes after the row's tokens
    block_moves: list[BlockMove] = []
    saves: list[StateSave] = []
    block_saves: list[BlockMove] = []

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())


class MaskTarget(msgspec.Struct, frozen=True):
    """A gated row of a step. It needs one mask, and one more after each draft."""

    index: int  # index of the row in the step
    handle: int
    draft_token_ids: list[int] = []


class FillMasks(msgspec.Struct, frozen=True):
    """Accept `accepted` in order, then fill the masks of `targets` and send them as StepMasks."""

    step_id: int
    accepted: list[tuple[int, int]]  # (handle, token id)
    targets: list[MaskTarget]  # by index, ascending


class DraftTarget(msgspec.Struct, frozen=True):
    """A request with a grammar whose next step may verify drafts."""

    handle: int
    source: str  # of the drafts; "" if there are none
    token_ids: list[int]
    tail: list[int] = []  # last output tokens
    limit: int = 0  # most tokens of an answer


class FindDrafts(msgspec.Struct, frozen=True):
    """Find the forced tokens of the targets, or cut their drafts to what is allowed.

    The answer is a GrammarReport with one DraftTarget for each.
    """

    targets: list[DraftTarget]


class DropMatchers(msgspec.Struct, frozen=True):
    handles: list[int]


class StepMasks(msgspec.Struct, frozen=True):
    """Masks for some of a step's gated rows; slow masks follow in later messages."""

    step_id: int
    indices: np.ndarray  # [M] int64, index of the row in the step, ascending
    counts: np.ndarray  # [M] int64, masks of the row: 1 + number of drafts
    bitmask: np.ndarray  # [sum of counts, ceil(V/32)] int32, bit 1 = allowed
    ended: list[int] = []  # indices of rows without a mask; nothing is sampled for them
    time_s: float = 0.0  # duration of filling them


class GrammarFailed(msgspec.Struct, frozen=True):
    """A matcher failed; its completion ends."""

    handle: int
    error: str
    cause: FailureCause

    @property
    def finish_reason(self) -> FinishReason:
        return "error" if self.cause == "fault" else "dead_end"


class GrammarReport(msgspec.Struct, frozen=True):
    """Matchers that failed, and answers about drafts."""

    failed: list[GrammarFailed]
    drafts: list[DraftTarget] = []  # answers to FindDrafts


class StepDone(msgspec.Struct, frozen=True):
    """Tokens sampled by a step. Gated rows may follow in later messages, so that plain rows do not wait for them."""

    step_id: int
    indices: np.ndarray  # [M] int64, index of the row in the step, ascending
    counts: np.ndarray  # [M] int64, tokens of the row: 1 + number of accepted drafts
    token_ids: np.ndarray  # [sum of counts] int64; may be BROKEN_LOGITS or NO_TOKEN_LEFT
    is_last: bool = True  # no further message for this step follows
    logprobs: dict[int, list[TokenLogprobs]] = {}  # by index, for rows that requested them; one per token
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # by index, in order
    skipped: list[int] = []  # indices of rows not computed, because their last token waits for its mask
    drafts: dict[int, list[int]] = {}  # by index, tokens that the device proposes after those of this message
    time_s: float = 0.0  # duration of the step without proposing; 0: not measured
    draft_time_s: float = 0.0  # duration of proposing
    idle_s: float = 0.0  # how long the device had nothing to do before the step
    mask_time_s: float = 0.0  # duration of filling the masks of these rows
    pooled: dict[int, np.ndarray] = {}  # by index, vectors [D] float32 of prompts that ended in this step


SchedulerInbox = (
    AddRequest
    | AbortRequest
    | TakeSnapshot
    | ResetPrefixCache
    | GrammarReport
    | AdapterReady
    | DropAdapter
    | BlocksAnswer
    | StepDone
)
ExecutorInbox = StepPlan | StepMasks | Sleep
GrammarInbox = FillMasks | FindDrafts | DropMatchers
