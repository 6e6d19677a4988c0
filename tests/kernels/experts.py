"""Experts with random weights, for the tests of all implementations."""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.ops import ExpertWeights, GatedActivation

CLAMPED = GatedActivation(alpha=1.702, limit=1.5)


def make_experts(
    num_experts: int,
    hidden_size: int,
    inner_size: int,
    dtype: torch.dtype = torch.float32,
    activation: GatedActivation | None = None,
    has_bias: bool = False,
) -> ExpertWeights:
    """Return matrices that keep the size of a token about the same."""
    generator = torch.Generator().manual_seed(num_experts)

    def draw(*shape: int, scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    return ExpertWeights(
        gate_up=draw(num_experts, 2 * inner_size, hidden_size, scale=2 * hidden_size**-0.5),
        gate_up_bias=draw(num_experts, 2 * inner_size, scale=0.5) if has_bias else None,
        down=draw(num_experts, hidden_size, inner_size, scale=inner_size**-0.5),
        down_bias=draw(num_experts, hidden_size, scale=0.5) if has_bias else None,
        activation=activation or GatedActivation(),
    )


def make_routes(
    num_tokens: int, hidden_size: int, num_experts: int, top_k: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x, ids, weights); the ids of a token differ."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, hidden_size, generator=generator).to(dtype)
    # A few experts get most of the tokens, as in practice.
    scores = torch.rand(num_tokens, num_experts, generator=generator) * torch.linspace(1, 0.2, num_experts)
    weights, ids = scores.topk(top_k, dim=-1)
    return x, ids, weights


def move(experts: ExpertWeights, device: torch.device) -> ExpertWeights:
    """Return the matrices on a device."""
    return replace(
        experts,
        gate_up=experts.gate_up.to(device),
        gate_up_bias=None if experts.gate_up_bias is None else experts.gate_up_bias.to(device),
        down=experts.down.to(device),
        down_bias=None if experts.down_bias is None else experts.down_bias.to(device),
    )
