// Products with weights of 4 or 8 bits: weight = scale * code + minimum, one scale and one minimum per group of inputs.
//
// Activations are rounded to int8 with one scale per row and group, so the sum of a group is exact in int32. A group adds
//
//     scale * activation_scale * sum(code * x)  +  minimum * activation_scale * sum(x)
//
// to its output in float32, group after group: the order depends on nothing else, as in `panels.h`. Centred matrices have
// no minimums.
//
// A matrix is stored as panels of 32 outputs. A group of a panel holds 32 scales, and 32 minimums, in float16, then
// 128 bytes for each eight or four inputs, one 32-bit word per output. With 4 bits the inputs 0 to 3 are in the low
// halves of its bytes, 4 to 7 in the high ones. Codes below 0 are stored around `kZero`. Inputs beyond the last one of the
// matrix meet activations of 0.

#pragma once

#include <cstdint>

#include "dispatch.h"
#include "pool.h"

namespace troupe {

constexpr int64_t kHalfBytes = 2;

// The sizes of a packed matrix.
struct Groups {
    int64_t size, count, factor_bytes, bytes;  // bytes: of a panel's group; factor_bytes: its scales and minimums

    explicit Groups(const Linear& linear) : size(linear.group_size), count(ceil_div(linear.in_features, size)) {
        with_grouped(linear.kind, [&](auto grouped) {
            factor_bytes = (grouped.kIsCentred ? 1 : 2) * kPanelWidth * kHalfBytes;
            bytes = factor_bytes + size * grouped.kBits / 32 * kPanelBytes;
        });
    }
    int64_t panel_bytes() const { return count * bytes; }
};

// The bytes of a packed matrix; `linear` needs no panels.
int64_t grouped_bytes(const Linear& linear);

// Write the panels. codes: [out, in], from -128 or, with 4 bits, from 0 and centred ones from -8; scales, minimums: [out, groups].
void pack_grouped(Pool* pool, const Linear& linear, const int8_t* codes, const float* scales, const float* minimums, uint8_t* panels);

// weight: [out, in], the products of the stored scales and codes plus the minimums.
void unpack_grouped(Pool* pool, const Linear& linear, float* weight);

// As `unpack_rows`.
void unpack_grouped_rows(Pool* pool, const Linear& linear, const int64_t* ids, int64_t count, float* out);

// Round a row to bytes, with zeros up to the end of its last group; the factors of a group lie `stride` apart.
template <class From>
void round_row(
    const From* x, int64_t count, int64_t group_size, int zero, uint32_t* words, GroupFactors* factors, int64_t stride);

// One panel, as `multiply_tile`.
template <class Arithmetic>
void multiply_codes(const TileProduct& tile, int rows);

}  // namespace troupe
