// The integer sums of one group of codes, for a few rows and all or half of a panel's outputs.

#pragma once

#include "grouped.h"

namespace troupe {

// Both kinds of accumulators must fit into the registers.
constexpr int kCodeVecs = 2;

#ifdef TROUPE_AVX512
template <int COUNT>
inline VecInt shift_right(VecInt w) { return _mm512_srli_epi16(w, COUNT); }
template <int COUNT>
inline VecInt shift_left(VecInt w) { return _mm512_slli_epi16(w, COUNT); }
inline VecInt and_int(VecInt a, VecInt b) { return _mm512_and_si512(a, b); }
inline Vec load_half(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
#ifdef TROUPE_DOT
inline VecInt add_products(VecInt sum, VecInt codes, VecInt x) { return _mm512_dpbusd_epi32(sum, codes, x); }
#else
inline VecInt multiply_pairs(VecInt codes, VecInt x) { return _mm512_maddubs_epi16(codes, x); }
inline VecInt multiply_signed(VecInt codes, VecInt x) {
    VecInt turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(codes), zero_int(), x);
    return _mm512_maddubs_epi16(_mm512_abs_epi8(codes), turned);
}
inline VecInt add_16(VecInt a, VecInt b) { return _mm512_add_epi16(a, b); }
inline VecInt add_pairs(VecInt sums) { return _mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }
#endif
// Round to int8; the values are within its range.
inline void store_bytes(uint8_t* p, Vec x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(to_int(x))); }
#else
template <int COUNT>
inline VecInt shift_right(VecInt w) { return _mm256_srli_epi16(w, COUNT); }
template <int COUNT>
inline VecInt shift_left(VecInt w) { return _mm256_slli_epi16(w, COUNT); }
inline VecInt and_int(VecInt a, VecInt b) { return _mm256_and_si256(a, b); }
inline Vec load_half(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
#ifdef TROUPE_DOT
inline VecInt add_products(VecInt sum, VecInt codes, VecInt x) { return _mm256_dpbusd_avx_epi32(sum, codes, x); }
#else
inline VecInt multiply_pairs(VecInt codes, VecInt x) { return _mm256_maddubs_epi16(codes, x); }
inline VecInt multiply_signed(VecInt codes, VecInt x) {
    return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
}
inline VecInt add_16(VecInt a, VecInt b) { return _mm256_add_epi16(a, b); }
inline VecInt add_pairs(VecInt sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
#endif
inline void store_bytes(uint8_t* p, Vec x) {
    __m256i pairs = _mm256_packs_epi32(to_int(x), _mm256_setzero_si256());
    __m256i bytes = _mm256_packs_epi16(pairs, pairs);
    int32_t low = _mm256_extract_epi32(bytes, 0), high = _mm256_extract_epi32(bytes, 4);
    std::memcpy(p, &low, 4);
    std::memcpy(p + 4, &high, 4);
}
#endif

template <int ROWS>
using Sums = VecInt[ROWS][kCodeVecs];

// sums[row] = start(row)
template <int ROWS, class Start>
inline void begin(Sums<ROWS>& sums, const Start& start) {
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
        for (int v = 0; v < kCodeVecs; ++v) sums[row][v] = start(row);
}

// A vector of the stored codes of four inputs, one word of a unit.
template <int BITS>
inline VecInt load_codes(const uint8_t* lines, int word) {
    if constexpr (BITS == 8) return load_int(lines + word * kPanelBytes);
    VecInt nibbles = load_int(lines + word / 2 * kPanelBytes);
    VecInt codes = and_int(word % 2 ? shift_right<4>(nibbles) : nibbles, splat_int(0x0f0f0f0f));
    if constexpr (BITS == 4) return codes;
    VecInt upper = load_int(lines + (4 + word / 4) * kPanelBytes);
    int place = word % 4;
    upper = place == 0 ? shift_left<4>(upper) : place == 1 ? shift_left<2>(upper) : place == 2 ? upper : shift_right<2>(upper);
    return or_int(codes, and_int(upper, splat_int(0x30303030)));
}

// totals += the products of a group of `num_units` units; `x` holds its words, block[word][row].
//
// Without an instruction that adds products of bytes in 32 bits, two products make a sum of 16 bits. Eight of those fit
// with codes of 4 bits, two with 6 bits, and one with 8 bits.
template <int BITS, int ROWS>
inline void add_group(const uint8_t* lines, const uint32_t* x, int64_t num_units, Sums<ROWS>& totals) {
    for (int64_t unit = 0; unit < num_units; ++unit, lines += BITS * kPanelBytes, x += kUnit / 4 * ROWS) {
#ifndef TROUPE_DOT
        Sums<ROWS> sums;
#endif
#pragma GCC unroll 8
        for (int word = 0; word < kUnit / 4; ++word) {
            VecInt codes[kCodeVecs];
#pragma GCC unroll 2
            for (int v = 0; v < kCodeVecs; ++v) codes[v] = load_codes<BITS>(lines + v * kLanes * 4, word);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row) {
                VecInt values = splat_int(int32_t(x[word * ROWS + row]));
#pragma GCC unroll 2
                for (int v = 0; v < kCodeVecs; ++v) {
#ifdef TROUPE_DOT
                    totals[row][v] = add_products(totals[row][v], codes[v], values);
#else
                    constexpr int most = BITS == 4 ? 8 : BITS == 6 ? 2 : 1;
                    VecInt pairs = BITS == 8 ? multiply_signed(codes[v], values) : multiply_pairs(codes[v], values);
                    sums[row][v] = word % most == 0 ? pairs : add_16(sums[row][v], pairs);
                    if (word % most == most - 1) totals[row][v] = add_int(totals[row][v], add_pairs(sums[row][v]));
#endif
                }
            }
        }
    }
}

}  // namespace troupe
