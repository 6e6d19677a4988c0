"""Builders of new rows and step plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from engine.messages import NewRow, StepPlan
from engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def make_new_row(
    row: int,
    tokens: Sequence[int],
    block_ids: Iterable[int],
    params: SamplingParams = GREEDY,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> NewRow:
    """A request that is all prompt; its seed is the row."""
    ids = np.array(tokens, dtype=np.int64)
    return NewRow(row, ids, len(ids), list(block_ids), params, row, bad_words)


def make_plan(
    runs: Iterable[tuple[int, int, int]] = (),
    step_id: int = 0,
    *,
    new: Iterable[NewRow] = (),
    new_blocks: Iterable[tuple[int, list[int]]] = (),
    gated: Sequence[int] = (),
    unsampled: Sequence[int] = (),
) -> StepPlan:
    """`runs` are (row, start, count); `gated` and `unsampled` are rows."""
    rows, starts, counts = np.ascontiguousarray(np.array(list(runs), np.int64).reshape(-1, 3).T)
    flags = ~np.isin(rows, unsampled), np.isin(rows, gated)
    return StepPlan(step_id, [], list(new), list(new_blocks), rows, starts, counts, *flags)
