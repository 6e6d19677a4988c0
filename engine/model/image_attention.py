"""ImageAttention: the tokens of an image attend to all of it, and otherwise as text does.

    causal      token p sees the keys up to p, in a layer with a window w those from p - w + 1
    an image    token p sees the keys up to the image's end, in such a layer those from p - w + 1

So each token is a run of one query that ends with the image. Tokens whose window cuts keys off have windows of
different lengths, and are computed one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.attn_metadata import AttnMetadata, ImageSpan
from engine.model.layer_spec import LayerSpec
from kernels import Ops
from kernels.ops import KVCache, Plan


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens with one window."""

    places: Tensor  # [Q] int64, among the step's tokens
    block_tables: Tensor  # [Q, max_blocks]
    starts: Tensor  # [Q + 1]
    seq_lens: Tensor  # [Q]
    window: int | None
    plan: Plan


class ImageAttention:
    """Computes the tokens of the images of one step again; all keys are in the cache."""

    def __init__(self, ops: Ops, metadata: AttnMetadata, spans: tuple[ImageSpan, ...], block_size: int) -> None:
        self._ops, self._metadata, self._spans, self._block_size = ops, metadata, spans, block_size
        self._parts: dict[tuple[int, int | None], list[_Part]] = {}  # by group and window of the layer

    def attend(self, found: Tensor, q: Tensor, kv_cache: KVCache, group: int, spec: LayerSpec) -> None:
        """Overwrite the attention of the images' tokens in `found`, [T, heads, head_size]."""
        key = (group, spec.window)
        if key not in self._parts:
            self._parts[key] = self._make_parts(group, spec.window)
        for part in self._parts[key]:
            found[part.places] = self._ops.paged_attention(
                q[part.places], *kv_cache, part.block_tables, part.starts, part.seq_lens, scale=spec.scale,
                sliding_window=part.window, soft_cap=spec.soft_cap, plan=part.plan,
            )

    def _make_parts(self, group: int, window: int | None) -> list[_Part]:
        by_window: dict[int | None, list[tuple[int, int, int]]] = {}
        for span in self._spans:
            for number in range(span.count):
                behind = span.count - 1 - number  # tokens of the image after this one
                is_cut = window is not None and span.end - behind > window
                own = window + behind if is_cut and window is not None else None
                by_window.setdefault(own, []).append((span.place + number, span.row, span.end))
        return [self._make_part(group, own, tokens) for own, tokens in by_window.items()]

    def _make_part(self, group: int, window: int | None, tokens: list[tuple[int, int, int]]) -> _Part:
        tables, device = self._metadata.block_tables[group], self._metadata.block_tables.device
        places, rows, ends = (list(each) for each in zip(*tokens, strict=True))
        block_tables = tables[torch.tensor(rows, device=device)]
        starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=device)
        seq_lens = torch.tensor(ends, dtype=torch.int32, device=device)
        plan = self._ops.make_plan(block_tables, starts, seq_lens, [1] * len(rows), ends, self._block_size)
        return _Part(torch.tensor(places, device=device), block_tables, starts, seq_lens, window, plan)
