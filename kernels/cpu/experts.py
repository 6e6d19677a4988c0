"""NativeExperts: the matrices of a layer's experts in panels, and the call that runs them; see `src/experts.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.library import NativeLibrary, ThreadPool
from kernels.cpu.panel_memory import PanelMemory
from kernels.cpu.structs import ExpertsStruct, LinearStruct
from kernels.cpu.weights import DTYPES, NativeWeight, WeightKind, choose_kind, pack, unpack
from kernels.grouped import GroupedRows
from kernels.ops import ExpertRows, ExpertWeights, GatedActivation, Quantization


@dataclass(frozen=True, slots=True)
class NativeExperts:
    """The packed matrices of all experts of one layer; they own the memory that `struct` points to."""

    gate: list[NativeWeight]
    up: list[NativeWeight]
    down: list[NativeWeight]
    activation: GatedActivation
    struct: ExpertsStruct

    @property
    def hidden_size(self) -> int:
        """Numbers of a token."""
        return self.down[0].out_features


def pack_experts(
    library: NativeLibrary,
    pool: ThreadPool,
    memory: PanelMemory,
    experts: ExpertWeights | ExpertRows,
    quantization: Quantization | None,
) -> NativeExperts:
    """Pack the matrices of a layer. All experts are stored in one way, which one call needs.

    Raises:
        ValueError: as `kernels.cpu.weights.pack`.
    """

    stacks: list[Sequence[Tensor | GroupedRows]]
    dtype: torch.dtype | None = None
    kinds: list[WeightKind | None] = [None, None]
    if isinstance(experts, ExpertRows):
        stacks, dtype = [experts.gate, experts.up, experts.down], experts.dtype
    else:
        gate_up, down = experts.gate_up.contiguous(), experts.down.contiguous()
        stacks = [list(each) for each in (*gate_up.chunk(2, dim=1), down)]
        if quantization is None:
            kinds = [choose_kind(library, pool, each, each.dtype) for each in (gate_up, down)]
    biases = [None, None] if experts.gate_up_bias is None else [*experts.gate_up_bias.chunk(2, dim=1)]
    fine: Quantization | None = "int6" if quantization == "int4" else quantization
    gate, up, lower = (
        [
            pack(library, pool, memory, matrix, None if bias is None else bias[index], rounding, kind, dtype)
            for index, matrix in enumerate(stack)
        ]
        for stack, bias, rounding, kind in zip(
            *(stacks, (*biases, experts.down_bias), (quantization, quantization, fine), (kinds[0], *kinds)),
            strict=True,
        )
    )
    return make_experts(gate, up, lower, experts.activation)


def make_experts(
    gate: list[NativeWeight], up: list[NativeWeight], down: list[NativeWeight], activation: GatedActivation
) -> NativeExperts:
    """Put the packed matrices of all experts together."""
    packed = (gate, up, down)
    arrays = ((LinearStruct * len(gate))(*(each.struct for each in matrices)) for matrices in packed)
    struct = ExpertsStruct(*arrays, len(gate), activation.alpha, activation.limit or 0.0)
    return NativeExperts(*packed, activation, struct)


def unpack_experts(library: NativeLibrary, pool: ThreadPool, packed: NativeExperts) -> ExpertWeights:
    """Return the matrices again, rounded where they were quantized."""

    def unpack_all(*parts: list[NativeWeight]) -> Tensor:
        rows = zip(*parts, strict=True)
        return torch.stack([torch.cat([unpack(library, pool, each) for each in row]) for row in rows])

    return ExpertWeights(
        unpack_all(packed.gate, packed.up),
        _stack_biases(packed.gate, packed.up),
        unpack_all(packed.down),
        _stack_biases(packed.down),
        packed.activation,
    )


def _stack_biases(*parts: list[NativeWeight]) -> Tensor | None:
    rows = zip(*parts, strict=True)
    biases = [[each.bias for each in row if each.bias is not None] for row in rows]
    return torch.stack([torch.cat(row) for row in biases]).to(parts[0][0].dtype) if biases[0] else None


def run_experts(
    library: NativeLibrary,
    pool: ThreadPool,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: NativeExperts,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Implement `kernels.ops.RunExperts`; equal bit for bit whatever the other tokens and the number of threads."""
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    num_tokens, top_k = ids.shape
    assert x.shape == (num_tokens, experts.hidden_size), f"x is {list(x.shape)} for {num_tokens} tokens"
    assert ids.dtype == torch.int64, f"ids must be int64, not {ids.dtype}"
    assert weights.shape == ids.shape and weights.dtype == torch.float32, "a float32 weight per id"
    out = torch.empty_like(x, dtype=out_dtype)
    library.experts(
        pool.handle,
        ctypes.byref(experts.struct),
        x.data_ptr(),
        DTYPES[x.dtype],
        ids.data_ptr(),
        weights.data_ptr(),
        num_tokens,
        top_k,
        out.data_ptr(),
        DTYPES[out.dtype],
    )
    return out
