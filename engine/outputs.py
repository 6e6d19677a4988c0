"""RequestOutput and its parts: the result of a request. Names follow vLLM.

CompletionOutput, RequestMetrics and RequestOutput are created for every output; frozen dataclasses would cost three
times as much.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

# dead_end: the request's grammar and sampling parameters allow no token; error: the engine failed.
FinishReason = Literal["stop", "length", "abort", "error", "dead_end"]


class Logprob(msgspec.Struct, array_like=True, gc=False):
    """Log-probability of one token at one position.

    `logprob` and `rank` refer to the model's distribution, before penalties, mask and temperature.
    `masked_logprob` is computed under the grammar mask; None for a request without a grammar.
    `part` holds the token's bytes if they may be part of a character; `decoded_token` then shows U+FFFD.
    """

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    decoded_token: str = ""
    masked_logprob: float | None = None
    part: bytes | None = None


class TokenLogprobs(msgspec.Struct, array_like=True, eq=False):
    """One position: the sampled token (or prompt token) and the most likely alternatives, best first.

    It is also a mapping from token id to Logprob, as in vLLM.
    """

    token: Logprob
    top: list[Logprob] = []
    # Speculative decoding: the source of the accepted draft; None for a token that no draft contained.
    draft_source: str | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenLogprobs) and (self.token, self.top) == (other.token, other.top)

    def _make_dict(self) -> dict[int, Logprob]:
        return {self.token.token_id: self.token} | {entry.token_id: entry for entry in self.top}

    def __getitem__(self, token_id: int) -> Logprob:
        return self._make_dict()[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._make_dict())

    def __len__(self) -> int:
        return len(self._make_dict())

    def get(self, token_id: int, default: Any = None) -> Any:
        """Return the entry of a token, if it is the sampled one or among the most likely."""
        return self._make_dict().get(token_id, default)

    def keys(self) -> KeysView[int]:
        """Return the token ids: the sampled one, then the most likely, best first."""
        return self._make_dict().keys()

    def values(self) -> ValuesView[Logprob]:
        """Return the entries in the order of `keys`."""
        return self._make_dict().values()

    def items(self) -> ItemsView[int, Logprob]:
        """Return the pairs of token id and entry."""
        return self._make_dict().items()


Mapping.register(TokenLogprobs)


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` completions; `SamplingParams.output_kind` selects cumulative text or deltas."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it; None for EOS
    error: str | None = None  # the cause if finish_reason is "error" or "dead_end"

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times (seconds, monotonic clock) and counters of one request."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_preemptions: int = 0
    # Source -> (drafted tokens, accepted ones), over all completions that have ended.
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def queue_time(self) -> float | None:
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def ttft(self) -> float | None:
        """Time to first token, from arrival."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    def tokens_per_second(self, num_tokens: int) -> float | None:
        """Return the mean decode rate after the first token; None before the second token."""
        if self.first_token_time is None or self.last_token_time is None or num_tokens < 2:
            return None
        elapsed = self.last_token_time - self.first_token_time
        return (num_tokens - 1) / elapsed if elapsed > 0 else None


@dataclass(frozen=True, slots=True)
class GrammarInfo:
    """The grammar backend of a request."""

    backend: str
    compile_time_s: float


@dataclass(slots=True)
class RequestOutput:
    """The state of one request. Exactly one output of a request has `finished=True`, the last."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # None for the first token
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))
    grammar: GrammarInfo | None = None
    pooled: np.ndarray | None = None  # [D] float32, if `SamplingParams.pooling` is set


Phase = Literal["queued", "prefill", "decode", "preempted"]


@dataclass(frozen=True, slots=True)
class RequestView:
    """One completion that has not ended. Counts are tokens."""

    handle: int  # distinguishes it from its siblings
    request_id: str
    phase: Phase
    age_s: float
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    has_grammar: bool
    block_ids: tuple[int, ...]  # without the null block
    adapter: str = ""  # its name; "": the base model


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Which requests are where and who owns which KV block, at one moment.

    Running requests come first; block 0 is never used.
    """

    requests: tuple[RequestView, ...]
    num_blocks: int
    block_size: int
    cached_block_ids: tuple[int, ...]  # those a prefix can be found in, owned or not
    max_num_seqs: int
    max_num_batched_tokens: int
