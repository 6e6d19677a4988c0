"""Products on the tile registers of AMX: their twin against other products, and the instructions in compiled code."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.cpu import build
from kernels.cpu.native_ops import NativeOps
from tests.kernels.cpu.conftest import TILE_TWIN, require_library

SHAPES = [(1, 1), (33, 2), (100, 63), (70, 64), (300, 131), (96, 1000)]  # (out, in)
INSTRUCTIONS = (*("ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored"), "tdpbf16ps")


@pytest.fixture
def tiles() -> NativeOps:
    return NativeOps(require_library(TILE_TWIN), num_threads=2)


def make_operands(rows: int, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, weights and bias."""
    generator = torch.Generator().manual_seed(rows)
    sizes = ((rows, shape[1]), shape, (shape[0],))
    x, weight, bias = (torch.randn(size, generator=generator) for size in sizes)
    return x.to(dtype), (weight * 0.1).to(dtype), bias.to(dtype)


def sum_pairs(x: Tensor, weight: Tensor) -> Tensor:
    """The sums of TDPBF16PS: 16 pairs at a time, even and odd inputs apart, each step rounded to float32."""
    size = -(-x.shape[1] // 32) * 32
    x, weight = (torch.nn.functional.pad(each.float(), (0, size - each.shape[1])) for each in (x, weight))
    total = torch.zeros(len(x), len(weight))
    for start in range(0, size, 32):
        sums = [torch.zeros_like(total), torch.zeros_like(total)]
        for at in range(start, start + 32):
            # float32 holds a product of two bfloat16 exactly
            sums[at % 2] += x[:, at, None] * weight[None, :, at]
        total += sums[0] + sums[1]
    return total


def test_the_library_says_that_it_has_tiles() -> None:
    assert "AMX" in require_library(TILE_TWIN).isa_name


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_sums_in_the_order_of_the_instruction(tiles: NativeOps, shape: tuple[int, int]) -> None:
    for rows in range(1, 41):
        x, weight, bias = make_operands(rows, shape, torch.bfloat16)
        sums = sum_pairs(x, weight)
        packed, with_bias = (tiles.pack_linear(weight, each, None) for each in (None, bias))
        assert torch.equal(tiles.linear(x, packed, None, torch.float32), sums)
        assert torch.equal(tiles.linear(x, with_bias, bias), (sums + bias.float()).bfloat16())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_float32_product_of_three_is_exact_to_16_bits_in_any_batch(tiles: NativeOps, shape: tuple[int, int]) -> None:
    x, weight, bias = make_operands(40, shape, torch.float32)
    pack = tiles.make_ops().pack_split
    assert pack is not None
    packed = pack(weight, bias, None)
    exact = x.double() @ weight.double().T + bias.double()
    bound = x.double().abs() @ weight.double().abs().T * 2**-15 + 1e-6
    found = tiles.linear(x, packed, bias)
    assert bool(((found - exact).abs() < bound).all())
    for rows in (1, 17, 33):
        assert torch.equal(tiles.linear(x[:rows], packed, bias), found[:rows])
    assert torch.allclose(tiles.make_ops().unpack_linear(packed), weight, rtol=2**-16, atol=0)


def assemble(architecture: str, folder: Path) -> str:
    """The code of the products on tiles; the test is skipped where the compiler does not know the processor."""
    compiler = shutil.which("g++") or pytest.skip("no g++ found")
    source, out = build.SOURCES / "tiles.cpp", folder / "tiles.s"
    command = [compiler, "-std=c++17", "-O1", f"-march={architecture}", "-S", str(source), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    if "bad value" in done.stderr:
        pytest.skip(f"the compiler does not know {architecture}")
    assert done.returncode == 0, done.stderr
    return out.read_text()


def test_a_processor_with_tiles_gets_their_instructions_and_others_none(tmp_path: Path) -> None:
    code = assemble("sapphirerapids", tmp_path)
    assert [each for each in INSTRUCTIONS if f"\t{each}" not in code] == []
    assert "tmm" not in assemble("x86-64-v4", tmp_path)
