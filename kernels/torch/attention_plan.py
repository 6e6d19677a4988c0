"""AttentionPlan: the index work of one step, done once and shared by all layers.

    requests with 1 to 16 new tokens   -> parts of several requests: same query length, contexts of similar length
    requests with more new tokens      -> parts of one request, 256 queries each where they need a mask

Shapes come from host copies of the lengths, so that building a plan never waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.ops import StepShape
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
    num_requests: int
    query_len: int
    slots: Tensor  # [num_requests * num_keys] int64, of the keys in the cache
    # 0 or -inf, [num_requests, 1, query_len, num_keys]; of short parts a row for each head of a group.
    bias: Tensor | None
    is_causal: bool  # in place of a mask
    # Room for the gathered keys and values, [num_requests * num_keys, KV, D], and the views of it to attend: of a
    # short part [num_requests, KV, num_keys, D], of a long one [KV, group_size, num_keys, D].
    k: Tensor
    v: Tensor
    k_heads: Tensor
    v_heads: Tensor


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
        self._parts: dict[tuple[int | None, torch.Size, torch.Size], list[Part]] = {}
        # Gathered keys and values, by the shape of one. One pair for all parts and layers: fresh memory costs
        # more in page faults than the gathering itself.
        self._buffers: dict[torch.Size, tuple[Tensor, Tensor]] = {}

    def list_parts(self, window: int | None, k_cache: Tensor, q: Tensor) -> list[Part]:
        """Return the work of a layer, made on the first call for its window and these shapes."""
        key = (window, k_cache.shape[2:], q.shape[1:])
        if key not in self._parts:
            self._reserve(k_cache, q.dtype)
            self._parts[key] = list(self._make_parts(window, k_cache, q))
        return self._parts[key]

    def _reserve(self, k_cache: Tensor, dtype: torch.dtype) -> None:
        """Make the pair of buffers for keys of this shape, with room for the most that a part gathers."""
        shape, longest = k_cache.shape[2:], max(self._seq_lens)
        if shape not in self._buffers:
            room = limit_keys(len(self._seq_lens), longest, k_cache.stride(1) * dtype.itemsize, self._device)
            k, v = (k_cache.new_empty((room, *shape), dtype=dtype) for _ in range(2))
            self._buffers[shape] = (k, v)

    def _make_parts(self, window: int | None, k_cache: Tensor, q: Tensor) -> Iterator[Part]:
        starts, token = [], 0
        short: dict[int, list[int]] = {}
        for request, query_len in enumerate(self._query_lens):
            starts.append(token)
            token += query_len
            if query_len <= MAX_SHORT_LEN:
                short.setdefault(query_len, []).append(request)
        for query_len, requests in short.items():
            for together in self._split(requests, window, k_cache.stride(1) * q.itemsize):
                rows = self._list_rows([starts[request] for request in together], query_len)
                yield self._make_part(together, rows, 0, query_len, window, k_cache, q)
        for request, query_len in enumerate(self._query_lens):
            if query_len <= MAX_SHORT_LEN:
                continue
            seq_len, end = self._seq_lens[request], starts[request] + query_len
            is_causal = query_len == seq_len and (window is None or seq_len <= window)
            step = query_len if is_causal else PIECE_LEN
            for offset in range(0, query_len, step):
                rows = slice(end - query_len + offset, min(end, end - query_len + offset + step))
                yield self._make_part([request], rows, offset, rows.stop - rows.start, window, k_cache, q)

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

    def _list_rows(self, starts: list[int], query_len: int) -> slice | Tensor:
        if all(each == starts[0] + i * query_len for i, each in enumerate(starts)):
            return slice(starts[0], starts[0] + len(starts) * query_len)
        return _upload([start + i for start in starts for i in range(query_len)], self._device)

    def _make_part(
        self,
        requests: list[int],
        rows: slice | Tensor,
        offset: int,
        query_len: int,
        window: int | None,
        k_cache: Tensor,
        q: Tensor,
    ) -> Part:
        """Return the part of the new tokens [offset, offset + query_len) of the requests."""
        firsts = [self._first_key(request, offset, window) for request in requests]
        ends = [self._seq_lens[r] - self._query_lens[r] + offset + query_len for r in requests]
        lens = [end - first for end, first in zip(ends, firsts, strict=True)]
        num_keys, group_size = max(lens), q.shape[1] // k_cache.shape[2]
        is_short = query_len <= MAX_SHORT_LEN
        is_causal = not is_short and query_len == num_keys and (window is None or num_keys <= window)
        slots, bias = self._slots(requests, firsts, num_keys), None
        if not is_causal and (query_len > 1 or min(lens) < num_keys):
            keys = torch.arange(num_keys, device=self._device)
            seen = _upload(lens, self._device).unsqueeze(1)
            # A padded key repeats the request's own first one: masked, and never another's memory, which
            # may hold a NaN that no mask can silence (0 * NaN).
            slots = torch.where(keys < seen, slots, slots[:, :1])
            last = (seen - query_len + torch.arange(query_len, device=self._device)).unsqueeze(2)
            visible = keys <= last
            if window is not None:
                visible &= keys > last - window
            bias = torch.zeros(visible.shape, dtype=q.dtype, device=self._device)
            bias = bias.masked_fill_(visible.logical_not_(), -torch.inf).unsqueeze(1)
            if is_short and query_len > 1:
                bias = bias.repeat_interleave(group_size, dim=2)
        k, v = (buffer[: slots.numel()] for buffer in self._buffers[k_cache.shape[2:]])
        if is_short:
            heads = [each.unflatten(0, slots.shape).transpose(1, 2) for each in (k, v)]
        else:
            heads = [each.transpose(0, 1).unsqueeze(1).expand(-1, group_size, -1, -1) for each in (k, v)]
        return Part(rows, len(requests), query_len, slots.flatten(), bias, is_causal, k, v, *heads)

    def _slots(self, requests: list[int], firsts: list[int], num_keys: int) -> Tensor:
        """Return the slots of `num_keys` positions of each request from its first on, [N, num_keys] int64.

        Positions beyond the request's context have slots that mean nothing.
        """
        tables, size = self._block_tables, self._block_size
        if len(requests) != tables.shape[0] or requests != sorted(requests):
            tables = tables.index_select(0, _upload(requests, self._device))
        offsets = torch.arange(num_keys, device=self._device)
        positions = _upload(firsts, self._device).unsqueeze(1) + offsets
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
