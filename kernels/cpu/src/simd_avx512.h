// Sixteen float32 lanes, and vdpbf16ps and vpdpbusd where the machine has them.

#pragma once

#include <immintrin.h>

namespace troupe {

constexpr int kLanes = 16;
using Vec = __m512;
using VecInt = __m512i;
using HalfVec = __m256i;

}  // namespace troupe

#define TROUPE_V(name) _mm512_##name
#define TROUPE_W(name) _mm512_##name##_si512
#define TROUPE_HALF(name) _mm256_##name##_si256
#include "simd_x86.h"

namespace troupe {

inline Vec abs(Vec a) { return _mm512_abs_ps(a); }
inline Vec round(Vec a) { return _mm512_roundscale_ps(a, 0); }
inline Vec floor(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEG_INF); }
// a * 2^n for whole n
inline Vec scale_by_power(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }
inline float sum(Vec a) { return _mm512_reduce_add_ps(a); }
inline float max_of(Vec a) { return _mm512_reduce_max_ps(a); }

inline __mmask16 first_lanes(int n) { return __mmask16((1u << n) - 1); }
inline Vec load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void store_first(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
// Lanes [n, 16) become `fill`.
inline Vec keep_first(Vec x, int n, float fill) {
    return n >= kLanes ? x : _mm512_mask_mov_ps(splat(fill), first_lanes(n), x);
}
// Lanes [0, n) become `fill`.
inline Vec drop_first(Vec x, int n, float fill) { return _mm512_mask_mov_ps(x, first_lanes(n), splat(fill)); }

inline Vec zero_below(Vec result, Vec x, float limit) {
    return _mm512_mask_mov_ps(result, _mm512_cmp_ps_mask(x, splat(limit), _CMP_LT_OQ), zero());
}

inline __m256i narrow(Vec x) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

inline void store(bf16* p, Vec x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
inline Vec load_first(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
inline void store_first(bf16* p, Vec x, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(x)); }

inline VecInt load_int_first(const void* p, int n) { return _mm512_maskz_loadu_epi32(first_lanes(n), p); }

inline VecInt multiply_signed(VecInt codes, VecInt x) {
    VecInt turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(codes), zero_int(), x);
    return _mm512_maddubs_epi16(_mm512_abs_epi8(codes), turned);
}
#ifdef __AVX512VNNI__
#define TROUPE_DOT 1
constexpr bool kDotIsSigned = false;
// Four products of unsigned and signed bytes in each lane.
inline VecInt add_products(VecInt sum, VecInt codes, VecInt x) { return _mm512_dpbusd_epi32(sum, codes, x); }
#endif
// Round to int8; the values are within its range.
inline void store_bytes(uint8_t* p, Vec x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(to_int(x))); }

#ifdef __AVX512BF16__
#define TROUPE_BF16 1
// Two products of bfloat16 in each lane.
inline Vec add_bf16_products(Vec sum, VecInt x, VecInt w) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w); }
#endif

}  // namespace troupe
