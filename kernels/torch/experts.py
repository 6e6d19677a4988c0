"""The experts of a mixture in plain torch: rows sorted by expert, one pair of products per expert that has rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import ExpertWeights, GatedActivation, PackedWeight, Quantization
from kernels.torch.elementwise import silu_mul
from kernels.torch.linear import linear, pack_linear, unpack_linear

MAX_TOKENS = 512  # at once, which bounds the memory; as in `cpu/src/experts.cpp`


@dataclass(frozen=True, slots=True)
class TorchExperts:
    """The experts of one layer as torch's products take them, expert by expert."""

    gate_up: list[PackedWeight]
    gate_up_bias: Tensor | None
    down: list[PackedWeight]
    down_bias: Tensor | None
    activation: GatedActivation


def pack_experts(experts: ExpertWeights, quantization: Quantization | None) -> TorchExperts:
    """Convert the matrices of a layer to the layout of `run_experts`.

    Raises:
        ValueError: this quantization does not work for the matrices on their device.
    """
    return TorchExperts(
        [pack_linear(matrix, None, quantization) for matrix in experts.gate_up],
        experts.gate_up_bias,
        [pack_linear(matrix, None, "int6" if quantization == "int4" else quantization) for matrix in experts.down],
        experts.down_bias,
        experts.activation,
    )


def unpack_experts(packed: TorchExperts) -> ExpertWeights:
    """Return the matrices, with the rounding that packing may have done."""
    return ExpertWeights(
        torch.stack([unpack_linear(matrix) for matrix in packed.gate_up]),
        packed.gate_up_bias,
        torch.stack([unpack_linear(matrix) for matrix in packed.down]),
        packed.down_bias,
        packed.activation,
    )


def run_experts(
    x: Tensor, ids: Tensor, weights: Tensor, experts: TorchExperts, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return the weighted sum of each token's experts; `kernels.ops.RunExperts` gives the shapes.

    It reads the number of rows per expert back from the device.
    """
    parts = zip(x.split(MAX_TOKENS), ids.split(MAX_TOKENS), weights.split(MAX_TOKENS), strict=True)
    return torch.cat([_run_part(*part, experts) for part in parts]).to(out_dtype or x.dtype)


def estimate_scratch(num_tokens: int, top_k: int, hidden_size: int, inner_size: int, itemsize: int) -> int:
    """Return the largest number of bytes that any implementation on the CPU needs beside its result.

    The native ops keep rows packed for both products in turn, the values between them and the results as float32; the
    pool allocates 25 % more.
    """
    words = 3 * hidden_size + inner_size
    num_pairs = min(num_tokens, MAX_TOKENS) * top_k
    return num_pairs * (words * torch.float32.itemsize + 3 * inner_size * itemsize) * 5 // 4


def _run_part(x: Tensor, ids: Tensor, weights: Tensor, experts: TorchExperts) -> Tensor:
    num_tokens, top_k = ids.shape
    order = ids.flatten().argsort(stable=True)
    start, *counts = (ids.flatten() + 1).bincount(minlength=len(experts.down) + 1).tolist()
    results = torch.zeros(num_tokens * top_k, x.shape[1], dtype=torch.float32, device=x.device)
    for expert, count in enumerate(counts):
        if count:
            pairs = order[start : start + count]
            results[pairs] = _run_expert(x[pairs // top_k], experts, expert).float()
            start += count
    # Added slot by slot, so that the order does not depend on the number of tokens.
    total = torch.zeros(num_tokens, x.shape[1], dtype=torch.float32, device=x.device)
    for slot, result in enumerate(results.view(num_tokens, top_k, -1).unbind(1)):
        total.addcmul_(result, weights[:, slot, None])
    return total


def _run_expert(rows: Tensor, experts: TorchExperts, expert: int) -> Tensor:
    gate_up_bias = None if experts.gate_up_bias is None else experts.gate_up_bias[expert]
    down_bias = None if experts.down_bias is None else experts.down_bias[expert]
    inner = activate(linear(rows, experts.gate_up[expert], gate_up_bias), experts.activation)
    return linear(inner, experts.down[expert], down_bias)


def activate(gate_up: Tensor, activation: GatedActivation) -> Tensor:
    """Apply the activation: [N, 2 I] -> [N, I], gate first."""
    if activation == GatedActivation():
        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit) + 1
    return gate * torch.sigmoid(activation.alpha * gate) * up
