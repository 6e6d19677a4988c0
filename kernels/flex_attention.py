"""Paged attention with torch's flex_attention over the concatenated contexts of all requests.

    keys     [ request 0 ........ | request 1 .... | request 2 ............ ]
    queries  [ 0 0 | 1 | 2 2 2 ]   each attends to its own request's keys, up to itself, within its window

The host computes from the lengths which blocks of 128 x 128 queries and keys are visible, so no full mask is built.
CUDA skips the invisible blocks, and the kernel is compiled once. The CPU computes all scores, which is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from kernels.attention_plan import upload_list
from kernels.ops import StepShape
from kernels.store_kv import take_slots

# Queries and keys per block of the mask; the default of flex_attention.
MASK_BLOCK = 128
# Bytes of index tensors per gathered key: request, position, block and slot, twice for the temporaries.
PLACE_BYTES = 2 * 4 * torch.int64.itemsize

ScoreChange = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Places:
    """The request of each query or key, and its position in that request."""

    request: Tensor  # [n] int64
    position: Tensor  # [n] int64


class FlexPlan:
    """Index tensors and masks of one step, shared by its layers. Owned by one forward pass.

    Args:
        block_tables: [num_requests, max_blocks] int32, on the device of the cache.
        query_lens: new tokens of each request.
        seq_lens: context length of each request including the new tokens.
        block_size: tokens in a KV block.
    """

    def __init__(
        self, block_tables: Tensor, query_lens: Sequence[int], seq_lens: Sequence[int], block_size: int
    ) -> None:
        self._lens = np.array(query_lens), np.array(seq_lens)
        self._firsts = [seq_len - query_len for query_len, seq_len in zip(query_lens, seq_lens, strict=True)]
        self.queries = _make_places(query_lens, self._firsts, block_tables.device)
        self.keys = _make_places(seq_lens, [0] * len(seq_lens), block_tables.device)
        request, position = self.keys.request, self.keys.position
        blocks = block_tables[request, position.div(block_size, rounding_mode="floor")].long()
        self._slots = blocks * block_size + position % block_size
        self._masks: dict[int | None, BlockMask] = {}
        self._seen_slots: dict[int | None, Tensor] = {None: self._slots}

    def slots(self, sliding_window: int | None) -> Tensor:
        """Return the slot of each key, [num_keys] int64.

        The block of a key outside every query's window may belong to another request by now. Its slot is replaced by
        that of the request's last key. Masking alone would not suffice: the block may hold NaN, and 0 * NaN is NaN.
        """
        slots = self._seen_slots.get(sliding_window)
        if slots is None:
            assert sliding_window is not None, "all keys are there from the start"
            request, device = self.keys.request, self._slots.device
            first_seen = upload_list([first + 1 - sliding_window for first in self._firsts], device)
            last_key = upload_list((self._lens[1].cumsum() - 1).tolist(), device)
            is_seen = self.keys.position >= first_seen[request]
            slots = torch.where(is_seen, self._slots, self._slots[last_key[request]])
            self._seen_slots[sliding_window] = slots
        return slots

    def mask(self, sliding_window: int | None) -> BlockMask:
        """Return the mask of the step for this window."""
        mask = self._masks.get(sliding_window)
        if mask is None:
            mask = self._masks[sliding_window] = self._make_mask(sliding_window)
        return mask

    def _make_mask(self, window: int | None) -> BlockMask:
        queries, keys = self.queries, self.keys

        def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            distance = queries.position[query] - keys.position[key]
            is_seen = (queries.request[query] == keys.request[key]) & (distance >= 0)
            return is_seen if window is None else is_seen & (distance < window)

        blocks = torch.from_numpy(_find_blocks(*self._lens, window))
        if self._slots.device.type == "cuda":
            blocks = blocks.pin_memory()  # otherwise the copy would wait for the device
        partial, full = blocks.to(self._slots.device, non_blocking=True)
        return BlockMask.from_kv_blocks(
            *_list_blocks(partial),
            *_list_blocks(full),
            BLOCK_SIZE=MASK_BLOCK,
            mask_mod=is_visible,
            seq_lengths=(len(queries.position), len(keys.position)),
        )


class FlexAttention:
    """Implements `kernels.ops.PagedAttention` with flex_attention; `plan` is a FlexPlan.

    Args:
        is_compiled: compile the kernel, which CUDA requires. The first call of each kind of layer then takes seconds.
    """

    def __init__(self, is_compiled: bool) -> None:
        self._attend = torch.compile(flex_attention, dynamic=True) if is_compiled else flex_attention

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        plan: FlexPlan | None = None,
    ) -> Tensor:
        """Attend the new tokens over their paged contexts, see `kernels.paged_attention`."""
        if plan is None:
            query_lens = query_start_loc.diff().tolist()
            plan = FlexPlan(block_tables, query_lens, seq_lens.tolist(), k_cache.shape[1])
        slots = plan.slots(sliding_window)
        k = take_slots(k_cache.flatten(0, 1), slots).to(q.dtype)
        v = take_slots(v_cache.flatten(0, 1), slots).to(q.dtype)
        attended, extra = self._attend(
            q.transpose(0, 1).unsqueeze(0),
            k.transpose(0, 1).unsqueeze(0),
            v.transpose(0, 1).unsqueeze(0),
            score_mod=None if soft_cap is None else _make_soft_cap(soft_cap),
            block_mask=plan.mask(sliding_window),
            scale=scale,
            enable_gqa=True,
            return_aux=AuxRequest(lse=sinks is not None),  # type: ignore[arg-type]  # its overload takes None only
        )
        if sinks is not None:
            share = torch.sigmoid(extra.lse - sinks.view(1, -1, 1)).unsqueeze(-1)
            attended = (attended * share).to(q.dtype)
        return attended.squeeze(0).transpose(0, 1).contiguous()


def make_flex_plan(
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    query_lens: Sequence[int],
    seq_lens_list: Sequence[int],
    block_size: int,
) -> FlexPlan:
    """Return the plan of one step. Shapes come from the lists, which avoids waiting for the device."""
    return FlexPlan(block_tables, query_lens, seq_lens_list, block_size)


def estimate_scratch(shape: StepShape) -> int:
    """Return the scratch bytes of a step: gathered keys and values, and the index tensors of the keys.

    Not counted: the copies of blocks that several requests share, and on the CPU the scores.
    """
    key_bytes = shape.num_kv_heads * shape.head_dim * shape.itemsize
    return shape.num_context_tokens * (2 * key_bytes + PLACE_BYTES)


def _make_places(lens: Sequence[int], firsts: Sequence[int], device: torch.device) -> Places:
    """Return the request and position of each token, for runs of `lens` tokens that begin at positions `firsts`."""
    starts, total = [], 0
    for length, first in zip(lens, firsts, strict=True):
        starts.append(total - first)
        total += length
    counts = upload_list(list(lens), device)
    index = torch.arange(len(starts), device=device)
    request = index.repeat_interleave(counts, output_size=total)
    shift = upload_list(starts, device).index_select(0, request)
    return Places(request, torch.arange(total, device=device) - shift)


def _find_blocks(query_lens: np.ndarray, seq_lens: np.ndarray, window: int | None) -> np.ndarray:
    """Return the partly and the fully visible blocks of a mask.

    Args:
        query_lens, seq_lens: [R] int64.

    Returns:
        [2, query blocks, key blocks] int8. First plane: 1 where some but not all pairs of query and key are visible;
        second plane: 1 where all are.
    """
    num_queries, num_keys = int(query_lens.sum()), int(seq_lens.sum())
    query_start, key_start = np.cumsum(query_lens) - query_lens, np.cumsum(seq_lens) - seq_lens
    # Runs of queries of one request in one block.
    runs = np.union1d(query_start, np.arange(0, num_queries, MASK_BLOCK))
    lengths = np.diff(runs, append=num_queries)
    request = np.searchsorted(query_start, runs, side="right") - 1
    first = (seq_lens - query_lens - query_start)[request] + runs
    last = first + lengths - 1
    width = num_keys if window is None else window
    # Keys [start, end) visible to the run's first and last query.
    starts = [key_start[request] + np.maximum(each - width + 1, 0) for each in (first, last)]
    ends = [key_start[request] + each + 1 for each in (first, last)]
    rows = runs // MASK_BLOCK
    shape = (-(-num_queries // MASK_BLOCK), -(-num_keys // MASK_BLOCK))
    some = _mark_runs(rows, starts[0] // MASK_BLOCK, -(-ends[1] // MASK_BLOCK), shape)
    whole = lengths == MASK_BLOCK
    every = _mark_runs(rows[whole], -(-starts[1][whole] // MASK_BLOCK), ends[0][whole] // MASK_BLOCK, shape)
    return np.stack((some & ~every, every)).astype(np.int8)


def _mark_runs(rows: np.ndarray, starts: np.ndarray, ends: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return [*shape] bool, True at [start, end) of each listed row. Runs may overlap or be empty."""
    steps = np.zeros((shape[0], shape[1] + 1), dtype=np.int32)
    np.add.at(steps, (rows, starts), 1)
    np.add.at(steps, (rows, np.maximum(starts, ends)), -1)
    return steps[:, :-1].cumsum(axis=1) > 0


def _list_blocks(marks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of marked blocks per row, [1, 1, Q] int32, and all block indices, marked ones first.

    The indices are [1, 1, Q, K] int32.
    """
    order = marks.argsort(dim=-1, descending=True, stable=True)
    return marks.sum(dim=-1).int()[None, None], order.int()[None, None]


def _make_soft_cap(soft_cap: float) -> ScoreChange:
    def bound(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return soft_cap * torch.tanh(score / soft_cap)

    return bound
