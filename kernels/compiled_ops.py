"""Ops whose small functions torch.compile fuses into one kernel each; products and attention stay as they are."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from kernels.gelu import gelu, gelu_mul
from kernels.ops import Ops
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import apply_rope
from kernels.silu_mul import silu_mul
from kernels.store_kv import store_kv


def compile_ops(ops: Ops, backend: str = "inductor") -> Ops:
    """Return torch's ops with compiled norms, RoPE and activation, for any number of tokens.

    Each is compiled at its first call, which takes seconds; one token has a variant of its own.

    Args:
        backend: torch.compile's.
    """
    compile_one = functools.partial(torch.compile, dynamic=True, backend=backend)
    norm_rope = compile_one(_norm_rope)

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
        num_rotated = heads.shape[1] - k_cache.shape[2]
        qk = norm_rope(heads[:, :num_rotated], qk_norm, eps, cos, sin)
        store_kv(qk[:, num_heads:], heads[:, num_rotated:], k_cache, v_cache, slot_mapping)
        return qk[:, :num_heads]

    return replace(
        ops,
        name=f"{ops.name}-compiled",
        rms_norm=compile_one(rms_norm),
        add_rms_norm=compile_one(add_rms_norm),
        silu_mul=compile_one(silu_mul),
        gelu_mul=compile_one(gelu_mul),
        gelu=compile_one(gelu),
        norm_rope_store=norm_rope_store,
    )


def _norm_rope(qk: Tensor, qk_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    if qk_norm is not None:
        qk = rms_norm(qk, qk_norm, eps)
    return apply_rope(qk, cos, sin)
