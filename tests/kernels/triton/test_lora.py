"""The products of adapters as Triton computes them, against torch, and in any company."""

import pytest
import torch

from kernels.lora import LoraLimits, LoraSegment, add_lora
from kernels.triton.lora import LoraOp
from tests.kernels.adapters import make_lora_matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_adapters_add_what_torch_adds_and_rows_do_not_depend_on_others(
    device: torch.device, dtype: torch.dtype
) -> None:
    op = LoraOp(dtype)
    sizes = [[(0, 100, 16)], [(3, 1, 1), (36, 64, 20)], [(0, 36, 3), (40, 60, 7)]]
    matrices = [make_lora_matrix(100, 300, each, seed, device=device) for seed, each in enumerate(sizes)]
    packed = [op.pack(matrix) for matrix in matrices]
    x, y = torch.randn(9, 300, device=device).to(dtype), torch.randn(9, 100, device=device).to(dtype)
    rows = torch.tensor([8, 0, 3, 5, 1, 7], device=device)
    bounds = [(0, 1), (1, 3), (4, 6)]  # the row at place 3 has another adapter, which changes nothing here
    expected, found = y.clone(), y.clone()
    add_lora(expected, x, rows, [LoraSegment(m, *b) for m, b in zip(matrices, bounds, strict=True)])
    op.add(found, x, rows, [LoraSegment(m, *b) for m, b in zip(packed, bounds, strict=True)])
    tolerance = expected.float().abs().max().item() * (1e-5 if dtype == torch.float32 else 5e-3)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    assert torch.equal(found[[2, 4, 5, 6]], y[[2, 4, 5, 6]])
    alone = y.clone()
    op.add(alone, x, rows[2:3], [LoraSegment(packed[1], 0, 1)])
    assert torch.equal(alone[3], found[3])
    # A recorded step goes through all rows, and its table has room for larger adapters.
    limits = LoraLimits(3, 24, 100)
    table, numbers = torch.zeros(4, limits.num_words, dtype=torch.int64), torch.full((9,), 3)
    for number, (each, (start, end)) in enumerate(zip(packed, bounds, strict=True)):
        entry = op.encode(each)
        table[number, : len(entry)] = torch.tensor(entry)
        numbers[rows[start:end].cpu()] = number
    recorded = y.clone()
    op.add_listed(recorded, x, torch.arange(9, device=device), numbers.to(device), table.to(device), limits)
    assert torch.equal(recorded, found)
