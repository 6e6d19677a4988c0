"""Request: the scheduler's state of one completion."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np

from engine.core.request_table import MAX_STOP_IDS, RequestTable
from engine.messages import AddRequest, Detail, NewCompletion
from engine.outputs import TokenLogprobs
from engine.sampling_params import find_end_ids
from engine.spec.draft_record import DraftRecord


class RequestStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True)
class RequestTransfer:
    """The state of a request in BlockTransfers; the request may run when `is_settled`."""

    is_settled: bool = False
    num_saved: int = 0  # leading blocks of each group that the store has, or that are being saved
    unit_hashes: list[bytes] = field(default_factory=list)  # if blocks are larger than units
    states: list[int] = field(default_factory=list)  # positions of states that were saved or loaded


class Request:
    """Mutable state of one completion; only the scheduler writes it.

    Counters that change in every step are in the RequestTable, at index `slot`.
    """

    __slots__ = (
        "adapter", "arrival_time", "bad_word_ids", "block_hashes", "block_ids", "drafts",
        "first_scheduled_time", "handle", "has_grammar", "image_keys", "images", "max_num_tokens",
        "needs_detail", "num_cached_tokens", "num_committed_blocks", "num_prompt_tokens", "num_scored",
        "params", "pending_prompt_logprobs", "pooled", "prediction", "priority", "prompt", "queue_key",
        "request_id", "reserved_ids", "row", "salt", "seed", "slot", "snapshot", "status", "stop_ids",
        "table", "token_ids", "transfer", "whole_images",
    )  # fmt: skip

    def __init__(
        self, message: AddRequest, completion: NewCompletion, table: RequestTable, max_model_len: int,
        eos_token_ids: frozenset[int], now: float,
    ) -> None:
        params = message.params
        self.handle = completion.handle
        self.request_id = message.request_id
        self.params = params
        self.seed = completion.seed
        self.priority = message.priority
        self.arrival_time = now - message.age_s
        self.salt = message.cache_salt
        self.adapter = message.adapter
        self.images = message.images
        self.whole_images = [  # ranges of tokens that one step computes
            (int(image.places[0]), int(image.places[-1]) + 1) for image in message.images if image.is_whole
        ]
        self.image_keys: dict[int, bytes] | None = None  # computed when blocks are hashed
        self.bad_word_ids = message.bad_word_ids
        self.prediction = message.prediction_token_ids
        self.drafts: DraftRecord | None = None  # None: the request has no source of drafts
        self.has_grammar = params.grammar is not None
        self.prompt = message.prompt_token_ids  # shared by the completions of one request
        self.token_ids = [*self.prompt, *completion.generated_token_ids]  # prompt, then output
        self.num_prompt_tokens = len(self.prompt)
        limit = max_model_len if params.max_tokens is None else self.num_prompt_tokens + params.max_tokens
        # The token that is drawn after a pooled prompt is dropped; it needs no room in the model's context.
        self.max_num_tokens = min(limit, max_model_len + (params.pooling is not None))
        self.stop_ids = find_end_ids(params, eos_token_ids)
        # Whether every token has logprobs, or may be one of so many stop tokens that the table does not hold them.
        self.needs_detail = params.logprobs is not None or len(params.stop_token_ids) > MAX_STOP_IDS

        self.status = RequestStatus.WAITING
        self.queue_key: tuple[float, float, int] = (0.0, 0.0, 0)
        self.row = -1
        self.block_ids: list[int] = []  # for each block of tokens, one of each group
        self.reserved_ids: list[int] = []  # for later chunks of the prompt
        self.block_hashes: list[bytes] = []
        self.snapshot = -1  # slot of the state after its cached tokens
        self.num_committed_blocks = 0  # leading blocks of each group already added to the prefix cache
        self.num_cached_tokens = 0
        self.first_scheduled_time: float | None = None
        self.pending_prompt_logprobs: list[TokenLogprobs | None] | None = None  # not sent yet
        self.pooled: np.ndarray | None = None  # sent with the next Detail
        self.transfer: RequestTransfer | None = None  # None: not looked for in the store of several cores
        self.num_scored = 0  # positions before score_end whose logprobs are known

        self.table = table
        self.slot = slot = table.take()
        table.num_planned[slot] = len(self.token_ids)
        table.max_num_tokens[slot] = self.max_num_tokens
        table.has_grammar[slot] = self.has_grammar
        if params.stop_token_ids:
            table.set_stop_ids(slot, params.stop_token_ids[:MAX_STOP_IDS])
        # Only the first completion computes the prompt's logprobs.
        if params.prompt_logprobs is not None and completion is message.completions[0]:
            table.score_end[slot] = self.num_prompt_tokens - 1
            self.pending_prompt_logprobs = [None]  # the first token has none
        table.needs_detail[slot] = True  # the first Detail has queue time and number of cached tokens

    @property
    def num_computed_tokens(self) -> int:
        return int(self.table.num_computed[self.slot])

    @property
    def num_in_flight(self) -> int:
        return int(self.table.num_in_flight[self.slot])

    @property
    def num_preemptions(self) -> int:
        return int(self.table.num_preemptions[self.slot])

    @property
    def wants_prompt_logprobs(self) -> bool:
        return bool(self.table.score_end[self.slot])

    @property
    def needs_all_tokens(self) -> bool:
        """Whether the hidden state of every prompt token is still needed, so that no cached prefix helps."""
        pooling = self.params.pooling
        return bool(self.table.score_end[self.slot]) or (pooling is not None and pooling.needs_all_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def take_prompt_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        """Add the logprobs of one run. After the last prompt position, no more are computed."""
        self.pending_prompt_logprobs = (self.pending_prompt_logprobs or []) + logprobs
        self.num_scored += len(logprobs)
        if self.num_scored == self.table.score_end[self.slot]:
            self.table.score_end[self.slot] = 0

    def restart_prompt_logprobs(self) -> None:
        """Start again with incomplete prompt logprobs; the next part then begins with None."""
        if self.wants_prompt_logprobs:
            self.pending_prompt_logprobs, self.num_scored = [None], 0

    def make_detail(self, **more: Any) -> Detail:
        """Make the next Detail, which takes the pending prompt logprobs and the pooled vector along."""
        prompt_logprobs, self.pending_prompt_logprobs = self.pending_prompt_logprobs, None
        pooled, self.pooled = self.pooled, None
        start = self.first_scheduled_time
        return Detail(
            self.handle, prompt_logprobs=prompt_logprobs, num_cached_tokens=self.num_cached_tokens,
            queue_time_s=None if start is None else start - self.arrival_time,
            num_preemptions=int(self.table.num_preemptions[self.slot]), pooled=pooled, **more,
        )

    def describe_dead_end(self) -> str:
        """Return an error message that names the parameters which together allow no token."""
        params = self.params
        fields = [name for name in ("grammar", "allowed_token_ids", "bad_words") if getattr(params, name)]
        if self.num_output_tokens < params.min_tokens:
            fields.append("min_tokens")
        return f"after {self.num_output_tokens} tokens of output no token satisfies {' and '.join(fields)}"
