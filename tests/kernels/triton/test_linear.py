"""Products with matrices in codes, and gated ones, against the numbers that the codes stand for."""

import pytest
import torch
from torch import Tensor

from kernels.grouped import Bits, ChangedRows, Form, GroupedInt, StackedRows, round_grouped
from kernels.scaled import FP8, FP8_GROUP, ScaledTensor, round_float8
from kernels.torch.linear import round_rows as round_expected
from kernels.triton.linear import gated_linear, linear, pack_linear, unpack_linear, unpack_rows
from kernels.triton.products import FEW_ROWS
from kernels.triton.round_rows import round_rows
from tests.kernels import reference
from tests.kernels.triton.batches import TOLERANCE

pytestmark = pytest.mark.gpu


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_codes(num_outputs: int, num_inputs: int, bits: Bits, group_size: int, is_centred: bool) -> GroupedInt:
    codes = round_grouped(make(num_outputs, num_inputs) / num_inputs**0.5, bits, group_size)
    if is_centred and bits == 4:
        scales = codes.scales.abs()
        return GroupedInt(codes.codes - 8, scales, None, group_size, 4)
    return codes if is_centred == codes.form.is_centred else codes.convert(Form(bits, group_size, is_centred))


@pytest.mark.parametrize(
    ("bits", "group_size", "is_centred"), [(4, 32, False), (4, 128, True), (6, 32, True), (8, 96, False)]
)
@pytest.mark.parametrize(
    ("dtype", "num_rows", "num_outputs", "num_inputs"),
    [(torch.float32, 1, 70, 63), (torch.float16, 3, 34, 200), (torch.float32, 20, 130, 320)],
)
def test_codes_are_multiplied_as_their_numbers(
    device: torch.device, dtype: torch.dtype, bits: Bits, group_size: int, is_centred: bool,
    num_rows: int, num_outputs: int, num_inputs: int,
) -> None:  # fmt: skip
    """Sizes that fill no tile, groups that divide no row, and a bias."""
    codes = make_codes(num_outputs, num_inputs, bits, group_size, is_centred)
    packed = pack_linear(codes, None, None, device=device)
    numbers, x, bias = codes.dequantize(), make(num_rows, num_inputs, seed=1).to(dtype), make(num_outputs).to(dtype)
    torch.testing.assert_close(unpack_linear(packed).cpu(), numbers, atol=1e-3, rtol=1e-3)
    expected = x.float() @ numbers.to(dtype).float().t() + bias.float()
    found = linear(x.to(device), packed, bias.to(device))
    tolerance = 4 * TOLERANCE[dtype]
    torch.testing.assert_close(found.cpu().float(), expected, atol=tolerance, rtol=tolerance)
    assert found.dtype == dtype


def make_scaled(num_outputs: int, num_inputs: int, kind: str) -> ScaledTensor:
    """A matrix of a checkpoint: scales per matrix, per output, or per block of 128 x 128."""
    block = (128, 128) if kind == "block" else None
    shape = {"matrix": (1,), "output": (num_outputs, 1), "block": (-(-num_outputs // 128), -(-num_inputs // 128))}
    values = (make(num_outputs, num_inputs) * 100).clamp(-448, 448).to(FP8)
    return ScaledTensor(values, make(*shape[kind], seed=3).abs() / 1000, block)


@pytest.mark.parametrize("kind", ["matrix", "output", "block"])
@pytest.mark.parametrize(
    ("dtype", "num_rows", "num_outputs", "num_inputs"),
    [(torch.float32, 1, 70, 96), (torch.float16, 3, 34, 200), (torch.float32, 20, 260, 384)],
)
def test_float8_is_multiplied_with_inputs_of_float8(
    device: torch.device, dtype: torch.dtype, kind: str, num_rows: int, num_outputs: int, num_inputs: int
) -> None:
    """Several parts in an order of their own, sizes that fill no tile, and a bias."""
    part, order = make_scaled(num_outputs, num_inputs, kind), torch.arange(num_outputs).flip(0)
    weight = StackedRows([part, ChangedRows(part, part.form, order)])
    packed = pack_linear(weight, None, None, device=device, has_fp8=True)
    numbers = part.dequantize()
    numbers = torch.cat((numbers, numbers[order]))
    assert torch.equal(unpack_linear(packed).cpu(), numbers)
    x, bias = make(num_rows, num_inputs, seed=1).to(dtype), make(len(numbers)).to(dtype)
    expected = round_float8(x).dequantize().double() @ numbers.double().t() + bias
    found = linear(x.to(device), packed, bias.to(device), torch.float32)
    torch.testing.assert_close(found.cpu().double(), expected, atol=1e-3, rtol=1e-4)


def test_float8_becomes_codes_where_the_device_has_none(device: torch.device) -> None:
    part = make_scaled(34, 200, "block")
    packed = pack_linear(part, None, None, device=device)
    assert not packed.is_float
    torch.testing.assert_close(unpack_linear(packed).cpu(), part.dequantize(), atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("quantization", [None, "int4"])
@pytest.mark.parametrize("num_rows", [3, FEW_ROWS + 1])
def test_gated_products_equal_product_and_gate(device: torch.device, quantization: None, num_rows: int) -> None:
    packed = pack_linear(make(2 * 70, 96) / 10, None, quantization, device=device)
    x, bias = make(num_rows, 96, seed=1), make(140, seed=2)
    expected = reference.silu_mul(x @ unpack_linear(packed).cpu().t() + bias)
    found = gated_linear(x.to(device), packed, bias.to(device))
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)


def test_a_row_does_not_depend_on_the_rows_beside_it(device: torch.device) -> None:
    packed, x = pack_linear(make(96, 160), None, "int4", device=device), make(40, 160, seed=1).to(device)
    assert torch.equal(linear(x[:3], packed, None), linear(x, packed, None)[:3])


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_rows_of_an_embedding_are_read_alone(device: torch.device, quantization: None) -> None:
    packed, ids = pack_linear(make(50, 96), None, quantization, device=device), torch.tensor([7, 0, 49], device=device)
    assert torch.equal(unpack_rows(packed, ids), unpack_linear(packed)[ids])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [1, 100, 1000])
def test_inputs_are_rounded_to_8_bits_as_torch_does(device: torch.device, size: int, dtype: torch.dtype) -> None:
    x = make(5, size).half().to(device)
    x[2] = 0
    x[3] *= torch.tensor([0.5, 1.5], device=device).repeat(size)[:size]
    for found, expected in zip(round_rows(x, 127.0, dtype), round_expected(x, 127.0, dtype), strict=True):
        assert torch.equal(found.float(), expected.float())
    values, scales = round_rows(x, 448.0, FP8, FP8_GROUP)
    expected_groups = round_float8(x.cpu())
    assert torch.equal(values.cpu().float(), expected_groups.values.float())
    assert torch.equal(scales.cpu(), expected_groups.scales)
