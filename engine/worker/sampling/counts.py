"""TokenCounts: counts the tokens of each request, and applies the penalties."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.device.device_link import RowSlots, upload_lists
from engine.sampling_params import SamplingParams
from kernels.ops import Penalise
from kernels.torch.sampling import IN_PROMPT
from kernels.upload import upload


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

    def penalise(self, logits: Tensor, places: np.ndarray, rows: np.ndarray, penalise: Penalise) -> None:
        """Apply the penalties in place to these rows of the logits."""
        penalties = self.penalties[rows]
        used = (penalties != (1.0, 0.0, 0.0)).any(axis=0).tolist()
        device_places, slots = upload_lists([places, self._slots.slot[rows]], self.device)
        penalise(logits, device_places, self._counts, slots, upload(penalties, self.device), used)
