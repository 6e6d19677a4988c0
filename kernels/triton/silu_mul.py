"""The gated activation of a Llama MLP."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import FUSED, check_float, make_output

BLOCK = 1024


@triton.jit
def silu_mul_kernel(
    out_ptr: tl.tensor, gate_up_ptr: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate_row = gate_up_ptr + row * (2 * SIZE)
    gate = tl.load(gate_row + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_row + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * SIZE + columns, product.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """As `kernels.torch.elementwise.silu_mul`, rounded once; `out` is written and returned when given."""
    check_float("gate_up", gate_up)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must be [T, 2 * M], not {tuple(gate_up.shape)}")
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    result = make_output(out, (num_tokens, size), gate_up)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(size, BLOCK))
        silu_mul_kernel[grid](result, gate_up.contiguous(), SIZE=size, BLOCK=BLOCK, num_warps=4, **FUSED)
    return result
