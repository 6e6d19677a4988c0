"""DecodeGraphs: decode steps recorded once per padded size and replayed over the same buffers.

    step of R rows ─▶ smallest recorded size ≥ R ─▶ buffers [R rows | rows that pad] ─▶ replay ─▶ hidden of R rows
                  └─▶ none yet, or rows of different or unrecorded widths ─▶ eager

The width of a step is the number of tokens of each row: 1, or 1 + d where every row verifies d draft tokens.
Recordings are made between steps, the largest size first, so that one recording already serves every batch.
A row that pads reads and writes only the null block.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.kv_cache_spec import group_layers
from engine.model import Model
from engine.model.attn_metadata import AttnMetadata
from engine.worker.input_batch import ModelInput
from kernels.ops import KVCache
from kernels.step_buffers import make_block_tables, make_slot_mapping
from kernels.triton_support import find_kernel_errors

logger = logging.getLogger("troupe.worker")


class Recorder(Protocol):
    """Turns a function of device tensors into one that does the same again, over their new contents."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run it at least once, and return the replay."""


class Recording(NamedTuple):
    """The steps that one recording serves."""

    num_rows: int
    width: int  # tokens of each row


def list_padded_sizes(max_num_seqs: int) -> list[int]:
    """Return 1, 2, 4, then every 8 up to 64 and every 16 above, up to the first that holds `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs + 16, 16)]
    return sizes[: bisect_left(sizes, max_num_seqs) + 1]


class DecodeBuffers:
    """The tensors that recorded steps of one width read: `max_num_rows` rows of `width` tokens; unused rows pad."""

    def __init__(
        self, max_num_rows: int, width: int, max_model_len: int, block_size: int, num_groups: int,
        device: torch.device,
    ) -> None:
        self._width = width
        self._max_model_len = max_model_len
        num_tokens, max_blocks = max_num_rows * width, -(-max_model_len // block_size)
        self._input_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self._slot_mapping = make_slot_mapping(num_groups, num_tokens, device).zero_()
        self._seq_lens = torch.full((max_num_rows,), width, dtype=torch.int32, device=device)
        self._block_tables = make_block_tables(num_groups, max_num_rows, max_blocks, device).zero_()
        self._query_start_loc = torch.arange(0, num_tokens + 1, width, dtype=torch.int32, device=device)
        self._num_used = 0

    def clear(self) -> None:
        """Make every row pad."""
        self._clear_rows(0, self._num_used)
        self._num_used = 0

    def fill(self, step: ModelInput) -> None:
        """Copy a decode step into the first rows; the rows behind it pad."""
        metadata = step.attn_metadata
        num_rows, num_tokens = len(metadata.query_lens_list), step.input_ids.shape[0]
        targets = [self._input_ids, self._positions, *self._slot_mapping]
        sources = [step.input_ids, step.positions, *metadata.slot_mapping]
        torch._foreach_copy_([target[:num_tokens] for target in targets], sources)
        self._seq_lens[:num_rows].copy_(metadata.seq_lens)
        # Columns beyond the step's keep old ids: attention does not read a table beyond its row's length.
        self._block_tables[:, :num_rows, : metadata.block_tables.shape[2]].copy_(metadata.block_tables)
        if num_rows < self._num_used:
            self._clear_rows(num_rows, self._num_used)
        self._num_used = num_rows

    def view(self, num_rows: int) -> ModelInput:
        """Return the first rows as a step; its lists are upper bounds, since a recording outlives any length."""
        num_tokens = num_rows * self._width
        metadata = AttnMetadata(
            slot_mapping=self._slot_mapping[:, :num_tokens],
            block_tables=self._block_tables[:, :num_rows],
            query_start_loc=self._query_start_loc[: num_rows + 1],
            seq_lens=self._seq_lens[:num_rows],
            query_lens_list=[self._width] * num_rows,
            seq_lens_list=[self._max_model_len] * num_rows,
        )
        last = np.arange(1, num_rows + 1) * self._width - 1
        return ModelInput(self._input_ids[:num_tokens], self._positions[:num_tokens], metadata, last)

    def _clear_rows(self, start: int, end: int) -> None:
        for tensor in (self._input_ids, self._positions, self._slot_mapping):
            tensor[..., start * self._width : end * self._width].zero_()
        self._block_tables[:, start:end].zero_()
        self._seq_lens[start:end].fill_(self._width)


class DecodeGraphs:
    """Runs steps: recorded ones by replay, all others eagerly. One thread owns it.

    Args:
        widths: tokens per row of the steps that are recorded, 1 among them.
    """

    def __init__(
        self, model: Model, kv_caches: Sequence[KVCache], max_num_seqs: int, max_model_len: int,
        recorder: Recorder, widths: Sequence[int] = (1,),
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._recorder = recorder
        keys, sizes = kv_caches[0][0], list_padded_sizes(max_num_seqs)
        num_groups = len(group_layers(model.kv_specs()))
        self._buffers = {
            width: DecodeBuffers(sizes[-1], width, max_model_len, keys.shape[1], num_groups, keys.device)
            for width in widths
        }
        # The last is the next, large before small. The largest of each width compile all that is launched.
        self._to_record = [Recording(size, width) for size in sizes for width in widths]
        self._num_first = len(widths)
        self._replays: dict[Recording, Callable[[], None]] = {}
        self._sizes: dict[int, list[int]] = defaultdict(list)  # recorded numbers of rows, ascending, by width
        shape = (sizes[-1] * max(widths), model.config.hidden_size * (1 + len(model.aux_layers)))
        self._hidden = torch.zeros(shape, dtype=model.dtype, device=keys.device)

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
        recording = self._to_record.pop()
        buffers = self._buffers[recording.width]
        buffers.clear()
        step = buffers.view(recording.num_rows)

        def run() -> None:
            self._hidden[: step.input_ids.shape[0]].copy_(self._run_model(step))

        try:
            self._replays[recording] = self._recorder.record(run)
        except find_kernel_errors() as error:
            self._to_record = []
            logger.warning(
                "decode steps of %d rows and fewer stay eager: recording failed: %s",
                recording.num_rows,
                error,
            )
            return
        insort(self._sizes[recording.width], recording.num_rows)
        if not self._to_record:
            logger.info("%d decode steps are recorded", len(self._replays))

    def __call__(self, step: ModelInput) -> Tensor:
        """Return the hidden states of the step [T, D], valid until the next step. Adapters are not recorded."""
        if step.adapters is not None:
            return self._run_model(step)
        query_lens = step.attn_metadata.query_lens_list
        num_rows, width = len(query_lens), query_lens[0]
        if width in self._buffers and query_lens.count(width) == num_rows:
            sizes = self._sizes[width]
            place = bisect_left(sizes, num_rows)
            if place < len(sizes):
                self._buffers[width].fill(step)
                self._replays[Recording(sizes[place], width)]()
                return self._hidden[: num_rows * width]
        return self._run_model(step)

    def _run_model(self, step: ModelInput) -> Tensor:
        return self._model(step.input_ids, step.positions, self._kv_caches, step.attn_metadata, step.adapters)
