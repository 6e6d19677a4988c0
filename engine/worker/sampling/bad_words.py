"""BadWords: forbids the last token of a word whose other tokens have just been produced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.worker.sampling.transfer import RowSlots, upload, upload_lists


class BadWords:
    """The bad words of rows that have some, flattened, and the newest output tokens of these rows.

    All of it stays on the device: words change only with their row, and the host has not yet seen the newest
    token when the next one is sampled. Tails have the newest token first. A prefix entry is one token of a word
    before its last.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.device = device
        self._slots = RowSlots(max_num_seqs)
        self._num_words = np.zeros(max_num_seqs, np.int64)  # by row
        self._num_entries = np.zeros(max_num_seqs, np.int64)  # by row
        # What fills the tables up matches nothing: no word has -1 entries, and no token is -1 or -2.
        self._tails = _SlotTable(-1, device)
        self._last_ids = _SlotTable(0, device)
        self._lengths = _SlotTable(-1, device)  # of a word: its entries
        self._entry_ids = _SlotTable(-2, device)
        self._entry_words = _SlotTable(0, device)  # which word of the row
        self._entry_places = _SlotTable(0, device)  # in the tail

    def add(self, row: int, words: Sequence[Sequence[int]], output_ids: np.ndarray, vocab_size: int) -> bool:
        """Take a row's words; False when none of them can ever be produced."""
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
        """Forget the row's words, if it has any."""
        self._slots.release(row)

    def append(self, rows: np.ndarray, token_ids: Tensor) -> None:
        """Let the tails of rows with words follow one token each; -1 leaves a tail as it is."""
        slots = upload(self._slots.slot[rows], self.device)
        new_ids = token_ids.unsqueeze(-1)
        old = self._tails.data.index_select(0, slots)
        moved = torch.cat([new_ids, old[:, :-1]], dim=1)
        self._tails.data.index_copy_(0, slots, torch.where(new_ids >= 0, moved, old))

    def forbid(self, logits: Tensor, places: np.ndarray, rows: np.ndarray) -> None:
        """Set the last token of every word whose prefix matches the tail to -inf, in place.

        Args:
            logits: [R, V] float32.
            places: [r] indices into the logits; rows: [r] the state's row of each.
        """
        num_words, num_entries = int(self._num_words[rows].max()), int(self._num_entries[rows].max())
        places_there, slots = upload_lists([places, self._slots.slot[rows]], self.device)
        tails = self._tails.data.index_select(0, slots)
        last_ids, lengths = self._last_ids.pick(slots, num_words), self._lengths.pick(slots, num_words)
        num_equal = torch.zeros_like(last_ids)
        if num_entries:
            tail_ids = tails.gather(1, self._entry_places.pick(slots, num_entries))
            is_equal = tail_ids == self._entry_ids.pick(slots, num_entries)
            num_equal.scatter_add_(1, self._entry_words.pick(slots, num_entries), is_equal.to(torch.int64))
        # Added rather than assigned: two words may end in the same token, and only one of them match.
        change = torch.zeros_like(last_ids, dtype=logits.dtype).masked_fill_(num_equal == lengths, -torch.inf)
        logits.index_put_((places_there.unsqueeze(-1), last_ids), change, accumulate=True)


class _SlotTable:
    """[slots, width] int64 on the device; it grows both ways, and `fill` stands where nothing was put."""

    def __init__(self, fill: int, device: torch.device) -> None:
        self.data = torch.full((0, 0), fill, dtype=torch.int64, device=device)
        self._fill = fill

    def put(self, slot: int, values: np.ndarray, num_slots: int) -> None:
        """Replace a slot by values that start at its left end, in a table of `num_slots` slots or more."""
        self._grow(num_slots, len(values))
        row = np.full(self.data.shape[1], self._fill, np.int64)
        row[: len(values)] = values
        self.data[slot] = upload(row, self.data.device)

    def widen(self, width: int) -> None:
        self._grow(0, width)

    def pick(self, slots: Tensor, width: int) -> Tensor:
        """[r, width] the left ends of slots."""
        return self.data[:, :width].index_select(0, slots)

    def _grow(self, num_slots: int, width: int) -> None:
        old_slots, old_width = self.data.shape
        if num_slots > old_slots or width > old_width:
            grown = self.data.new_full((max(num_slots, old_slots), max(width, old_width)), self._fill)
            grown[:old_slots, :old_width] = self.data
            self.data = grown
