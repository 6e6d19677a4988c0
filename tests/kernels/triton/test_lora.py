"""The products of adapters as Triton computes them, against torch, and in any company."""

import gc
import weakref

import pytest
import torch

from kernels.lora import LoraSegment, add_lora
from kernels.triton.lora import LoraOp
from tests.kernels.adapters import make_lora_matrix


def test_tables_keep_no_adapter_and_are_never_those_of_another(device: torch.device) -> None:
    op, matrix = LoraOp(torch.float32), make_lora_matrix(100, 300, [(0, 100, 16)], 0, device=device)
    first = op.pack(matrix)
    table = op._find_table([LoraSegment(first, 0, 1)], 1, device)
    assert op._find_table([LoraSegment(first, 0, 1)], 1, device) is table
    key, dropped = next(iter(op._tables)), weakref.ref(first)
    del first
    gc.collect()
    assert dropped() is None
    second = op.pack(matrix)
    op._tables = {(key[0], (id(second), 0, 1)): table}  # as if it had the address of the first
    assert op._find_table([LoraSegment(second, 0, 1)], 1, device) is not table


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
    for _ in range(2):  # the second time from the table
        found = y.clone()
        op.add(found, x, rows, [LoraSegment(m, *b) for m, b in zip(packed, bounds, strict=True)])
    tolerance = expected.float().abs().max().item() * (1e-5 if dtype == torch.float32 else 5e-3)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    assert torch.equal(found[[2, 4, 5, 6]], y[[2, 4, 5, 6]])
    alone = y.clone()
    op.add(alone, x, rows[2:3], [LoraSegment(packed[1], 0, 1)])
    assert torch.equal(alone[3], found[3])
