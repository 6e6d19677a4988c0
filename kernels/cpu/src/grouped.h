// Products with weights of 4, 6 or 8 bits: weight = scale * code + minimum, one scale and one minimum per group of inputs.
//
// Activations are rounded to int8 with one scale per row and group, so the sum of a group is exact in int32. A group adds
//
//     scale * activation_scale * sum(code * x)  +  minimum * activation_scale * sum(x)
//
// to its output in float32, group after group: the order depends on nothing else, as in `panels.h`. Centred matrices have
// no minimums.
//
// A matrix is stored as panels of 32 outputs. A group of a panel holds 32 scales, and 32 minimums, in float16, then
// lines of 128 bytes, one 32-bit word per output, for each 32 inputs:
//
//     8 bits   eight lines of four inputs
//     4 bits   four lines: the first four of eight inputs are in the low halves of the bytes, the others in the high ones
//     6 bits   the same lines of the low 4 bits; then two lines of the high 2 bits, four times four inputs each
//
// For many rows the lines of a panel are spread once into lines of a byte a code, as those of 8 bits, or, of 8 bits without an
// instruction that adds products of bytes in 32 bits, of 16 bits: the even inputs of four in one line, the odd ones in the
// next. The sums of a group are whole numbers, so they are the same.
//
// Codes below 0 are stored around `kZero`. Inputs beyond the last one of the matrix meet activations of 0.

#pragma once

#include <cstdint>

#include "dispatch.h"
#include "pool.h"

namespace troupe {

constexpr int64_t kHalfBytes = 2;
constexpr int kUnit = 32;  // inputs

// Codes of 8 bits are unsigned where an instruction adds the products of unsigned and signed bytes in 32 bits.
// `kSpreadBlocks6` is how many blocks of rows make it worth it to spread codes of 6 bits.
#ifdef TROUPE_DOT
constexpr int kZero8 = kDotIsSigned ? 0 : 128, kSpreadBlocks6 = 4;
#else
constexpr int kZero8 = 0, kSpreadBlocks6 = 2;
#endif

template <int BITS, bool CENTRED>
struct Grouped {
    static constexpr int kBits = BITS;
    static constexpr bool kIsCentred = CENTRED;
    // What is added to a code, so that the stored one is unsigned; products without the instruction take signed bytes.
    static constexpr int kZero = BITS == 8 ? kZero8 : CENTRED ? 1 << (BITS - 1) : 0;
    // Words of four spread codes.
#ifdef TROUPE_DOT
    static constexpr int kSpreadWords = 1;
#else
    static constexpr int kSpreadWords = BITS == 8 ? 2 : 1;
#endif
    static constexpr int64_t kFactorBytes = (CENTRED ? 1 : 2) * kPanelWidth * kHalfBytes;
};

template <class Body>
void with_grouped(int32_t kind, const Body& body) {
    switch (kind) {
        case kWeightGrouped4: return body(Grouped<4, false>());
        case kWeightGrouped6: return body(Grouped<6, false>());
        case kWeightGrouped8: return body(Grouped<8, false>());
        case kWeightCentred4: return body(Grouped<4, true>());
        case kWeightCentred6: return body(Grouped<6, true>());
        default: return body(Grouped<8, true>());
    }
}

inline int zero_of(int32_t kind) {
    int zero = 0;
    with_grouped(kind, [&](auto grouped) { zero = grouped.kZero; });
    return zero;
}

// The sizes of a packed matrix.
struct Groups {
    int64_t size, count, factor_bytes, bytes, spread_bytes;  // bytes: of a panel's group; factor_bytes: its scales and minimums
    int spread_words;

    explicit Groups(const Linear& linear) : size(linear.group_size), count(ceil_div(linear.in_features, size)) {
        with_grouped(linear.kind, [&](auto grouped) {
            factor_bytes = grouped.kFactorBytes;
            bytes = factor_bytes + size * grouped.kBits / 32 * kPanelBytes;
            spread_words = grouped.kSpreadWords;
            spread_bytes = factor_bytes + size / 4 * spread_words * kPanelBytes;
        });
    }
    int64_t panel_bytes() const { return count * bytes; }
};

// The bytes of a packed matrix; `linear` needs no panels.
int64_t grouped_bytes(const Linear& linear);

// Write the panels. codes: [out, in], signed, but from 0 with minimums and 4 or 6 bits; scales, minimums: [out, groups].
void pack_grouped(Pool* pool, const Linear& linear, const int8_t* codes, const float* scales, const float* minimums, uint8_t* panels);

// As `unpack_rows`: the products of the stored scales and codes plus the minimums.
void unpack_grouped_rows(Pool* pool, const Linear& linear, const int64_t* ids, int64_t count, float* out);

// Round a row to bytes, with zeros up to the end of its last group; the factors of a group lie `stride` apart.
template <class From>
void round_row(
    const From* x, int64_t count, int64_t group_size, int zero, uint32_t* words, GroupFactors* factors, int64_t stride);

// Whether spreading the codes pays for so many rows: codes of 6 bits take most to decode, wider ones take memory.
inline bool is_spread(int32_t kind, int64_t rows) {
    int64_t least = 0;
    with_grouped(kind, [&](auto grouped) {
        bool differs = grouped.kBits < 8 || grouped.kSpreadWords > 1;
        if (differs) least = kCodeRows * (grouped.kBits == 6 ? kSpreadBlocks6 : 8);
    });
    return least && rows >= least;
}

// Spread a panel of Groups::count * spread_bytes bytes.
void spread_panel(const Linear& linear, const uint8_t* panel, uint8_t* out);

// One panel, as `multiply_tile`; a spread one has more than half of kCodeRows rows.
void multiply_codes(int32_t kind, const TileProduct& tile, int rows, bool is_spread);

}  // namespace troupe
