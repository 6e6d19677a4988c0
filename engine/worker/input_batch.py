"""InputBatch: what the worker keeps about the rows of the batch from step to step.

Rows persist; a step plan brings only changes. Token ids live on the device in a pool [row, position], so the
token that one step samples is gathered there by the next, without a detour over the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.messages import NewRow, StepPlan
from engine.worker.attn_metadata import AttnMetadata


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One flattened step: T tokens of R rows."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attn_metadata: AttnMetadata
    last_token_index: np.ndarray  # [R] int64, index of each run's last token among the T


class InputBatch:
    """Block tables (host) and token pool (device) of up to `max_num_seqs` rows."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device
        # One place more than the model length: the last token is sampled but never computed.
        self._stride = max_model_len + 1
        max_blocks = -(-max_model_len // block_size)
        self._block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self._num_blocks = [0] * max_num_seqs
        self._token_pool = torch.zeros(max_num_seqs * self._stride, dtype=torch.int64, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Take in the rows and blocks that are new with this plan."""
        for new_row in plan.new_rows:
            self._add(new_row)
        for row, block_ids in plan.new_blocks:
            start = self._num_blocks[row]
            self._block_tables[row, start : start + len(block_ids)] = block_ids
            self._num_blocks[row] = start + len(block_ids)

    def make_input(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> ModelInput:
        """Flatten runs [start, start + count) of the given rows into one input; all arrays are [R] int64."""
        ends = starts + counts
        bounds = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(counts, out=bounds[1:])
        if bounds[-1] == len(rows):  # one token a row: nothing to repeat
            positions, token_rows = starts, rows
        else:
            positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1] - starts, counts)
            token_rows = np.repeat(rows, counts)
        blocks = self._block_tables[token_rows, positions // self.block_size].astype(np.int64)
        slot_mapping = blocks * self.block_size + positions % self.block_size
        max_blocks = -(-int(ends.max()) // self.block_size)
        pool_index = self._to_device(token_rows * self._stride + positions)
        metadata = AttnMetadata(
            slot_mapping=self._to_device(slot_mapping),
            block_tables=self._to_device(self._block_tables[rows, :max_blocks]),
            query_start_loc=self._to_device(bounds.astype(np.int32)),
            seq_lens=self._to_device(ends.astype(np.int32)),
            query_lens_list=counts.tolist(),
            seq_lens_list=ends.tolist(),
        )
        return ModelInput(
            input_ids=self._token_pool.index_select(0, pool_index),
            positions=self._to_device(positions),
            attn_metadata=metadata,
            last_token_index=bounds[1:] - 1,
        )

    def append(self, rows: np.ndarray, positions: np.ndarray, token_ids: Tensor) -> None:
        """Write sampled tokens [R] at their positions; -1 (nothing sampled) is written as 0."""
        index = self._to_device(rows * self._stride + positions)
        self._token_pool.index_copy_(0, index, token_ids.clamp(min=0))

    def token_ids(self, row: int, start: int, end: int) -> Tensor:
        """Tokens [start, end) of a row, on the device."""
        return self._token_pool[row * self._stride + start : row * self._stride + end]

    def _add(self, new_row: NewRow) -> None:
        row, block_ids = new_row.row, new_row.block_ids
        self._block_tables[row, : len(block_ids)] = block_ids
        self._num_blocks[row] = len(block_ids)
        offset = row * self._stride
        places = self._token_pool[offset : offset + len(new_row.token_ids)]
        places.copy_(self._to_device(new_row.token_ids), non_blocking=True)

    def _to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)
