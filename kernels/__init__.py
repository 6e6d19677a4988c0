"""The ops of a forward pass: one per file, each with a slow and obvious twin in `kernels.reference`.

The model takes them as one `Ops` object, which `kernels.torch_ops`, `kernels.triton` and `kernels.cpu` make; the
names exported here are torch's, which run on every device.
"""

from kernels.attention_plan import AttentionPlan
from kernels.norm_rope_store import norm_rope_store
from kernels.ops import LayerWeights, Ops
from kernels.paged_attention import paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import apply_rope
from kernels.silu_mul import silu_mul
from kernels.store_kv import store_kv

__all__ = [
    "AttentionPlan",
    "LayerWeights",
    "Ops",
    "add_rms_norm",
    "apply_rope",
    "norm_rope_store",
    "paged_attention",
    "rms_norm",
    "silu_mul",
    "store_kv",
]
