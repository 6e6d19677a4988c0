"""LogitEdits: applies logit_bias, allowed_token_ids and min_tokens, which change few logits of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.device.device_link import upload_lists
from engine.sampling_params import SamplingParams, find_end_ids
from kernels.upload import upload


@dataclass(frozen=True, slots=True)
class _RowEdits:
    """The edits of one row; arrays may be empty."""

    bias_ids: np.ndarray
    bias: np.ndarray  # float32
    allowed_ids: np.ndarray
    end_ids: np.ndarray  # forbidden before min_tokens


class LogitEdits:
    """Sparse edits of the logits, by row."""

    def __init__(self, max_num_seqs: int) -> None:
        self.min_tokens = np.zeros(max_num_seqs, np.int64)
        self._edits: dict[int, _RowEdits] = {}

    def add(self, row: int, params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        """Add a row's edits. All ids are inside the vocabulary, except stop ids, which may be outside.

        Before min_tokens, EOS is forbidden only if it would end the request.
        """
        end_ids = find_end_ids(params, eos_token_ids)
        reachable = sorted(token_id for token_id in end_ids if 0 <= token_id < vocab_size)
        self.min_tokens[row] = params.min_tokens if reachable else 0
        self._edits[row] = _RowEdits(
            bias_ids=np.array(list(params.logit_bias), np.int64),
            bias=np.array(list(params.logit_bias.values()), np.float32),
            allowed_ids=np.array(sorted(set(params.allowed_token_ids or ())), np.int64),
            end_ids=np.array(reachable, np.int64),
        )

    def remove(self, row: int) -> None:
        self._edits.pop(row, None)
        self.min_tokens[row] = 0

    def apply(self, logits: Tensor, places: np.ndarray, rows: np.ndarray) -> None:
        """Add logit_bias, then forbid all tokens except allowed_token_ids, in place."""
        edits = [self._edits[row] for row in rows.tolist()]
        bias = np.concatenate([edit.bias for edit in edits])
        if len(bias):
            bias_places, bias_ids = _flatten(places, [edit.bias_ids for edit in edits], logits.device)
            logits[bias_places, bias_ids] += upload(bias, logits.device)
        allowed = [edit.allowed_ids for edit in edits]
        is_limited = np.array([len(ids) > 0 for ids in allowed])
        if is_limited.any():
            allowed_places, allowed_ids = _flatten(places, allowed, logits.device)
            kept = logits[allowed_places, allowed_ids]
            logits.index_fill_(0, upload(places[is_limited], logits.device), -torch.inf)
            logits[allowed_places, allowed_ids] = kept

    def forbid_end(self, logits: Tensor, places: np.ndarray, rows: np.ndarray, has_mask: bool) -> None:
        """Forbid the ids that would end the text, in place, for rows that have not reached min_tokens.

        Args:
            logits: [R, V] float32, already masked.
            places, rows: as in `apply`.
            has_mask: whether grammars mask the rows. If a grammar allows only end tokens, the text cannot become
                longer, and min_tokens is ignored.
        """
        end_ids = [self._edits[row].end_ids for row in rows.tolist()]
        end_places, token_ids = _flatten(places, end_ids, logits.device)
        before = logits[end_places, token_ids]
        logits[end_places, token_ids] = -torch.inf
        if not has_mask:
            return
        is_stuck = logits.index_select(0, upload(places, logits.device)).amax(dim=-1) == -torch.inf
        entry_rows = upload(np.repeat(np.arange(len(rows)), [len(ids) for ids in end_ids]), logits.device)
        logits[end_places, token_ids] = torch.where(is_stuck[entry_rows], before, -torch.inf)


def _flatten(places: np.ndarray, ids: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, ...]:
    lengths = [len(row_ids) for row_ids in ids]
    return upload_lists([np.repeat(places, lengths), np.concatenate(ids)], device)
