// One vector of float32 lanes for whatever the compiler targets, and the two products everything rests on.
//
//   AVX-512   16 lanes; vdpbf16ps and vpdpbusd where the machine has them
//   AVX2       8 lanes; the same results as AVX-512 without those instructions would give
//
// Nothing here branches on the number of rows of a batch: a row's result is the same in any company.

#pragma once

#include <immintrin.h>

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

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define TROUPE_AVX512 1
#endif

#ifdef TROUPE_AVX512

constexpr int kLanes = 16;
using Vec = __m512;
using VecInt = __m512i;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
// The second operand where either is NaN.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec abs(Vec a) { return _mm512_abs_ps(a); }
// a * b + c
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
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

inline Vec widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

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

inline Vec load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
inline void store(bf16* p, Vec x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
inline Vec load_first(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
inline void store_first(bf16* p, Vec x, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(x)); }

inline VecInt zero_int() { return _mm512_setzero_si512(); }
inline VecInt splat_int(int32_t x) { return _mm512_set1_epi32(x); }
inline VecInt load_int(const void* p) { return _mm512_loadu_si512(p); }
inline VecInt load_int_first(const void* p, int n) { return _mm512_maskz_loadu_epi32(first_lanes(n), p); }
inline void store_int(void* p, VecInt x) { _mm512_storeu_si512(p, x); }
inline Vec to_vec(VecInt x) { return _mm512_cvtepi32_ps(x); }
inline VecInt to_int(Vec x) { return _mm512_cvtps_epi32(x); }
inline VecInt add_int(VecInt a, VecInt b) { return _mm512_add_epi32(a, b); }
inline VecInt sub_int(VecInt a, VecInt b) { return _mm512_sub_epi32(a, b); }
inline VecInt max_int(VecInt a, VecInt b) { return _mm512_max_epi32(a, b); }
inline Vec as_float(VecInt x) { return _mm512_castsi512_ps(x); }
inline VecInt as_int(Vec x) { return _mm512_castps_si512(x); }
inline VecInt or_int(VecInt a, VecInt b) { return _mm512_or_si512(a, b); }
inline VecInt xor_int(VecInt a, VecInt b) { return _mm512_xor_si512(a, b); }
inline VecInt shift_left_7(VecInt x) { return _mm512_slli_epi32(x, 7); }
inline VecInt shift_left_16(VecInt x) { return _mm512_slli_epi32(x, 16); }
inline VecInt shift_right_16(VecInt x) { return _mm512_srli_epi32(x, 16); }
inline VecInt upper_16(VecInt x) { return _mm512_and_si512(x, _mm512_set1_epi32(int32_t(0xffff0000u))); }

#else  // AVX2

constexpr int kLanes = 8;
using Vec = __m256;
using VecInt = __m256i;

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec splat(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec abs(Vec a) { return _mm256_andnot_ps(splat(-0.0f), a); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec round(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec floor(Vec a) { return _mm256_floor_ps(a); }
// In two steps, so that 2^n itself may lie outside the range of a float.
inline Vec scale_by_power(Vec a, Vec n) {
    __m256i whole = _mm256_cvtps_epi32(n);
    __m256i half = _mm256_srai_epi32(whole, 1);
    __m256i rest = _mm256_sub_epi32(whole, half);
    __m256i bias = _mm256_set1_epi32(127);
    __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
    return _mm256_mul_ps(_mm256_mul_ps(a, first), second);
}
inline float sum(Vec a) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_of(Vec a) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec load_first(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
inline void store_first(float* p, Vec x, int n) { _mm256_maskstore_ps(p, first_lanes(n), x); }
inline Vec keep_first(Vec x, int n, float fill) {
    return n >= kLanes ? x : _mm256_blendv_ps(splat(fill), x, _mm256_castsi256_ps(first_lanes(n)));
}
inline Vec drop_first(Vec x, int n, float fill) {
    return _mm256_blendv_ps(x, splat(fill), _mm256_castsi256_ps(first_lanes(n)));
}

inline Vec widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }

inline __m128i narrow(Vec x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}

inline Vec load(const bf16* p) { return widen(_mm_loadu_si128((const __m128i*)p)); }
inline void store(bf16* p, Vec x) { _mm_storeu_si128((__m128i*)p, narrow(x)); }
inline Vec load_first(const bf16* p, int n) {
    bf16 lanes[kLanes] = {};
    std::memcpy(lanes, p, n * sizeof(bf16));
    return load(lanes);
}
inline void store_first(bf16* p, Vec x, int n) {
    bf16 lanes[kLanes];
    store(lanes, x);
    std::memcpy(p, lanes, n * sizeof(bf16));
}

inline VecInt zero_int() { return _mm256_setzero_si256(); }
inline VecInt splat_int(int32_t x) { return _mm256_set1_epi32(x); }
inline VecInt load_int(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline VecInt load_int_first(const void* p, int n) {
    return _mm256_maskload_epi32(static_cast<const int32_t*>(p), first_lanes(n));
}
inline void store_int(void* p, VecInt x) { _mm256_storeu_si256((__m256i*)p, x); }
inline Vec to_vec(VecInt x) { return _mm256_cvtepi32_ps(x); }
inline VecInt to_int(Vec x) { return _mm256_cvtps_epi32(x); }
inline VecInt add_int(VecInt a, VecInt b) { return _mm256_add_epi32(a, b); }
inline VecInt sub_int(VecInt a, VecInt b) { return _mm256_sub_epi32(a, b); }
inline VecInt max_int(VecInt a, VecInt b) { return _mm256_max_epi32(a, b); }
inline Vec as_float(VecInt x) { return _mm256_castsi256_ps(x); }
inline VecInt as_int(Vec x) { return _mm256_castps_si256(x); }
inline VecInt or_int(VecInt a, VecInt b) { return _mm256_or_si256(a, b); }
inline VecInt xor_int(VecInt a, VecInt b) { return _mm256_xor_si256(a, b); }
inline VecInt shift_left_7(VecInt x) { return _mm256_slli_epi32(x, 7); }
inline VecInt shift_left_16(VecInt x) { return _mm256_slli_epi32(x, 16); }
inline VecInt shift_right_16(VecInt x) { return _mm256_srli_epi32(x, 16); }
inline VecInt upper_16(VecInt x) { return _mm256_and_si256(x, _mm256_set1_epi32(int32_t(0xffff0000u))); }

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
#ifdef TROUPE_AVX512
    return _mm512_mask_mov_ps(result, _mm512_cmp_ps_mask(x, splat(-87.3f), _CMP_LT_OQ), zero());
#else
    return _mm256_andnot_ps(_mm256_cmp_ps(x, splat(-87.3f), _CMP_LT_OQ), result);
#endif
}

inline Vec tanh(Vec x) {
    Vec e = exp(mul(splat(2.0f), x));
    return sub(splat(1.0f), div(splat(2.0f), add(e, splat(1.0f))));
}

}  // namespace troupe
