"""The draws on the device against those of torch: the same noise, the same kept tokens, the same winner."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.torch import sampling
from kernels.triton.sampling import draw_filtered, draw_full, draw_greedy

pytestmark = pytest.mark.gpu

# The interpreter's cost is per operation, so it is given many borders at once.
PIVOTS = 64


def make_logits(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    """Random rows, and after them every kind of row that has something special."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    alike, spikes, few, lone = torch.zeros(4, vocab_size)
    spikes[[1, vocab_size - 1]] = 50.0
    few[:] = torch.arange(vocab_size) % 3
    lone[:] = -torch.inf
    lone[vocab_size // 2] = 1.0
    half = logits[0].clone()
    half[: vocab_size // 2] = -torch.inf
    return torch.cat((logits, torch.stack((alike, spikes, few, lone, half))))


def make_keys(num_rows: int) -> Tensor:
    return torch.from_numpy(sampling.make_row_keys(np.arange(num_rows) * 7 - 3, np.arange(num_rows) + 5))


def make_broken(vocab_size: int) -> Tensor:
    """Rows of which no token can be drawn."""
    logits = torch.randn(4, vocab_size)
    logits[0, 1], logits[1, 0], logits[2, :] = torch.nan, torch.inf, -torch.inf
    logits[3, :2] = torch.tensor([torch.nan, torch.inf])
    return logits


@pytest.mark.parametrize("vocab_size", [2, 97, 5000])
def test_greedy_takes_the_lowest_of_the_best(device: torch.device, vocab_size: int) -> None:
    logits = torch.cat((make_logits(3, vocab_size), make_broken(vocab_size)))
    actual = draw_greedy(logits.to(device)).cpu()
    assert torch.equal(actual, sampling.draw_greedy(logits))


@pytest.mark.parametrize("has_min_p", [False, True])
@pytest.mark.parametrize("vocab_size", [2, 2500])
def test_full_draws_equal_those_of_torch(device: torch.device, vocab_size: int, has_min_p: bool) -> None:
    logits = torch.cat((make_logits(4, vocab_size), make_broken(vocab_size)))
    keys, temperature = make_keys(len(logits)), torch.linspace(0.01, 2.0, len(logits))
    log_min_p = torch.linspace(1e-4, 0.5, len(logits)).log() if has_min_p else None
    expected = sampling.draw_full(logits, keys, temperature, log_min_p)
    moved = [None if each is None else each.to(device) for each in (logits, keys, temperature, log_min_p)]
    assert torch.equal(draw_full(*moved).cpu(), expected)  # type: ignore[arg-type]


def assert_filtered_equals_torch(
    device: torch.device, logits: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor
) -> None:
    num_rows, vocab_size = logits.shape
    keys, temperature = make_keys(num_rows), torch.linspace(0.3, 1.7, num_rows)
    rows = (logits, keys, temperature, top_k, top_p, log_min_p)
    expected = sampling.draw_filtered(*rows, vocab_size)
    actual = draw_filtered(*(each.to(device) for each in rows), num_pivots=PIVOTS)
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize(("vocab_size", "filters"), [(7, "k"), (300, "p"), (300, "both")])
def test_filtered_draws_equal_those_of_torch(device: torch.device, vocab_size: int, filters: str) -> None:
    logits = make_logits(2, vocab_size)
    generator = torch.Generator().manual_seed(vocab_size)
    top_k, top_p = torch.full((len(logits),), vocab_size), torch.full((len(logits),), 2.0)
    if filters != "p":
        top_k = torch.randint(1, vocab_size + 1, top_k.shape, generator=generator)
    if filters != "k":
        top_p = torch.rand(top_p.shape, generator=generator)
    off = torch.full((len(logits),), -torch.inf)
    assert_filtered_equals_torch(device, logits, top_k, top_p, off if filters == "k" else off.fill_(-3.0))


def test_filters_at_their_ends_keep_one_token_or_all(device: torch.device) -> None:
    logits = torch.cat((make_logits(1, 50), make_logits(1, 50, 1)))
    top_k = torch.tensor([1, 50, 2, 50, 49, 50, 50, 3, 50, 50, 1, 50])
    top_p = torch.tensor([2.0, 0.0, 0.0, 1e-9, 1.0, 0.999999, 1.0, 1.0, 0.5, 2.0, 0.5, 1e-3])
    assert_filtered_equals_torch(device, logits, top_k, top_p, torch.full((12,), -torch.inf))


def find_keys(vocab_size: int, winner: int) -> Tensor:
    """Keys of a row in whose noise this token stands out."""
    keys = make_keys(50 * vocab_size)
    noise = sampling.make_gumbel_noise(keys, torch.arange(vocab_size, dtype=torch.int32).unsqueeze(0))
    return keys[noise.argmax(dim=-1) == winner][:1]


def test_the_border_runs_between_two_equal_tokens(device: torch.device) -> None:
    """Three of eight equal tokens are kept; the last kept and the first dropped would win among all."""
    last, first = find_keys(8, 2), find_keys(8, 3)
    keys = torch.cat((last, first, last, first))
    top_k, top_p = torch.tensor([3, 3, 8, 8]), torch.tensor([2.0, 2.0, 3 / 8, 3 / 8])
    rows = (torch.zeros(4, 8), keys, torch.ones(4), top_k, top_p, torch.full((4,), -torch.inf))
    drawn = draw_filtered(*(each.to(device) for each in rows), num_pivots=PIVOTS).tolist()
    assert drawn == sampling.draw_filtered(*rows, 8).tolist()
    assert drawn[0] == drawn[2] == 2 and drawn[1] == drawn[3] < 3


def test_broken_rows_give_no_token(device: torch.device) -> None:
    logits = make_broken(40).to(device)
    ones, keys = torch.ones(4, device=device), make_keys(4).to(device)
    top_k = torch.full((4,), 5, device=device)
    assert draw_filtered(logits, keys, ones, top_k, ones / 2, -ones).tolist() == [-1] * 4


def test_the_number_of_pivots_changes_nothing(device: torch.device) -> None:
    logits = make_logits(1, 20)[:3].to(device)
    num_rows = len(logits)
    rows = (make_keys(num_rows), torch.ones(num_rows), torch.full((num_rows,), 8), torch.full((num_rows,), 0.7))
    moved = [each.to(device) for each in rows]
    off = torch.full((num_rows,), -torch.inf, device=device)
    few, many = (draw_filtered(logits, *moved, off, num_pivots=count) for count in (8, 64))
    assert torch.equal(few, many)


def test_a_row_draws_the_same_in_any_order(device: torch.device) -> None:
    logits, keys = make_logits(6, 300).to(device), make_keys(11).to(device)
    temperature = torch.ones(11, device=device)
    order = torch.randperm(11).to(device)
    shuffled = draw_full(logits[order], keys[order], temperature, None)
    assert torch.equal(shuffled, draw_full(logits, keys, temperature, None)[order])


def test_rows_may_lie_in_a_wider_matrix(device: torch.device) -> None:
    logits = make_logits(2, 100).to(device)
    wide = torch.cat((logits, torch.full_like(logits, 99.0)), dim=1)
    assert torch.equal(draw_greedy(wide[:, :100]), draw_greedy(logits))


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    logits, ones = make_logits(1, 30).to(device), torch.ones(5, device=device)
    with pytest.raises(ValueError, match=r"temperature must have shape \(6,\), not \(5,\)"):
        draw_full(logits, make_keys(6).to(device), ones, None)
    with pytest.raises(ValueError, match="contiguous rows"):
        draw_greedy(logits.t())
