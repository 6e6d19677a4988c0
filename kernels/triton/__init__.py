"""The ops as Triton kernels, one per file, for CUDA devices; matrix products stay with torch and cuBLAS.

What is imported here imports triton, which only machines with a GPU need: `kernels` finds it by name.
"""

from __future__ import annotations

import torch

from kernels.gelu import gelu, gelu_mul
from kernels.linear import linear, pack_linear, unpack_linear
from kernels.ops import Ops
from kernels.triton.add_rms_norm import add_rms_norm
from kernels.triton.attention_plan import AttentionPlan, make_plan, share_prefixes
from kernels.triton.cascade_attention import cascade_attention
from kernels.triton.experts import pack_experts, run_experts, unpack_experts
from kernels.triton.launch import FLOATS
from kernels.triton.lm_head_sample import lm_head_sample
from kernels.triton.lora import LoraOp
from kernels.triton.norm_rope_store import norm_rope_store
from kernels.triton.paged_attention import estimate_scratch, paged_attention
from kernels.triton.rms_norm import rms_norm
from kernels.triton.silu_mul import silu_mul

__all__ = [
    "AttentionPlan",
    "add_rms_norm",
    "cascade_attention",
    "lm_head_sample",
    "make_ops",
    "make_plan",
    "norm_rope_store",
    "paged_attention",
    "rms_norm",
    "run_experts",
    "silu_mul",
]


def make_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """Return the ops of a CUDA device.

    Raises:
        ValueError: a dtype that the kernels do not take.
    """
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be float32, float16 or bfloat16, not {dtype}")
    lora = LoraOp(dtype)
    return Ops(
        name="triton",
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        silu_mul=silu_mul,
        gelu_mul=gelu_mul,
        gelu=gelu,
        norm_rope_store=norm_rope_store,
        make_plan=make_plan,
        paged_attention=paged_attention,
        linear=linear,
        pack_linear=pack_linear,
        unpack_linear=unpack_linear,
        pack_experts=pack_experts,
        run_experts=run_experts,
        unpack_experts=unpack_experts,
        pack_lora=lora.pack,
        add_lora=lora.add,
        share_prefixes=share_prefixes,
        lm_head_sample=lm_head_sample,
        estimate_scratch=estimate_scratch,
        is_graph_safe=True,
        takes_fp8_cache=True,
    )
