"""The fused last product and draw against its slow twin and against the draw over logits."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.torch import sampling
from kernels.triton.lm_head_sample import lm_head_sample
from tests.kernels import reference

pytestmark = pytest.mark.gpu


def make(
    num_rows: int, vocab_size: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows + vocab_size)
    hidden = torch.randn(num_rows, width, generator=generator).to(dtype)
    weight = torch.randn(vocab_size, width, generator=generator).to(dtype)
    keys = torch.from_numpy(sampling.make_row_keys(np.arange(num_rows), np.arange(num_rows) + 3))
    temperature = torch.linspace(0.0, 1.5, num_rows) if num_rows > 1 else torch.ones(1)
    return hidden, weight, keys, temperature


def move(tensors: tuple[Tensor, ...], device: torch.device) -> list[Tensor]:
    return [each.to(device) for each in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_rows", "vocab_size", "width"), [(1, 5, 7), (3, 300, 64), (17, 129, 100)])
def test_draws_equal_the_reference(
    device: torch.device, num_rows: int, vocab_size: int, width: int, dtype: torch.dtype
) -> None:
    tensors = make(num_rows, vocab_size, width, dtype)
    assert lm_head_sample(*move(tensors, device)).tolist() == reference.lm_head_sample(*tensors).tolist()


def test_draws_equal_those_over_logits(device: torch.device) -> None:
    hidden, weight, keys, temperature = make(6, 300, 64, torch.float32)
    temperature += 0.5
    expected = sampling.draw_full(hidden @ weight.t(), keys, temperature, None)
    assert lm_head_sample(*move((hidden, weight, keys, temperature), device)).tolist() == expected.tolist()


def test_a_row_that_is_not_finite_gives_no_token(device: torch.device) -> None:
    hidden, weight, keys, temperature = make(2, 40, 16, torch.float32)
    expected = reference.lm_head_sample(hidden, weight, keys, temperature).tolist()
    hidden[1, 3] = torch.nan
    drawn = lm_head_sample(*move((hidden, weight, keys, temperature), device)).tolist()
    assert drawn == [expected[0], -1]


def test_more_rows_than_a_small_batch_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="at most 64 rows, not 65"):
        lm_head_sample(*move(make(65, 5, 16, torch.float32), device))
