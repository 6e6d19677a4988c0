"""Training attention in blocks of queries: no score is kept, and keys behind a block are never touched."""

from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # queries at a time: their scores stay in the processor's cache


def make_bias(branches: Tensor) -> Tensor:
    """Return the bias of each position on the scores of the keys [B or 1, T, T] in bfloat16: 0, or -inf to hide one.

    Hidden are later keys and those of another branch. Branch 0 is the common beginning of a row; branches 1,
    2, ... go on after it without seeing each other. One plane serves all rows when none has branches.
    """
    T = branches.shape[1]
    if not branches.any():
        branches = branches[:1]
    later = torch.ones(T, T, dtype=torch.bool, device=branches.device).triu(1)
    own, common = branches[:, :, None] == branches[:, None, :], (branches == 0)[:, None, :]
    bias = torch.zeros(len(branches), T, T, dtype=torch.bfloat16, device=branches.device)
    return bias.masked_fill_(later | ~(own | common), float("-inf"))


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention [B, H, T, D] of queries over keys and values with fewer heads [B, G, T, D].

    The backward pass computes the shares again (Dao et al., 2022, FlashAttention). On a CPU this takes a
    quarter to three quarters of the time of the whole score matrix, and half that of torch's fused attention.
    """
    out: Tensor = BlockAttention.apply(q, k, v, bias)  # type: ignore[no-untyped-call]
    return out


class BlockAttention(torch.autograd.Function):
    """See `attend`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        B, H, T, D = q.shape
        G = k.shape[1]
        grouped = (q * D**-0.5).reshape(B, G, H // G, T, D)
        keys, values = k.reshape(B * G, T, D), v.reshape(B * G, T, D)
        out = torch.empty_like(grouped)
        for begin in range(0, T, BLOCK):
            end = min(T, begin + BLOCK)
            shares = share_out(grouped, keys, bias, begin, end)
            out[:, :, :, begin:end] = (shares @ values[:, :end]).view(B, G, -1, end - begin, D)
        ctx.save_for_backward(grouped, keys, values, bias)
        return out.view(B, H, T, D)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        grouped, keys, values, bias = ctx.saved_tensors
        B, G, R, T, D = grouped.shape
        d_out = gradients[0].reshape(B, G, R, T, D)
        d_q = torch.empty_like(grouped)
        d_k, d_v = torch.zeros(2, B * G, T, D, device=keys.device)
        for begin in range(0, T, BLOCK):
            end = min(T, begin + BLOCK)
            shares = share_out(grouped, keys, bias, begin, end)
            d_block = d_out[:, :, :, begin:end].reshape(B * G, -1, D)
            d_v[:, :end] += shares.mT @ d_block
            d_shares = d_block @ values[:, :end].mT
            d_scores = torch._softmax_backward_data(d_shares, shares, -1, shares.dtype)
            d_q[:, :, :, begin:end] = (d_scores @ keys[:, :end]).view(B, G, R, -1, D)
            d_k[:, :end] += d_scores.mT @ grouped[:, :, :, begin:end].reshape(B * G, -1, D)
        d_keys, d_values = (part.to(keys.dtype).view(B, G, T, D) for part in (d_k, d_v))
        return (d_q * D**-0.5).view(B, G * R, T, D), d_keys, d_values, None


def share_out(grouped: Tensor, keys: Tensor, bias: Tensor, begin: int, end: int) -> Tensor:
    """Softmax shares [B*G, R*(end-begin), end] of the queries [begin, end) of all heads of each group."""
    B, G, R, _, D = grouped.shape
    scores = grouped[:, :, :, begin:end].reshape(B * G, -1, D) @ keys[:, :end].mT
    scores.view(B, G * R, end - begin, end).add_(bias[:, None, begin:end, :end])
    return scores.softmax(-1)
