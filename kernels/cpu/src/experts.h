// The experts of a mixture: each token passes through the few that its router chose.

#pragma once

#include "linear.h"

namespace troupe {

// Read by `kernels.cpu.structs`. Matrices of one kind and shape for all experts.
struct Experts {
    const Linear* gate;  // [num_experts], hidden -> inner
    const Linear* up;
    const Linear* down;  // [num_experts], inner -> hidden
    int64_t num_experts;
    float alpha;  // inner = gate * sigmoid(alpha * gate) * up
    float limit;  // above 0: gate at most so large, up within +-limit, and plus 1
};

// x: [tokens, hidden] of `dtype`; out: the same of `out_dtype`, which is `dtype` or float32; ids: [tokens, top_k], each in [0, num_experts); weights: [tokens, top_k].
// A token's results are added in the order of its ids, so they depend on no other token.
void run_experts(
    Pool* pool, const Experts& experts, const void* x, int32_t dtype, const int64_t* ids, const float* weights,
    int64_t tokens, int64_t top_k, void* out, int32_t out_dtype);

}  // namespace troupe
