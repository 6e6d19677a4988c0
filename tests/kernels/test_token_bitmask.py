"""Unpacking of token masks, bit by bit."""

import numpy as np
import pytest
import torch

from kernels.torch.sampling import FEW_ELEMENTS, apply_bitmask, unpack_bitmask
from tests.kernels import reference


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 63, 100, 1000])
@pytest.mark.parametrize("extra_words", [-1, 0, 1])
def test_unpacked_bits_are_the_tokens_of_the_mask(vocab_size: int, extra_words: int) -> None:
    num_words = max(1, -(-vocab_size // 32) + extra_words)
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (3, num_words)).astype(np.int32)
    allowed = unpack_bitmask(torch.from_numpy(words), vocab_size)
    for row in range(3):
        for token_id in range(vocab_size):
            word = int(words[row, token_id // 32]) if token_id // 32 < num_words else 0
            assert bool(allowed[row, token_id]) == bool(word >> (token_id % 32) & 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("vocab_size", [1, 63, 1000])
def test_cuda_unpacks_the_same_bits(vocab_size: int) -> None:
    words = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), dtype=torch.int32)
    assert torch.equal(unpack_bitmask(words.cuda(), vocab_size).cpu(), unpack_bitmask(words, vocab_size))


@pytest.mark.parametrize("vocab_size", [70, FEW_ELEMENTS // 2], ids=["few", "many"])
def test_what_a_mask_forbids_is_minus_infinity_and_nothing_else_changes(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(3, vocab_size, generator=generator)
    bitmask = torch.randint(-(2**31), 2**31, (3, vocab_size // 32), generator=generator).int()
    expected = logits.clone()
    reference.apply_bitmask(expected, bitmask)
    apply_bitmask(logits, bitmask)
    assert torch.equal(logits, expected)
