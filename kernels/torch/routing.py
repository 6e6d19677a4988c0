"""The choice of experts for each token, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops import Routing
from kernels.torch.elementwise import compute_sigmoid

# Keeps a sum of sigmoids that are all 0 from dividing by 0. Source: DeepSeek-V3.
TINY = 1e-20


def choose_experts(
    logits: Tensor, routing: Routing, correction_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Implement `kernels.ops.ChooseExperts`."""
    if routing.score == "topk_softmax":
        best, ids = logits.topk(routing.top_k, dim=-1)
        return ids, best.softmax(dim=-1) * routing.scale
    scores = logits.softmax(dim=-1) if routing.score == "softmax" else compute_sigmoid(logits)
    ranked = scores if correction_bias is None else scores + correction_bias
    if routing.num_groups > 1:
        ranked = _keep_best_groups(ranked, routing)
    ids = ranked.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if routing.is_normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    return ids, weights * routing.scale


def _keep_best_groups(ranked: Tensor, routing: Routing) -> Tensor:
    """Set the scores of all but the best groups to -inf."""
    groups = ranked.unflatten(-1, (routing.num_groups, -1))
    totals = groups.topk(routing.group_best, dim=-1).values.sum(dim=-1)
    best = totals.topk(routing.num_chosen_groups, dim=-1).indices
    is_dropped = torch.ones(groups.shape[:2], dtype=torch.bool, device=ranked.device).scatter_(1, best, False)
    return groups.masked_fill(is_dropped.unsqueeze(-1), -torch.inf).flatten(1)
