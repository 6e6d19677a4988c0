"""What stands between the QKV product and attention: head norms, RoPE, and the write into the cache."""

from __future__ import annotations

from torch import Tensor

from kernels.rms_norm import rms_norm
from kernels.rope import apply_rope
from kernels.store_kv import store_kv


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
    """Norm and rotate queries and keys, write keys and values to their slots; see `kernels.ops.NormRopeStore`.

    Returns the queries, [T, H, D].
    """
    num_rotated = heads.shape[1] - k_cache.shape[2]
    qk, v = heads[:, :num_rotated], heads[:, num_rotated:]
    if qk_norm is not None:
        qk = rms_norm(qk, qk_norm, eps)
    qk = apply_rope(qk, cos, sin)
    store_kv(qk[:, num_heads:], v, k_cache, v_cache, slot_mapping)
    return qk[:, :num_heads]
