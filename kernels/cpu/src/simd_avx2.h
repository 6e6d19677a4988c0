// Eight float32 lanes: the same results as AVX-512 without products of bfloat16 would give.

#pragma once

#include <immintrin.h>

namespace troupe {

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

inline Vec zero_below(Vec result, Vec x, float limit) { return _mm256_andnot_ps(_mm256_cmp_ps(x, splat(limit), _CMP_LT_OQ), result); }

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
inline VecInt upper_16(VecInt x) { return _mm256_and_si256(x, _mm256_set1_epi32(int32_t(0xffff0000u))); }

template <int COUNT>
inline VecInt shift_right(VecInt w) { return _mm256_srli_epi16(w, COUNT); }
template <int COUNT>
inline VecInt shift_left(VecInt w) { return _mm256_slli_epi16(w, COUNT); }
inline VecInt and_int(VecInt a, VecInt b) { return _mm256_and_si256(a, b); }
inline Vec load_half(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline VecInt multiply_pairs(VecInt codes, VecInt x) { return _mm256_maddubs_epi16(codes, x); }
inline VecInt multiply_signed(VecInt codes, VecInt x) {
    return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
}
// The sum, which is not computed later: the compiler would keep all the terms of a long sum and add them as a tree.
inline VecInt now(VecInt sum) {
    asm("" : "+x"(sum));
    return sum;
}
inline VecInt add_16(VecInt a, VecInt b) { return now(_mm256_add_epi16(a, b)); }
// Two products of 16 bits in each lane, and the bytes of even and odd places as 16 bits.
inline VecInt multiply_wide(VecInt codes, VecInt x) { return _mm256_madd_epi16(codes, x); }
inline VecInt widen_even(VecInt bytes) { return _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8); }
inline VecInt widen_odd(VecInt bytes) { return _mm256_srai_epi16(bytes, 8); }
inline VecInt add_pairs(VecInt sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
#ifdef __AVXVNNI__
#define TROUPE_DOT 1
#endif
constexpr bool kDotIsSigned = false;
// Four products of unsigned and signed bytes in each lane.
inline VecInt add_products(VecInt sum, VecInt codes, VecInt x) {
#ifdef TROUPE_DOT
    return _mm256_dpbusd_avx_epi32(sum, codes, x);
#else
    return now(add_int(sum, add_pairs(multiply_pairs(codes, x))));
#endif
}
// The same with signed ones.
inline VecInt add_signed(VecInt sum, VecInt codes, VecInt x) { return now(add_int(sum, add_pairs(multiply_signed(codes, x)))); }
inline void store_bytes(uint8_t* p, Vec x) {
    __m256i pairs = _mm256_packs_epi32(to_int(x), _mm256_setzero_si256());
    __m256i bytes = _mm256_packs_epi16(pairs, pairs);
    int32_t low = _mm256_extract_epi32(bytes, 0), high = _mm256_extract_epi32(bytes, 4);
    std::memcpy(p, &low, 4);
    std::memcpy(p + 4, &high, 4);
}

}  // namespace troupe
