"""Native products against float64, and against themselves in other company."""

from dataclasses import replace

import pytest
import torch

from kernels.cpu.native_ops import NativeOps
from kernels.cpu.weights import NativeWeight, WeightKind, make_convert, unpack, unpack_rows
from kernels.grouped import Bits, Form, GroupedInt, StackedRows, align, round_grouped
from kernels.ops import Quantization
from kernels.torch.linear import GroupedIntWeight
from tests.kernels.cpu.conftest import require_library

SHAPES = [(1, 1), (33, 2), (64, 64), (100, 63), (300, 131), (96, 1000)]  # (out, in)
ROWS = [1, 2, 5, 6, 7, 13, 64, 100]
KINDS = ["float32", "half", "bfloat16", "int8", "int8-bfloat16", "int6", "int4", "int4-bfloat16"]


@pytest.fixture
def ops(product_ops: NativeOps) -> NativeOps:
    return product_ops


def make(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_operands(kind: str, rows: int, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations and weights for one kind of product."""
    x, weight = make(rows, shape[1]), make(*shape, seed=1) * 0.1
    if kind == "half":
        weight = weight.bfloat16().float()
    if kind.endswith("bfloat16"):
        x, weight = x.bfloat16(), weight.bfloat16()
    return x, weight


def pack(ops: NativeOps, kind: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> NativeWeight:
    quantizations: dict[str, Quantization] = {"int8": "int8", "int6": "int6", "int4": "int4"}
    return ops.pack_linear(weight, bias, quantizations.get(kind[:4]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["float32", "half", "bfloat16"])
def test_equals_the_exact_product(ops: NativeOps, kind: str, shape: tuple[int, int]) -> None:
    tolerance = 2e-2 if kind == "bfloat16" else 3e-5
    for rows in ROWS:
        x, weight = make_operands(kind, rows, shape)
        bias = make(shape[0], seed=2).to(x.dtype)
        expected = x.double() @ weight.double().T + bias.double()
        actual = ops.linear(x, pack(ops, kind, weight, bias), bias)
        assert actual.dtype == x.dtype
        torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.008), ("int8-bfloat16", 0.009), ("int6", 0.03), ("int4", 0.08)])
def test_quantized_products_are_close_to_the_exact_one(ops: NativeOps, kind: str, most: float) -> None:
    x, weight = make_operands(kind, 64, (300, 1000))
    expected = x.double() @ weight.double().T
    actual = ops.linear(x, pack(ops, kind, weight), None).double()
    assert (actual - expected).norm() / expected.norm() < most


def make_grouped(shape: tuple[int, int], bits: Bits, group_size: int, is_centred: bool) -> GroupedInt:
    weight = round_grouped(make(*shape, seed=1) * 0.1, bits, group_size)
    if bits == 4 and is_centred:
        return replace(weight, codes=weight.codes - 8, minimums=None)
    return weight.convert(Form(bits, group_size, is_centred))


@pytest.mark.parametrize(
    ("bits", "group_size", "is_centred"),
    [
        (4, 32, False), (4, 32, True), (4, 64, True), (4, 128, False), (6, 32, True), (6, 64, False), (8, 32, False),
        (8, 128, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", SHAPES)
def test_grouped_codes_give_the_product_of_rounded_operands(
    ops: NativeOps, shape: tuple[int, int], bits: Bits, group_size: int, is_centred: bool
) -> None:
    """Shapes whose inputs do not fill their last group too; torch's form of it, which has a bias of its own."""
    weight = make_grouped(shape, bits, group_size, is_centred)
    bias = make(shape[0], seed=2)
    packed = ops.pack_linear(weight, bias, None)
    twin = GroupedIntWeight(weight)
    for rows in ROWS:
        x = make(rows, shape[1])
        torch.testing.assert_close(ops.linear(x, packed, bias), twin.multiply(x, bias), atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize(("bits", "code"), [(4, 15), (4, -8), (6, 63), (6, -32), (8, 127), (8, -128)])
def test_sums_of_the_largest_codes_and_activations_are_exact(ops: NativeOps, bits: Bits, code: int) -> None:
    """Products are summed in 16 bits where the machine has no wider instruction."""
    codes = torch.full((40, 256), code, dtype=torch.int8)
    weight = GroupedInt(codes, torch.ones(40, 2), torch.zeros(40, 2) if code in (15, 63) else None, 128, bits)
    x = torch.tensor([[127.0], [-127.0]]).expand(2, 256).contiguous()
    out = ops.linear(x, ops.pack_linear(weight, None, None), None)
    assert torch.equal(out, 256 * code * torch.tensor([[127.0], [-127.0]]).expand(2, 40))


@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_codes_and_scales_survive_packing(ops: NativeOps, bits: Bits, is_centred: bool) -> None:
    weight = make_grouped((100, 131), bits, 32, is_centred)
    packed = ops.pack_linear(weight, None, None)
    assert torch.equal(unpack(ops.library, ops.pool, packed), weight.dequantize())
    ids = torch.tensor([99, 0, 33])
    assert torch.equal(unpack_rows(ops.library, ops.pool, packed, ids), weight.dequantize()[ids])


@pytest.mark.parametrize("is_centred", [False, True])
def test_a_stack_of_other_forms_keeps_its_values(ops: NativeOps, is_centred: bool) -> None:
    parts = [make_grouped((5, 70), bits, size, is_centred) for bits, size in ((4, 64), (6, 32), (8, 32))]
    parts += [] if is_centred else [make_grouped((5, 70), 6, 32, True)]
    stacked = StackedRows(align(parts, 8))
    assert stacked.form == Form(8, 32, is_centred)
    expected = torch.cat([part.dequantize() for part in parts])
    actual = unpack(ops.library, ops.pool, ops.pack_linear(stacked, None, None))
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-3)


def test_int4_has_a_smaller_error_than_levels_between_the_least_and_the_greatest_weight() -> None:
    weight = make(9, 200)
    rounded = round_grouped(weight, 4)
    assert (rounded.codes.min(), rounded.codes.max()) == (0, 15)
    groups = torch.nn.functional.pad(weight, (0, 24)).unflatten(1, (-1, 32))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    step = (high - low) / 15
    plain = (((groups - low) / step).round() * step + low - groups).square().sum()
    assert (rounded.dequantize() - weight).square().sum() < 0.9 * plain


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_codes_rounded_again_stay_as_they_are(bits: Bits) -> None:
    first = round_grouped(make(20, 96), bits).dequantize()
    torch.testing.assert_close(round_grouped(first, bits).dequantize(), first, atol=2e-3, rtol=0)


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 128), (6, 32), (8, 64)])
@pytest.mark.parametrize("columns", [96, 131])
def test_rounding_gives_the_bits_of_torch(ops: NativeOps, bits: Bits, group_size: int, columns: int) -> None:
    weight = make(300, columns) * torch.logspace(-9, 5, 300).unsqueeze(1)
    weight[100:140] += 1000.0
    weight[140:180].clamp_(min=0.0)
    weight[180:220, 5] *= 1e3
    weight[:8] = torch.tensor([0.0, 1e-7, 3000.7, -1e6, 1e30, -1e-40, torch.inf, -0.0]).unsqueeze(1)
    weight[8, 40], weight[9, 40], weight[10, 40], weight[11] = torch.nan, torch.inf, -torch.inf, 1e-42 * make(columns)
    found = make_convert(ops.library, ops.pool).round(weight, bits, group_size)
    wanted = round_grouped(weight, bits, group_size)
    assert found.form == wanted.form and torch.equal(found.codes, wanted.codes)
    for mine, other in ((found.scales, wanted.scales), (found.minimums, wanted.minimums)):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert torch.equal(mine.nan_to_num(1.5, 1e5, -1e5), other.float().nan_to_num(1.5, 1e5, -1e5))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_rows_beside_it(ops: NativeOps, kind: str) -> None:
    x, weight = make_operands(kind, 100, (300, 131))
    packed = pack(ops, kind, weight)
    together = ops.linear(x, packed, None)
    for rows in ROWS:
        for start in (0, 100 - rows):
            part = ops.linear(x[start : start + rows], packed, None)
            assert torch.equal(part, together[start : start + rows])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_threads", [1, 3, 8])
def test_the_number_of_threads_does_not_matter(native: NativeOps, num_threads: int, kind: str) -> None:
    x, weight = make_operands(kind, 20, (300, 131))
    other = NativeOps(require_library(), num_threads)
    expected = native.linear(x, pack(native, kind, weight), None)
    assert torch.equal(other.linear(x, pack(other, kind, weight), None), expected)


def test_weights_that_bfloat16_holds_take_half_the_memory_and_give_the_same_bits(ops: NativeOps) -> None:
    x, weight = make_operands("half", 20, (300, 131))
    half = ops.pack_linear(weight, None, None)
    assert half.kind == WeightKind.FLOAT32_HALF
    # one weight that does not fit, in a row of its own
    spoiled = torch.cat((weight, torch.full((1, 131), 1 + 2**-20)))
    full = ops.pack_linear(spoiled, None, None)
    assert full.kind == WeightKind.FLOAT32
    assert full.num_bytes > 1.9 * half.num_bytes
    assert torch.equal(ops.linear(x, full, None)[:, :300], ops.linear(x, half, None))


@pytest.mark.parametrize("kind", ["float32", "half", "bfloat16"])
def test_unpacking_returns_the_matrix(ops: NativeOps, kind: str) -> None:
    _, weight = make_operands(kind, 1, (100, 63))
    unpacked = unpack(ops.library, ops.pool, pack(ops, kind, weight))
    assert unpacked.dtype == weight.dtype
    assert torch.equal(unpacked, weight)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_in_its_row_and_column_and_is_never_lost(ops: NativeOps, kind: str) -> None:
    """Integers have no NaN: taken for a zero it would make wrong tokens, and no error."""
    x, weight = make_operands(kind, 7, (40, 131))
    x[2, 5] = x[4, 130] = weight[7, 3] = weight[9, 129] = torch.nan
    out = ops.linear(x, pack(ops, kind, weight), None)
    expected = torch.zeros(7, 40, dtype=torch.bool)
    expected[[2, 4]] = True
    expected[:, [7, 9]] = True
    assert torch.equal(out.isnan(), expected)


def test_no_rows_are_no_work(native: NativeOps) -> None:
    packed = native.pack_linear(make(40, 64), None, None)
    assert native.linear(torch.empty(0, 64), packed, None).shape == (0, 40)


def test_other_quantizations_are_refused(native: NativeOps) -> None:
    with pytest.raises(ValueError, match=r"quantization='fp8' is not available.*int8, int4"):
        native.pack_linear(make(40, 64), None, "fp8")


def test_other_dtypes_are_refused(native: NativeOps) -> None:
    with pytest.raises(ValueError, match=r"not torch\.float16"):
        native.pack_linear(make(40, 64).half(), None, None)
