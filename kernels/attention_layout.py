"""What an AttentionPlan prepares: which keys to gather, and which queries to attend over them.

Layout ─┬─ UniformBatch ── Chunk ── Gather      requests with 1 to 16 new tokens, padded together
        └─ Segment ─┬───────────── Gather       one request with more new tokens
                    └─ Piece                    256 of its queries
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gather:
    """Which slots to copy out of the cache, and the buffers they go to: valid until the next gather."""

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
    """What one kind of layer (full attention or one sliding window) has to do in this step."""

    batches: list[UniformBatch]
    segments: list[Segment]
