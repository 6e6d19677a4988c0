// y = x W^T + b over packed weights.

#pragma once

#include <cstdint>

#include "pool.h"

namespace troupe {

// Mirrored by `kernels.cpu.weights`.
enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1 };
// Split is float32 as two numbers of bfloat16. The grouped kinds have 4, 6 and 8 bits; the last three have no minimums.
enum WeightKind : int32_t { kWeightFloat32, kWeightFloat32Half, kWeightBFloat16, kWeightSplit, kWeightGrouped4, kWeightGrouped6,
    kWeightGrouped8, kWeightCentred4, kWeightCentred6, kWeightCentred8 };

struct Linear {
    const uint8_t* panels;
    const float* bias;  // [out] or null
    int64_t in_features;
    int64_t out_features;
    int32_t kind;
    int32_t group_size;  // of the grouped kinds only, see `grouped.h`
};

inline bool is_grouped(int32_t kind) { return kind >= kWeightGrouped4; }

// The bytes of a matrix of the first four kinds.
int64_t packed_bytes(int32_t kind, int64_t out_features, int64_t in_features);

// Write the panels of a row-major matrix [out, in] of one of these kinds.
void pack_weight(
    Pool* pool, int32_t kind, const void* weight, int32_t dtype, int64_t out_features, int64_t in_features,
    uint8_t* panels);

// The inverse of packing any kind: out[i] = row ids[i] of the matrix, float32 [count, in].
void unpack_rows(Pool* pool, const Linear& linear, const int64_t* ids, int64_t count, float* out);

// Whether bfloat16 holds each of the values exactly.
bool fits_bfloat16(Pool* pool, const float* values, int64_t count);

// x: [rows, in] of `x_dtype`; y: [rows, out] of `y_dtype`, both contiguous.
void run_linear(Pool* pool, const Linear& linear, const void* x, int32_t x_dtype, void* y, int32_t y_dtype, int64_t rows);

}  // namespace troupe
