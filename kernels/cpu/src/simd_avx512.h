// Sixteen float32 lanes, and vdpbf16ps and vpdpbusd where the machine has them.

#pragma once

#include <immintrin.h>

namespace troupe {

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

inline Vec zero_below(Vec result, Vec x, float limit) {
    return _mm512_mask_mov_ps(result, _mm512_cmp_ps_mask(x, splat(limit), _CMP_LT_OQ), zero());
}

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
inline VecInt upper_16(VecInt x) { return _mm512_and_si512(x, _mm512_set1_epi32(int32_t(0xffff0000u))); }

template <int COUNT>
inline VecInt shift_right(VecInt w) { return _mm512_srli_epi16(w, COUNT); }
template <int COUNT>
inline VecInt shift_left(VecInt w) { return _mm512_slli_epi16(w, COUNT); }
inline VecInt and_int(VecInt a, VecInt b) { return _mm512_and_si512(a, b); }
inline Vec load_half(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline VecInt multiply_pairs(VecInt codes, VecInt x) { return _mm512_maddubs_epi16(codes, x); }
inline VecInt multiply_signed(VecInt codes, VecInt x) {
    VecInt turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(codes), zero_int(), x);
    return _mm512_maddubs_epi16(_mm512_abs_epi8(codes), turned);
}
// The sum, which is not computed later: the compiler would keep all the terms of a long sum and add them as a tree.
inline VecInt now(VecInt sum) {
    asm("" : "+v"(sum));
    return sum;
}
inline VecInt add_16(VecInt a, VecInt b) { return now(_mm512_add_epi16(a, b)); }
// Two products of 16 bits in each lane, and the bytes of even and odd places as 16 bits.
inline VecInt multiply_wide(VecInt codes, VecInt x) { return _mm512_madd_epi16(codes, x); }
inline VecInt widen_even(VecInt bytes) { return _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8); }
inline VecInt widen_odd(VecInt bytes) { return _mm512_srai_epi16(bytes, 8); }
inline VecInt add_pairs(VecInt sums) { return _mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }
#ifdef __AVX512VNNI__
#define TROUPE_DOT 1
#endif
constexpr bool kDotIsSigned = false;
// Four products of unsigned and signed bytes in each lane.
inline VecInt add_products(VecInt sum, VecInt codes, VecInt x) {
#ifdef TROUPE_DOT
    return _mm512_dpbusd_epi32(sum, codes, x);
#else
    return now(add_int(sum, add_pairs(multiply_pairs(codes, x))));
#endif
}
// The same with signed ones.
inline VecInt add_signed(VecInt sum, VecInt codes, VecInt x) { return now(add_int(sum, add_pairs(multiply_signed(codes, x)))); }
// Round to int8; the values are within its range.
inline void store_bytes(uint8_t* p, Vec x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(to_int(x))); }

#ifdef __AVX512BF16__
#define TROUPE_BF16 1
// Two products of bfloat16 in each lane.
inline Vec add_bf16_products(Vec sum, VecInt x, VecInt w) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w); }
#endif

}  // namespace troupe
