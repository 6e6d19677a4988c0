"""MaskOrders: which masks are ordered when, and which tokens the matchers get."""

from itertools import chain

import numpy as np

from engine.core.actor_messages import FillMasks, MaskTarget, StepDone, StepPlan
from engine.core.mask_orders import NO_STEP, MaskOrders


def make_plan(step_id: int, *handles: int | None, drafts: dict[int, list[int]] | None = None) -> StepPlan:
    """A step of one row per handle; None: a row without a grammar."""
    runs = [(drafts or {}).get(index, []) for index in range(len(handles))]
    counts = np.array([1 + len(run) for run in runs])
    is_gated = np.array([handle is not None for handle in handles])
    rows = np.arange(len(handles))
    known = [handle for handle in handles if handle is not None]
    return StepPlan(
        step_id, [], [], [], rows, rows, counts, counts, is_gated, np.array([*chain(*runs)], dtype=np.int64), known
    )


def make_done(
    step_id: int, tokens: dict[int, list[int]], is_last: bool = True, skipped: tuple[int, ...] = ()
) -> StepDone:  # fmt: skip
    counts = np.array([len(each) for each in tokens.values()], dtype=np.int64)
    ids = np.array([*chain(*tokens.values())], dtype=np.int64)
    return StepDone(step_id, np.array(list(tokens), dtype=np.int64), counts, ids, is_last, skipped=list(skipped))


def test_tokens_reach_the_matchers_without_a_next_step() -> None:
    orders = MaskOrders()
    orders.add(make_plan(0, 7, drafts={0: [1, 2]}))
    assert orders.flush() == [FillMasks(0, [], [MaskTarget(0, 7, [1, 2])])]
    orders.take(make_done(0, {0: [1, 9]}))
    assert orders.flush() == [FillMasks(NO_STEP, [(7, 1), (7, 9)], [])]


def test_a_skipped_row_is_ordered_in_the_step_that_computes_it() -> None:
    orders = MaskOrders()
    orders.add(make_plan(0, 7, 8))
    orders.add(make_plan(1, 7, 8))
    orders.flush()
    orders.take(make_done(0, {1: [4]}, is_last=False))
    orders.take(make_done(1, {}, is_last=False, skipped=(0,)))
    assert orders.flush() == [FillMasks(1, [(8, 4)], [MaskTarget(1, 8)])]
    orders.add(make_plan(2, 7))
    orders.take(make_done(0, {0: [3]}))
    assert orders.flush() == [FillMasks(2, [(7, 3)], [MaskTarget(0, 7)])]


def test_the_masks_of_a_step_are_ordered_by_row() -> None:
    orders = MaskOrders()
    orders.add(make_plan(0, 7))
    orders.add(make_plan(1, 7, 8))
    orders.take(make_done(0, {0: [3]}))
    assert orders.flush()[-1] == FillMasks(1, [], [MaskTarget(0, 7), MaskTarget(1, 8)])
