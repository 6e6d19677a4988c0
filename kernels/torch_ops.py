"""The ops in plain torch: they run on every device, and everything else is compared with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from kernels import attention_plan, flex_attention
from kernels.attention_plan import AttentionPlan
from kernels.experts import pack_experts, run_experts, unpack_experts
from kernels.flex_attention import FlexAttention, make_flex_plan
from kernels.gelu import gelu, gelu_mul
from kernels.linear import linear, pack_linear, unpack_linear
from kernels.lora import add_lora, pack_lora
from kernels.norm_rope_store import norm_rope_store
from kernels.ops import Ops
from kernels.paged_attention import paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.silu_mul import silu_mul


def make_ops(attention: Literal["sdpa", "flex"] = "sdpa", device: torch.device | None = None) -> Ops:
    """Return torch's ops.

    Args:
        attention: scaled_dot_product_attention over gathered pages, or flex_attention.
        device: where they will run; decides whether flex_attention is compiled.
    """
    is_flex = attention == "flex"
    device = device or torch.device("cpu")
    gathers = partial(attention_plan.estimate_scratch, device=device)
    return Ops(
        name=f"torch-{attention}",
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        silu_mul=silu_mul,
        gelu_mul=gelu_mul,
        gelu=gelu,
        norm_rope_store=norm_rope_store,
        make_plan=make_flex_plan if is_flex else make_plan,
        paged_attention=FlexAttention(device.type == "cuda") if is_flex else paged_attention,
        linear=linear,
        pack_linear=pack_linear,
        unpack_linear=unpack_linear,
        pack_experts=pack_experts,
        run_experts=run_experts,
        pack_lora=pack_lora,
        add_lora=add_lora,
        unpack_experts=unpack_experts,
        estimate_scratch=flex_attention.estimate_scratch if is_flex else gathers,
        takes_fp8_cache=True,
    )


def make_plan(
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    query_lens: Sequence[int],
    seq_lens_list: Sequence[int],
    block_size: int,
) -> AttentionPlan:
    """Return the plan of one step; shapes come from the lists, so that nothing waits for the device."""
    return AttentionPlan(block_tables, query_lens, seq_lens_list, block_size)
