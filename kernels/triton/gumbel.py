"""The noise and the probability mass of `kernels.torch.sampling`, for use inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def make_noise(first_key: tl.tensor, second_key: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise of a row's two key words and its token ids: the hash of `make_gumbel_noise`."""
    hashed = (token_ids ^ first_key).to(tl.uint32, bitcast=True)
    hashed = (hashed ^ (hashed >> 17)) * 0xED5AD4BB + second_key.to(tl.uint32, bitcast=True)
    hashed = (hashed ^ (hashed >> 11)) * 0xAC4C1B51
    hashed = (hashed ^ (hashed >> 15)) * 0x31848BAB
    hashed = (hashed ^ (hashed >> 14)) & 0x7FFFFFFF
    # The factor is the largest float32 below 2**-31.
    negative = (hashed.to(tl.int32).to(tl.float32) + 0.5) * -4.656612595521636e-10
    return -tl.log(-log1p(negative))


@triton.jit
def log1p(x: tl.tensor) -> tl.tensor:
    """Return log(1 + x) to two units in the last place. A factor corrects the rounding of 1 + x.

    Source: Goldberg, 1991, theorem 4.
    """
    grown = 1.0 + x
    is_tiny = grown == 1.0
    return tl.where(is_tiny, x, tl.log(grown) * x / tl.where(is_tiny, 1.0, grown - 1.0))


@triton.jit
def compute_mass(score: tl.tensor) -> tl.tensor:
    """exp(score) in fixed point, 2**40 being 1, as int64; scores are at most 0.

    The exponential is a polynomial, because the device's own is too coarse far from 0.
    """
    bounded = tl.maximum(score, -80.0)
    power = tl.floor(bounded * 1.4426950408889634 + 0.5)
    rest = bounded - power * 0.693359375 - power * -2.12194440e-4
    curve = 1.9875691500e-4
    curve = curve * rest + 1.3981999507e-3
    curve = curve * rest + 8.3334519073e-3
    curve = curve * rest + 4.1665795894e-2
    curve = curve * rest + 1.6666665459e-1
    curve = curve * rest + 5.0000001201e-1
    exponential = curve * (rest * rest) + rest + 1.0
    factor = ((power.to(tl.int32) + (127 + 40)) << 23).to(tl.float32, bitcast=True)
    return (exponential * factor).to(tl.int64)
