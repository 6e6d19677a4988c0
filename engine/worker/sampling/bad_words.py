"""BadWords: forbids the last token of a bad word whose other tokens were just sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.device.device_link import RowSlots, upload_lists
from kernels.upload import upload


class BadWords:
    """The bad words of all rows, flattened, and the last output tokens (tail) of these rows.

    Both are on the device, because the host does not know the last token yet when the next one is sampled. A tail
    has the newest token first. An entry is one token of a word before its last.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.device = device
        self._slots = RowSlots(max_num_seqs)
        self._num_words = np.zeros(max_num_seqs, np.int64)  # by row
        self._num_entries = np.zeros(max_num_seqs, np.int64)  # by row
        # Padding never matches: no word has -1 entries, and no token id is -1 or -2.
        self._tails = _SlotTable(-1, device)
        self._last_ids = _SlotTable(0, device)
        self._lengths = _SlotTable(-1, device)  # entries per word
        self._entry_ids = _SlotTable(-2, device)
        self._entry_words = _SlotTable(0, device)  # index of the entry's word in the row
        self._entry_places = _SlotTable(0, device)  # position of the entry in the tail

    def add(self, row: int, words: Sequence[Sequence[int]], output_ids: np.ndarray, vocab_size: int) -> bool:
        """Add a row's words. Returns False if none of them can be sampled."""
        possible = [np.asarray(word, np.int64) for word in words if len(word) and max(word) < vocab_size]
        if not possible:
            return False
        lengths = np.array([len(word) - 1 for word in possible])
        self._num_words[row], self._num_entries[row] = len(possible), lengths.sum()
        slot = self._slots.take(row)
        values = (
            (self._tails, output_ids[::-1][: lengths.max()]),
            (self._last_ids, np.array([word[-1] for word in possible])),
            (self._lengths, lengths),
            (self._entry_ids, np.concatenate([word[:-1] for word in possible])),
            (self._entry_words, np.repeat(np.arange(len(possible)), lengths)),
            (self._entry_places, np.concatenate([np.arange(length)[::-1] for length in lengths])),
        )
        for table, value in values:
            table.put(slot, value, self._slots.capacity)
        self._tails.widen(max(1, int(lengths.max())))
        return True

    def remove(self, row: int) -> None:
        self._slots.release(row)

    def append(self, rows: np.ndarray, token_ids: Tensor) -> None:
        """Append one token to each row's tail; negative ids are ignored."""
        slots = upload(self._slots.slot[rows], self.device)
        new_ids = token_ids.unsqueeze(-1)
        old = self._tails.data.index_select(0, slots)
        moved = torch.cat([new_ids, old[:, :-1]], dim=1)
        self._tails.data.index_copy_(0, slots, torch.where(new_ids >= 0, moved, old))

    def forbid(self, logits: Tensor, places: np.ndarray, rows: np.ndarray) -> None:
        """Set the last token of every word whose prefix matches the tail to -inf, in place.

        Args:
            logits: [R, V] float32.
            places: [r] indices into the logits.
            rows: [r] rows of the state.
        """
        num_words, num_entries = int(self._num_words[rows].max()), int(self._num_entries[rows].max())
        device_places, slots = upload_lists([places, self._slots.slot[rows]], self.device)
        tails = self._tails.data.index_select(0, slots)
        last_ids, lengths = self._last_ids.pick(slots, num_words), self._lengths.pick(slots, num_words)
        num_equal = torch.zeros_like(last_ids)
        if num_entries:
            tail_ids = tails.gather(1, self._entry_places.pick(slots, num_entries))
            is_equal = tail_ids == self._entry_ids.pick(slots, num_entries)
            num_equal.scatter_add_(1, self._entry_words.pick(slots, num_entries), is_equal.to(torch.int64))
        # Added rather than assigned, because a word that does not match may end in the same token as one that does.
        change = torch.zeros_like(last_ids, dtype=logits.dtype).masked_fill_(num_equal == lengths, -torch.inf)
        logits.index_put_((device_places.unsqueeze(-1), last_ids), change, accumulate=True)


class _SlotTable:
    """[slots, width] int64 on the device, padded with `fill`; both dimensions grow on demand."""

    def __init__(self, fill: int, device: torch.device) -> None:
        self.data = torch.full((0, 0), fill, dtype=torch.int64, device=device)
        self._fill = fill

    def put(self, slot: int, values: np.ndarray, num_slots: int) -> None:
        """Set a slot to the values, padded on the right; grow the table to at least `num_slots` slots."""
        self._grow(num_slots, len(values))
        row = np.full(self.data.shape[1], self._fill, np.int64)
        row[: len(values)] = values
        self.data[slot] = upload(row, self.data.device)

    def widen(self, width: int) -> None:
        self._grow(0, width)

    def pick(self, slots: Tensor, width: int) -> Tensor:
        """Return the first `width` values of the slots: [r, width]."""
        return self.data[:, :width].index_select(0, slots)

    def _grow(self, num_slots: int, width: int) -> None:
        old_slots, old_width = self.data.shape
        if num_slots > old_slots or width > old_width:
            grown = self.data.new_full((max(num_slots, old_slots), max(width, old_width)), self._fill)
            grown[:old_slots, :old_width] = self.data
            self.data = grown
