"""The best candidates and ranks of rows as long as real vocabularies, against a plain sort."""

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.torch.candidates import rank_tokens, select_candidates

LONG = 151_936


def make_rows(kind: str, vocab_size: int) -> Tensor:
    rows = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(5)) * 3
    if kind == "tied":
        rows = rows.round_()
    elif kind == "flat":
        rows.zero_()
        rows[:, 1::2] = -0.0
    elif kind == "forbidden":
        rows[:, 7:] = -torch.inf
    elif kind == "sorted":
        rows = rows.sort(dim=-1).values
    return rows


def order_row(row: Tensor) -> np.ndarray:
    return np.argsort(-row.numpy(), kind="stable")


@pytest.mark.parametrize("kind", ["plain", "tied", "flat", "forbidden", "sorted"])
@pytest.mark.parametrize(
    ("vocab_size", "width"),
    [(LONG, 1), (LONG, 20), (LONG, 1024), (3073, 20), (700, 20), (40, 40), (9, 4), (2, 1), (1, 1)],
)
def test_candidates_of_long_rows_are_those_of_a_sort(kind: str, vocab_size: int, width: int) -> None:
    rows = make_rows(kind, vocab_size)
    found, ids = select_candidates(rows, torch.arange(vocab_size), width)
    for row in range(len(rows)):
        expected = order_row(rows[row])[:width]
        assert ids[row].tolist() == expected.tolist()
        assert torch.equal(found[row], rows[row, torch.from_numpy(expected)])


@pytest.mark.parametrize("kind", ["plain", "tied", "flat", "forbidden"])
def test_ranks_are_places_in_that_order(kind: str) -> None:
    rows = make_rows(kind, 3073)
    token_ids = torch.tensor([[0], [5], [1000], [3072]])
    ranks = rank_tokens(rows, torch.arange(3073), token_ids)
    orders = [order_row(row).tolist() for row in rows]
    assert ranks.tolist() == [[1 + order.index(i)] for order, [i] in zip(orders, token_ids.tolist(), strict=True)]


def test_a_row_with_nan_still_has_candidates_of_its_own() -> None:
    rows = make_rows("plain", LONG)
    rows[1, 77] = torch.nan
    _, ids = select_candidates(rows, torch.arange(LONG), 20)
    assert len(set(ids[1].tolist())) == 20
    for row in (0, 2, 3):
        assert ids[row].tolist() == order_row(rows[row])[:20].tolist()


def measure(work: Callable[[], object]) -> float:
    """CPU seconds of the fastest of some runs."""
    best = float("inf")
    for _ in range(9):
        start = time.thread_time()
        work()
        best = min(best, time.thread_time() - start)
    return best


def test_candidates_and_rank_cost_a_few_softmaxes() -> None:
    """A sort of integer keys took fifteen, and the rank another five."""
    rows, vocab = make_rows("plain", LONG)[:1], torch.arange(LONG)
    own = torch.tensor([[11]])
    softmax = measure(lambda: rows.log_softmax(dim=-1))
    assert measure(lambda: select_candidates(rows, vocab, 20)) < 5 * softmax
    assert measure(lambda: rank_tokens(rows, vocab, own)) < 2 * softmax
