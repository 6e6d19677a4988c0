"""Every message of the core, in order of flow.

    front ──AddRequest──▶ Detokenizer, Scheduler      front ──AbortRequest──▶ Scheduler
    Scheduler ──RunStep──▶ Executor                   Scheduler ──FillMasks, DropMatchers──▶ Grammar
    Grammar ──SampleGate──▶ Executor                  Grammar ──GrammarBroken──▶ Scheduler
    Executor ──StepDone──▶ Scheduler                  Scheduler ──NewTokens──▶ Detokenizer
    Detokenizer ──AbortRequest (stop string)──▶ Scheduler
    EngineCore ──Sleep──▶ Executor, when no request is left

Messages are frozen, hold no tensors, locks or back references, and are sent once per step, never per token.
Arrays and lists in them are never changed again, by nobody: steps with the same rows share theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine.outputs import FinishReason, TokenLogprobs
from engine.sampling_params import SamplingParams

Integers = np.ndarray | Sequence[int]
# In place of a token id, where none could be sampled.
BROKEN_LOGITS = -1  # the largest logit is no number
NO_TOKEN_LEFT = -2  # the request's own constraints forbid every token
# Between the name of a request, or of one of its completions, and a number that nobody else has.
SERIAL_MARK = "~"


@dataclass(frozen=True, slots=True)
class AddRequest:
    """A validated, tokenised request; its grammar, if any, is compiled and its matcher is open."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    arrival_time: float  # seconds, monotonic
    priority: int = 0  # lower runs first
    cache_salt: str | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """End these requests now. Unknown ids are ignored: an abort may cross a finish on its way."""

    request_ids: tuple[str, ...]
    finish_reason: FinishReason = "abort"
    error: str | None = None


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that enters the batch: everything the worker must know about it."""

    row: int
    token_ids: np.ndarray  # [num_tokens] int64: prompt, then what was generated before a preemption
    num_prompt_tokens: int
    block_ids: list[int]
    params: SamplingParams
    seed: int
    bad_word_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: R rows, each computing a run of tokens. Rows persist; only changes are sent.

    Rows leave and enter before the step in the order removed_rows, new_rows, new_blocks.
    """

    step_id: int
    removed_rows: list[int]
    new_rows: list[NewRow]
    new_blocks: list[tuple[int, list[int]]]  # (row, block ids appended to its block table)
    rows: np.ndarray  # [R] int64
    starts: np.ndarray  # [R] int64, position of the first token of the run
    num_scheduled_tokens: np.ndarray  # [R] int64
    is_sampled: np.ndarray  # [R] bool: the run ends at the last token, so a new one is sampled
    is_gated: np.ndarray  # [R] bool: sampling needs the grammar's mask (SampleGate)

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())


@dataclass(frozen=True, slots=True)
class RunStep:
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class FillMasks:
    """Accept `accepted` in order, then fill one mask for each of `targets` and send them as a SampleGate."""

    step_id: int
    accepted: list[tuple[str, int]]  # (request_id, token id)
    targets: list[tuple[int, str]]  # (index of the row in the step, request_id)


@dataclass(frozen=True, slots=True)
class DropMatchers:
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SampleGate:
    """The masks of a step's gated rows. A gated row without a mask has ended: nothing is sampled for it."""

    step_id: int
    indices: np.ndarray  # [M] int64, index of the row in the step
    bitmask: np.ndarray  # [M, ceil(V/32)] int32, bit 1 = allowed


@dataclass(frozen=True, slots=True)
class Sleep:
    """The executor's last message: give back the KV cache, and the weights as the level says."""

    level: int  # 1: the host keeps the weights; 2: nobody does


@dataclass(frozen=True, slots=True)
class GrammarBroken:
    """A matcher failed; only its request pays."""

    step_id: int  # whose masks were being filled
    request_id: str
    error: str
    finish_reason: FinishReason  # "dead_end" where its grammar is to blame, "error" for a fault of ours


@dataclass(frozen=True, slots=True)
class StepDone:
    """What a step sampled. A step with plain and gated rows answers twice: plain rows never wait."""

    step_id: int
    indices: Integers  # indices of the rows in the step, ascending
    token_ids: Integers  # beside indices; BROKEN_LOGITS or NO_TOKEN_LEFT where nothing could be sampled
    is_last: bool  # no further answer for this step will come
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by index, for rows that asked
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by index, in order
    skipped: tuple[int, ...] = ()  # rows not computed: their last token was still waiting for its mask


class RequestTokens(NamedTuple):
    """What one request got in one step; with `finish_reason` it is the request's last message.

    A named tuple because many are made per step: a frozen dataclass costs four times as much.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # a part; one that begins with None begins anew
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    first_scheduled_time: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What a step brought, or an abort.

    Most rows of most steps got one token and nothing else: they stand in `plain_ids` and, beside it, in
    `plain_tokens`. As long as the batch stays the same, `plain_ids` is the same object.
    """

    items: list[RequestTokens]
    plain_ids: list[str] = field(default_factory=list)
    plain_tokens: list[int] = field(default_factory=list)


SchedulerInbox = AddRequest | AbortRequest | GrammarBroken | StepDone
ExecutorInbox = RunStep | SampleGate | Sleep
GrammarInbox = FillMasks | DropMatchers
DetokenizerInbox = AddRequest | NewTokens
