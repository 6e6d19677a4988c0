"""Penalties and draws of tokens on the native library."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.library import NativeLibrary, ThreadPool
from kernels.cpu.structs import DrawStruct
from kernels.ops import DrawRows
from kernels.torch.sampling import draw_filtered

_UNDECIDED = -3  # kUndecided of `src/sampling.h`


def draw(
    library: NativeLibrary, pool: ThreadPool, logits: Tensor, rows: DrawRows, bitmask: Tensor | None
) -> Tensor:
    """Implement `kernels.ops.Draw`; rows whose two best tokens are too close for the native op are drawn by torch's."""
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32, f"logits must be float32, not {logits.dtype}"
    assert logits.is_contiguous(), "logits must be contiguous"
    if bitmask is not None:
        bitmask = bitmask.contiguous()
    arrays = [
        np.ascontiguousarray(array, dtype)
        for array, dtype in (
            (rows.keys, np.int32), (rows.temperature, np.float32), (rows.top_k, np.int64), (rows.top_p, np.float32),
            (rows.log_min_p, np.float32),
        )
    ]  # fmt: skip
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    library.draw(
        pool.handle,
        DrawStruct(
            *(logits.data_ptr(), num_rows, vocab_size, *(array.ctypes.data for array in arrays)),
            *((None, 0) if bitmask is None else (bitmask.data_ptr(), bitmask.shape[1])),
            token_ids.data_ptr(),
        ),
    )
    for row in np.flatnonzero(token_ids.numpy() == _UNDECIDED).tolist():
        one = slice(row, row + 1)
        keys, temperature, top_k, top_p, log_min_p = (torch.from_numpy(array[one]) for array in arrays)
        width = min(int(top_k), vocab_size)
        token_ids[one] = draw_filtered(logits[one], keys, temperature, top_k, top_p, log_min_p, width)
    return token_ids


def penalise(
    library: NativeLibrary, pool: ThreadPool, logits: Tensor, places: Tensor, counts: Tensor, slots: Tensor,
    penalties: Tensor, used: Sequence[bool],
) -> None:  # fmt: skip
    """As `kernels.torch.sampling.penalise`."""
    pointers = [tensor.data_ptr() for tensor in (counts, slots, penalties)]
    library.penalise(
        pool.handle, logits.data_ptr(), logits.shape[1], places.data_ptr(), len(places), *pointers
    )
