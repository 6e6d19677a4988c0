// The integer sums of one group of codes, for a few rows and all or half of a panel's outputs.

#pragma once

#include "grouped.h"

namespace troupe {

// Both kinds of accumulators must fit into the registers.
constexpr int kCodeVecs = 2;

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
template <class Grouped, bool SPREAD, int ROWS>
inline void add_group(const uint8_t* lines, const uint32_t* x, int64_t num_units, Sums<ROWS>& totals) {
    constexpr int BITS = Grouped::kBits, words = kUnit / 4 * (SPREAD ? Grouped::kSpreadWords : 1);
    for (int64_t unit = 0; unit < num_units; ++unit, lines += (SPREAD ? words : BITS) * kPanelBytes, x += words * ROWS) {
#ifndef TROUPE_DOT
        Sums<ROWS> sums;
#endif
#pragma GCC unroll 8
        for (int word = 0; word < words; ++word) {
            VecInt codes[kCodeVecs];
#pragma GCC unroll 2
            for (int v = 0; v < kCodeVecs; ++v) codes[v] = load_codes<SPREAD ? 8 : BITS>(lines + v * kLanes * 4, word);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row) {
                VecInt values = splat_int(int32_t(x[word * ROWS + row]));
#pragma GCC unroll 2
                for (int v = 0; v < kCodeVecs; ++v) {
#ifdef TROUPE_DOT
                    totals[row][v] = add_products(totals[row][v], codes[v], values);
#else
                    if constexpr (words > kUnit / 4) {
                        totals[row][v] = now(add_int(totals[row][v], multiply_wide(codes[v], values)));
                        continue;
                    }
                    constexpr int most = BITS == 4 ? 8 : BITS == 6 ? 2 : 1;
                    VecInt pairs = BITS == 8 ? multiply_signed(codes[v], values) : multiply_pairs(codes[v], values);
                    sums[row][v] = word % most == 0 ? pairs : add_16(sums[row][v], pairs);
                    if (word % most == most - 1) totals[row][v] = now(add_int(totals[row][v], add_pairs(sums[row][v])));
#endif
                }
            }
        }
    }
}

}  // namespace troupe
