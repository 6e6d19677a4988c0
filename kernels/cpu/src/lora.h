// The low-rank products of adapters, added to the rows of a product that use them. `kernels.lora` defines the computation.

#pragma once

#include "linear.h"

namespace troupe {

constexpr int64_t kLoraPanelWidth = 32;

// Read by `kernels.cpu.structs`: the change of the outputs [start, start + width).
struct LoraPart {
    const void* b;        // panels of 32 outputs: [panel][rank][32], of the matrix's dtype, filled up with zeros
    const float* factor;  // [width] or null
    const float* offset;  // [width] or null
    int64_t start, width, first_rank, rank;
};

// Read by `kernels.cpu.structs`.
struct Lora {
    const void* a;        // [ranks, in]
    const float* scales;  // [ranks]
    const LoraPart* parts;
    int64_t num_parts, num_ranks, in_features, out_features;
    int32_t dtype;  // of A and B
    int32_t reserved;
};

// Read by `kernels.cpu.structs`: places [first, first + count) of the list of rows.
struct LoraSegment {
    const Lora* lora;
    int64_t first, count;
};

// y[row] = (y[row] + x[row] A^T B^T) * factor + offset for the rows of each segment. The sums of a row have one order,
// independent of the other rows.
void run_lora(
    Pool* pool, const int64_t* rows, const LoraSegment* segments, int64_t num_segments, const void* x, int32_t x_dtype,
    void* y, int32_t y_dtype);

}  // namespace troupe
