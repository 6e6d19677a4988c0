"""Noise, candidates, filters and draws of `kernels.torch.sampling` against their slow twin."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.torch import sampling
from tests.chi_square import compute_p_value
from tests.kernels import sampling_reference

# Fixed seeds: a right implementation fails with this probability once, when seeds are chosen, not per run.
ALPHA = 1e-4
SEEDS = np.array([0, 1, -1, 123456789, -(2**63), 2**63 - 1])
POSITIONS = np.array([0, 1, 2, 17, 4095, 10**6])


def gumbel_noise(
    seeds: np.ndarray, positions: np.ndarray, tokens: int | Tensor, device: torch.device | str = "cpu"
) -> Tensor:
    """Noise from seeds and positions.

    Args:
        seeds, positions: [R] int64.
        tokens: a vocabulary size V, or ids [R, K] of any integer dtype on the device.

    Returns [R, V] or [R, K] float32 on the device.
    """
    if isinstance(tokens, int):
        tokens = torch.arange(tokens, dtype=torch.int32, device=device).unsqueeze(0)
    keys = torch.from_numpy(sampling.make_row_keys(seeds, positions)).to(device)
    return sampling.make_gumbel_noise(keys, tokens.to(torch.int32))


def make_keys(seed: int, num_rows: int) -> Tensor:
    """Keys of one seed at positions 0, 1, ..."""
    return torch.from_numpy(sampling.make_row_keys(np.full(num_rows, seed), np.arange(num_rows)))


def to_uniform(noise: Tensor) -> np.ndarray:
    return np.exp(-np.exp(-noise.double().numpy()))


def vary(axis: str, count: int) -> Tensor:
    """Noise along one of the three coordinates, the other two fixed."""
    values = {"seeds": np.full(count, 11), "positions": np.full(count, 5), "ids": np.full(count, 7)}
    values[axis] = np.arange(count)
    ids = torch.from_numpy(values["ids"]).unsqueeze(-1)
    return gumbel_noise(values["seeds"], values["positions"], ids).flatten()


def test_noise_equals_the_reference() -> None:
    ids = torch.tensor([0, 1, 2, 31, 1000, 151_935, 2**31 - 1])
    noise = gumbel_noise(SEEDS, POSITIONS, ids.expand(len(SEEDS), -1))
    for row, (seed, position) in enumerate(zip(SEEDS.tolist(), POSITIONS.tolist(), strict=True)):
        expected = sampling_reference.gumbel_noise(seed, position, ids.tolist())
        np.testing.assert_allclose(noise[row].numpy(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("vocab_size", [1, 63, 100, 1000, 70_000])
def test_noise_of_gathered_ids_has_the_bits_of_the_full_row(vocab_size: int) -> None:
    full = gumbel_noise(SEEDS, POSITIONS, vocab_size)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (len(SEEDS), 37), generator=generator)
    assert torch.equal(gumbel_noise(SEEDS, POSITIONS, ids), full.gather(1, ids))


def test_noise_of_a_row_has_the_same_bits_alone() -> None:
    full = gumbel_noise(SEEDS, POSITIONS, 3001)
    for row in range(len(SEEDS)):
        assert torch.equal(gumbel_noise(SEEDS[row : row + 1], POSITIONS[row : row + 1], 3001)[0], full[row])


@pytest.mark.parametrize("axis", ["seeds", "positions", "ids"])
def test_uniforms_are_uniform_along_each_coordinate(axis: str) -> None:
    counts = np.histogram(to_uniform(vary(axis, 200_000)), bins=256, range=(0, 1))[0]
    assert compute_p_value(counts, np.full(256, 1 / 256)) > ALPHA


@pytest.mark.parametrize("axis", ["seeds", "positions", "ids"])
@pytest.mark.parametrize("distance", [1, 2, 32, 1024])
def test_neighbours_are_independent(axis: str, distance: int) -> None:
    uniforms = to_uniform(vary(axis, 200_000))
    pairs = np.histogram2d(uniforms[:-distance], uniforms[distance:], bins=16, range=((0, 1), (0, 1)))[0]
    assert compute_p_value(pairs.ravel(), np.full(256, 1 / 256)) > ALPHA


def test_rows_of_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    """100 rows of 4096 ids; the largest of 4,950 correlations exceeds 6 / sqrt(4096) with p < 1e-5."""
    seeds, positions = np.tile(np.arange(10), 10), np.repeat(np.arange(10), 10)
    correlation = np.corrcoef(to_uniform(gumbel_noise(seeds, positions, 4096)))
    assert np.abs(correlation - np.eye(100)).max() < 6 / np.sqrt(4096)


def test_extreme_hashes_give_finite_noise() -> None:
    hashes = torch.tensor([0, 1, 2**31 - 2, 2**31 - 1], dtype=torch.int32)
    uniforms = hashes.to(torch.float32).add_(0.5).mul_(sampling.UNIFORM_SCALE)
    assert (uniforms > 0).all()
    assert (uniforms < 1).all()


def draw_filtered(logits: Tensor, temperature: float, k: int, p: float, min_p: float) -> Tensor:
    """Draws of seed 3 at positions 0, 1, ..."""
    num_rows, vocab_size = logits.shape
    keys = make_keys(3, num_rows).to(logits.device)
    log_min_p = float(np.log(min_p)) if min_p else -np.inf
    return sampling.draw_filtered(
        logits,
        keys,
        torch.full((num_rows,), temperature),
        torch.full((num_rows,), k or vocab_size),
        torch.full((num_rows,), p if p < 1 else 2.0),
        torch.full((num_rows,), log_min_p),
        k or vocab_size,
    )


@pytest.mark.parametrize("vocab_size", [1, 63, 100, 1000, 3072])
@pytest.mark.parametrize(
    ("k", "p", "min_p"), [(0, 0.6, 0.0), (0, 0.999, 0.0), (20, 1.0, 0.0), (20, 0.8, 0.1), (0, 0.9, 0.3)]
)
def test_filtered_draws_equal_the_reference(vocab_size: int, k: int, p: float, min_p: float) -> None:
    """Half-integer logits: most of them are tied, and no set's mass comes near the threshold."""
    k = min(k, vocab_size)
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(1)).mul_(4).round_().div_(2)
    drawn = draw_filtered(logits.clone(), 0.7, k, p, min_p)
    for row in range(8):
        ranked = sampling_reference.rank_draws(logits[row].numpy(), 3, row, 0.7, k, p, min_p)
        assert drawn[row] == ranked[0][1]


@pytest.mark.parametrize("temperature", [0.01, 1.0, 2.0])
def test_full_draws_equal_the_reference(temperature: float) -> None:
    logits = torch.randn(8, 1000, generator=torch.Generator().manual_seed(2)) * 3
    keys = make_keys(3, 8)
    drawn = sampling.draw_full(logits, keys, torch.full((8,), temperature), torch.full((8,), float(np.log(0.01))))
    for row in range(8):
        ranked = sampling_reference.rank_draws(logits[row].numpy(), 3, row, temperature, min_p=0.01)
        assert drawn[row] == ranked[0][1]


@pytest.mark.parametrize(("k", "num_kept"), [(2, 1), (3, 2)])
def test_top_p_counts_the_mass_of_the_top_k_alone(k: int, num_kept: int) -> None:
    """Of .4, .3 and .3 the best has .57 of two, and less than half of three."""
    scores = torch.tensor([[0.4, 0.3, 0.3, 1e-9]]).log()
    limits = torch.tensor([k]), torch.tensor([0.5]), torch.tensor([-torch.inf])
    *_, found = sampling.select_kept(scores, torch.arange(4), *limits, width=4)
    assert found.tolist() == [num_kept]


@pytest.mark.parametrize("k", [0, 5])
def test_min_p_of_one_keeps_every_token_tied_for_best(k: int) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.9]]).repeat(64, 1)
    assert set(draw_filtered(logits, 1.0, k, 0.999, 1.0).tolist()) == {1, 2}


@pytest.mark.parametrize("bad", ["nan", "inf", "all forbidden"])
def test_a_bad_row_yields_minus_one_and_spares_the_others(bad: str) -> None:
    clean = torch.randn(3, 2000, generator=torch.Generator().manual_seed(3))
    dirty = clean.clone()
    if bad == "all forbidden":
        dirty[1] = -torch.inf
    else:
        dirty[1, 77] = float(bad)
    keys, ones = make_keys(0, 3), torch.ones(3)
    draws = [sampling.draw_greedy, lambda x: sampling.draw_full(x, keys, ones, None)]
    draws += [lambda x, k=k: draw_filtered(x, 1.0, k, 0.9, 0.0) for k in (0, 5, 1500)]
    for draw in draws:
        expected = draw(clean.clone())
        expected[1] = -1
        assert draw(dirty.clone()).tolist() == expected.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("k", "p", "min_p"), [(0, 0.9, 0.0), (20, 1.0, 0.0), (1500, 0.8, 0.1)])
def test_cuda_draws_equal_cpu_draws(k: int, p: float, min_p: float) -> None:
    logits = torch.randn(16, 5000, generator=torch.Generator().manual_seed(4)) * 3
    torch.testing.assert_close(
        gumbel_noise(SEEDS, POSITIONS, 5000, "cuda").cpu(),
        gumbel_noise(SEEDS, POSITIONS, 5000),
        rtol=0,
        atol=1e-5,
    )
    expected = draw_filtered(logits.clone(), 0.7, k, p, min_p)
    with torch.device("cuda"):
        drawn = draw_filtered(logits.cuda(), 0.7, k, p, min_p)
    assert drawn.tolist() == expected.tolist()
