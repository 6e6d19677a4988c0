"""Token masks: int32 [rows, ceil(V/32)], bit 1 = allowed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.device_kernels import find_device_kernels

# So many are done in the time that it takes torch to wake another thread.
FEW_ELEMENTS = 2**18


def unpack_bitmask(bitmask: Tensor, vocab_size: int) -> Tensor:
    """Turn packed token masks into booleans.

    Args:
        bitmask: [M, W] int32, bit 1 = allowed, token t in bit t % 32 of word t // 32. Tokens beyond the last
            word are forbidden: a grammar's vocabulary may be smaller than the padded one of the model.

    Returns [M, vocab_size] bool, True = allowed.
    """
    num_words = -(-vocab_size // 32)
    words = bitmask[:, :num_words]
    if words.shape[1] < num_words:
        words = torch.nn.functional.pad(words, (0, num_words - words.shape[1]))
    if words.device.type == "cpu":
        octets = words.contiguous().numpy().view(np.uint8)
        bits = np.unpackbits(octets, axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits).view(torch.bool)
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, :vocab_size].bool()


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    Args:
        logits: [R, V], contiguous.
        bitmask: [M, W] int32 as for `unpack_bitmask`.
        rows: [M] int64, the row of the logits that each mask is for; all different. None: M = R, in order.

    Few of them, and on a CPU, are not copied.
    """
    kernels = find_device_kernels(logits.device.type, "token_bitmask")
    if kernels is not None:
        if rows is None:
            rows = torch.arange(len(logits), device=logits.device)
        kernels.apply_bitmask(logits, bitmask, rows)
        return
    allowed = unpack_bitmask(bitmask, logits.shape[1])
    if logits.device.type == "cpu" and allowed.numel() <= FEW_ELEMENTS:
        values = logits.numpy()
        places = range(len(logits)) if rows is None else rows.tolist()
        for row, forbidden in zip(places, ~allowed.numpy(), strict=True):
            np.putmask(values[row], forbidden, -np.inf)
    elif rows is None:
        logits.masked_fill_(~allowed, -torch.inf)
    else:
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(~allowed, -torch.inf))
