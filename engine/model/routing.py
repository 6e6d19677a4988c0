"""Chooses the experts of each token from the router's logits."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.moe_spec import MoESpec

# Keeps a sum of sigmoids that are all 0 from dividing by 0. Source: DeepSeek-V3.
_TINY = 1e-20


def choose_experts(logits: Tensor, spec: MoESpec, correction_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the experts of each token and their weights.

    Args:
        logits: [T, E] float32.
        correction_bias: [E] float32, added to the scores for the choice.

    Returns (ids [T, K] int64, weights [T, K] float32).
    """
    if spec.score == "topk_softmax":
        best, ids = logits.topk(spec.top_k, dim=-1)
        return ids, best.softmax(dim=-1) * spec.scale
    scores = logits.softmax(dim=-1) if spec.score == "softmax" else compute_sigmoid(logits)
    ranked = scores if correction_bias is None else scores + correction_bias
    if spec.num_groups > 1:
        ranked = _keep_best_groups(ranked, spec.num_groups, spec.num_chosen_groups)
    ids = ranked.topk(spec.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if spec.is_normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _TINY)
    return ids, weights * spec.scale


def compute_sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of each number, the same bits whatever the size of the tensor.

    torch computes the last numbers of a tensor, which do not fill a vector, with another exponential. Its softmax does
    the same for every row.
    """
    return torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(dim=-1)[..., 0]


def _keep_best_groups(ranked: Tensor, num_groups: int, num_chosen: int) -> Tensor:
    """Set the scores of all but the best groups to -inf. A group counts as much as its two best experts."""
    groups = ranked.unflatten(-1, (num_groups, -1))
    best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(num_chosen, dim=-1).indices
    is_dropped = torch.ones(groups.shape[:2], dtype=torch.bool, device=ranked.device).scatter_(1, best, False)
    return groups.masked_fill(is_dropped.unsqueeze(-1), -torch.inf).flatten(1)
