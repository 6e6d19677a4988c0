"""BadWords: forbids the last token of a word whose other tokens have just been produced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.worker.sampling_transfer import RowSlots, upload, upload_lists


@dataclass(frozen=True, slots=True)
class _RowWords:
    """The words of one row, flattened: one entry per word, and one per token before a word's last."""

    last_ids: np.ndarray  # [W]
    prefix_ids: np.ndarray  # [E]
    prefix_words: np.ndarray  # [E] which word
    prefix_distances: np.ndarray  # [E] 1 = the newest output token


class BadWords:
    """The bad words of every row, and the newest output tokens of rows that have words of several tokens.

    The tails, [slots, length] int64 with the newest token last and -1 before the first, stay on the device:
    the host has not yet seen the newest token when the next one is sampled.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.device = device
        self._words: dict[int, _RowWords] = {}
        self._slots = RowSlots(max_num_seqs)
        self._tails = torch.full((0, 1), -1, dtype=torch.int64, device=device)

    def add(self, row: int, words: Sequence[Sequence[int]], output_ids: np.ndarray, vocab_size: int) -> bool:
        """Take a row's words; False when none of them can ever be produced."""
        possible = [np.asarray(word, np.int64) for word in words if len(word) and max(word) < vocab_size]
        if not possible:
            return False
        lengths = np.array([len(word) - 1 for word in possible])
        self._words[row] = _RowWords(
            last_ids=np.array([word[-1] for word in possible], np.int64),
            prefix_ids=np.concatenate([word[:-1] for word in possible]),
            prefix_words=np.repeat(np.arange(len(possible)), lengths),
            prefix_distances=np.concatenate([np.arange(length, 0, -1) for length in lengths]),
        )
        if lengths.any():
            self._start_tail(row, int(lengths.max()), output_ids)
        return True

    def remove(self, row: int) -> None:
        """Forget the row's words, if it has any."""
        self._words.pop(row, None)
        self._slots.release(row)

    def append(self, rows: np.ndarray, token_ids: Tensor) -> None:
        """Let the tails follow one token per row; -1 leaves a tail as it is."""
        has_tail = self._slots.slot[rows] >= 0
        if not has_tail.any():
            return
        lists = [np.flatnonzero(has_tail), self._slots.slot[rows[has_tail]]]
        places, slots = upload_lists(lists, self.device)
        new_ids = token_ids.index_select(0, places).unsqueeze(-1)
        old = self._tails.index_select(0, slots)
        moved = torch.cat([old[:, 1:], new_ids], dim=1)
        self._tails.index_copy_(0, slots, torch.where(new_ids >= 0, moved, old))

    def forbid(self, logits: Tensor, places: np.ndarray, rows: np.ndarray) -> None:
        """Set the last token of every word whose prefix matches the tail to -inf, in place.

        Args:
            logits: [R, V] float32.
            places: [r] indices into the logits; rows: [r] the state's row of each.
        """
        words = [self._words[row] for row in rows.tolist()]
        num_words = np.array([len(entry.last_ids) for entry in words])
        num_prefix_ids = np.array([len(entry.prefix_ids) for entry in words])
        first_word = np.repeat(np.cumsum(num_words) - num_words, num_prefix_ids)
        lists = [
            np.repeat(places, num_words),
            np.concatenate([entry.last_ids for entry in words]),
            np.repeat(self._slots.slot[rows], num_prefix_ids),
            np.concatenate([entry.prefix_distances for entry in words]),
            np.concatenate([entry.prefix_ids for entry in words]),
            first_word + np.concatenate([entry.prefix_words for entry in words]),
        ]
        word_places, last_ids, slots, distances, prefix_ids, prefix_words = upload_lists(lists, self.device)
        differs = self._tails[slots, self._tails.shape[1] - distances] != prefix_ids
        num_different = torch.zeros_like(last_ids).index_add_(0, prefix_words, differs.to(torch.int64))
        # Added rather than assigned: two words may end in the same token, and only one of them match.
        change = torch.zeros_like(last_ids, dtype=logits.dtype).masked_fill_(num_different == 0, -torch.inf)
        logits.index_put_((word_places, last_ids), change, accumulate=True)

    def _start_tail(self, row: int, length: int, output_ids: np.ndarray) -> None:
        slot = self._slots.take(row)
        num_slots, old_length = self._tails.shape
        if self._slots.capacity > num_slots or length > old_length:
            new_length = max(length, old_length)
            tails = self._tails.new_full((self._slots.capacity, new_length), -1)
            tails[:num_slots, new_length - old_length :] = self._tails
            self._tails = tails
        tail = np.full(self._tails.shape[1], -1, np.int64)
        newest = output_ids[-len(tail) :]
        tail[len(tail) - len(newest) :] = newest
        self._tails[slot] = upload(tail, self.device)
