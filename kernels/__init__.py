"""The ops of a forward pass: one per file, each with a slow and obvious twin in `kernels.reference`.

Import ops from here: these names are the dispatch. Today every op has one implementation in torch that runs
on CPU and CUDA; a faster one for a device slips in behind the same name and signature.
"""

from kernels.attention_plan import AttentionPlan
from kernels.paged_attention import paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import apply_rope
from kernels.silu_mul import silu_mul
from kernels.store_kv import store_kv

__all__ = [
    "AttentionPlan",
    "add_rms_norm",
    "apply_rope",
    "paged_attention",
    "rms_norm",
    "silu_mul",
    "store_kv",
]
