"""Paged attention through torch's flex_attention: every context gathered end to end, other requests masked away.

    keys     [ request 0 ........ | request 1 .... | request 2 ............ ]
    queries  [ 0 0 | 1 | 2 2 2 ]   sees its own request's keys, up to itself, within its window

On CUDA the mask becomes a list of blocks that are skipped whole, and the kernel is compiled once. On CPU the scores
are all computed: right, and slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from kernels.attention_plan import upload_list
from kernels.store_kv import take_slots

ScoreChange = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Places:
    """Of each query or key: whose it is, and where it stands in its request."""

    request: Tensor  # [n] int64
    position: Tensor  # [n] int64


class FlexPlan:
    """The index work of one step, shared by its layers. Owned by one forward pass.

    Args:
        block_tables: [num_requests, max_blocks] int32, on the device of the cache.
        query_lens: new tokens of each request.
        seq_lens: context length of each request including the new tokens.
        block_size: tokens in a block.
    """

    def __init__(
        self, block_tables: Tensor, query_lens: Sequence[int], seq_lens: Sequence[int], block_size: int
    ) -> None:
        firsts = [seq_len - query_len for query_len, seq_len in zip(query_lens, seq_lens, strict=True)]
        self.queries = _make_places(query_lens, firsts, block_tables.device)
        self.keys = _make_places(seq_lens, [0] * len(seq_lens), block_tables.device)
        request, position = self.keys.request, self.keys.position
        blocks = block_tables[request, position.div(block_size, rounding_mode="floor")].long()
        self.slots = blocks * block_size + position % block_size
        self._masks: dict[int | None, BlockMask] = {}

    def mask(self, sliding_window: int | None) -> BlockMask:
        """Return what each query of the step sees under this window."""
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

        num_queries, num_keys = len(queries.position), len(keys.position)
        device = str(self.slots.device)
        return create_block_mask(is_visible, None, None, num_queries, num_keys, device=device)


class FlexAttention:
    """`kernels.ops.PagedAttention` by flex_attention; `plan` is a FlexPlan.

    Args:
        is_compiled: fuse it, which CUDA needs; the first call of each kind of layer then takes seconds.
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
        plan: FlexPlan | None = None,
    ) -> Tensor:
        """Attend the new tokens over their paged contexts, see `kernels.paged_attention`."""
        if plan is None:
            query_lens = query_start_loc.diff().tolist()
            plan = FlexPlan(block_tables, query_lens, seq_lens.tolist(), k_cache.shape[1])
        k = take_slots(k_cache.flatten(0, 1), plan.slots).to(q.dtype)
        v = take_slots(v_cache.flatten(0, 1), plan.slots).to(q.dtype)
        attended = self._attend(
            q.transpose(0, 1).unsqueeze(0),
            k.transpose(0, 1).unsqueeze(0),
            v.transpose(0, 1).unsqueeze(0),
            score_mod=None if soft_cap is None else _make_soft_cap(soft_cap),
            block_mask=plan.mask(sliding_window),
            scale=scale,
            enable_gqa=True,
        )
        assert isinstance(attended, Tensor)
        return attended.squeeze(0).transpose(0, 1).contiguous()


def make_flex_plan(
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    query_lens: Sequence[int],
    seq_lens_list: Sequence[int],
    block_size: int,
) -> FlexPlan:
    """Return the plan of one step; shapes come from the lists, so that nothing waits for the device."""
    return FlexPlan(block_tables, query_lens, seq_lens_list, block_size)


def _make_places(lens: Sequence[int], firsts: Sequence[int], device: torch.device) -> Places:
    """Spell out runs of `lens` tokens that begin at the positions `firsts`."""
    starts, total = [], 0
    for length, first in zip(lens, firsts, strict=True):
        starts.append(total - first)
        total += length
    counts = upload_list(list(lens), device)
    index = torch.arange(len(starts), device=device)
    request = index.repeat_interleave(counts, output_size=total)
    shift = upload_list(starts, device).index_select(0, request)
    return Places(request, torch.arange(total, device=device) - shift)


def _make_soft_cap(soft_cap: float) -> ScoreChange:
    def bound(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return soft_cap * torch.tanh(score / soft_cap)

    return bound
