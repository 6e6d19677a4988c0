"""The ops as Triton kernels, one per file, for CUDA; products in 16 bits, and of rounded int8 and fp8, are torch's.

What is imported here imports triton, which only machines with a GPU need: `engine.device.ops_choice` finds it by name.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

import kernels.torch as torch_ops
from kernels.ops import Ops
from kernels.triton.add_rms_norm import add_rms_norm
from kernels.triton.attention_plan import make_plan
from kernels.triton.experts import pack_experts, run_experts, unpack_experts
from kernels.triton.gather_inputs import gather_inputs
from kernels.triton.launch import FLOATS
from kernels.triton.linear import gated_linear, linear, pack_linear, unpack_linear, unpack_rows
from kernels.triton.lora import LoraOp
from kernels.triton.norm_rope_store import norm_rope_store
from kernels.triton.paged_attention import estimate_scratch, paged_attention
from kernels.triton.rms_norm import gated_norm, rms_norm
from kernels.triton.routing import choose_experts
from kernels.triton.sampling import draw_filtered, draw_full, draw_greedy
from kernels.triton.silu_mul import silu_mul
from kernels.triton.states import run_conv, scan_states
from kernels.triton.token_bitmask import apply_bitmask


def make_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """Return the ops of a CUDA device.

    Raises:
        ValueError: a dtype that the kernels do not take.
    """
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be float32, float16 or bfloat16, not {dtype}")
    lora = LoraOp(dtype)
    has_fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return replace(
        torch_ops.make_ops(device),
        name="triton",
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        silu_mul=silu_mul,
        gated_norm=gated_norm,
        norm_rope_store=norm_rope_store,
        make_plan=make_plan,
        paged_attention=paged_attention,
        linear=linear,
        gated_linear=gated_linear,
        pack_linear=partial(pack_linear, device=device, has_fp8=has_fp8),
        unpack_linear=unpack_linear,
        unpack_rows=unpack_rows,
        takes_grouped=True,
        pack_experts=partial(pack_experts, device=device, has_fp8=has_fp8),
        choose_experts=choose_experts,
        run_experts=run_experts,
        unpack_experts=unpack_experts,
        pack_lora=lora.pack,
        add_lora=lora.add,
        lora_tables=lora,
        draw_greedy=draw_greedy,
        draw_full=draw_full,
        draw_filtered=draw_filtered,
        apply_bitmask=apply_bitmask,
        run_conv=run_conv,
        scan_states=scan_states,
        gather_inputs=gather_inputs,
        estimate_scratch=estimate_scratch,
        is_graph_safe=True,
    )
