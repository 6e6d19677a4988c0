"""Masks live in memory that is used again, but never while somebody reads it."""

import numpy as np
import torch

from engine.core.mask_pool import MAX_NUM_BUFFERS, MaskPool


def test_memory_that_nobody_reads_is_used_again() -> None:
    pool = MaskPool(100)
    address = pool.take(3).ctypes.data
    assert [pool.take(count).ctypes.data for count in (4, 1, 3)] == [address] * 3


def test_memory_is_not_used_again_while_anything_refers_to_it() -> None:
    pool = MaskPool(100)
    for hold in (lambda masks: masks, lambda masks: masks[1:2], lambda masks: torch.from_numpy(masks)):
        masks = pool.take(4)
        masks[:] = 7
        held = hold(masks)
        del masks
        pool.take(4)[:] = 0
        assert np.asarray(held).min() == 7
        del held


def test_the_pool_grows_with_the_rows_and_keeps_a_bounded_number_of_buffers() -> None:
    pool = MaskPool(100)
    held = [pool.take(rows) for rows in (1, 9, 2, 40, 3, 5, 6, 7)]
    assert [masks.shape for masks in held] == [(rows, 4) for rows in (1, 9, 2, 40, 3, 5, 6, 7)]
    assert len(pool._buffers) <= MAX_NUM_BUFFERS
    assert pool.take(0).shape == (0, 4)
