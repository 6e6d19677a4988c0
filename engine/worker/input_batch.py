"""InputBatch: the worker's state of the rows, and the model inputs of each step.

Rows persist between steps; a plan contains only changes. Token ids are kept in a pool [row, position] on the device, so
that a step reads the tokens sampled by the previous one without a copy to the host. Inputs are made in one of two ways:

    on the host:      slots, positions, tables, lengths of the step ─▶ device; token ids ◀─ pool
    on the device:    rows, starts, counts ─▶ device; all others ◀─ pool and tables (`Ops.gather_inputs`)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.core.actor_messages import NewRow, StepPlan
from engine.model.adapters import StepAdapters
from engine.model.attn_metadata import AttnMetadata, StepImages
from kernels.ops import GatherInputs
from kernels.step_buffers import StepBuffers, make_block_tables, make_slot_mapping
from kernels.upload import upload


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One flattened step: T tokens of R rows."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attn_metadata: AttnMetadata
    last_token_index: np.ndarray  # [R] int64, index of each run's last token among the T
    adapters: StepAdapters | None = None
    images: StepImages | None = None
    is_placed: bool = False  # the tensors are those of recorded steps


class StepPlace(Protocol):
    """Memory that recorded steps read."""

    query_start_loc: Tensor  # [max rows + 1] int32

    def take(self, num_rows: int, longest: int, num_tokens: int, max_blocks: int) -> StepBuffers | None:
        """Return the memory of a step's rows, and of its tokens and all that pad; None: no recording has room."""


class InputBatch:
    """Block tables and token pool of up to `max_num_seqs` rows.

    Args:
        num_groups: groups of layers, each with its own block table.
        gather: makes the inputs on the device, which then also keeps the block tables; None: the host makes them.

    Attributes:
        version: incremented by every new row.
        block_tables: [num_groups, max_num_seqs, max_blocks] int32 on the host.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device,
        num_groups: int = 1, gather: GatherInputs | None = None,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.num_groups = num_groups
        self.block_size = block_size
        self.device = device
        self.version = 0
        # One position more than the model length: the last token is sampled but never computed.
        self._stride = max_model_len + 1
        max_blocks = -(-max_model_len // block_size)
        self.block_tables = np.zeros((num_groups, max_num_seqs, max_blocks), dtype=np.int32)
        self._num_blocks = [0] * max_num_seqs
        self._token_pool = torch.zeros(max_num_seqs * self._stride, dtype=torch.int32, device=device)
        self._device_tables: Tensor | None = None
        self._gather_inputs = gather
        if gather is not None:
            self._device_tables = torch.from_numpy(self.block_tables).to(device, copy=True)

    def apply(self, plan: StepPlan) -> None:
        for new_row in plan.new_rows:
            self._add(new_row)
        for row, block_ids in plan.new_blocks:
            self._append_blocks(row, block_ids)
        if self._device_tables is not None:
            self._update_tables([new.row for new in plan.new_rows] + [row for row, _ in plan.new_blocks])
        if len(plan.draft_token_ids):
            num_drafts = np.maximum(plan.num_samples - 1, 0)
            firsts = plan.starts + plan.num_scheduled_tokens - num_drafts
            offsets = np.cumsum(num_drafts) - num_drafts
            positions = np.repeat(firsts - offsets, num_drafts) + np.arange(len(plan.draft_token_ids))
            self.append(
                np.repeat(plan.rows, num_drafts), positions, upload(plan.draft_token_ids, self.device)
            )

    def make_input(
        self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, place: StepPlace | None = None
    ) -> ModelInput:
        """Flatten the runs [start, start + count) of the rows into one input. All arrays are [R] int64.

        Args:
            place: takes the input if it can and the device makes it.
        """
        ends = starts + counts
        bounds = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(counts, out=bounds[1:])
        max_blocks = -(-int(ends.max()) // self.block_size)
        placed = None
        if self._device_tables is None:
            buffers, query_start_loc = self._assemble(rows, starts, counts, bounds, max_blocks)
        else:
            if place is not None:
                placed = place.take(len(rows), int(counts.max()), int(bounds[-1]), max_blocks)
            start_loc = None if placed is None or place is None else place.query_start_loc
            buffers, query_start_loc = self._gather(
                rows, starts, bounds, placed or self._make_buffers(bounds, max_blocks), start_loc, self._device_tables
            )
        metadata = AttnMetadata(
            slot_mapping=buffers.slot_mapping, block_tables=buffers.block_tables,
            query_start_loc=query_start_loc, seq_lens=buffers.seq_lens, query_lens_list=counts.tolist(),
            seq_lens_list=ends.tolist(),
        )
        return ModelInput(
            buffers.input_ids, buffers.positions, metadata, bounds[1:] - 1, is_placed=placed is not None
        )

    def append(self, rows: np.ndarray, positions: np.ndarray, token_ids: Tensor) -> None:
        """Write tokens [N] at their positions; -1 (nothing sampled) is written as 0."""
        index = upload(rows * self._stride + positions, self.device)
        self._token_pool.index_copy_(0, index, token_ids.clamp(min=0).int().to(self.device))

    def list_slots(self, row: int, start: int, end: int) -> np.ndarray:
        """Return the KV cache slots of the row's positions [start, end) in the first group."""
        positions = np.arange(start, end)
        blocks = self.block_tables[0, row, positions // self.block_size].astype(np.int64)
        slots: np.ndarray = blocks * self.block_size + positions % self.block_size
        return slots

    def token_ids(self, row: int, start: int, end: int) -> Tensor:
        """Return tokens [start, end) of a row, on the device."""
        return self._token_pool[row * self._stride + start : row * self._stride + end].long()

    def _assemble(
        self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, bounds: np.ndarray, max_blocks: int
    ) -> tuple[StepBuffers, Tensor]:
        """Compute the step's inputs on the host. Returns buffers and query_start_loc."""
        if bounds[-1] == len(rows):  # one token per row
            positions, token_rows = starts, rows
        else:
            positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1] - starts, counts)
            token_rows = np.repeat(rows, counts)
        blocks = self.block_tables[:, token_rows, positions // self.block_size].astype(np.int64)
        slot_mapping = blocks * self.block_size + positions % self.block_size
        pool_index = upload(token_rows * self._stride + positions, self.device)
        buffers = StepBuffers(
            input_ids=self._token_pool.index_select(0, pool_index).long(),
            positions=upload(positions, self.device),
            slot_mapping=upload(slot_mapping, self.device),
            block_tables=upload(self.block_tables[:, rows, :max_blocks], self.device),
            seq_lens=upload((starts + counts).astype(np.int32), self.device),
        )
        return buffers, upload(bounds.astype(np.int32), self.device)

    def _gather(
        self, rows: np.ndarray, starts: np.ndarray, bounds: np.ndarray, buffers: StepBuffers,
        place: Tensor | None, tables: Tensor,
    ) -> tuple[StepBuffers, Tensor]:
        """Gather the step's inputs on the device. Returns the parts of the buffers that it uses, and query_start_loc.

        Args:
            place: of query_start_loc for more rows, which get no tokens; None: new memory for the step's rows.
        """
        num_rows, num_tokens = len(rows), int(bounds[-1])
        num_bounds = num_rows + 1 if place is None else len(place)
        # An even width aligns every row to 16 bytes; an unaligned pointer would compile another kernel.
        width = num_bounds + num_bounds % 2
        record = np.full((3, width), num_tokens)
        record[0, :num_rows], record[1, :num_rows], record[2, : num_rows + 1] = rows, starts, bounds
        sent = upload(record, self.device)
        start_loc = sent[2, :num_bounds].int() if place is None else place.copy_(sent[2, :num_bounds])
        pool = self._token_pool.view(self.max_num_seqs, self._stride)
        assert self._gather_inputs is not None, "without it there are no tables on the device"
        self._gather_inputs(
            pool, tables, sent[0, :num_rows], sent[1, :num_rows], start_loc[: num_rows + 1], self.block_size, buffers
        )
        used = replace(
            buffers, input_ids=buffers.input_ids[:num_tokens], positions=buffers.positions[:num_tokens],
            slot_mapping=buffers.slot_mapping[:, :num_tokens],
        )
        return used, start_loc[: num_rows + 1]

    def _make_buffers(self, bounds: np.ndarray, max_blocks: int) -> StepBuffers:
        num_rows, num_tokens = len(bounds) - 1, int(bounds[-1])

        def make(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        return StepBuffers(
            input_ids=make(num_tokens),
            positions=make(num_tokens),
            slot_mapping=make_slot_mapping(self.num_groups, num_tokens, self.device),
            block_tables=make_block_tables(self.num_groups, num_rows, max_blocks, self.device),
            seq_lens=make(num_rows, dtype=torch.int32),
        )

    def _update_tables(self, rows: list[int]) -> None:
        """Copy the tables of changed rows to the device, with their row numbers, in one transfer."""
        if not rows or self._device_tables is None:
            return
        changed = np.unique(rows)
        tables = self.block_tables[:, changed]
        sent = upload(np.concatenate((changed.astype(np.int32), tables.ravel())), self.device)
        places, new = sent.split((len(changed), tables.size))
        self._device_tables.index_copy_(1, places.long(), new.view(tables.shape))

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        start = self._num_blocks[row]
        end = self._num_blocks[row] = start + len(block_ids) // self.num_groups
        self.block_tables[:, row, start:end] = (
            np.array(block_ids, dtype=np.int32).reshape(-1, self.num_groups).T
        )

    def _add(self, new_row: NewRow) -> None:
        row = new_row.row
        self.version += 1
        self._num_blocks[row] = 0
        self._append_blocks(row, new_row.block_ids)
        offset = row * self._stride
        places = self._token_pool[offset : offset + len(new_row.token_ids)]
        places.copy_(upload(new_row.token_ids, self.device), non_blocking=True)
