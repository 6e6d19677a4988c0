"""Low-rank products of adapters on native ops: against torch, bit for bit in any company."""

import pytest
import torch

from kernels.cpu.native_ops import NativeOps
from kernels.lora import LoraSegment, add_lora
from tests.kernels.adapters import make_lora_matrix

# outputs, inputs, and (start, width, rank) of the parts
SHAPES = [
    (96, 64, [(0, 96, 16)]), (100, 63, [(0, 33, 1), (50, 50, 7)]),
    (577, 1000, [(0, 512, 9), (512, 1, 3), (513, 64, 32)]),
]


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_adapters_add_what_torch_adds(
    ops: NativeOps,
    shape: tuple[int, int, list[tuple[int, int, int]]],
    dtypes: tuple[str, str],
    weights: torch.dtype,
) -> None:
    native = ops.make_ops()
    x_dtype, y_dtype = (getattr(torch, name) for name in dtypes)
    x = torch.randn(90, shape[1]).to(x_dtype)
    y = torch.randn(90, shape[0]).to(y_dtype)
    rows = torch.randperm(90)[:77]
    matrices = [make_lora_matrix(*shape, seed, weights) for seed in range(3)]
    bounds = [(0, 1), (1, 7), (8, 77)]  # place 7 has an adapter that does not change this matrix
    expected, found = y.clone(), y.clone()
    add_lora(expected, x, rows, [LoraSegment(m, *b) for m, b in zip(matrices, bounds, strict=True)])
    packed = [native.pack_lora(matrix) for matrix in matrices]
    native.add_lora(found, x, rows, [LoraSegment(m, *b) for m, b in zip(packed, bounds, strict=True)])
    scale = expected.abs().max().item()
    tolerance = scale * (1e-5 if y_dtype == torch.float32 else 8e-3)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    untouched = torch.ones(90, dtype=torch.bool)
    untouched[torch.cat([rows[start:end] for start, end in bounds])] = False
    assert torch.equal(found[untouched], y[untouched])
    for matrix, (start, end) in zip(packed, bounds, strict=True):
        for place in {start, (start + end) // 2, end - 1}:
            alone = y.clone()
            native.add_lora(alone, x, rows[place : place + 1], [LoraSegment(matrix, 0, 1)])
            assert torch.equal(alone[rows[place]], found[rows[place]])
