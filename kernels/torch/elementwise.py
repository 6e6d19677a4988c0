"""Norms, rotary embedding, activations and the write into the paged cache.

A cache in float8 (e4m3) holds half of what bfloat16 takes: values are clamped to +-448 and rounded to 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(FP8).max


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each vector of the last dimension to unit root mean square, then by `weight`.

    Args:
        x: [..., D].
        weight: [D], or [N, D] for one weight per head of x [..., N, D].
        eps: added to the mean square.

    Returns the shape and dtype of x; the arithmetic is float32.
    Source: Zhang and Sennrich, 2019.
    """
    if x.device.type != "cpu":
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight
    # On CPU torch runs its own rms_norm as a dozen small ops; these are half as many.
    norm = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
    scale = torch.addcmul(norm.new_full((), eps), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    return (x * scale).mul_(weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream, then norm the sum.

    Args:
        x: [T, D], left as it is.
        residual: [T, D], overwritten with the sum.
        weight: [D].

    Returns (normed, residual), both [T, D]; `residual` is the tensor passed in.
    """
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head of x by the angles of its token.

    Args:
        x: [T, N, D], queries and keys side by side in N.
        cos: [T, 1, D] float32, both halves alike.
        sin: [T, 1, D] float32, the first half negated, so that the rotation is one multiply-add over
            swapped halves.

    Returns [T, N, D], dtype of x; the arithmetic is float32.
    Source: Su et al., 2021 (RoFormer), in the half-split layout of Hugging Face checkpoints.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos).addcmul_(swapped, sin).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up.

    Args:
        gate_up: [T, 2 * M], gate first; left as it is.

    Returns [T, M], dtype of gate_up.
    Source: Shazeer, 2020 (SwiGLU).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, *, is_gate_first: bool,
    norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm, multiply: Callable[[Tensor], Tensor] = silu_mul,
) -> Tensor:  # fmt: skip
    """Implement `kernels.ops.GatedNorm` with the norm and the gated activation of some ops."""
    if is_gate_first:
        gated = multiply(torch.cat((gate, x), dim=1))
        result = norm(gated.view(len(x), -1, weight.shape[-1]), weight, eps)
    else:
        normed = norm(x.view(-1, weight.shape[-1]), weight, eps)
        result = multiply(torch.cat((gate.reshape(normed.shape), normed), dim=1))
    return result.view(x.shape).to(dtype)


def gelu(x: Tensor) -> Tensor:
    """Return gelu(x) of any shape, dtype of x. Source: Hendrycks and Gimpel, 2016."""
    return F.gelu(x, approximate="tanh")


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up.

    Args:
        gate_up: [T, 2 * M], gate first; left as it is.

    Returns [T, M], dtype of gate_up.
    Source: Shazeer, 2020 (GEGLU).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate).mul_(up)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write one key and one value per token into its slot, in place.

    Args:
        k, v: [T, num_kv_heads, head_dim], any strides over tokens.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous, dtype of k or float8.
        slot_mapping: [T] int64, `block_id * block_size + offset`. Padding tokens point into the null block;
            real slots do not repeat.
    """
    if k_cache.dtype == FP8:
        # Indexing knows no float8; the bytes are moved.
        k, v = (each.clamp(-_FP8_MAX, _FP8_MAX).to(FP8).view(torch.uint8) for each in (k, v))
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    if v_cache.data_ptr() != k_cache.data_ptr():
        v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)


def take_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """Copy slots [n] of a flattened cache [num_slots, num_kv_heads, head_dim], dtype of the cache."""
    if cache.dtype == FP8:
        return cache.view(torch.uint8).index_select(0, slots).view(FP8)
    return cache.index_select(0, slots)


def norm_rope_store(
    heads: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
) -> Tensor:
    """Implement `kernels.ops.NormRopeStore`."""
    num_rotated = heads.shape[1] - k_cache.shape[2]
    qk, v = heads[:, :num_rotated], heads[:, num_rotated:]
    if qk_norm is not None:
        qk = rms_norm(qk, qk_norm, eps)
    qk = apply_rope(qk, cos, sin)
    store_kv(qk[:, num_heads:], v, k_cache, v_cache, slot_mapping)
    return qk[:, :num_heads]


def compute_sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of each number, the same bits whatever the size of the tensor.

    On the CPU torch computes the last numbers of a tensor, which do not fill a vector, with another exponential. Its
    softmax does the same for every row.
    """
    if x.device.type != "cpu":
        return torch.sigmoid(x)
    return torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(dim=-1)[..., 0]
