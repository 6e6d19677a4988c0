"""TokenCounts: counts the tokens of each request, and applies the penalties."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.device.device_link import RowSlots, pick_rows, put_rows, upload
from engine.sampling_params import SamplingParams
from kernels.torch.sampling import split_rows

# One int32 per token: its count in the output, and this bit if it is in the prompt.
IN_PROMPT = 1 << 30


class TokenCounts:
    """Token counts of the rows with a penalty: [slots, V] int32 on the device, grown on demand."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.penalties = np.zeros((max_num_seqs, 3), np.float32)  # repetition, frequency, presence
        self._slots = RowSlots(max_num_seqs)
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)

    def add(self, row: int, params: SamplingParams, prompt_ids: np.ndarray, output_ids: np.ndarray) -> None:
        """Start counting for a row. Ids outside the vocabulary (placeholders of other inputs) are skipped."""
        self.penalties[row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        slot = self._slots.take(row)
        grow_by = self._slots.capacity - self._counts.shape[0]
        if grow_by > 0:
            self._counts = torch.cat([self._counts, self._counts.new_zeros(grow_by, self.vocab_size)])
        counts = np.bincount(output_ids[output_ids < self.vocab_size], minlength=self.vocab_size)
        counts[prompt_ids[prompt_ids < self.vocab_size]] |= IN_PROMPT
        self._counts[slot] = upload(counts.astype(np.int32), self.device)

    def remove(self, row: int) -> None:
        self._slots.release(row)

    def append(self, rows: np.ndarray, token_ids: Tensor) -> None:
        """Count one more output token per row; negative ids are ignored."""
        slots = upload(self._slots.slot[rows], self.device)
        ones = (token_ids >= 0).to(torch.int32)
        self._counts.index_put_((slots, token_ids.clamp(min=0)), ones, accumulate=True)

    def penalise(self, logits: Tensor, places: np.ndarray, rows: np.ndarray) -> None:
        """Apply the penalties in place.

        The repetition penalty divides positive and multiplies negative logits of tokens in prompt or output. The
        frequency penalty is subtracted per occurrence in the output, the presence penalty once.
        Source: Keskar et al., 2019 (CTRL) for the first; the OpenAI API for the others.
        """
        penalties = self.penalties[rows]
        used = penalties != (1.0, 0.0, 0.0)
        factors = upload(penalties, self.device)
        slots = upload(self._slots.slot[rows], self.device)
        part = pick_rows(logits, places)
        for chunk in split_rows(len(places), self.vocab_size, self.device):
            self._penalise_chunk(part[chunk], slots[chunk], factors[chunk], used[chunk].any(axis=0))
        put_rows(logits, places, part)

    def _penalise_chunk(self, logits: Tensor, slots: Tensor, factors: Tensor, used: np.ndarray) -> None:
        counts = self._counts.index_select(0, slots)
        repetition, frequency, presence = factors.unsqueeze(-1).unbind(1)
        if used[0]:
            penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits.copy_(torch.where(counts > 0, penalised, logits))
        if used[1:].any():
            num_seen = counts.bitwise_and_(IN_PROMPT - 1).to(torch.float32)
            if used[1]:
                logits.sub_(num_seen * frequency)
            if used[2]:
                logits.sub_(num_seen.clamp_(max=1.0).mul_(presence))
