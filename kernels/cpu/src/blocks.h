// Blocks of GGUF files, and numbers, into the codes of grouped products: signed bytes with a scale per 32 inputs.

#pragma once

#include <cstdint>

#include "pool.h"

namespace troupe {

// Split blocks with so many values, of a type of GGUF, into codes, one after the other, and a scale and minimum per 32 of them.
// `minimums` is null for types without. Returns false for types that it does not know.
bool split_blocks(
    Pool* pool, int32_t type, const uint8_t* blocks, int64_t num_values, int8_t* codes, float* scales, float* minimums);

// Round a matrix [rows, columns] as `round_grouped` of kernels/grouped.py does, to the same bits.
// scales, minimums: [rows, groups], float16 numbers; minimums are null for 6 and 8 bits.
void round_rows(
    Pool* pool, const float* values, int64_t rows, int64_t columns, int64_t group_size, int bits, int8_t* codes, float* scales,
    float* minimums);

}  // namespace troupe
