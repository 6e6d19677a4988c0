"""DecodeGraphs: decode steps recorded once per padded size and replayed over the same buffers.

    step of R rows, T tokens ─▶ smallest recorded size ≥ R, T ─▶ buffers [the step | padding] ─▶ replay ─▶ hidden of T
                             └─▶ none yet, or a prompt in it  ─▶ eager

Rows may verify different numbers of drafts: their tokens lie one after the other, and padding follows the last row. A
row that pads has no tokens; a token that pads reads and writes only the null block. A recording for short contexts
divides none among programs, and so needs fewer launches.
Recordings are made between steps, the largest size first, so that one recording already serves every batch.
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
from engine.model.adapters import AdapterTables, StepAdapters
from engine.model.attn_metadata import AttnMetadata
from engine.worker.input_batch import ModelInput
from kernels.ops import KVCache
from kernels.states import StateSegments, StateTables
from kernels.step_buffers import StepBuffers, make_block_tables, make_slot_mapping
from kernels.triton_support import find_kernel_errors

logger = logging.getLogger("troupe.worker")

# A context of 512 tokens is one part, and one program may read up to 7 of them; see `kernels.triton.paged_attention`.
SHORT_CONTEXTS = (512, 3584)


class Recorder(Protocol):
    """Turns a function of device tensors into one that does the same again, over their new contents."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run it at least once, and return the replay."""


class Recording(NamedTuple):
    """The steps that one recording serves. Of those that serve a step, the least takes it."""

    num_tokens: int
    max_context: int
    num_rows: int
    has_adapters: bool = False


def list_padded_sizes(max_num_seqs: int) -> list[int]:
    """Return 1, 2, 4, then every 8 up to 64 and every 16 above, up to the first that holds `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs + 16, 16)]
    return sizes[: bisect_left(sizes, max_num_seqs) + 1]


class DecodeBuffers:
    """The tensors that recorded steps read; see `Recording` for the sizes."""

    def __init__(
        self, max_num_rows: int, max_num_tokens: int, max_model_len: int, block_size: int, num_groups: int,
        device: torch.device, *, max_query_len: int = 1, has_states: bool = False,
        tables: AdapterTables | None = None,
    ) -> None:
        self.max_query_len = max_query_len
        max_blocks = -(-max_model_len // block_size)
        self._input_ids = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._slot_mapping = make_slot_mapping(num_groups, max_num_tokens, device).zero_()
        self._seq_lens = torch.ones(max_num_rows, dtype=torch.int32, device=device)
        self._block_tables = make_block_tables(num_groups, max_num_rows, max_blocks, device).zero_()
        self.query_start_loc = torch.zeros(max_num_rows + 1, dtype=torch.int32, device=device)
        self._states: StateTables | None = None
        if has_states:
            # Each token may begin a segment, and each row may end with one without tokens. A row that pads reads on.
            segments = torch.zeros(max_num_tokens + max_num_rows + 1, 4, dtype=torch.int64, device=device)
            self._states = StateTables(segments, segments.new_zeros(max_num_rows + 1))
        self._tables = tables
        self._adapter_rows = torch.arange(max_num_tokens if tables is not None else 0, device=device)
        self._adapter_numbers = torch.full_like(self._adapter_rows, 0 if tables is None else tables.max_loras)
        self._num_used = 0  # tokens

    def clear(self) -> None:
        """Make every row pad."""
        for tensor in (self._input_ids, self._positions, self._slot_mapping):
            tensor[..., : self._num_used].zero_()
        self._num_used = 0
        self.query_start_loc.zero_()
        if self._states is not None:
            self._states.bounds.zero_()

    def take(self, num_rows: int, longest: int, num_tokens: int, max_blocks: int) -> StepBuffers | None:
        """See `StepPlace`."""
        if longest > self.max_query_len or num_tokens > len(self._input_ids) or num_rows > len(self._seq_lens):
            return None
        end, self._num_used = max(num_tokens, self._num_used), num_tokens
        # Columns beyond the step's keep old ids: attention does not read a table beyond its row's length.
        tables = self._block_tables[:, :num_rows, :max_blocks]
        slots, seq_lens = self._slot_mapping[:, :end], self._seq_lens[:num_rows]
        return StepBuffers(self._input_ids[:end], self._positions[:end], slots, tables, seq_lens)

    def fill(self, step: ModelInput) -> None:
        """Copy what `take` has no memory for: adapters and states of the step, and positions that images shift."""
        metadata = step.attn_metadata
        if step.positions.data_ptr() != self._positions.data_ptr():
            self._positions[: len(step.positions)].copy_(step.positions)
        if self._tables is not None and step.adapters is not None and step.adapters.numbers is not None:
            self._adapter_numbers.fill_(self._tables.max_loras)
            self._adapter_numbers.index_copy_(0, step.adapters.rows, step.adapters.numbers)
        if self._states is not None and metadata.states is not None:
            num_rows = len(metadata.query_lens_list)
            tables, num_segments = metadata.states.find_tables(self._seq_lens.device), len(metadata.states.source)
            self._states.segments[:num_segments].copy_(tables.segments)
            self._states.bounds[:num_rows].copy_(tables.bounds[:num_rows])
            self._states.bounds[num_rows:].fill_(num_segments)

    def view(self, recording: Recording) -> ModelInput:
        """Return the first rows as a step; its lists are upper bounds, since a recording outlives any length."""
        num_tokens, max_context, num_rows, has_adapters = recording
        query_lens = [num_tokens // num_rows] * num_rows
        metadata = AttnMetadata(
            slot_mapping=self._slot_mapping[:, :num_tokens], block_tables=self._block_tables[:, :num_rows],
            query_start_loc=self.query_start_loc[: num_rows + 1], seq_lens=self._seq_lens[:num_rows],
            query_lens_list=query_lens, seq_lens_list=[max_context] * num_rows,
            max_query_len=self.max_query_len if num_tokens > num_rows else 1,
            states=self._view_states(query_lens),
        )
        last = np.cumsum(query_lens) - 1
        adapters = None
        if has_adapters and self._tables is not None:
            rows, numbers = self._adapter_rows[:num_tokens], self._adapter_numbers[:num_tokens]
            adapters = StepAdapters(self._tables.ops, rows, [], tables=self._tables, numbers=numbers)
        return ModelInput(self._input_ids[:num_tokens], self._positions[:num_tokens], metadata, last, adapters)

    def _view_states(self, query_lens: list[int]) -> StateSegments | None:
        if self._states is None:
            return None
        rows, counts = np.arange(len(query_lens)), np.array(query_lens)
        tables = StateTables(self._states.segments, self._states.bounds[: len(rows) + 1])
        return StateSegments(rows, rows, np.cumsum(counts) - counts, counts, rows + 1, tables=tables)


class DecodeGraphs:
    """Runs steps: recorded ones by replay, all others eagerly. One thread owns it.

    Args:
        kv_caches: those of a step.
        widths: tokens for each row that a recorded step has room for, 1 among them.
        max_query_len: tokens of a row at most; default: the largest width.
        tables: of the adapters; None: steps with adapters are not recorded.
    """

    def __init__(
        self, model: Model, kv_caches: Sequence[KVCache], max_num_seqs: int, max_model_len: int,
        recorder: Recorder, widths: Sequence[int] = (1,), max_query_len: int = 0,
        tables: AdapterTables | None = None,
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._recorder = recorder
        keys, sizes = kv_caches[0][0], list_padded_sizes(max_num_seqs)
        num_groups, num_tokens = len(group_layers(model.kv_specs())), sizes[-1] * max(widths)
        self.buffers = DecodeBuffers(
            sizes[-1], num_tokens, max_model_len, keys.shape[1], num_groups, keys.device,
            max_query_len=max(max_query_len, *widths), has_states=len(kv_caches) > len(model.kv_specs()), tables=tables,
        )
        self._widths = sorted(widths)
        self._contexts = [*(each for each in SHORT_CONTEXTS if each < max_model_len), max_model_len]
        # The last is the next, large before small. The largest of each width compile all that is launched.
        self._to_record = [
            Recording(size * width, context, size, has_adapters)
            for context in self._contexts
            for has_adapters in ((False,) if tables is None else (True, False))
            for size in sizes
            for width in self._widths
        ]
        self._replays: dict[Recording, Callable[[], None]] = {}
        # Recorded numbers of rows, ascending, by width, longest context, and whether they have adapters.
        self._sizes: dict[tuple[int, int, bool], list[int]] = defaultdict(list)
        shape = (num_tokens, model.config.hidden_size * (1 + len(model.aux_layers)))
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
        return self.has_more and len(self._replays) < len(self._widths)

    @property
    def has_more(self) -> bool:
        """Whether a size waits to be recorded."""
        return bool(self._to_record)

    @torch.inference_mode()
    def record_next(self) -> None:
        """Record one more size. A device that refuses keeps what it has; everything else stays eager."""
        recording = self._to_record.pop()
        self.buffers.clear()
        width = recording.num_tokens // recording.num_rows
        step = self.buffers.view(recording)

        def run() -> None:
            self._hidden[: recording.num_tokens].copy_(self._run_model(step))

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
        insort(self._sizes[width, recording.max_context, recording.has_adapters], recording.num_rows)
        if not self._to_record:
            logger.info("%d decode steps are recorded", len(self._replays))

    def __call__(self, step: ModelInput) -> Tensor:
        """Return the hidden states of the step [T, D], valid until the next step."""
        # Positions on several axes are those of a prompt with images.
        is_decode = step.is_placed and step.positions.dim() == 1
        recording = self._find(step.attn_metadata, step.adapters) if is_decode else None
        if recording is None:
            return self._run_model(step)
        self.buffers.fill(step)
        self._replays[recording]()
        return self._hidden[: step.input_ids.shape[0]]

    def _find(self, metadata: AttnMetadata, adapters: StepAdapters | None) -> Recording | None:
        """Return the least recording that serves a step."""
        query_lens = metadata.query_lens_list
        longest, num_tokens, max_context = max(query_lens), sum(query_lens), max(metadata.seq_lens_list)
        if not (adapters is None or adapters.is_recordable):
            return None
        found: list[Recording] = []
        for (width, context, has_adapters), sizes in self._sizes.items():
            is_fit = context >= max_context and (width == 1) == (longest == 1)
            if not is_fit or has_adapters != (adapters is not None):
                continue
            place = bisect_left(sizes, max(len(query_lens), -(-num_tokens // width)))
            if place < len(sizes):
                found.append(Recording(sizes[place] * width, context, sizes[place], has_adapters))
        return min(found, default=None)

    def _run_model(self, step: ModelInput) -> Tensor:
        return self._model(step.input_ids, step.positions, self._kv_caches, step.attn_metadata, step.adapters)
