// Products with weights of 4 or 8 bits: weight = scale * code + minimum, one scale and one minimum per group of inputs.
//
// Activations are rounded to int8 with one scale per row and group, so the sum of a group is exact in int32. A group adds
//
//     scale * activation_scale * sum(code * x)  +  minimum * activation_scale * sum(x)
//
// to its output in float32, group after group: the order depends on nothing else, as in `panels.h`.
//
// A matrix is stored as panels of 32 outputs. A group of a panel holds 32 scales and 32 minimums in float16, then
// 128 bytes for each eight or four inputs, one 32-bit word per output. With 4 bits the inputs 0 to 3 are in the low
// halves of its bytes, 4 to 7 in the high ones. Inputs beyond the last one of the matrix have the code 0 and meet activations of 0.

#pragma once

#include <cstdint>

#include "linear.h"
#include "pool.h"

namespace troupe {

// The bytes of a packed matrix [out, in] in groups of `group_size` inputs, a multiple of 32.
int64_t grouped_bytes(int32_t kind, int64_t out_features, int64_t in_features, int64_t group_size);

// codes: [out, in], 0 to 15 or 255; scales, minimums: [out, groups].
void pack_grouped(
    Pool* pool, int32_t kind, const uint8_t* codes, const float* scales, const float* minimums, int64_t out_features,
    int64_t in_features, int64_t group_size, uint8_t* panels);

// weight: [out, in], the products of the stored scales and codes plus the minimums.
void unpack_grouped(Pool* pool, const Linear& linear, float* weight);

// As `run_linear`.
void run_grouped(Pool* pool, const Linear& linear, const void* x, int32_t x_dtype, void* y, int32_t y_dtype, int64_t rows);

// As `unpack_rows`.
void unpack_grouped_rows(Pool* pool, const Linear& linear, const int64_t* ids, int64_t count, float* out);

}  // namespace troupe
