"""The ops in plain torch: they run on every device, and the others are compared with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.lora import add_lora, pack_lora
from kernels.ops import Ops
from kernels.torch.attention import AttentionPlan, estimate_scratch, paged_attention
from kernels.torch.elementwise import (
    FP8,
    add_rms_norm,
    gated_norm,
    gelu,
    gelu_mul,
    norm_rope_store,
    rms_norm,
    silu_mul,
    store_kv,
)
from kernels.torch.experts import pack_experts, run_experts, unpack_experts
from kernels.torch.linear import linear, pack_linear, unpack_linear
from kernels.torch.routing import choose_experts
from kernels.torch.sampling import apply_bitmask, draw_filtered, draw_full, draw_greedy, penalise
from kernels.torch.states import run_conv, scan_states


def make_ops(device: torch.device = torch.device("cpu")) -> Ops:  # noqa: B008  immutable
    """Return torch's ops, with scaled_dot_product_attention over gathered pages."""
    return Ops(
        name="torch-sdpa",
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        silu_mul=silu_mul,
        gelu_mul=gelu_mul,
        gelu=gelu,
        gated_norm=gated_norm,
        norm_rope_store=norm_rope_store,
        store_kv=store_kv,
        make_plan=make_plan,
        paged_attention=paged_attention,
        linear=linear,
        pack_linear=pack_linear,
        unpack_linear=unpack_linear,
        pack_experts=pack_experts,
        choose_experts=choose_experts,
        run_experts=run_experts,
        unpack_experts=unpack_experts,
        run_conv=run_conv,
        scan_states=scan_states,
        draw_greedy=draw_greedy,
        draw_full=draw_full,
        draw_filtered=draw_filtered,
        apply_bitmask=apply_bitmask,
        penalise=penalise,
        pack_lora=pack_lora,
        add_lora=add_lora,
        estimate_scratch=partial(estimate_scratch, device=device),
        cache_dtypes=(FP8,),
    )


def make_plan(
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    query_lens: Sequence[int],
    seq_lens_list: Sequence[int],
    block_size: int,
    max_query_len: int = 0,
) -> AttentionPlan:
    """Return the plan of one step; shapes come from the lists, so that nothing waits for the device."""
    return AttentionPlan(block_tables, query_lens, seq_lens_list, block_size)
