"""Attention of a flattened batch over paged keys and values, and the index work of a step, shared by all layers.

    requests with 1 to 16 new tokens   -> parts of several requests: same query length, contexts of similar length
    requests with more new tokens      -> parts of one request and at most 256 queries

Shapes come from host copies of the lengths, so that building a plan never waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import StepShape
from kernels.torch.elementwise import take_slots
from kernels.upload import upload

# Requests with at most this many new tokens (decode, verification of drafts) are attended together.
MAX_SHORT_LEN = 16
# Queries of a long request attended at once: bounds the mask, skips most future keys.
PIECE_LEN = 256
# Contexts up to this length are padded together whatever their difference.
MIN_PADDED_LEN = 64
# Bytes of keys gathered at once; K and V of that size stay in the L2 cache of a CPU core.
CPU_PART_BYTES = 512 * 1024
DEVICE_PART_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Part:
    """Queries attended at once: as many of each request, over keys padded to one length."""

    rows: slice | Tensor  # of q
    query_len: int
    slots: Tensor  # [num_requests, num_keys] int64, of the keys in the cache
    # 0 or -inf, [num_requests, 1, query_len, num_keys]; of short parts a row for each head of a group.
    bias: Tensor | None


class AttentionPlan:
    """The torch attention path's view of one step. Owned by one forward pass; not shared between threads.

    Args:
        block_tables: [num_requests, max_blocks] int32, on the device of the cache.
        query_lens: new tokens of each request, in the order of the flattened batch; all at least 1.
        seq_lens: context length of each request including the new tokens.
        block_size: tokens in a block.
    """

    def __init__(
        self, block_tables: Tensor, query_lens: Sequence[int], seq_lens: Sequence[int], block_size: int
    ) -> None:
        self._block_tables, self._block_size = block_tables, block_size
        self._query_lens, self._seq_lens = query_lens, seq_lens
        self._starts = [0, *accumulate(query_lens)]
        self._device = block_tables.device
        self._parts: dict[tuple[int | None, int, int], list[Part]] = {}
        # Gathered keys and values, by the shape of one. One pair for all parts and layers: fresh memory costs
        # more in page faults than the gathering itself.
        self._memory: dict[torch.Size, tuple[Tensor, Tensor]] = {}

    def list_parts(self, window: int | None, k_cache: Tensor, q: Tensor) -> list[Part]:
        """Return the work of a layer, made on the first call for its window and these shapes."""
        group_size, key_bytes = q.shape[1] // k_cache.shape[2], k_cache.stride(1) * q.itemsize
        key = (window, group_size, key_bytes)
        if key not in self._parts:
            self._parts[key] = [
                self._make_part(requests, offset, query_len, window, group_size, q.dtype)
                for requests, offset, query_len in self._cut(window, key_bytes)
            ]
        return self._parts[key]

    def gather(self, part: Part, k_cache: Tensor, v_cache: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Return the part's keys and values [num_requests, num_keys, KV, D]; the next call overwrites them."""
        shape, slots = k_cache.shape[2:], part.slots.flatten()
        if shape not in self._memory:
            key_bytes = k_cache.stride(1) * dtype.itemsize
            room = limit_keys(len(self._seq_lens), max(self._seq_lens), key_bytes, self._device)
            k, v = (k_cache.new_empty((room, *shape), dtype=dtype) for _ in range(2))
            self._memory[shape] = (k, v)
        found = [memory[: len(slots)] for memory in self._memory[shape]]
        for cache, target in zip((k_cache, v_cache), found, strict=True):
            if cache.dtype == dtype:
                torch.index_select(cache.flatten(0, 1), 0, slots, out=target)
            else:
                target.copy_(take_slots(cache.flatten(0, 1), slots))
        return [each.unflatten(0, part.slots.shape) for each in found]

    def _cut(self, window: int | None, key_bytes: int) -> Iterator[tuple[list[int], int, int]]:
        """Yield requests, their first new token and the number of them for each part."""
        short: dict[int, list[int]] = {}
        for request, query_len in enumerate(self._query_lens):
            if query_len <= MAX_SHORT_LEN:
                short.setdefault(query_len, []).append(request)
            else:
                for offset in range(0, query_len, PIECE_LEN):
                    yield [request], offset, min(PIECE_LEN, query_len - offset)
        for query_len, requests in short.items():
            for together in self._split(requests, window, key_bytes):
                yield together, 0, query_len

    def _split(self, requests: list[int], window: int | None, key_bytes: int) -> Iterator[list[int]]:
        """Split requests so that their keys stay in the cache, and padding at most doubles a context."""
        lens = {r: self._seq_lens[r] - self._first_key(r, 0, window) for r in requests}
        longest = max(lens.values())
        if longest > max(MIN_PADDED_LEN, 2 * min(lens.values())):
            requests = sorted(requests, key=lambda r: -lens[r])
        room = limit_keys(len(requests), longest, key_bytes, self._device)
        together: list[int] = []
        for request in requests:
            longest = max(lens[r] for r in (*together, request))
            is_unlike = longest > max(MIN_PADDED_LEN, 2 * lens[request])
            if together and (is_unlike or (len(together) + 1) * longest > room):
                yield together
                together = []
            together.append(request)
        yield together

    def _first_key(self, request: int, offset: int, window: int | None) -> int:
        """Return the first position that the new token at an offset can see."""
        position = self._seq_lens[request] - self._query_lens[request] + offset
        return 0 if window is None else max(0, position + 1 - window)

    def _make_part(
        self,
        requests: list[int],
        offset: int,
        query_len: int,
        window: int | None,
        group_size: int,
        dtype: torch.dtype,
    ) -> Part:
        """Return the part of the new tokens [offset, offset + query_len) of the requests."""
        firsts = [self._first_key(request, offset, window) for request in requests]
        ends = [self._seq_lens[r] - self._query_lens[r] + offset + query_len for r in requests]
        lens = [end - first for end, first in zip(ends, firsts, strict=True)]
        rows = self._list_rows([self._starts[request] + offset for request in requests], query_len)
        slots = self._slots(requests, firsts, max(lens))
        if query_len == 1 and min(lens) == max(lens):
            return Part(rows, query_len, slots, None)
        keys = torch.arange(max(lens), device=self._device)
        seen = _upload(lens, self._device).unsqueeze(1)
        # A padded key repeats the request's own first one: masked, and never another's memory, which
        # may hold a NaN that no mask can silence (0 * NaN).
        slots = torch.where(keys < seen, slots, slots[:, :1])
        last = (seen - query_len + torch.arange(query_len, device=self._device)).unsqueeze(2)
        visible = keys <= last
        if window is not None:
            visible &= keys > last - window
        bias = torch.zeros(visible.shape, dtype=dtype, device=self._device)
        bias = bias.masked_fill_(visible.logical_not_(), -torch.inf).unsqueeze(1)
        if 1 < query_len <= MAX_SHORT_LEN:
            bias = bias.repeat_interleave(group_size, dim=2)
        return Part(rows, query_len, slots, bias)

    def _list_rows(self, starts: list[int], query_len: int) -> slice | Tensor:
        if all(each == starts[0] + i * query_len for i, each in enumerate(starts)):
            return slice(starts[0], starts[0] + len(starts) * query_len)
        return _upload([start + i for start in starts for i in range(query_len)], self._device)

    def _slots(self, requests: list[int], firsts: list[int], num_keys: int) -> Tensor:
        """Return the slots of `num_keys` positions of each request from its first on, [N, num_keys] int64.

        Positions beyond the request's context have slots that mean nothing.
        """
        tables, size = self._block_tables.index_select(0, _upload(requests, self._device)), self._block_size
        positions = _upload(firsts, self._device).unsqueeze(1) + torch.arange(num_keys, device=self._device)
        places = positions.div(size, rounding_mode="floor").clamp_(max=tables.shape[1] - 1)
        return tables.gather(1, places).long().mul_(size).add_(positions.remainder_(size))


def limit_keys(num_requests: int, longest: int, key_bytes: int, device: torch.device) -> int:
    """Return how many keys are gathered at once."""
    limit = CPU_PART_BYTES if device.type == "cpu" else DEVICE_PART_BYTES
    return max(longest, min(num_requests * longest, limit // key_bytes))


def estimate_scratch(shape: StepShape, device: torch.device) -> int:
    """Return the bytes that a step of sdpa takes at most beside its results: gathered keys and values, slots, masks."""
    key_bytes = shape.num_kv_heads * shape.head_dim * shape.itemsize
    num_keys = limit_keys(shape.num_requests, shape.context_len, key_bytes, device)
    # Slots of all contexts; a long request has them again for each piece.
    num_slots = (shape.num_requests + shape.num_tokens // PIECE_LEN) * shape.context_len
    # Rows of masks: of drafts for each head of a group, of pieces one for each token.
    num_drafted = min(shape.num_tokens, shape.num_requests * MAX_SHORT_LEN)
    num_masked = num_drafted * (shape.num_heads // shape.num_kv_heads) + shape.num_tokens
    masks = num_masked * shape.context_len * (shape.itemsize + torch.bool.itemsize)
    return 2 * num_keys * key_bytes + 2 * num_slots * torch.int64.itemsize + masks


def _upload(values: list[int], device: torch.device) -> Tensor:
    return upload(np.array(values, dtype=np.int64), device)


def paged_attention(
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
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Implement `kernels.ops.PagedAttention`."""
    if plan is None:
        query_lens = query_start_loc.diff().tolist()
        plan = AttentionPlan(block_tables, query_lens, seq_lens.tolist(), k_cache.shape[1])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for part in plan.list_parts(sliding_window, k_cache, q):
        k, v = plan.gather(part, k_cache, v_cache, q.dtype)
        out[part.rows] = _attend_part(q[part.rows], k, v, part, scale, soft_cap, sinks)
    return out


def _attend_part(
    q: Tensor, k: Tensor, v: Tensor, part: Part, scale: float, soft_cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend queries [num_requests * query_len, H, D] over keys and values [num_requests, num_keys, KV, D]."""
    num_kv_heads = k.shape[2]
    rows = q.unflatten(0, (-1, part.query_len)).unflatten(2, (num_kv_heads, -1))
    if part.query_len <= MAX_SHORT_LEN:
        # The heads of a group act as more queries of their shared key head: [N, KV, query_len * G, D].
        folded, (k, v) = rows.transpose(1, 2).flatten(2, 3), (each.transpose(1, 2) for each in (k, v))
        if sinks is not None:
            sinks = (
                sinks.view(num_kv_heads, 1, -1).expand(-1, part.query_len, -1).reshape(num_kv_heads, -1, 1)
            )
        attended = _attend(folded, k, v, part.bias, scale, soft_cap, sinks)
        return (
            attended.view(len(k), num_kv_heads, part.query_len, -1, q.shape[2])
            .transpose(1, 2)
            .reshape(q.shape)
        )
    # The key heads act as a batch, and the heads of a group share their keys: [KV, G, query_len, D].
    folded = rows[0].permute(1, 2, 0, 3)
    k, v = (each[0].transpose(0, 1).unsqueeze(1).expand(-1, folded.shape[1], -1, -1) for each in (k, v))
    if sinks is not None:
        sinks = sinks.view(num_kv_heads, -1, 1, 1)
    attended = _attend(folded, k, v, part.bias, scale, soft_cap, sinks)
    return attended.permute(2, 0, 1, 3).reshape(q.shape)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Plain attention of [N, H, Q, D] over [N, H, num_keys, D]; `bias` is added to the scores."""
    if soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    scores = torch.matmul(q.float(), k.float().transpose(-2, -1)).mul_(scale / (soft_cap or 1.0))
    if soft_cap is not None:
        scores.tanh_().mul_(soft_cap)
    if bias is not None:
        scores += bias
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[-2]]
    return torch.matmul(weights, v.float()).to(q.dtype)
