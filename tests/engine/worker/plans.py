"""Builders of new rows and step plans."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from engine.core.actor_messages import NewRow, StepPlan
from engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def make_new_row(
    row: int,
    tokens: Sequence[int],
    block_ids: Iterable[int],
    params: SamplingParams = GREEDY,
    bad_words: Sequence[list[int]] = (),
) -> NewRow:
    """A request that is all prompt; its seed is the row."""
    ids = np.array(tokens, dtype=np.int64)
    return NewRow(row, ids, len(ids), list(block_ids), params, row, list(bad_words))


def make_plan(
    runs: Iterable[tuple[int, int, int]] = (),
    step_id: int = 0,
    *,
    new: Iterable[NewRow] = (),
    new_blocks: Iterable[tuple[int, list[int]]] = (),
    gated: Sequence[int] = (),
    unsampled: Sequence[int] = (),
    drafts: Mapping[int, Sequence[int]] | None = None,
) -> StepPlan:
    """`runs` are (row, start, count), drafts included; `gated` and `unsampled` are rows, `drafts` are by row."""
    rows, starts, counts = np.ascontiguousarray(np.array(list(runs), np.int64).reshape(-1, 3).T)
    by_row = [list((drafts or {}).get(row, ())) for row in rows.tolist()]
    num_samples = np.array([1 + len(each) for each in by_row], np.int64) * ~np.isin(rows, unsampled)
    flat_drafts = np.array([token_id for each in by_row for token_id in each], np.int64)
    return StepPlan(
        step_id=step_id,
        removed_rows=[],
        new_rows=list(new),
        new_blocks=list(new_blocks),
        rows=rows,
        starts=starts,
        num_scheduled_tokens=counts,
        num_samples=num_samples,
        is_gated=np.isin(rows, gated),
        draft_token_ids=flat_drafts,
    )
