"""SamplingState: the sampling parameters and histories of all rows, in arrays indexed by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.device.device_link import pick_rows
from engine.sampling_params import SamplingParams
from engine.worker.sampling.bad_words import BadWords
from engine.worker.sampling.counts import TokenCounts
from engine.worker.sampling.edits import LogitEdits
from kernels.torch.sampling import NARROW_WIDTH

# Lower temperatures are greedy: float32 scores divided by them would exceed the noise anyway.
MIN_TEMPERATURE = 1e-5

TokenIds = Sequence[int] | np.ndarray


class DrawKind:
    """How a row draws its token. Plain ints, because numpy is slow with enums."""

    GREEDY = 0
    FULL = 1  # temperature alone, or with min_p
    NARROW = 2  # top_k small enough for a bounded set of candidates
    SORTED = 3  # top_p without top_k, or a large top_k


class RowFlag:
    """Bits for the operations that a row needs."""

    PENALTIES = 1
    EDITS = 2
    BAD_WORDS = 4
    MIN_TOKENS = 8
    LOGPROBS = 16


class SamplingState:
    """Sampling parameters and histories of the running requests.

    The parameters are arrays on the host, so that a step selects its groups without reading the device. The histories
    of sampled tokens (penalty counts, last tokens for bad words) are on the device. Rows are 0..max_num_seqs-1. One
    thread owns the object.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.kind = np.zeros(max_num_seqs, np.int8)
        self.flags = np.zeros(max_num_seqs, np.int32)
        self.seed = np.zeros(max_num_seqs, np.int64)
        self.temperature = np.ones(max_num_seqs, np.float32)
        self.top_k = np.full(max_num_seqs, vocab_size, np.int64)  # vocab_size: off
        self.top_p = np.full(max_num_seqs, 2.0, np.float32)  # above 1: off
        self.log_min_p = np.full(max_num_seqs, -np.inf, np.float32)
        self.num_logprobs = np.zeros(max_num_seqs, np.int32)  # of rows with logprobs
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.counts = TokenCounts(max_num_seqs, vocab_size, self.device)
        self.bad_words = BadWords(max_num_seqs, self.device)
        self.edits = LogitEdits(max_num_seqs)

    @torch.inference_mode()
    def add(
        self, row: int, params: SamplingParams, seed: int, prompt_token_ids: TokenIds,
        output_token_ids: TokenIds, *, eos_token_ids: Sequence[int], bad_word_ids: Sequence[Sequence[int]],
    ) -> None:
        """Put a request into a row, new or resumed after a preemption.

        Args:
            seed: of this completion; taken modulo 2**64.
            prompt_token_ids, output_token_ids: prompt, and tokens generated so far. Penalties, bad words and min_tokens
                then continue as if the request had not been preempted.
        """
        self.remove(row)
        output = np.asarray(output_token_ids, np.int64)
        self.seed[row] = np.uint64(seed % 2**64).astype(np.int64)
        self.num_prompt_tokens[row] = len(prompt_token_ids)
        self._set_draw(row, params)
        if params.logprobs is not None:
            self.num_logprobs[row] = params.logprobs
            self.flags[row] |= RowFlag.LOGPROBS
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            self.counts.add(row, params, np.asarray(prompt_token_ids, np.int64), output)
            self.flags[row] |= RowFlag.PENALTIES
        has_edits = bool(params.logit_bias) or params.allowed_token_ids is not None
        if has_edits or params.min_tokens:
            self.edits.add(row, params, eos_token_ids, self.vocab_size)
            self.flags[row] |= RowFlag.EDITS * has_edits
            self.flags[row] |= RowFlag.MIN_TOKENS * bool(self.edits.min_tokens[row])
        if bad_word_ids and self.bad_words.add(row, bad_word_ids, output, self.vocab_size):
            self.flags[row] |= RowFlag.BAD_WORDS

    def remove(self, row: int) -> None:
        """Remove the row's request, if any, and free its histories."""
        flags, self.flags[row] = self.flags[row], 0
        if flags & RowFlag.PENALTIES:
            self.counts.remove(row)
        if flags & RowFlag.BAD_WORDS:
            self.bad_words.remove(row)
        if flags & (RowFlag.EDITS | RowFlag.MIN_TOKENS):
            self.edits.remove(row)

    @torch.inference_mode()
    def append(self, rows: np.ndarray, token_ids: Tensor) -> None:
        """Append sampled tokens to the histories of penalties and bad words, on the device.

        Args:
            token_ids: [R] int64 on the device; negative values (no token, or a rejected one) are ignored.
        """
        flags = self.flags[rows]
        for flag, history in ((RowFlag.PENALTIES, self.counts), (RowFlag.BAD_WORDS, self.bad_words)):
            places = np.flatnonzero(flags & flag)
            if len(places):
                history.append(rows[places], pick_rows(token_ids, places))

    def _set_draw(self, row: int, params: SamplingParams) -> None:
        top_k = min(params.top_k or self.vocab_size, self.vocab_size)
        self.temperature[row] = min(params.temperature, 1e30)  # uniform, and finite in float32
        self.top_k[row] = top_k
        # At exactly 1, tokens whose fixed-point probability rounds to 0 would be dropped; 2 keeps all.
        self.top_p[row] = params.top_p if params.top_p < 1.0 else 2.0
        self.log_min_p[row] = np.log(params.min_p) if params.min_p > 0 else -np.inf
        if params.temperature < MIN_TEMPERATURE or top_k == 1:
            self.kind[row], self.temperature[row] = DrawKind.GREEDY, 0.0
        elif top_k == self.vocab_size and params.top_p >= 1.0:
            self.kind[row] = DrawKind.FULL
        else:
            self.kind[row] = DrawKind.NARROW if top_k <= NARROW_WIDTH else DrawKind.SORTED
