// Eight float32 lanes: the same results as AVX-512 without products of bfloat16 would give.

#pragma once

#include <immintrin.h>

namespace troupe {

constexpr int kLanes = 8;
using Vec = __m256;
using VecInt = __m256i;
using HalfVec = __m128i;

}  // namespace troupe

#define TROUPE_V(name) _mm256_##name
#define TROUPE_W(name) _mm256_##name##_si256
#define TROUPE_HALF(name) _mm_##name##_si128
#include "simd_x86.h"

namespace troupe {

inline Vec abs(Vec a) { return _mm256_andnot_ps(splat(-0.0f), a); }
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

inline __m128i narrow(Vec x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}

inline void store(bf16* p, Vec x) { _mm_storeu_si128((__m128i*)p, narrow(x)); }

inline VecInt load_int_first(const void* p, int n) {
    return _mm256_maskload_epi32(static_cast<const int32_t*>(p), first_lanes(n));
}

inline VecInt multiply_signed(VecInt codes, VecInt x) {
    return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
}
#ifdef __AVXVNNI__
#define TROUPE_DOT 1
constexpr bool kDotIsSigned = false;
// Four products of unsigned and signed bytes in each lane.
inline VecInt add_products(VecInt sum, VecInt codes, VecInt x) { return _mm256_dpbusd_avx_epi32(sum, codes, x); }
#endif
inline void store_bytes(uint8_t* p, Vec x) {
    __m256i pairs = _mm256_packs_epi32(to_int(x), _mm256_setzero_si256());
    __m256i bytes = _mm256_packs_epi16(pairs, pairs);
    int32_t low = _mm256_extract_epi32(bytes, 0), high = _mm256_extract_epi32(bytes, 4);
    std::memcpy(p, &low, 4);
    std::memcpy(p + 4, &high, 4);
}

}  // namespace troupe
