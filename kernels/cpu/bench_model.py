"""A decoder of random weights on any implementation's ops, for the benchmark: the shape of a model, not its text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import LayerWeights, Ops, PackedWeight, Quantization

BLOCK_SIZE = 16
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder."""

    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    qk_norm: bool

    @property
    def matrix_sizes(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of a layer's matrices: qkv, output, gate_up, down."""
        q_size = self.num_heads * self.head_dim
        qkv_size = q_size + 2 * self.num_kv_heads * self.head_dim
        return (
            (qkv_size, self.hidden),
            (self.hidden, q_size),
            (2 * self.inner, self.hidden),
            (self.hidden, self.inner),
        )

    @property
    def num_layer_weights(self) -> int:
        """Weights in the matrices of all layers."""
        return self.num_layers * sum(rows * columns for rows, columns in self.matrix_sizes)

    @property
    def num_head_weights(self) -> int:
        return self.vocabulary * self.hidden


SHAPES = {
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 128, 151936, True),
    "smollm2-135m": Shape(576, 1536, 30, 9, 3, 64, 49152, False),
    "demo": Shape(256, 768, 6, 4, 2, 64, 3072, True),
}


@dataclass(frozen=True, slots=True)
class Weights:
    """One layer's random matrices, which every layer copies, and the head."""

    matrices: tuple[Tensor, ...]
    head: Tensor

    @classmethod
    def make(cls, shape: Shape, dtype: torch.dtype) -> Weights:
        generator = torch.Generator().manual_seed(0)
        sizes = (*shape.matrix_sizes, (shape.vocabulary, shape.hidden))
        tensors = [torch.empty(size).normal_(0.0, 0.02, generator=generator).to(dtype) for size in sizes]
        return cls(tuple(tensors[:4]), tensors[4])


class BenchModel:
    """Random weights packed for one implementation; every layer has memory of its own."""

    def __init__(
        self, shape: Shape, weights: Weights, ops: Ops, quantization: Quantization | None = None
    ) -> None:
        self.shape, self.ops = shape, ops
        self._dtype = weights.head.dtype
        self._norm = torch.ones(shape.hidden, dtype=self._dtype)
        self._qk_norm = None
        if shape.qk_norm:
            num_rows = shape.num_heads + shape.num_kv_heads
            self._qk_norm = torch.ones(num_rows, shape.head_dim, dtype=self._dtype)
        pack = ops.pack_linear
        self.head: PackedWeight = pack(weights.head, None, quantization)
        self._layers = []
        for _ in range(shape.num_layers):
            qkv, output, gate_up, down = (pack(each.clone(), None, quantization) for each in weights.matrices)
            self._layers.append(
                LayerWeights(
                    input_norm=self._norm,
                    qkv=qkv,
                    qkv_bias=None,
                    qk_norm=self._qk_norm,
                    output=output,
                    output_bias=None,
                    post_attention_norm=self._norm,
                    gate_up=gate_up,
                    gate_up_bias=None,
                    down=down,
                    down_bias=None,
                    sliding_window=None,
                )
            )

    def make_step(self, num_requests: int, query_len: int, context: int) -> Callable[[], Tensor]:
        """Return a function that computes the logits of each request's last token after `context` others."""
        shape = self.shape
        seq_len = context + query_len
        num_blocks = -(-seq_len // BLOCK_SIZE)
        cache_shape = (num_requests * num_blocks + 1, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        caches = [
            (torch.zeros(cache_shape, dtype=self._dtype), torch.zeros(cache_shape, dtype=self._dtype))
            for _ in range(shape.num_layers)
        ]
        tables = 1 + torch.randperm(num_requests * num_blocks).int().view(num_requests, num_blocks)
        positions = torch.arange(context, seq_len)
        slots = tables[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        angles = torch.outer(positions.repeat(num_requests).float(), torch.rand(shape.head_dim // 2))
        cos = torch.cat((angles.cos(), angles.cos()), dim=-1).unsqueeze(1)
        sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).unsqueeze(1)
        embedded = torch.randn(num_requests * query_len, shape.hidden).to(self._dtype)
        starts = torch.arange(num_requests + 1).int() * query_len
        lens = torch.full((num_requests,), seq_len).int()
        last = (starts[1:] - 1).long()

        def step() -> Tensor:
            plan = self.ops.make_plan(
                tables, starts, lens, [query_len] * num_requests, [seq_len] * num_requests, BLOCK_SIZE
            )
            metadata = (cos, sin, slots.flatten(), tables, starts, lens, plan)
            hidden = self._run(embedded.clone(), caches, *metadata)
            return self.ops.linear(hidden[last], self.head, None)

        return step

    def _run(
        self,
        hidden: Tensor,
        caches: list[tuple[Tensor, Tensor]],
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        tables: Tensor,
        starts: Tensor,
        lens: Tensor,
        plan: object,
    ) -> Tensor:
        """What the engine's decoder does in a step."""
        ops, shape = self.ops, self.shape
        scale = shape.head_dim**-0.5
        if ops.run_layers is not None:
            return ops.run_layers(
                self._layers,
                hidden,
                caches,
                *(cos, sin, slots, tables, starts, lens, plan),
                num_heads=shape.num_heads,
                eps=EPS,
                scale=scale,
                final_norm=self._norm,
            )
        residual, product = hidden, torch.zeros_like(hidden)
        for layer, (k_cache, v_cache) in zip(self._layers, caches, strict=True):
            normed, residual = ops.add_rms_norm(product, residual, layer.input_norm, EPS)
            heads = ops.linear(normed, layer.qkv, None).view(len(hidden), -1, shape.head_dim)
            places = (k_cache, v_cache, slots, shape.num_heads)
            q = ops.norm_rope_store(heads, layer.qk_norm, EPS, cos, sin, *places)
            attended = ops.paged_attention(q, k_cache, v_cache, tables, starts, lens, scale=scale, plan=plan)
            product = ops.linear(attended.flatten(1), layer.output, None)
            normed, residual = ops.add_rms_norm(product, residual, layer.post_attention_norm, EPS)
            product = ops.linear(ops.silu_mul(ops.linear(normed, layer.gate_up, None)), layer.down, None)
        return ops.add_rms_norm(product, residual, self._norm, EPS)[0]
