"""DecodeGraphs: decode steps recorded once per padded size and replayed over the same buffers.

    step of R rows ─▶ smallest recorded size ≥ R ─▶ buffers [R rows | rows that pad] ─▶ replay ─▶ hidden[:R]
                  └─▶ none yet, or not one token a row ─▶ eager

Recording goes on between steps, the largest size first, so that one recording already serves every batch. Where
the ops can share prefixes, a second set of recordings does; results are the same bits, so either may serve a step.
A row that pads reads one token of the null block and writes there.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.model import Model
from engine.model.attn_metadata import AttnMetadata
from engine.worker.input_batch import ModelInput
from kernels.device_kernels import find_kernel_errors
from kernels.ops import KVCache
from kernels.shared_prefixes import SharedPrefixes, pack_groups

logger = logging.getLogger("troupe.worker")

# Fewer rows hardly share enough to be worth a recording of their own.
MIN_SHARED_ROWS = 8


class Recorder(Protocol):
    """Turns a function of device tensors into one that does the same again, over their new contents."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run it at least once, and return the replay."""


def list_padded_sizes(max_num_seqs: int) -> list[int]:
    """Return 1, 2, 4 and then every 8, up to the first that holds `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, max_num_seqs + 8, 8)]
    return sizes[: bisect_left(sizes, max_num_seqs) + 1]


class DecodeBuffers:
    """The tensors that recorded steps read: `max_num_rows` rows of one token each; rows in no use pad."""

    def __init__(self, max_num_rows: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self._max_model_len = max_model_len
        width = -(-max_model_len // block_size)
        self._input_ids = torch.zeros(max_num_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_num_rows, dtype=torch.int64, device=device)
        self._slot_mapping = torch.zeros(max_num_rows, dtype=torch.int64, device=device)
        self._seq_lens = torch.ones(max_num_rows, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(max_num_rows, width, dtype=torch.int32, device=device)
        self._query_start_loc = torch.arange(max_num_rows + 1, dtype=torch.int32, device=device)
        self._no_groups = torch.from_numpy(pack_groups([], max_num_rows)).to(device)
        self._shared = SharedPrefixes.view(self._no_groups.clone(), max_num_rows)
        self._num_used = 0

    def clear(self) -> None:
        """Make every row pad."""
        self._clear_rows(0, self._num_used)
        self._shared.packed.copy_(self._no_groups)
        self._num_used = 0

    def fill(self, step: ModelInput) -> None:
        """Copy a decode step into the first rows; the rows behind it pad."""
        metadata = step.attn_metadata
        num_rows = len(metadata.query_lens_list)
        targets = [self._input_ids, self._positions, self._slot_mapping]
        sources = [step.input_ids, step.positions, metadata.slot_mapping]
        torch._foreach_copy_([target[:num_rows] for target in targets], sources)
        self._seq_lens[:num_rows].copy_(metadata.seq_lens)
        # Columns beyond the step's are left: nobody reads a table beyond the length of its row.
        self._block_tables[:num_rows, : metadata.block_tables.shape[1]].copy_(metadata.block_tables)
        if metadata.shared is not None:
            self._shared.packed.copy_(metadata.shared.packed)
        if num_rows < self._num_used:
            self._clear_rows(num_rows, self._num_used)
        self._num_used = num_rows

    def view(self, size: int, is_shared: bool = False) -> ModelInput:
        """Return the first rows as a step; its lists are upper bounds, since a recording outlives any length.

        Args:
            is_shared: whether the step knows of shared prefixes.
        """
        metadata = AttnMetadata(
            slot_mapping=self._slot_mapping[:size],
            block_tables=self._block_tables[:size],
            query_start_loc=self._query_start_loc[: size + 1],
            seq_lens=self._seq_lens[:size],
            query_lens_list=[1] * size,
            seq_lens_list=[self._max_model_len] * size,
            shared=self._shared if is_shared else None,
        )
        return ModelInput(self._input_ids[:size], self._positions[:size], metadata, np.arange(size))

    def _clear_rows(self, start: int, end: int) -> None:
        for tensor in (self._input_ids, self._positions, self._slot_mapping, self._block_tables):
            tensor[start:end].zero_()
        self._seq_lens[start:end].fill_(1)


class DecodeGraphs:
    """Runs steps: recorded ones by replay, all others eagerly. One thread owns it."""

    def __init__(
        self,
        model: Model,
        kv_caches: Sequence[KVCache],
        buffers: DecodeBuffers,
        sizes: Sequence[int],
        recorder: Recorder,
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._buffers = buffers
        self._recorder = recorder
        has_sharing = model.ops.share_prefixes is not None
        shared = [(True, size) for size in sorted(sizes) if has_sharing and size >= MIN_SHARED_ROWS]
        plain = [(False, size) for size in sorted(sizes)]
        # The last is the next, large before small. First the largest plain one and two that share prefixes: they
        # compile all that is launched. The others that share wait for a step that shares something.
        first = [*shared[:1], *shared[1:][-1:], plain[-1]]
        self._num_first = len(first)
        self._to_record = plain[:-1] + first
        self._waiting = shared[1:-1]
        self._replays: dict[tuple[bool, int], Callable[[], None]] = {}
        self._sizes: dict[bool, list[int]] = {False: [], True: []}  # recorded, ascending
        shape = (max(sizes), model.config.hidden_size)
        self._hidden = torch.zeros(shape, dtype=model.dtype, device=kv_caches[0][0].device)

    @property
    def num_recorded(self) -> int:
        return len(self._replays)

    @property
    def num_left(self) -> int:
        return len(self._to_record)

    @property
    def is_cold(self) -> bool:
        """Whether kernels of recorded steps may still have to be compiled."""
        return self.has_more and len(self._replays) < self._num_first

    @property
    def has_more(self) -> bool:
        """Whether a size waits to be recorded."""
        return bool(self._to_record)

    @torch.inference_mode()
    def record_next(self) -> None:
        """Record one more size. A device that refuses keeps what it has; everything else stays eager."""
        is_shared, size = self._to_record.pop()
        self._buffers.clear()
        step = self._buffers.view(size, is_shared)

        def run() -> None:
            self._hidden[:size].copy_(self._run_model(step))

        try:
            self._replays[is_shared, size] = self._recorder.record(run)
        except find_kernel_errors() as error:
            self._to_record, self._waiting = [], []
            logger.warning("decode steps of %d rows and fewer stay eager: recording failed: %s", size, error)
            return
        insort(self._sizes[is_shared], size)
        if not self._to_record:
            logger.info("decode steps are recorded at %d sizes", len(self._sizes[False]))

    def __call__(self, step: ModelInput) -> Tensor:
        """Return the hidden states of the step [T, D], valid until the next step."""
        num_rows = len(step.attn_metadata.query_lens_list)
        if step.attn_metadata.shared is not None and self._waiting:
            self._to_record, self._waiting = self._waiting + self._to_record, []
        if step.input_ids.shape[0] == num_rows:
            for is_shared in (True, False) if step.attn_metadata.shared is not None else (False,):
                sizes = self._sizes[is_shared]
                place = bisect_left(sizes, num_rows)
                if place < len(sizes):
                    self._buffers.fill(step)
                    self._replays[is_shared, sizes[place]]()
                    return self._hidden[:num_rows]
        return self._run_model(step)

    def _run_model(self, step: ModelInput) -> Tensor:
        return self._model(step.input_ids, step.positions, self._kv_caches, step.attn_metadata)
