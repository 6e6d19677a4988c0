"""Layers with states in plain torch: decodes in one batch, longer runs in chunks of 64 tokens.

Results agree with the recurrence token by token up to rounding, which depends on where a run is cut.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.states import ScanWeights, StateSegments
from kernels.upload import upload

_CHUNK = 64


def run_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    segments: StateSegments,
    *,
    has_silu: bool,
) -> Tensor:
    """Implement `kernels.states.RunConv`."""
    kept = weight.shape[0] - 1
    out = torch.empty(x.shape, device=x.device)

    def convolve(rows: Tensor) -> Tensor:
        """Convolve [N, kept + count, C]."""
        count = rows.shape[1] - kept
        taps = (rows[:, tap : tap + count] * weight[tap] for tap in range(kept + 1))
        total = sum(taps, torch.zeros((), device=x.device)) if bias is None else sum(taps, bias)
        return F.silu(total) if has_silu else total

    decodes, others = _split(segments)
    if decodes:
        tokens, targets = (upload(each[decodes], x.device) for each in (segments.first, segments.target))
        rows = torch.cat((_read(states, segments, decodes), x.index_select(0, tokens).unsqueeze(1)), dim=1)
        out.index_copy_(0, tokens, convolve(rows)[:, 0])
        states.index_copy_(0, targets, rows[:, 1:])
    for each in others:
        first, count = int(segments.first[each]), int(segments.count[each])
        rows = torch.cat((_read(states, segments, [each])[0], x[first : first + count]))
        if count:
            out[first : first + count] = convolve(rows.unsqueeze(0))[0]
        states[int(segments.target[each])] = rows[count:]
    return out


def scan_states(
    mixed: Tensor,
    dt: Tensor,
    beta: Tensor | None,
    weights: ScanWeights,
    states: Tensor,
    segments: StateSegments,
) -> Tensor:
    """Implement `kernels.states.ScanStates`."""
    step = F.softplus(dt + weights.dt_bias)
    log_decay = -weights.a_log.exp() * step
    factor = step if beta is None else torch.sigmoid(beta)
    queries, keys = (_take_groups(mixed, at, weights) for at in (weights.query_at, weights.key_at))
    size = weights.num_heads * weights.value_size
    values = mixed[:, weights.value_at : weights.value_at + size].unflatten(1, (weights.num_heads, -1))
    if beta is not None:
        keys = keys * torch.rsqrt(keys.square().sum(-1, keepdim=True) + 1e-6)
        queries = queries * torch.rsqrt(queries.square().sum(-1, keepdim=True) + 1e-6)
        queries = queries * weights.key_size**-0.5
    out = torch.empty_like(values)
    decodes, others = _split(segments)
    if decodes:
        tokens, targets = (upload(each[decodes], mixed.device) for each in (segments.first, segments.target))
        state = _read(states, segments, decodes) * log_decay[tokens].exp()[..., None, None]
        key, value = keys[tokens].unsqueeze(-1), values[tokens]
        if beta is not None:
            value = value - (state * key).sum(-2)
        state = state + key * (value * factor[tokens].unsqueeze(-1)).unsqueeze(-2)
        out.index_copy_(0, tokens, (state * queries[tokens].unsqueeze(-1)).sum(-2))
        states.index_copy_(0, targets, state)
    for each in others:
        first, count = int(segments.first[each]), int(segments.count[each])
        state = _read(states, segments, [each])[0]
        for start in range(first, first + count, _CHUNK):
            part = slice(start, min(start + _CHUNK, first + count))
            found, state = _scan_chunk(
                *(queries[part].transpose(0, 1), keys[part].transpose(0, 1), values[part].transpose(0, 1)),
                *(log_decay[part].t(), factor[part].t(), state),
                is_delta=beta is not None,
            )
            out[part] = found.transpose(0, 1)
        states[int(segments.target[each])] = state
    if weights.skip is not None:
        out += weights.skip.unsqueeze(-1) * values
    return out.flatten(1)


def _scan_chunk(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decay: Tensor,
    factor: Tensor,
    state: Tensor,
    *,
    is_delta: bool,
) -> tuple[Tensor, Tensor]:
    """Run some tokens: queries, keys [H, N, K], values [H, N, V], log_decay, factor [H, N], state [H, K, V].

    Returns the output [H, N, V] and the state after them.
    """
    total = log_decay.cumsum(-1)
    before = total.exp().unsqueeze(-1)  # decay since the state
    # Decay from token j to token i, 0 for j after i.
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    changes = values
    if is_delta:
        changes = changes - before * (keys @ state)
    changes = changes * factor.unsqueeze(-1)
    if is_delta:
        # Each token's change depends on those before it in the chunk.
        lower = (keys @ keys.transpose(1, 2) * between * factor.unsqueeze(-1)).tril(-1)
        changes = torch.linalg.solve_triangular(
            lower + torch.eye(lower.shape[-1], device=lower.device), changes, upper=False, unitriangular=True
        )
    out = before * (queries @ state) + (queries @ keys.transpose(1, 2) * between) @ changes
    after = (total[:, -1:] - total).exp().unsqueeze(-1)
    state = state * total[:, -1].exp()[:, None, None] + (keys * after).transpose(1, 2) @ changes
    return out, state


def _take_groups(mixed: Tensor, at: int, weights: ScanWeights) -> Tensor:
    """Return the queries or keys [T, H, K] of all heads."""
    size = weights.num_groups * weights.key_size
    groups = mixed[:, at : at + size].unflatten(1, (weights.num_groups, -1))
    return groups.repeat_interleave(weights.num_heads // weights.num_groups, dim=1)


def _split(segments: StateSegments) -> tuple[list[int], list[int]]:
    """Return the segments of one token that are their whole run, and the others in order."""
    decodes: list[int] = []
    others: list[int] = []
    begin = 0
    for end in segments.run_ends.tolist():
        is_decode = end == begin + 1 and segments.count[begin] == 1
        (decodes if is_decode else others).extend(range(begin, end))
        begin = end
    return decodes, others


def _read(states: Tensor, segments: StateSegments, wanted: list[int]) -> Tensor:
    """Return the states that these segments start from."""
    source = segments.source[wanted]
    found = states.index_select(0, upload(source.clip(min=0), states.device))
    for place in np.flatnonzero(source < 0).tolist():
        found[place] = 0
    return found
