"""The ops in plain torch: they run on every device, and everything else is compared with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.attention_plan import AttentionPlan, estimate_scratch
from kernels.experts import pack_experts, run_experts, unpack_experts
from kernels.gelu import gelu, gelu_mul
from kernels.linear import linear, pack_linear, unpack_linear
from kernels.lora import add_lora, pack_lora
from kernels.norm_rope_store import norm_rope_store
from kernels.ops import Ops
from kernels.paged_attention import paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.silu_mul import silu_mul


def make_ops(device: torch.device = torch.device("cpu")) -> Ops:  # noqa: B008  immutable
    """Return torch's ops, with scaled_dot_product_attention over gathered pages."""
    return Ops(
        name="torch-sdpa",
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
        pack_lora=pack_lora,
        add_lora=add_lora,
        unpack_experts=unpack_experts,
        estimate_scratch=partial(estimate_scratch, device=device),
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
