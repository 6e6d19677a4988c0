"""One small case for every op that has a Triton kernel, run with these ops and with those expected to be right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import kernels.torch as torch_ops
from kernels.grouped import Bits, round_grouped
from kernels.lora import LoraMatrix, LoraPart, LoraSegment
from kernels.ops import ExpertWeights, GatedActivation, Ops, Routing
from kernels.scaled import FP8, ScaledTensor
from kernels.states import ScanWeights, StateSegments
from kernels.step_buffers import StepBuffers
from kernels.torch.sampling import make_row_keys

Names = tuple[str, ...]
# Ops that work only together; all others are replaced one by one.
ATTENTION: Names = ("paged_attention", "make_plan", "estimate_scratch")
EXPERTS: Names = ("run_experts", "pack_experts", "unpack_experts", "takes_grouped")
LINEAR: Names = ("linear", "gated_linear", "pack_linear", "unpack_linear", "unpack_rows", "takes_grouped")
# Ops that are checked with the heads of each layer.
HEADED: tuple[Names, ...] = (("norm_rope_store",), ATTENTION)
BLOCK_SIZE = 16


class Heads(NamedTuple):
    """The heads of a layer."""

    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64


class Tensors:
    """Random tensors, the same ones for both sides."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype, heads: Heads
    ) -> None:
        self.device, self.dtype, self.cache_dtype, self.heads = device, dtype, cache_dtype, heads
        self._generator = torch.Generator().manual_seed(0)

    def make(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, dtype or self.dtype)

    def integers(self, *values: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def make_keys(self, num_rows: int) -> Tensor:
        return torch.from_numpy(make_row_keys(np.arange(num_rows), np.arange(num_rows))).to(self.device)


def make_expected_ops(device: torch.device) -> Ops:
    """Torch's ops, with the one that only Triton has in a slow form."""
    return replace(torch_ops.make_ops(device), gather_inputs=_gather)


def _gather(
    token_pool: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    starts: Tensor,
    query_start_loc: Tensor,
    block_size: int,
    out: StepBuffers,
) -> None:
    """Gather the inputs of requests with two new tokens each."""
    row, position = rows.repeat_interleave(2), starts.repeat_interleave(2)
    position[1::2] += 1
    out.positions.copy_(position)
    out.input_ids.copy_(token_pool[row, position])
    out.slot_mapping.copy_(block_tables[:, row, position // block_size] * block_size + position % block_size)
    out.block_tables.copy_(block_tables[:, rows, : out.block_tables.shape[2]])
    out.seq_lens.copy_(starts + 2)


def _norm(ops: Ops, given: Tensors) -> list[Tensor]:
    return [ops.rms_norm(given.make(5, 320), given.make(320), 1e-6)]


def _add_norm(ops: Ops, given: Tensors) -> list[Tensor]:
    return list(ops.add_rms_norm(given.make(5, 320), given.make(5, 320), given.make(320), 1e-6))


def _silu(ops: Ops, given: Tensors) -> list[Tensor]:
    return [ops.silu_mul(given.make(5, 640))]


def _gated_norm(ops: Ops, given: Tensors) -> list[Tensor]:
    x, gate = given.make(5, 96, dtype=torch.float32), given.make(5, 96, dtype=torch.float32)
    delta = ops.gated_norm(x, gate, given.make(24), 1e-6, given.dtype, is_gate_first=False)
    return [delta, ops.gated_norm(x, gate, given.make(2, 48), 1e-6, given.dtype, is_gate_first=True)]


def _norm_rope_store(ops: Ops, given: Tensors) -> list[Tensor]:
    num_heads, num_kv_heads, head_dim = given.heads
    heads = given.make(5, num_heads + 2 * num_kv_heads, head_dim)
    angles = given.make(5, 1, head_dim // 2, dtype=torch.float32)
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    zeros = torch.zeros(3, 4, num_kv_heads, head_dim, device=given.device)
    keys, values = (zeros.to(given.cache_dtype, copy=True) for _ in range(2))
    norm, slots = given.make(num_heads + num_kv_heads, head_dim), given.integers(4, 9, 5, 11, 7)
    queries = ops.norm_rope_store(heads, norm, 1e-6, cos, sin, keys, values, slots, num_heads)
    # The expected ops round keys once, the Triton kernels more often; in 8 bits the difference is large.
    return [queries, values.float()] + [keys.float()] * (given.cache_dtype == given.dtype)


def _attention(ops: Ops, given: Tensors) -> list[Tensor]:
    """Attend three decodes (two share a block, one has several splits), drafts, and a chunk of a prompt."""
    query_lens, seq_lens = [1, 1, 1, 3, 20], [40, 33, 1100, 50, 45]
    num_heads, num_kv_heads, head_dim = given.heads
    q = given.make(sum(query_lens), num_heads, head_dim)
    shape = (351, BLOCK_SIZE, num_kv_heads, head_dim)
    k_cache, v_cache = (given.make(*shape).to(given.cache_dtype) for _ in range(2))
    tables = torch.arange(1, 351, device=given.device, dtype=torch.int32).view(5, 70)
    bounds = given.integers(0, *np.cumsum(query_lens).tolist(), dtype=torch.int32)
    lens = given.integers(*seq_lens, dtype=torch.int32)
    results = []
    for window, soft_cap in ((None, None), (30, 5.0)):
        plan = ops.make_plan(tables, bounds, lens, query_lens, seq_lens, BLOCK_SIZE)
        options: dict[str, Any] = {"sliding_window": window, "soft_cap": soft_cap, "plan": plan}
        results.append(ops.paged_attention(q, k_cache, v_cache, tables, bounds, lens, scale=0.1, **options))
    return results


def _experts(ops: Ops, given: Tensors) -> list[Tensor]:
    gate_up, down = given.make(4, 2 * 96, 64) / 8, given.make(4, 64, 96) / 8
    packed = ops.pack_experts(ExpertWeights(gate_up, None, down, None, GatedActivation()), None)
    ids, x = given.integers(3, 0, 1, 3, 0, 2, 3, 1, 2, 0).view(5, 2), given.make(5, 64)
    return [ops.run_experts(x, ids, given.make(5, 2).float().sigmoid(), packed)]


def _routing(ops: Ops, given: Tensors) -> list[Tensor]:
    logits, bias = given.make(5, 24, dtype=torch.float32), given.make(24, dtype=torch.float32)
    grouped = Routing(4, "sigmoid", is_normalized=True, num_groups=4, num_chosen_groups=2)
    chosen = (ops.choose_experts(logits, each, bias) for each in (grouped, Routing(4), Routing(4, "topk_softmax")))
    return [each for pair in chosen for each in pair]


def _linear(ops: Ops, given: Tensors) -> list[Tensor]:
    """Multiply in int8, and codes of 4 bits and of 6; the expected ops multiply the numbers of the codes."""
    results = [ops.linear(given.make(3, 160), ops.pack_linear(given.make(96, 160), None, "int8"), None)]
    choices: tuple[Bits, ...] = (4, 6)
    for bits in choices:
        codes = round_grouped(given.make(96, 160, dtype=torch.float32).cpu() / 8, bits)
        weight = codes.dequantize().to(given.device, given.dtype)
        packed = ops.pack_linear(codes if ops.takes_grouped else weight, None, None)
        results += [ops.linear(given.make(rows, 160), packed, None) for rows in (3, 20)]
        x = given.make(3, 160)
        gated = ops.gated_linear(x, packed, None) if ops.gated_linear else ops.silu_mul(ops.linear(x, packed, None))
        results.append(gated)
    return [*results, _measure_scaled(ops, given)]


def _measure_scaled(ops: Ops, given: Tensors) -> Tensor:
    """Return how far a checkpoint's float8 is from the product with its matrix; float8 holds these inputs exactly."""
    values = (given.make(96, 160, dtype=torch.float32).cpu() * 100).clamp(-448, 448).to(FP8)
    weight, x = ScaledTensor(values, torch.tensor([0.001])), given.make(3, 160).mul(2).round().clamp(-7, 7)
    x[:, ::32] = 7
    numbers = weight.dequantize().to(given.device, given.dtype)
    packed = ops.pack_linear(weight if ops.takes_grouped else numbers, None, None)
    return ops.linear(x, packed, None, torch.float32) - x.float() @ ops.unpack_linear(packed).float().t()


def _lora(ops: Ops, given: Tensors) -> list[Tensor]:
    part = LoraPart(8, 0, given.make(48, 4), 0.1, None, None)
    packed = ops.pack_lora(LoraMatrix(given.make(4, 64), (part,), 96))
    y = given.make(5, 96)
    ops.add_lora(y, given.make(5, 64), given.integers(3, 0, 4), [LoraSegment(packed, 0, 3)])
    return [y]


def _make_segments() -> StateSegments:
    """Return a decode, a run with two drafts, and a run in chunks."""
    source, target = np.array([0, -1, 1, 2, 4]), np.array([0, 1, 2, 3, 4])
    count = np.array([1, 1, 1, 1, 40])
    return StateSegments(source, target, np.cumsum(count) - count, count, np.array([1, 4, 5]))


def _conv(ops: Ops, given: Tensors) -> list[Tensor]:
    x, weight, states = (
        given.make(*shape, dtype=torch.float32) for shape in ((44, 160), (4, 160), (5, 3, 160))
    )
    return [ops.run_conv(x, weight, None, states, _make_segments(), has_silu=True), states]


def _scan(ops: Ops, given: Tensors) -> list[Tensor]:
    def make(*shape: int) -> Tensor:
        return given.make(*shape, dtype=torch.float32)

    weights = ScanWeights(4, 2, 16, 24, 96, 128, 0, make(4), make(4), None)
    states = make(5, 4, 16, 24)
    return [ops.scan_states(make(44, 160), make(44, 4), make(44, 4), weights, states, _make_segments()), states]


def _greedy(ops: Ops, given: Tensors) -> list[Tensor]:
    return [ops.draw_greedy(given.make(4, 2500, dtype=torch.float32))]


def _full(ops: Ops, given: Tensors) -> list[Tensor]:
    logits, ones = given.make(4, 2500, dtype=torch.float32) * 4, torch.ones(4, device=given.device)
    return [ops.draw_full(logits, given.make_keys(4), ones, least) for least in (None, ones - 3)]


def _filtered(ops: Ops, given: Tensors) -> list[Tensor]:
    logits, ones = given.make(4, 2500, dtype=torch.float32) * 4, torch.ones(4, device=given.device)
    top_k, top_p = given.integers(2500, 20, 3, 2500), ones * 0.9
    return [ops.draw_filtered(logits, given.make_keys(4), ones, top_k, top_p, ones - 9, 2500)]


def _mask(ops: Ops, given: Tensors) -> list[Tensor]:
    logits, words = (
        given.make(3, 100, dtype=torch.float32),
        given.integers(-7, 9, 5, 1, 0, -1, 3, 2, 6, 8, 4, -2),
    )
    ops.apply_bitmask(logits, words.view(3, 4).int())
    return [logits]


def _inputs(ops: Ops, given: Tensors) -> list[Tensor]:
    assert ops.gather_inputs is not None, "Triton's ops and the expected ones have it"
    pool = torch.arange(4 * 64, device=given.device, dtype=torch.int32).view(4, 64)
    tables = torch.arange(4 * 16, device=given.device, dtype=torch.int32).view(1, 4, 16)
    rows, starts, bounds = (
        given.integers(2, 0),
        given.integers(13, 30),
        given.integers(0, 2, 4, dtype=torch.int32),
    )
    ids, positions = (torch.full((4,), -1, device=given.device) for _ in range(2))
    table = torch.zeros(1, 2, 9, device=given.device, dtype=torch.int32)
    out = StepBuffers(
        ids, positions, torch.zeros_like(ids).view(1, 4), table, torch.zeros_like(table[0, :, 0])
    )
    ops.gather_inputs(pool, tables, rows, starts, bounds, 4, out)
    return [out.input_ids, out.positions, out.slot_mapping, out.block_tables, out.seq_lens]


CASES: dict[Names, Callable[[Ops, Tensors], list[Tensor]]] = {
    ("rms_norm",): _norm,
    ("add_rms_norm",): _add_norm,
    ("silu_mul",): _silu,
    ("gated_norm",): _gated_norm,
    ("norm_rope_store",): _norm_rope_store,
    ATTENTION: _attention,
    ("choose_experts",): _routing,
    EXPERTS: _experts,
    LINEAR: _linear,
    ("add_lora", "pack_lora", "lora_tables"): _lora,
    ("run_conv",): _conv,
    ("scan_states",): _scan,
    ("draw_greedy",): _greedy,
    ("draw_full",): _full,
    ("draw_filtered",): _filtered,
    ("apply_bitmask",): _mask,
    ("gather_inputs",): _inputs,
}
