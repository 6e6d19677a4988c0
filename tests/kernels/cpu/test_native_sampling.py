"""Draws and penalties of the native ops have the bits of torch's."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.native_ops import NativeOps
from kernels.ops import DrawRows
from kernels.torch import sampling
from tests.kernels.cpu.conftest import require_library

NUM_ROWS = 24


def draw_by_torch(logits: Tensor, rows: DrawRows, bitmask: Tensor | None) -> list[int]:
    """The tokens of torch's ops, a row at a time."""
    is_sound = sampling.find_sound_rows(logits).tolist()
    if bitmask is not None:
        sampling.apply_bitmask(logits, bitmask)
    vocab_size, token_ids = logits.shape[1], []
    for row in range(len(logits)):
        one = slice(row, row + 1)
        keys, temperature, top_k, top_p, log_min_p = (
            torch.from_numpy(array[one])
            for array in (rows.keys, rows.temperature, rows.top_k, rows.top_p, rows.log_min_p)
        )
        if not temperature:
            token_id = sampling.draw_greedy(logits[one])
        elif top_k >= vocab_size and top_p > 1:
            token_id = sampling.draw_full(logits[one], keys, temperature, log_min_p)
        else:
            width = min(int(top_k), vocab_size)
            token_id = sampling.draw_filtered(logits[one], keys, temperature, top_k, top_p, log_min_p, width)
        is_left = int(token_id) >= 0 or bitmask is None
        token_ids.append((int(token_id) if is_left else -2) if is_sound[row] else -1)
    return token_ids


def make_rows(vocab_size: int, generator: np.random.Generator, num_rows: int = NUM_ROWS) -> DrawRows:
    """Rows of all kinds of draws, with every filter on and off."""

    def choose(values: list[Any], dtype: type) -> np.ndarray:
        return generator.choice(np.array(values, dtype), num_rows)

    seeds, positions = generator.integers(0, 2**62, num_rows), generator.integers(0, 9999, num_rows)
    top_k = np.minimum(choose([1, 2, 40, 1024, 3000, vocab_size, vocab_size], np.int64), vocab_size)
    return DrawRows(
        sampling.make_row_keys(seeds, positions), choose([0.0, 1e-5, 0.1, 0.7, 1.0, 3.0, 1e30], np.float32), top_k,
        choose([0.0, 0.1, 0.5, 0.95, 0.9999999, 2.0, 2.0], np.float32),
        np.log(choose([1e-30, 0.001, 0.1, 1.0], np.float32)) + choose([0, 0, -np.inf], np.float32),
    )


def make_logits(vocab_size: int, generator: np.random.Generator) -> Tensor:
    """Flat, peaked and tied rows, and rows that are not sound."""
    logits = generator.standard_normal((NUM_ROWS, vocab_size), np.float32)
    logits *= generator.choice(np.array([0.0, 0.01, 1.0, 4.0, 40.0], np.float32), (NUM_ROWS, 1))
    logits[::3] = np.round(logits[::3])
    for row, value in ((2, np.nan), (5, np.inf), (7, -np.inf)):
        logits[row, generator.integers(vocab_size)] = value
    logits[11] = -np.inf
    return torch.from_numpy(logits)


@pytest.mark.parametrize("vocab_size", [1, 2, 31, 64, 100, 3072, 151_936])
@pytest.mark.parametrize("mask", ["none", "random", "few", "short"])
def test_rows_draw_the_tokens_of_torch(ops: NativeOps, vocab_size: int, mask: str) -> None:
    generator = np.random.default_rng(vocab_size)
    logits, rows = make_logits(vocab_size, generator), make_rows(vocab_size, generator)
    bitmask = None
    if mask != "none":
        words = generator.integers(0, 2**32, (NUM_ROWS, -(-vocab_size // 32)), np.uint32)
        if mask == "few":
            words[generator.random(words.shape) < 0.98] = 0
        words[::4] = 0xFFFFFFFF
        words[3] = 0
        if mask == "short":  # a grammar's vocabulary may be smaller than the model's
            words = words[:, : max(1, words.shape[1] // 2)]
        bitmask = torch.from_numpy(words.view(np.int32).copy())
    expected = draw_by_torch(logits.clone(), rows, bitmask)
    draw = ops.make_ops().draw
    assert draw is not None
    assert draw(logits.clone(), rows, bitmask).tolist() == expected


def test_a_draw_that_rounding_decides_is_torchs() -> None:
    """Of 400,000 draws between two equal tokens about four are closer than the native op decides."""
    num_rows = 400_000
    keys = sampling.make_row_keys(np.full(num_rows, 5), np.arange(num_rows))
    every = np.ones(num_rows, np.float32)
    rows = DrawRows(keys, every, np.full(num_rows, 2), 2 * every, np.full(num_rows, -np.inf, np.float32))
    draw = NativeOps(require_library(), num_threads=1).make_ops().draw
    assert draw is not None
    logits = torch.zeros(num_rows, 2)
    expected = sampling.draw_full(logits, torch.from_numpy(keys), torch.from_numpy(every), None)
    assert torch.equal(draw(logits, rows, None), expected)


@pytest.mark.parametrize("vocab_size", [1, 100, 5000])
def test_penalties_change_logits_to_the_bits_of_torch(ops: NativeOps, vocab_size: int) -> None:
    generator = np.random.default_rng(1)
    logits = make_logits(vocab_size, generator)
    counts = generator.integers(-9, 5, (6, vocab_size), np.int32).clip(0)
    counts |= sampling.IN_PROMPT * generator.integers(0, 2, counts.shape, np.int32)
    penalties = generator.choice(np.array([-1.3, 0.0, 0.3, 1.7], np.float32), (6, 3))
    penalties[:, 0] = [1.0, 1.3, 0.5, 2.0, 1.0, 1.1]
    places, slots = generator.permutation(NUM_ROWS)[:6], generator.permutation(6)
    operands = list(map(torch.from_numpy, (places, counts, slots, penalties)))
    expected, found = logits.clone(), logits.clone()
    sampling.penalise(expected, *operands, [True] * 3)
    ops.make_ops().penalise(found, *operands, [True] * 3)
    assert torch.equal(found.nan_to_num(nan=-7), expected.nan_to_num(nan=-7))
