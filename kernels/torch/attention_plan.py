"""AttentionPlan: the index work of one step, done once and shared by all layers.

    requests with 1 to 16 new tokens   -> UniformBatch: same query length, contexts of similar length, padded
    requests with more new tokens      -> Segment: one request, cut into pieces of 256 queries

Shapes come from host copies of the lengths, so that building a plan never waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import StepShape

# Requests with at most this many new tokens (decode, verification of drafts) are attended in batches.
MAX_UNIFORM_QUERY_LEN = 16
# Queries attended at once by a long request that needs a mask: bounds the mask, skips most future keys.
PIECE_LEN = 256
# Contexts up to this length are padded together whatever their difference.
MIN_BUCKET_LEN = 64
# Bytes of keys gathered at once; K and V of that size stay in the L2 cache of a CPU core.
CPU_CHUNK_BYTES = 512 * 1024
DEVICE_CHUNK_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Gather:
    """The slots to copy out of the cache, and their buffers; valid until the next gather."""

    slots: Tensor  # [n] int64
    k: Tensor  # [n, num_kv_heads, head_dim]
    v: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some requests of a UniformBatch whose keys are gathered together."""

    start: int  # requests [start, end) of the batch
    end: int
    gather: Gather
    k: Tensor  # [end - start, num_kv_heads, num_keys, head_dim], view of the gathered keys
    v: Tensor
    bias: Tensor | None  # [end - start, 1, 1 or query_len * group_size, num_keys], 0 or -inf


@dataclass(frozen=True, slots=True)
class UniformBatch:
    """Requests with the same query length; their contexts are padded to one length."""

    num_requests: int
    query_len: int
    token_index: Tensor | None  # [num_requests * query_len] rows of q; None: all of q, in order
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries [start, end) of a step over the keys of a Segment that they can see; bias None: causal."""

    start: int
    end: int
    k: Tensor  # [num_kv_heads, group_size, num_keys, head_dim], view of the gathered keys
    v: Tensor
    bias: Tensor | None  # [end - start, num_keys], 0 or -inf


@dataclass(frozen=True, slots=True)
class Segment:
    """One request with many new tokens, and the part of its context that they can see."""

    gather: Gather
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class Layout:
    """The work of one kind of layer (full attention or one sliding window) in this step."""

    batches: list[UniformBatch]
    segments: list[Segment]


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
        self._block_tables = block_tables
        self._query_lens = query_lens
        self._seq_lens = seq_lens
        self._block_size = block_size
        self._device = block_tables.device
        self._layouts: dict[tuple[int | None, torch.Size, torch.Size], Layout] = {}
        self._scratch: tuple[Tensor, Tensor] | None = None

    def layout(self, sliding_window: int | None, q: Tensor, k_cache: Tensor) -> Layout:
        """Return the work of a layer, made on the first call for this window and these shapes."""
        key = (sliding_window, q.shape[1:], k_cache.shape[2:])
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._make_layout(sliding_window, q, k_cache)
        return layout

    def list_contexts(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the tokens [start, end) of each request, and the slots of its context."""
        start = 0
        for request, (query_len, seq_len) in enumerate(zip(self._query_lens, self._seq_lens, strict=True)):
            yield start, start + query_len, self._slots([request], [0], seq_len).flatten()
            start += query_len

    def _make_layout(self, window: int | None, q: Tensor, k_cache: Tensor) -> Layout:
        starts: list[int] = []
        by_query_len: dict[int, list[int]] = {}
        long_requests: list[int] = []
        token = 0
        for request, query_len in enumerate(self._query_lens):
            starts.append(token)
            token += query_len
            if query_len <= MAX_UNIFORM_QUERY_LEN:
                by_query_len.setdefault(query_len, []).append(request)
            else:
                long_requests.append(request)
        buckets = [each for requests in by_query_len.values() for each in self._bucket(requests, window)]
        self._reserve(buckets, long_requests, window, q.dtype, k_cache)
        batches = [self._make_batch(bucket, starts, window, q, k_cache) for bucket in buckets]
        segments = []
        if long_requests:
            template = self._make_template(long_requests, window, q.dtype)
            segments = [self._make_segment(r, starts[r], window, template, q, k_cache) for r in long_requests]
        return Layout(batches, segments)

    def _first_key(self, request: int, window: int | None) -> int:
        """Return the first position that the first new token of the request can see."""
        if window is None:
            return 0
        return max(0, self._seq_lens[request] - self._query_lens[request] + 1 - window)

    def _bucket(self, requests: list[int], window: int | None) -> list[list[int]]:
        """Split requests so that padding at most doubles a context (log2(longest) buckets at most)."""
        lens = {r: self._count_keys(r, window) for r in requests}
        longest = max(lens.values())
        if 2 * min(lens.values()) >= longest or longest <= MIN_BUCKET_LEN:
            return [requests]
        buckets: list[list[int]] = []
        for request in sorted(requests, key=lambda r: -lens[r]):
            if not buckets or (2 * lens[request] < longest and longest > MIN_BUCKET_LEN):
                longest = lens[request]
                buckets.append([])
            buckets[-1].append(request)
        return buckets

    def _make_batch(
        self, requests: list[int], starts: list[int], window: int | None, q: Tensor, k_cache: Tensor
    ) -> UniformBatch:
        query_len = self._query_lens[requests[0]]
        firsts = [self._first_key(r, window) for r in requests]
        lens = [self._seq_lens[r] - first for r, first in zip(requests, firsts, strict=True)]
        num_keys = max(lens)
        is_padded = min(lens) < num_keys
        slots = self._slots(requests, firsts, num_keys)
        bias = None
        if is_padded or query_len > 1:
            keys = torch.arange(num_keys, device=self._device)
            lens_tensor = upload_list(lens, self._device).unsqueeze(1)
            bias = self._make_batch_bias(keys, lens_tensor, query_len, window, q.dtype)
            if query_len > 1:
                bias = bias.repeat_interleave(q.shape[1] // k_cache.shape[2], dim=1)
            bias = bias.unsqueeze(1)
            # A padded key repeats the request's own first one: masked, and never another's memory, which
            # may hold a NaN that no mask can silence (0 * NaN).
            slots = torch.where(keys < lens_tensor, slots, slots[:, :1])
        token_index = self._token_index(requests, starts, query_len, q.shape[0])
        return UniformBatch(
            len(requests), query_len, token_index, self._make_chunks(slots, bias, k_cache, q.dtype)
        )

    def _make_batch_bias(
        self, keys: Tensor, lens: Tensor, query_len: int, window: int | None, dtype: torch.dtype
    ) -> Tensor:
        """Return the mask [N, query_len, num_keys] of requests with `lens` [N, 1] visible keys."""
        offsets = torch.arange(query_len - 1, -1, -1, device=self._device)
        last = (lens - 1 - offsets).unsqueeze(2)
        visible = keys <= last
        if window is not None:
            visible &= keys > last - window
        return _make_bias(visible, dtype)

    def _make_chunks(
        self, slots: Tensor, bias: Tensor | None, k_cache: Tensor, dtype: torch.dtype
    ) -> list[Chunk]:
        num_requests, num_keys = slots.shape
        step = _count_gathered(num_keys, k_cache.stride(1) * dtype.itemsize, self._device)
        chunks = []
        for start in range(0, num_requests, step):
            end = min(start + step, num_requests)
            gather = self._make_gather(slots[start:end].flatten())
            shape = (end - start, num_keys, *k_cache.shape[2:])
            k, v = gather.k.view(shape).transpose(1, 2), gather.v.view(shape).transpose(1, 2)
            chunks.append(Chunk(start, end, gather, k, v, None if bias is None else bias[start:end]))
        return chunks

    def _reserve(
        self,
        buckets: list[list[int]],
        long_requests: list[int],
        window: int | None,
        dtype: torch.dtype,
        k_cache: Tensor,
    ) -> None:
        """Make the plan's one pair of buffers, with room for the most keys that are gathered at once.

        Why one pair: fresh memory for gathered keys costs more in page faults than the gathering itself.
        """
        key_bytes = k_cache.stride(1) * dtype.itemsize
        sizes = [self._count_keys(request, window) for request in long_requests]
        for bucket in buckets:
            num_keys = max(self._count_keys(request, window) for request in bucket)
            sizes.append(num_keys * min(len(bucket), _count_gathered(num_keys, key_bytes, self._device)))
        most = max(sizes, default=0)
        shape, has = (most, *k_cache.shape[2:]), None if self._scratch is None else self._scratch[0].shape
        if has is None or has[0] < most or has[1:] != k_cache.shape[2:]:
            self._scratch = (k_cache.new_empty(shape, dtype=dtype), k_cache.new_empty(shape, dtype=dtype))

    def _count_keys(self, request: int, window: int | None) -> int:
        """Keys that some new token of the request can see."""
        return self._seq_lens[request] - self._first_key(request, window)

    def _make_gather(self, slots: Tensor) -> Gather:
        """Give the slots a place in the plan's pair of buffers."""
        assert self._scratch is not None, "reserved before the layout is made"
        k, v = self._scratch
        return Gather(slots, k[: len(slots)], v[: len(slots)])

    def _token_index(
        self, requests: list[int], starts: list[int], query_len: int, num_tokens: int
    ) -> Tensor | None:
        if len(requests) * query_len == num_tokens and requests == sorted(requests):
            return None
        return upload_list([starts[r] + i for r in requests for i in range(query_len)], self._device)

    def _slots(self, requests: list[int], firsts: list[int], num_keys: int) -> Tensor:
        """Return the slots of `num_keys` positions of each request from its first on, [N, num_keys] int64.

        Positions beyond the request's context have slots that mean nothing.
        """
        tables, size = self._block_tables, self._block_size
        if len(requests) != tables.shape[0] or requests != sorted(requests):
            tables = tables.index_select(0, upload_list(requests, self._device))
        if not any(firsts):
            starts = tables[:, : -(-num_keys // size)].long().mul_(size)
            offsets = torch.arange(size, device=self._device)
            return (starts.unsqueeze(2) + offsets).flatten(1)[:, :num_keys]
        positions = upload_list(firsts, self._device).unsqueeze(1) + torch.arange(
            num_keys, device=self._device
        )
        places = positions.div(size, rounding_mode="floor").clamp_(max=tables.shape[1] - 1)
        return tables.gather(1, places).long().mul_(size).add_(positions.remainder_(size))

    def _make_template(self, requests: list[int], window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return a mask of which every piece's mask is a slice, or None where no piece needs one.

        A mask depends only on key minus query, so one mask with room for the longest cached context,
        [PIECE_LEN, context + PIECE_LEN], shifted to the left, serves them all.
        """
        masked = [r for r in requests if not self._is_plain_causal(r, window)]
        if not masked:
            return None
        context = max(self._seq_lens[r] for r in masked)
        if window is not None:
            context = min(context, window - 1)
        rows = torch.arange(PIECE_LEN, device=self._device).unsqueeze(1) + context
        keys = torch.arange(context + PIECE_LEN, device=self._device)
        visible = keys <= rows
        if window is not None:
            visible &= keys > rows - window
        return _make_bias(visible, dtype)

    def _is_plain_causal(self, request: int, window: int | None) -> bool:
        seq_len = self._seq_lens[request]
        return seq_len == self._query_lens[request] and (window is None or seq_len <= window)

    def _make_segment(
        self,
        request: int,
        start: int,
        window: int | None,
        template: Tensor | None,
        q: Tensor,
        k_cache: Tensor,
    ) -> Segment:
        query_len, seq_len = self._query_lens[request], self._seq_lens[request]
        first = self._first_key(request, window)
        gather = self._make_gather(self._slots([request], [first], seq_len - first).flatten())
        # [num_keys, KV, D] -> [KV, G, num_keys, D], shared by the heads of a group without a copy
        group_size = q.shape[1] // k_cache.shape[2]
        k = gather.k.transpose(0, 1).unsqueeze(1).expand(-1, group_size, -1, -1)
        v = gather.v.transpose(0, 1).unsqueeze(1).expand(-1, group_size, -1, -1)
        if template is None or self._is_plain_causal(request, window):
            return Segment(gather, [Piece(start, start + query_len, k, v, None)])
        pieces = []
        for offset in range(0, query_len, PIECE_LEN):
            length = min(PIECE_LEN, query_len - offset)
            position = seq_len - query_len + offset
            first_key = first if window is None else max(first, position + 1 - window)
            num_keys = position + length - first_key
            shift = template.shape[1] - PIECE_LEN - (position - first_key)
            bias = template[:length, shift : shift + num_keys]
            if self._device.type != "cpu":
                # Device kernels want aligned masks.
                bias = bias.contiguous()
            seen = slice(first_key - first, first_key - first + num_keys)
            begin = start + offset
            pieces.append(Piece(begin, begin + length, k[:, :, seen], v[:, :, seen], bias))
        return Segment(gather, pieces)


def estimate_scratch(shape: StepShape, device: torch.device) -> int:
    """Return the bytes that a step of sdpa takes at most beside its results: gathered keys and values, slots, masks."""
    key_bytes = shape.num_kv_heads * shape.head_dim * shape.itemsize
    num_gathered = shape.context_len * min(
        shape.num_requests, _count_gathered(shape.context_len, key_bytes, device)
    )
    num_slots = shape.num_requests * shape.context_len
    num_drafted = min(shape.num_tokens, shape.num_requests * MAX_UNIFORM_QUERY_LEN)
    # Rows of masks: of drafts for each head of a group, of pieces one for each token.
    num_masked = num_drafted * (shape.num_heads // shape.num_kv_heads) + shape.num_tokens + PIECE_LEN
    masks = num_masked * shape.context_len * (shape.itemsize + torch.bool.itemsize)
    return 2 * num_gathered * key_bytes + 2 * num_slots * torch.int64.itemsize + masks


def _count_gathered(num_keys: int, key_bytes: int, device: torch.device) -> int:
    """How many requests of so many keys are gathered at once."""
    limit = CPU_CHUNK_BYTES if device.type == "cpu" else DEVICE_CHUNK_BYTES
    return max(1, limit // max(1, num_keys * key_bytes))


def upload_list(values: list[int], device: torch.device) -> Tensor:
    """Copy integers to the device as int64; from pinned memory, or the copy would wait for the device."""
    tensor = torch.tensor(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _make_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
