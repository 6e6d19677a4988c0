"""Products with packed weights: unchanged values, int8 against its slow twin, and what float8 and int4 keep."""

import pytest
import torch
from torch import Tensor

from kernels import torch as torch_ops
from kernels.torch.linear import ScaledWeight, round_rows
from tests.kernels import reference

OPS = torch_ops.make_ops()
DTYPES = [torch.float32, torch.bfloat16]


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True)
def product_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the matrices of int8 products, here exact as CUDA's: those of a CPU with AVX2 saturate in 16 bits."""
    sizes: list[int] = []

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        sizes.extend(b.shape)
        return (a.long() @ b.long()).int()

    monkeypatch.setattr(torch, "_int_mm", multiply)
    return sizes


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_matrix_keeps_its_values(dtype: torch.dtype) -> None:
    weight = make(30, 20, dtype=dtype)
    packed = OPS.pack_linear(weight, None, None)
    assert torch.equal(OPS.unpack_linear(packed), weight)
    x, bias = make(5, 20, dtype=dtype, seed=1), make(30, dtype=dtype, seed=2)
    expected = (x.float() @ weight.float().t() + bias.float()).to(dtype)
    torch.testing.assert_close(OPS.linear(x, packed, bias), expected, atol=4e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 17, 63])
def test_int8_equals_its_slow_twin(num_tokens: int, has_bias: bool, dtype: torch.dtype) -> None:
    weight, x = make(48, 100, dtype=dtype), make(num_tokens, 100, dtype=dtype, seed=1)
    bias = make(48, dtype=dtype, seed=2) if has_bias else None
    actual = ScaledWeight(weight, torch.int8).multiply(x, bias)
    assert actual.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 6e-2
    torch.testing.assert_close(actual, reference.linear_int8(x, weight, bias), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (9, 16), (16, 9), (50, 57)])
def test_int8_of_any_size_multiplies_in_sizes_that_cuda_takes(
    product_sizes: list[int], num_outputs: int, num_inputs: int
) -> None:
    """Its product wants both sizes of the matrix in eights; a vocabulary may be 50,257."""
    weight, x, bias = make(num_outputs, num_inputs), make(3, num_inputs, seed=1), make(num_outputs, seed=2)
    packed = ScaledWeight(weight, torch.int8)
    result = packed.multiply(x, bias)
    assert product_sizes and all(size % 8 == 0 for size in product_sizes)
    assert result.is_contiguous() and packed.unpack().shape == weight.shape
    torch.testing.assert_close(result, reference.linear_int8(x, weight, bias), atol=1e-4, rtol=1e-4)


def test_int8_rounds_weights_and_activations_no_further_than_half_a_step() -> None:
    for each in (make(9, 64), make(9, 64) * 1e-6, make(9, 64) * 1e6):
        values, scales = round_rows(each, 127.0)
        assert values.dtype == torch.int8
        assert values.abs().amax(dim=1).eq(127).all()
        assert ((values * scales - each).abs() <= scales * 0.5001).all()


def test_a_row_of_zeros_stays_zero_in_int8() -> None:
    weight = make(4, 8)
    weight[1] = 0
    packed = ScaledWeight(weight, torch.int8)
    result = packed.multiply(torch.cat((make(1, 8), torch.zeros(1, 8))), None)
    assert (result[0, 1], result[1].abs().sum()) == (0, 0)
    assert result.isfinite().all()


def test_a_row_does_not_depend_on_the_rows_beside_it_in_int8() -> None:
    packed, x = ScaledWeight(make(24, 32), torch.int8), make(7, 32, seed=1)
    together = packed.multiply(x, None)
    assert all(torch.equal(packed.multiply(x[i : i + 1], None)[0], together[i]) for i in range(7))


def test_float8_keeps_three_bits_of_each_value() -> None:
    values, scales = round_rows(make(9, 64), 448.0, torch.float8_e4m3fn)
    assert values.dtype == torch.float8_e4m3fn
    error = (values.float() * scales - make(9, 64)).abs()
    assert (error <= make(9, 64).abs() / 16 + scales * 2**-9).all()


@pytest.mark.parametrize(
    ("shape", "dtype", "quantization", "message"),
    [((30, 32), torch.bfloat16, "fp8", "divisible by 16")],
)
def test_a_matrix_that_does_not_fit_is_refused(
    shape: tuple[int, int], dtype: torch.dtype, quantization: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        OPS.pack_linear(make(*shape, dtype=dtype), None, quantization)  # type: ignore[arg-type]
