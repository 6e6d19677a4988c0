"""The best tokens of a row and the rank of one of them. Order is by score, ties by the lower token id."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# On CPU a long row is folded between these numbers of times to find a score that enough of its best tokens reach.
MAX_FOLDS = 64
MIN_FOLDS = 8
# Column maxima kept per wanted token; with fewer, the bound would admit too many other tokens.
MAXIMA_PER_TOKEN = 4


def select_candidates(scores: Tensor, vocab: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` best tokens of each row, best first, ties by the lower id.

    Args:
        scores: [R, V] float32.
        vocab: [V] int64, 0..V-1 (made once by the caller of a loop).
        width: 1..V.

    Returns scores [R, width] float32 and token ids [R, width] int64.
    """
    if scores.device.type == "cpu":
        ids = _select_on_host(scores, vocab, width)
    else:
        keys = _make_order_keys(scores, vocab)
        if width < scores.shape[-1]:
            keys = keys.topk(width, dim=-1, largest=False, sorted=True).values
        else:
            keys = keys.sort(dim=-1).values
        ids = _read_ids(keys)
    return scores.gather(-1, ids), ids


def rank_tokens(scores: Tensor, vocab: Tensor, token_ids: Tensor) -> Tensor:
    """The place of one token of each row in the order of `select_candidates`, from 1.

    Args:
        scores, vocab: as in `select_candidates`.
        token_ids: [R, 1] int64.

    Returns [R, 1] int64.
    """
    own = scores.gather(-1, token_ids)
    if scores.device.type != "cpu":
        is_better = (scores > own) | ((scores == own) & (vocab < token_ids))
        return 1 + is_better.sum(dim=-1, keepdim=True)
    # NumPy counts with vector instructions: 24 us for a row of 151,936, where torch takes 600.
    triples = zip(scores.numpy(), own.flatten().tolist(), token_ids.flatten().tolist(), strict=True)
    ranks = [
        1 + np.count_nonzero(row > score) + np.count_nonzero(row[:token_id] == score)
        for row, score, token_id in triples
    ]
    return torch.tensor(ranks, dtype=torch.int64).unsqueeze(-1)


def _select_on_host(scores: Tensor, vocab: Tensor, width: int) -> Tensor:
    """Token ids [R, width]; long rows are cut down to a few tokens before they are put in order."""
    num_folds = min(MAX_FOLDS, scores.shape[-1] // (MAXIMA_PER_TOKEN * width))
    if num_folds < MIN_FOLDS:
        return _order(scores, vocab, width)
    ids = torch.empty(scores.shape[0], width, dtype=torch.int64)
    for at, row in enumerate(scores.numpy()):
        few = torch.from_numpy(_find_few(row, width, num_folds))
        ids[at] = _order(scores[at].index_select(0, few), few, width)
    return ids


def _find_few(row: np.ndarray, width: int, num_folds: int) -> np.ndarray:
    """Ids, ascending, of all tokens that reach a bound which at least `width` of them do.

    The row is cut into pieces that are laid on each other; each column's maximum is a token, so the `width`-th of
    these maxima is such a bound. Tied tokens pass it together, and so does NaN.
    """
    num_columns = len(row) // num_folds
    maxima = row[: num_folds * num_columns].reshape(num_folds, num_columns).max(axis=0)
    maxima.partition(num_columns - width)
    return np.flatnonzero(~(row < maxima[num_columns - width]))


def _order(scores: Tensor, ids: Tensor, width: int) -> Tensor:
    """The ids of the `width` best scores, best first.

    Args:
        scores: [..., C] float32 on the host; ids: [C] int64.
    """
    # numpy's vectorised partition and sort of integers are several times faster than torch.topk on CPU.
    keys = _make_order_keys(scores, ids).numpy()
    if width < keys.shape[-1]:
        keys.partition(width - 1, axis=-1)
        keys = keys[..., :width].copy()
    keys.sort(axis=-1)
    return _read_ids(torch.from_numpy(keys))


def _make_order_keys(scores: Tensor, ids: Tensor) -> Tensor:
    """[..., C] int64 keys, all different: ascending keys are descending scores, then ascending ids."""
    # + 0.0 turns -0.0 into 0.0, which compares equal to it but has other bits.
    bits = (scores + 0.0).view(torch.int32)
    # Floats are sign and magnitude: invert the positive, clear the others' sign, and bigger comes first.
    flips = (bits >> 31).bitwise_not_().bitwise_or_(torch.iinfo(torch.int32).min)
    return bits.bitwise_xor_(flips).to(torch.int64).bitwise_left_shift_(32).bitwise_or_(ids)


def _read_ids(keys: Tensor) -> Tensor:
    return keys & 0xFFFFFFFF
