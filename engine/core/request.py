"""Request: the scheduler's own record of one prompt being generated."""

from __future__ import annotations

from enum import Enum, auto

from engine.core.request_table import RequestTable
from engine.messages import AddRequest
from engine.outputs import TokenLogprobs
from engine.sampling_params import find_end_ids


class RequestStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """Mutable state of one request; only the scheduler writes it.

    What changes with every step stands in the scheduler's RequestTable, in the request's slot there.
    """

    __slots__ = (
        "arrival_time",
        "bad_word_ids",
        "block_hashes",
        "block_ids",
        "first_scheduled_time",
        "first_step",
        "has_grammar",
        "is_watched",
        "max_num_tokens",
        "num_cached_tokens",
        "num_committed_blocks",
        "num_prompt_tokens",
        "num_scored",
        "params",
        "pending_prompt_logprobs",
        "priority",
        "prompt",
        "queue_key",
        "request_id",
        "row",
        "salt",
        "seed",
        "slot",
        "status",
        "stop_ids",
        "table",
        "token_ids",
    )

    def __init__(
        self,
        message: AddRequest,
        table: RequestTable,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        first_step: int = 0,
    ) -> None:
        params = message.params
        self.first_step = first_step  # no step before it has anything to do with this request
        self.request_id = message.request_id
        self.params = params
        self.seed = message.seed
        self.priority = message.priority
        self.arrival_time = message.arrival_time
        self.salt = message.cache_salt
        self.bad_word_ids = message.bad_word_ids
        self.has_grammar = params.grammar is not None
        self.prompt = message.prompt_token_ids  # completions of one request share it
        self.token_ids = list(self.prompt)  # prompt, then output
        self.num_prompt_tokens = len(self.token_ids)
        limit = max_model_len if params.max_tokens is None else self.num_prompt_tokens + params.max_tokens
        self.max_num_tokens = min(limit, max_model_len)
        self.stop_ids = find_end_ids(params, eos_token_ids)
        # Every token has more to tell than its id, or may be one of its own ends.
        self.is_watched = params.logprobs is not None or bool(params.stop_token_ids)

        self.status = RequestStatus.WAITING
        self.queue_key: tuple[float, float, int] = (0.0, 0.0, 0)
        self.row = -1
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_committed_blocks = 0  # leading blocks already offered to the prefix cache
        self.num_cached_tokens = 0
        self.first_scheduled_time: float | None = None
        self.pending_prompt_logprobs: list[TokenLogprobs | None] | None = None  # not told yet
        self.num_scored = 0  # positions before score_end whose log-probabilities have come

        self.table = table
        self.slot = slot = table.take()
        table.num_planned[slot] = self.num_prompt_tokens
        table.max_num_tokens[slot] = self.max_num_tokens
        table.has_grammar[slot] = self.has_grammar
        if params.prompt_logprobs is not None:
            table.score_end[slot] = self.num_prompt_tokens - 1
            self.pending_prompt_logprobs = [None]  # nothing comes before the first token
        table.is_watched[slot] = True  # the first token comes with the times and the number of cached tokens

    @property
    def num_computed_tokens(self) -> int:
        return int(self.table.num_computed[self.slot])

    @property
    def num_in_flight(self) -> int:
        """Sampled tokens that have not come back yet."""
        return int(self.table.num_in_flight[self.slot])

    @property
    def num_preemptions(self) -> int:
        return int(self.table.num_preemptions[self.slot])

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to come."""
        return bool(self.table.score_end[self.slot])

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
        """Those of one run, in order. A prompt that is told wholly is not scored again."""
        self.pending_prompt_logprobs = (self.pending_prompt_logprobs or []) + logprobs
        self.num_scored += len(logprobs)
        if self.num_scored == self.table.score_end[self.slot]:
            self.table.score_end[self.slot] = 0

    def restart_prompt_logprobs(self) -> None:
        """Begin anew with a prompt that is not told wholly; a part that begins with None says so."""
        if self.wants_prompt_logprobs:
            self.pending_prompt_logprobs, self.num_scored = [None], 0
