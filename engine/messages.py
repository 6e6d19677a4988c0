"""Messages between the front and a core, in order of flow; core/actor_messages.py has those inside a core.

    front ──AddRequest, AbortRequest, DropAdapter, Sleep──▶ core
    core ──Accepted or Refused, NewTokens, CoreStats, KVEvents──▶ front
    front ──TakeSnapshot, ResetPrefixCache, LoadAdapter (calls)──▶ core ──Reply──▶ front

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
    is_whole: bool = False  # its tokens attend to each other, so one step computes all of them


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
            case EngineError():
                return Refused(handle, "internal", str(error))
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
    num_grammars_cached: int = 0
    num_grammars_retired: int = 0
    dead_ends_no_token: int = 0
    dead_ends_limit: int = 0
    dead_ends_slow: int = 0


class KVEvents(msgspec.Struct, frozen=True):
    """Block hashes that entered or left the prefix cache since the last KVEvents; for routers."""

    stored: list[bytes] = []
    removed: list[bytes] = []


class Sleep(msgspec.Struct, frozen=True):
    """The executor's last message: free the KV cache, and the weights according to the level."""

    level: int  # 1: the weights stay on the host; 2: they are dropped


class Detail(msgspec.Struct, frozen=True):
    """Further data for a completion. With `finish_reason` it is the completion's last message."""

    handle: int
    logprobs: list[TokenLogprobs] | None = None  # one per token of the same message
    # Next part; a part starting with None restarts them
    prompt_logprobs: list[TokenLogprobs | None] | None = None
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


Call = TakeSnapshot | ResetPrefixCache | LoadAdapter
CoreInbox = AddRequest | AbortRequest | DropAdapter | Sleep | Call
CoreOutput = Accepted | Refused | NewTokens | CoreStats | KVEvents | Reply
