// Values out of the keys of a piece, for layers that keep only keys; see `kv_pieces.h` for both layouts.

#pragma once

#include "kv_pieces.h"

namespace troupe {

// Sixteen words, whatever registers the compiler has for them.
using Words = uint32_t __attribute__((vector_size(64)));

inline Words interleave_low(Words a, Words b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline Words interleave_high(Words a, Words b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

// Turn 16 words of 16 slots around: row i becomes column i.
inline void transpose(Words* rows) {
#pragma GCC unroll 4
    for (int stage = 0; stage < 4; ++stage) {
        Words turned[16];
#pragma GCC unroll 8
        for (int row = 0; row < 8; ++row) {
            turned[2 * row] = interleave_low(rows[row], rows[row + 8]);
            turned[2 * row + 1] = interleave_high(rows[row], rows[row + 8]);
        }
        std::memcpy(rows, turned, sizeof(turned));
    }
}

// Write the first `dim` numbers, a multiple of 2, of the keys of 16 slots as values.
template <class T>
void turn_keys(const uint32_t* keys, int64_t dim, uint32_t* values) {
    constexpr int kWord = kWordNumbers<T>;
    for (int64_t first = 0; first < dim / kWord; first += 16) {
        int64_t left = dim / kWord - first;
        int count = int(left < 16 ? left : 16);
        Words rows[16] = {};
        std::memcpy(rows, keys + first * kPieceSlots, count * sizeof(Words));
        transpose(rows);
        if constexpr (kWord == 1) {
            for (int slot = 0; slot < kPieceSlots; ++slot) std::memcpy(values + slot * dim + first, &rows[slot], count * 4);
        } else {
            for (int slot = 0; slot < kPieceSlots; slot += 2) {
                Words even = rows[slot], odd = rows[slot + 1];
                Words lower = (even & 0xffff) | (odd << 16), upper = (even >> 16) | (odd & 0xffff0000u);
                Words both[2] = {interleave_low(lower, upper), interleave_high(lower, upper)};
                std::memcpy(values + slot / 2 * dim + first * 2, both, count * 8);
            }
        }
    }
}

}  // namespace troupe
