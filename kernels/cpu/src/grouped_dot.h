// The integer sums of one group of 4-bit or 8-bit weights, for a few rows and all or half of a panel's outputs.

#pragma once

#include "grouped.h"

namespace troupe {

// Inputs whose products with codes of 4 bits may be added up in 16 bits: 8 pairs of at most 2 * 15 * 127.
constexpr int kUnit = 32;
// Both kinds of accumulators must fit into the registers.
constexpr int kCodeVecs = 2;

#ifdef TROUPE_AVX512
inline VecInt low_codes(VecInt w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
inline VecInt high_codes(VecInt w) { return low_codes(_mm512_srli_epi16(w, 4)); }
inline Vec load_half(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
#ifdef __AVX512VNNI__
#define TROUPE_DOT 1
inline VecInt add_products(VecInt sum, VecInt codes, VecInt x) { return _mm512_dpbusd_epi32(sum, codes, x); }
#else
inline VecInt add_products(VecInt sum, VecInt codes, VecInt x) {
    return _mm512_add_epi16(sum, _mm512_maddubs_epi16(codes, x));
}
inline VecInt add_unit(VecInt total, VecInt sum, int16_t factor = 1) {
    return _mm512_add_epi32(total, _mm512_madd_epi16(sum, _mm512_set1_epi16(factor)));
}
#endif
// Round to int8; the values are within its range.
inline void store_bytes(uint8_t* p, Vec x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(to_int(x))); }
#else
inline VecInt low_codes(VecInt w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
inline VecInt high_codes(VecInt w) { return low_codes(_mm256_srli_epi16(w, 4)); }
inline Vec load_half(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
#ifdef __AVXVNNI__
#define TROUPE_DOT 1
inline VecInt add_products(VecInt sum, VecInt codes, VecInt x) { return _mm256_dpbusd_avx_epi32(sum, codes, x); }
#else
inline VecInt add_products(VecInt sum, VecInt codes, VecInt x) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x));
}
inline VecInt add_unit(VecInt total, VecInt sum, int16_t factor = 1) {
    return _mm256_add_epi32(total, _mm256_madd_epi16(sum, _mm256_set1_epi16(factor)));
}
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

// sums += the products of one word of each output with the word of each row.
template <int ROWS>
inline void add_words(Sums<ROWS>& sums, const VecInt (&codes)[kCodeVecs], const uint32_t* x) {
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row) {
        VecInt word = splat_int(int32_t(x[row]));
#pragma GCC unroll 2
        for (int v = 0; v < kCodeVecs; ++v) sums[row][v] = add_products(sums[row][v], codes[v], word);
    }
}

// totals += the products of a group of `num_units` units; `x` holds its words, block[word][row].
//
// Without an instruction that adds products of bytes in 32 bits, codes of 8 bits are multiplied in two halves.
template <int BITS, int ROWS>
inline void add_group(const uint8_t* w, const uint32_t* x, int64_t num_units, Sums<ROWS>& totals) {
    for (int64_t unit = 0; unit < num_units; ++unit) {
#ifdef TROUPE_DOT
        auto& sums = totals;
#else
        Sums<ROWS> sums, upper;
        auto none = [](int) { return zero_int(); };
        begin<ROWS>(sums, none);
        if constexpr (BITS == 8) begin<ROWS>(upper, none);
#endif
#pragma GCC unroll 8
        for (int step = 0; step < kUnit * BITS / 32; ++step, w += kPanelBytes) {
            VecInt first[kCodeVecs], second[kCodeVecs];
#pragma GCC unroll 2
            for (int v = 0; v < kCodeVecs; ++v) {
                VecInt words = load_int(w + v * kLanes * 4);
#ifdef TROUPE_DOT
                if constexpr (BITS == 8) {
                    first[v] = words;
                    continue;
                }
#endif
                first[v] = low_codes(words), second[v] = high_codes(words);
            }
            add_words<ROWS>(sums, first, x);
            if constexpr (BITS == 4) {
                add_words<ROWS>(sums, second, x + ROWS);
                x += 2 * ROWS;
            } else {
#ifndef TROUPE_DOT
                add_words<ROWS>(upper, second, x);
#endif
                x += ROWS;
            }
        }
#ifndef TROUPE_DOT
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
            for (int v = 0; v < kCodeVecs; ++v) {
                totals[row][v] = add_unit(totals[row][v], sums[row][v]);
                if constexpr (BITS == 8) totals[row][v] = add_unit(totals[row][v], upper[row][v], 16);
            }
#endif
    }
}

}  // namespace troupe
