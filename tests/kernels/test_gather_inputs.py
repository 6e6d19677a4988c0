"""Gathering a step's inputs, and masking logits by row map: torch against the slow twins."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.gather_inputs import gather_inputs
from kernels.token_bitmask import apply_bitmask
from tests.kernels.steps import run_gather

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(8))
def test_gathered_inputs_equal_the_reference(seed: int) -> None:
    actual, expected = (run_gather(gather, CPU, seed) for gather in (gather_inputs, reference.gather_inputs))
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("vocab_size", [1, 32, 100])
def test_masks_forbid_tokens_in_their_own_rows(vocab_size: int) -> None:
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(0))
    words = torch.randint(-(2**31), 2**31, (3, max(1, vocab_size // 32))).int()
    rows, expected = torch.tensor([4, 0, 3]), logits.clone()
    reference.apply_bitmask(expected, words, rows)
    apply_bitmask(logits, words, rows)
    assert torch.equal(logits, expected)
