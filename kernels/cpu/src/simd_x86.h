// What AVX2 and AVX-512 have alike. TROUPE_V(add_ps) is the intrinsic of their width, TROUPE_W(and) that of all its bits.

#pragma once

namespace troupe {

inline Vec zero() { return TROUPE_V(setzero_ps)(); }
inline Vec splat(float x) { return TROUPE_V(set1_ps)(x); }
inline Vec load(const float* p) { return TROUPE_V(loadu_ps)(p); }
inline void store(float* p, Vec x) { TROUPE_V(storeu_ps)(p, x); }
inline Vec add(Vec a, Vec b) { return TROUPE_V(add_ps)(a, b); }
inline Vec sub(Vec a, Vec b) { return TROUPE_V(sub_ps)(a, b); }
inline Vec mul(Vec a, Vec b) { return TROUPE_V(mul_ps)(a, b); }
inline Vec div(Vec a, Vec b) { return TROUPE_V(div_ps)(a, b); }
// The second operand where either is NaN.
inline Vec max(Vec a, Vec b) { return TROUPE_V(max_ps)(a, b); }
inline Vec min(Vec a, Vec b) { return TROUPE_V(min_ps)(a, b); }
// a * b + c
inline Vec fma(Vec a, Vec b, Vec c) { return TROUPE_V(fmadd_ps)(a, b, c); }

inline VecInt zero_int() { return TROUPE_W(setzero)(); }
inline VecInt splat_int(int32_t x) { return TROUPE_V(set1_epi32)(x); }
inline VecInt load_int(const void* p) { return TROUPE_W(loadu)(static_cast<const VecInt*>(p)); }
inline void store_int(void* p, VecInt x) { TROUPE_W(storeu)(static_cast<VecInt*>(p), x); }
inline Vec to_vec(VecInt x) { return TROUPE_V(cvtepi32_ps)(x); }
inline VecInt to_int(Vec x) { return TROUPE_V(cvtps_epi32)(x); }
inline VecInt add_int(VecInt a, VecInt b) { return TROUPE_V(add_epi32)(a, b); }
inline VecInt sub_int(VecInt a, VecInt b) { return TROUPE_V(sub_epi32)(a, b); }
inline VecInt max_int(VecInt a, VecInt b) { return TROUPE_V(max_epi32)(a, b); }
inline Vec as_float(VecInt x) { return Vec(x); }
inline VecInt as_int(Vec x) { return VecInt(x); }
inline VecInt and_int(VecInt a, VecInt b) { return TROUPE_W(and)(a, b); }
inline VecInt or_int(VecInt a, VecInt b) { return TROUPE_W(or)(a, b); }
inline VecInt xor_int(VecInt a, VecInt b) { return TROUPE_W(xor)(a, b); }
inline VecInt shift_left_7(VecInt x) { return TROUPE_V(slli_epi32)(x, 7); }
inline VecInt shift_left_16(VecInt x) { return TROUPE_V(slli_epi32)(x, 16); }
inline VecInt upper_16(VecInt x) { return and_int(x, splat_int(int32_t(0xffff0000u))); }
// Of 16-bit numbers.
template <int COUNT>
inline VecInt shift_right(VecInt x) { return TROUPE_V(srli_epi16)(x, COUNT); }
template <int COUNT>
inline VecInt shift_left(VecInt x) { return TROUPE_V(slli_epi16)(x, COUNT); }

inline HalfVec load_16(const void* p) { return TROUPE_HALF(loadu)(static_cast<const HalfVec*>(p)); }
inline Vec load_half(const uint8_t* p) { return TROUPE_V(cvtph_ps)(load_16(p)); }
inline Vec widen(HalfVec x) { return as_float(shift_left_16(TROUPE_V(cvtepu16_epi32)(x))); }
inline Vec load(const bf16* p) { return widen(load_16(p)); }

// Sums of two products of 8 bits in 16, or of 16 bits in 32.
inline VecInt multiply_pairs(VecInt codes, VecInt x) { return TROUPE_V(maddubs_epi16)(codes, x); }
inline VecInt multiply_wide(VecInt codes, VecInt x) { return TROUPE_V(madd_epi16)(codes, x); }
inline VecInt add_pairs(VecInt sums) { return multiply_wide(sums, TROUPE_V(set1_epi16)(1)); }
// The sum, which is not computed later: the compiler would keep all the terms of a long sum and add them as a tree.
inline VecInt now(VecInt sum) {
    asm("" : "+v"(sum));
    return sum;
}
inline VecInt add_16(VecInt a, VecInt b) { return now(TROUPE_V(add_epi16)(a, b)); }
// The bytes of even and odd places as 16 bits.
inline VecInt widen_odd(VecInt bytes) { return TROUPE_V(srai_epi16)(bytes, 8); }
inline VecInt widen_even(VecInt bytes) { return widen_odd(shift_left<8>(bytes)); }

inline float read_half(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}
inline void write_half(uint8_t* p, float value) {
    uint16_t half = uint16_t(_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT), 0));
    std::memcpy(p, &half, 2);
}

}  // namespace troupe
