"""Every message of the engine, in order of flow.

    front ──AddRequest, AbortRequest, DropAdapter, Sleep──▶ core
    core ──Accepted or Refused, NewTokens, CoreStats, KVEvents──▶ front
    front ──TakeSnapshot, ResetPrefixCache, LoadAdapter (calls)──▶ core ──Reply──▶ front

Inside the core:

    Encoder ──AddRequest (images encoded)──▶ Grammar or Scheduler
    Grammar ──AddRequest (matchers ready)──▶ Scheduler
    Scheduler ──StepPlan──▶ Executor                  Scheduler ──FillMasks, FindDrafts, DropMatchers──▶ Grammar
    Grammar ──StepMasks──▶ Executor                   Grammar ──GrammarReport──▶ Scheduler
    Executor ──StepDone──▶ Scheduler
    Scheduler ──PinAdapter, UnpinAdapter──▶ Adapters  Adapters ──AdapterReady──▶ Scheduler
    Scheduler ──MatchBlocks, LoadBlocks, SaveBlocks, DiscardUnits, ReportEnds──▶ Transfer
    Transfer ──BlocksMatched, BlocksLoaded, BlocksSaved──▶ Scheduler

Messages are frozen, contain no tensors and no locks, and are sent once per step, never per token.
Their arrays and lists are immutable: steps with the same rows share them.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from engine.errors import ConfigError, EngineDead, EngineError, InvalidRequest
from engine.outputs import EngineSnapshot, FinishReason, GrammarInfo, TokenLogprobs
from engine.sampling_params import SamplingParams
from grammar import GrammarError, InvalidGrammar, UnsupportedGrammar

# Reported instead of a token id when none can be sampled.
BROKEN_LOGITS = -1  # the largest logit is not a number
NO_TOKEN_LEFT = -2  # the request's constraints forbid every token


class AdapterRef(msgspec.Struct, frozen=True):
    """An adapter, identified by its content."""

    name: str
    path: str  # folder or hub name
    digest: str  # SHA-256 of its files, as hexadecimal digits


class NewCompletion(msgspec.Struct, frozen=True):
    """One of the n completions of a request."""

    handle: int  # identifies the completion in all messages; never reused
    seed: int
    generated_token_ids: list[int] = []  # generated earlier, here or elsewhere; it continues after them


class ImagePart(msgspec.Struct, frozen=True):
    """An image of a prompt: its pixels until it is encoded, its features afterwards."""

    digest: bytes  # of pixels, settings of the image processor and cache salt
    places: np.ndarray  # [n] int64, ascending; tokens of the prompt that the features replace
    grid: list[int]  # rows and columns, see the image processor
    pixels: np.ndarray | None = None  # uint8, [parts, 3, ...]
    features: np.ndarray | None = None  # [n, D] float32


class AddRequest(msgspec.Struct, frozen=True):
    """A validated, tokenised request."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    completions: list[NewCompletion]
    age_s: float = 0.0  # seconds since the request arrived
    priority: int = 0  # lower runs first
    cache_salt: str | None = None
    bad_word_ids: list[list[int]] = []
    prediction_token_ids: list[int] = []  # expected output, a source of drafts
    adapter: AdapterRef | None = None  # None: the base model
    images: list[ImagePart] = []  # in the order of the prompt


class AbortRequest(msgspec.Struct, frozen=True):
    """End these completions. Unknown handles are ignored, because a completion may finish before the abort arrives."""

    handles: list[int]
    finish_reason: FinishReason = "abort"
    error: str | None = None


class TakeSnapshot(msgspec.Struct, frozen=True):
    """Describe the requests and, `with_blocks`, their blocks."""

    call_id: int  # of the Reply, in this and the other calls
    with_blocks: bool = True


class ResetPrefixCache(msgspec.Struct, frozen=True):
    """Drop all cached prefixes."""

    call_id: int


class LoadAdapter(msgspec.Struct, frozen=True):
    """Read an adapter, to find out whether it is valid."""

    call_id: int
    ref: AdapterRef


class Reply(msgspec.Struct, frozen=True):
    """Answers a call. A core that ends or falls asleep first sends none."""

    call_id: int
    snapshot: EngineSnapshot | None = None
    is_reset: bool = False  # the prefix cache; False if requests own blocks, it is then unchanged
    error: str | None = None  # why the adapter cannot be used


class DropAdapter(msgspec.Struct, frozen=True):
    """Free an adapter that no request uses any more."""

    digest: str


class PinAdapter(msgspec.Struct, frozen=True):
    """Read an adapter if it is not in memory, and keep it there; the answer is AdapterReady."""

    ref: AdapterRef


class UnpinAdapter(msgspec.Struct, frozen=True):
    """The adapter may be evicted from memory."""

    digest: str


class AdapterReady(msgspec.Struct, frozen=True):
    digest: str
    error: str | None = None  # why the adapter cannot be used


class Accepted(msgspec.Struct, frozen=True):
    """The request will run, and each completion will end exactly once."""

    handle: int  # of the first completion
    grammar: GrammarInfo | None = None


class Refused(msgspec.Struct, frozen=True):
    """The request will not run, because its grammar was rejected."""

    handle: int  # of the first completion
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
        """Return an error with the type and message of the one passed to `make`."""
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


class SourceCounts(msgspec.Struct, frozen=True):
    """Verified drafts of one source since the core started."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_position: list[int] = []


class CoreStats(msgspec.Struct, frozen=True):
    """The core's current gauges, and its counters since it started; sent after every step.

    EngineStats has and explains the fields of the same names.
    """

    num_running: int = 0
    num_steps: int = 0
    num_open_steps: int = 0
    num_step_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    step_gaps_s: list[float] = []  # executor idle times while there was work, since the last message
    mask_times_s: list[float] = []  # durations of filling masks, since the last message
    step_tokens: list[int] = []  # tokens of each step planned since the last message
    drafts: dict[str, SourceCounts] = {}  # by source
    kv_offload_loads: int = 0
    kv_received_tokens: int = 0
    kv_saved_tokens: int = 0
    prefix_cache_stateless: int = 0
    prefix_cache_windowless: int = 0


class KVEvents(msgspec.Struct, frozen=True):
    """Block hashes that entered or left the prefix cache since the last KVEvents; for routers."""

    stored: list[bytes] = []
    removed: list[bytes] = []


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


class MatchBlocks(msgspec.Struct, frozen=True):
    """How many of these units does the store hold? The answer is BlocksMatched."""

    transfer_id: int
    unit_keys: list[bytes]
    # Where layers have states: number of tokens and keys of the state after them, the longest first.
    states: list[tuple[int, list[bytes]]] | None = None


class BlocksMatched(msgspec.Struct, frozen=True):
    transfer_id: int
    num_tokens: int  # of the longest prefix that can be loaded


class LoadBlocks(msgspec.Struct, frozen=True):
    """Load these blocks; the answer is BlocksLoaded."""

    transfer_id: int
    blocks: list[BlockCopy]


class BlocksLoaded(msgspec.Struct, frozen=True):
    transfer_id: int
    is_loaded: list[bool]  # for each block; False: it was missing or damaged


class SaveBlocks(msgspec.Struct, frozen=True):
    """Save these blocks; the answer is BlocksSaved."""

    blocks: list[BlockCopy]


class BlocksSaved(msgspec.Struct, frozen=True):
    slots: list[int]
    num_tokens: int  # that were saved; 0 if the store failed


class DiscardUnits(msgspec.Struct, frozen=True):
    """Remove these units from the store."""

    unit_keys: list[bytes]


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
    targets: list[MaskTarget]
    ended: list[int] = []  # indices of gated rows whose completions have ended; they need no mask


class DraftTarget(msgspec.Struct, frozen=True):
    """A request with a grammar whose next step may verify drafts."""

    handle: int
    source: str  # of the drafts; "" if there are none
    token_ids: list[int]
    tail: list[int] = []  # last output tokens
    limit: int = 0  # most tokens of an answer


class FindDrafts(msgspec.Struct, frozen=True):
    """Accept `accepted` in order, then find the forced tokens of the targets, or cut their drafts to what is allowed.

    The answer is a GrammarReport with one DraftTarget for each.
    """

    accepted: list[tuple[int, int]]  # (handle, token id)
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


class Sleep(msgspec.Struct, frozen=True):
    """The executor's last message: free the KV cache, and the weights according to the level."""

    level: int  # 1: the weights stay on the host; 2: they are dropped


class GrammarFailed(msgspec.Struct, frozen=True):
    """A matcher failed; its completion ends."""

    handle: int
    error: str
    finish_reason: FinishReason  # "dead_end" if the grammar caused it, "error" for an engine fault


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


class Detail(msgspec.Struct, frozen=True):
    """Further data for a completion. With `finish_reason` it is the completion's last message."""

    handle: int
    logprobs: list[TokenLogprobs] | None = None  # one per token of the same message
    prompt_logprobs: list[TokenLogprobs | None] | None = (
        None  # next part; a part starting with None restarts them
    )
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id
    error: str | None = None
    num_cached_tokens: int = 0
    queue_time_s: float | None = None  # from arrival to the first step
    num_preemptions: int = 0
    drafts: dict[str, tuple[int, int]] = {}  # source -> (drafted tokens, accepted ones), in the last message
    pooled: np.ndarray | None = None  # [D] float32, the vector of the prompt


class NewTokens(msgspec.Struct, frozen=True):
    """Result of a step or an abort. While the batch does not change, `handles` is the same object."""

    handles: list[int] = []  # completions with new tokens
    counts: list[int] = []  # new tokens per handle; empty: one each
    token_ids: list[int] = []  # completion after completion
    details: list[Detail] = []
    source: int = 0  # the replica that sent it; set by the front


class ReportEnds(msgspec.Struct, frozen=True):
    """Deliver this when all earlier SaveBlocks are done."""

    news: NewTokens


Call = TakeSnapshot | ResetPrefixCache | LoadAdapter
CoreInbox = AddRequest | AbortRequest | DropAdapter | Sleep | Call
CoreOutput = Accepted | Refused | NewTokens | CoreStats | KVEvents | Reply
SchedulerInbox = (
    AddRequest
    | AbortRequest
    | TakeSnapshot
    | ResetPrefixCache
    | GrammarReport
    | AdapterReady
    | DropAdapter
    | BlocksMatched
    | BlocksLoaded
    | BlocksSaved
    | StepDone
)
TransferInbox = MatchBlocks | LoadBlocks | SaveBlocks | DiscardUnits | ReportEnds
AdapterInbox = LoadAdapter | DropAdapter | PinAdapter | UnpinAdapter
EncoderInbox = AddRequest
ExecutorInbox = StepPlan | StepMasks | Sleep
GrammarInbox = FillMasks | FindDrafts | DropMatchers
