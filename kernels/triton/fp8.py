"""8-bit floats (e4m3) in uint8 words, coded with integer arithmetic: the same bits on every device.

Devices before sm_89 have no conversion of their own, and the interpreter has none for any.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def encode_e4m3(x: tl.tensor) -> tl.tensor:
    """float32 to e4m3, to nearest even; beyond 448 it saturates, NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    bounded = tl.minimum(magnitude, 0x47000000)
    normal = ((bounded + 0x7FFFF + ((bounded >> 20) & 1)) >> 20) - 960
    # Adding 2**14 leaves a float32 whose last bit is worth 2**-9, the step of e4m3 below 2**-6.
    shifted = bounded.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(bounded < 0x3C800000, subnormal, normal), 0x7E)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def decode_e4m3(code: tl.tensor) -> tl.tensor:
    """e4m3 to float16, exact."""
    wide = code.to(tl.int16)
    magnitude = wide & 0x7F
    # Exponent and mantissa land in their places; the smaller bias of e4m3 is worth 2**8.
    half = (((wide & 0x80) << 8) | (magnitude << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where(magnitude == 0x7F, float("nan"), half).to(tl.float16)
