"""Every message of the engine, in order of flow.

    front ──AddRequest, AbortRequest, TakeSnapshot, ResetPrefixCache, Sleep──▶ core
    core ──Accepted or Refused, NewTokens, CoreStats, EngineSnapshot, PrefixCacheReset──▶ front

Inside the core:

    Grammar ──AddRequest (its matchers are open)──▶ Scheduler
    Scheduler ──StepPlan──▶ Executor                  Scheduler ──FillMasks, DropMatchers──▶ Grammar
    Grammar ──StepMasks──▶ Executor                   Grammar ──GrammarReport──▶ Scheduler
    Executor ──StepDone──▶ Scheduler

Messages are frozen, hold no tensors and no locks, and are sent once per step, never per token.
Their arrays and lists are never changed: steps with the same rows share them.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from engine.errors import ConfigError, EngineDead, EngineError, InvalidRequest
from engine.outputs import EngineSnapshot, FinishReason, GrammarInfo, TokenLogprobs
from engine.sampling_params import SamplingParams
from grammar import GrammarError, InvalidGrammar, UnsupportedGrammar

# In place of a token id, where none could be sampled.
BROKEN_LOGITS = -1  # the largest logit is no number
NO_TOKEN_LEFT = -2  # the request's own constraints forbid every token


class NewCompletion(msgspec.Struct, frozen=True):
    """One of the n completions of a request."""

    handle: int  # by which all messages name it; no other completion ever has it
    seed: int
    generated_token_ids: list[
        int
    ] = []  # tokens it has produced before, here or elsewhere; it continues after them


class AddRequest(msgspec.Struct, frozen=True):
    """A validated, tokenised request."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    completions: list[NewCompletion]
    age_s: float = 0.0  # since it arrived
    priority: int = 0  # lower runs first
    cache_salt: str | None = None
    bad_word_ids: list[list[int]] = []


class AbortRequest(msgspec.Struct, frozen=True):
    """End these completions now. Unknown handles are ignored: an abort may cross a finish on its way."""

    handles: list[int]
    finish_reason: FinishReason = "abort"
    error: str | None = None


class TakeSnapshot(msgspec.Struct, frozen=True):
    """Answered by an EngineSnapshot."""

    with_blocks: bool = True


class ResetPrefixCache(msgspec.Struct, frozen=True):
    """Forget all cached prefixes; answered by PrefixCacheReset."""


class PrefixCacheReset(msgspec.Struct, frozen=True):
    is_reset: bool  # False and unchanged while requests own blocks


class Accepted(msgspec.Struct, frozen=True):
    """The request will run, and end exactly once."""

    handle: int  # of its first completion
    grammar: GrammarInfo | None = None


class Refused(msgspec.Struct, frozen=True):
    """The request never runs, because of its grammar."""

    handle: int  # of its first completion
    kind: Literal["invalid_request", "invalid_grammar", "unsupported_grammar", "config", "dead", "internal"]
    message: str
    pointer: str | None = None
    keyword: str = ""

    @staticmethod
    def make(handle: int, error: BaseException) -> Refused:
        match error:
            case UnsupportedGrammar():
                return Refused(handle, "unsupported_grammar", error.reason, error.pointer, error.keyword)
            case GrammarError():
                return Refused(handle, "invalid_grammar", str(error), getattr(error, "pointer", None))
            case InvalidRequest():
                return Refused(handle, "invalid_request", str(error), error.param)
            case ConfigError():
                return Refused(handle, "config", str(error))
            case EngineDead():
                return Refused(handle, "dead", str(error))
        return Refused(handle, "internal", f"the grammar could not be compiled: {error!r}")

    def to_error(self) -> EngineError | GrammarError:
        """The error that `make` was given, or one that says the same."""
        match self.kind:
            case "unsupported_grammar":
                return UnsupportedGrammar(self.pointer or "", self.keyword, self.message)
            case "invalid_grammar":
                return InvalidGrammar(self.message, self.pointer)
            case "invalid_request":
                return InvalidRequest(self.message, self.pointer)
            case "config":
                return ConfigError(self.message)
            case "dead":
                return EngineDead(self.message)
        return EngineError(self.message)


class CoreStats(msgspec.Struct, frozen=True):
    """The core's gauges of now and its counters since it began; sent after every step."""

    num_running: int = 0
    num_steps: int = 0
    num_open_steps: int = 0
    num_step_tokens: int = 0
    num_preemptions: int = 0
    num_queried_tokens: int = 0  # of the prefix cache
    num_hit_tokens: int = 0
    num_blocks: int = 0  # usable ones
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    step_gaps_s: list[
        float
    ] = []  # how long the executor had nothing to do while there was work, since the last message
    mask_times_s: list[float] = []  # what the masks of steps took, since the last message


class NewRow(msgspec.Struct, frozen=True):
    """A completion that enters the batch: everything the worker must know about it."""

    row: int
    token_ids: np.ndarray  # [num_tokens] int64: prompt, then what was generated before
    num_prompt_tokens: int
    block_ids: list[int]
    params: SamplingParams
    seed: int
    bad_word_ids: list[list[int]] = []


class StepPlan(msgspec.Struct, frozen=True):
    """One step: R rows, each computing a run of tokens. Rows persist; only changes are sent.

    Rows leave and enter before the step in the order removed_rows, new_rows, new_blocks.

    A run that reaches the last known token samples the next one. A run may continue with drafts; then a token is
    sampled after each draft, too, and the tokens after the first wrong draft are dropped.
    """

    step_id: int
    removed_rows: list[int]
    new_rows: list[NewRow]
    new_blocks: list[tuple[int, list[int]]]  # (row, block ids appended to its block table)
    rows: np.ndarray  # [R] int64
    starts: np.ndarray  # [R] int64, position of the first token of the run
    num_scheduled_tokens: np.ndarray  # [R] int64, drafts included
    num_samples: np.ndarray  # [R] int64: 0, or one more than the run has drafts
    is_gated: np.ndarray  # [R] bool: sampling needs the grammar's masks (StepMasks)
    draft_token_ids: np.ndarray  # [num_samples - 1, summed] int64, of one row after another

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())


class MaskTarget(msgspec.Struct, frozen=True):
    """A gated row of a step: it needs a mask, and one more behind each of its drafts."""

    index: int  # of the row in the step
    handle: int
    draft_token_ids: list[int] = []


class FillMasks(msgspec.Struct, frozen=True):
    """Accept `accepted` in order, then fill the masks of `targets` and send them as StepMasks."""

    step_id: int
    accepted: list[tuple[int, int]]  # (handle, token id)
    targets: list[MaskTarget]
    ended: list[int] = []  # indices of gated rows that need no mask: their requests have ended


class DropMatchers(msgspec.Struct, frozen=True):
    handles: list[int]


class StepMasks(msgspec.Struct, frozen=True):
    """Masks of some of a step's gated rows; slow ones come later, in a message of their own."""

    step_id: int
    indices: np.ndarray  # [M] int64, index of the row in the step, ascending
    counts: np.ndarray  # [M] int64, how many masks the row has: one, and one for each draft
    bitmask: np.ndarray  # [counts, summed; ceil(V/32)] int32, bit 1 = allowed
    ended: list[int] = []  # indices of rows that get no mask: nothing is sampled for them


class Sleep(msgspec.Struct, frozen=True):
    """The executor's last message: give back the KV cache, and the weights as the level says."""

    level: int  # 1: the weights stay on the host; 2: they are dropped


class GrammarFailed(msgspec.Struct, frozen=True):
    """A matcher failed; only its completion pays."""

    handle: int
    error: str
    finish_reason: FinishReason  # "dead_end" where its grammar is to blame, "error" for a fault of ours


class GrammarReport(msgspec.Struct, frozen=True):
    """What came of filling masks, or of opening a matcher."""

    failed: list[GrammarFailed]
    fill_time_s: float | None = None


class StepDone(msgspec.Struct, frozen=True):
    """What a step sampled. A step with plain and gated rows answers twice: plain rows never wait."""

    step_id: int
    indices: np.ndarray  # [M] int64, index of the row in the step, ascending
    counts: np.ndarray  # [M] int64, tokens of each row: one, and one for each right draft
    token_ids: (
        np.ndarray
    )  # [counts, summed] int64; BROKEN_LOGITS or NO_TOKEN_LEFT where none could be sampled
    is_last: bool = True  # no further answer for this step will come
    logprobs: dict[int, list[TokenLogprobs]] = {}  # by index, for rows that asked; beside the tokens
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # by index, in order
    skipped: list[int] = []  # rows not computed: their last token was still waiting for its mask


class Detail(msgspec.Struct, frozen=True):
    """What a completion gets beside its tokens; with `finish_reason` it is its last message."""

    handle: int
    logprobs: list[TokenLogprobs] | None = None  # beside the tokens of the same message
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # a part; one that begins with None begins anew
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id
    error: str | None = None
    num_cached_tokens: int = 0
    queue_time_s: float | None = None  # from its arrival to its first step
    num_preemptions: int = 0


class NewTokens(msgspec.Struct, frozen=True):
    """What a step brought, or an abort. As long as the batch stays the same, `handles` is the same object."""

    handles: list[int] = []  # of completions with new tokens
    counts: list[int] = []  # how many each has got, in the order of handles; empty: one each
    token_ids: list[int] = []  # of one completion after another
    details: list[Detail] = []


CoreInbox = AddRequest | AbortRequest | TakeSnapshot | ResetPrefixCache | Sleep
CoreOutput = Accepted | Refused | NewTokens | CoreStats | EngineSnapshot | PrefixCacheReset
SchedulerInbox = AddRequest | AbortRequest | TakeSnapshot | ResetPrefixCache | GrammarReport | StepDone
ExecutorInbox = StepPlan | StepMasks | Sleep
GrammarInbox = FillMasks | DropMatchers
DetokenizerInbox = AddRequest | NewTokens
