// One vector of float32 lanes for whatever the compiler targets, and the two products everything rests on.
//
//   AVX-512   16 lanes; vdpbf16ps and vpdpbusd where the machine has them
//   AVX2       8 lanes; the same results as AVX-512 without those instructions would give
//   NEON       8 lanes; the same results as AVX2, but for bfdot, which it uses where the machine has it
//
// Nothing here branches on the number of rows of a batch: a row's result is the same in any company.

#pragma once

#include <cstdint>
#include <cstring>

namespace troupe {

// The upper half of a float32, as a type of its own so that overloads can tell it from an integer.
struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Rounds to nearest even; a NaN stays one.
inline bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return {uint16_t((bits >> 16) | 0x40)};
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline void from_float(float x, float* out) { *out = x; }
inline void from_float(float x, bf16* out) { *out = to_bf16(x); }

}  // namespace troupe

#ifdef __aarch64__
#include "simd_neon.h"
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define TROUPE_AVX512 1
#include "simd_avx512.h"
#else
#include "simd_avx2.h"
#endif

namespace troupe {

#ifndef TROUPE_AVX512
template <class T>
inline Vec load_first(const T* p, int n) {
    T lanes[kLanes] = {};
    std::memcpy(lanes, p, (n < kLanes ? n : kLanes) * sizeof(T));
    return load(lanes);
}
template <class T>
inline void store_first(T* p, Vec x, int n) {
    T lanes[kLanes];
    store(lanes, x);
    std::memcpy(p, lanes, (n < kLanes ? n : kLanes) * sizeof(T));
}
#endif

// e^x to about 1 ulp; 0 below -87.3 (results would be denormal), NaN for NaN. Source: Cephes expf.
inline Vec exp(Vec x) {
    // Bounds come first: `max` and `min` keep their second operand where it is NaN.
    Vec clamped = max(splat(-88.0f), min(splat(88.0f), x));
    Vec n = round(mul(clamped, splat(1.44269504088896341f)));
    Vec r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    Vec poly = splat(1.9875691500e-4f);
    poly = fma(poly, r, splat(1.3981999507e-3f));
    poly = fma(poly, r, splat(8.3334519073e-3f));
    poly = fma(poly, r, splat(4.1665795894e-2f));
    poly = fma(poly, r, splat(1.6666665459e-1f));
    poly = fma(poly, r, splat(5.0000001201e-1f));
    poly = fma(mul(r, r), poly, add(r, splat(1.0f)));
    Vec result = scale_by_power(poly, n);
    return zero_below(result, x, -87.3f);
}

inline Vec tanh(Vec x) {
    Vec e = exp(mul(splat(2.0f), x));
    return sub(splat(1.0f), div(splat(2.0f), add(e, splat(1.0f))));
}

}  // namespace troupe
