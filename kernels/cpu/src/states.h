// Layers that keep a state per request: short causal convolutions and gated linear recurrences.
//
// A run of tokens is cut into segments. Each reads its state from one slot and writes it to another, so that a state
// in the middle of a run can be kept. Tokens follow one another in float32: a token's result does not depend on where
// its run was cut, nor on other runs.

#pragma once

#include <cstdint>

#include "pool.h"

namespace troupe {

// Read by `kernels.cpu.structs`. Segments of a run are neighbours.
struct Segments {
    const int64_t* source;    // [segments] slot, negative: a state of zeros
    const int64_t* target;    // [segments] slot
    const int64_t* first;     // [segments] first token
    const int64_t* count;     // [segments] tokens, may be 0
    const int64_t* run_ends;  // [runs] index after the run's last segment
    int64_t num_runs;
};

struct Conv {
    const float* x;       // rows of `stride` numbers, the first `channels` are read
    const float* weight;  // [width, channels], the newest input last
    const float* bias;    // [channels] or null
    float* states;        // [slots, width - 1, channels], the newest input last
    float* out;           // [tokens, channels]
    int64_t stride, channels, width;  // width: 2 to 4
    int32_t has_silu, reserved;
};

struct Scan {
    const float* mixed;    // [tokens, stride]: queries, keys and values at their offsets
    const float* dt;       // [tokens, num_heads] before bias and softplus
    const float* beta;     // [tokens, num_heads] before the sigmoid, or null: the step size is the factor of the values
    const float* a_log;    // [num_heads]
    const float* dt_bias;  // [num_heads]
    const float* skip;     // [num_heads] factor of the values in the output, or null
    float* states;         // [slots, num_heads, key_size, value_size]
    float* out;            // [tokens, num_heads, value_size]
    int64_t stride, query_at, key_at, value_at;
    int64_t num_heads, num_groups, key_size, value_size;  // heads of a group share queries and keys
};

void run_conv(Pool* pool, const Conv& conv, const Segments& segments);

// With beta: S = decay S + k (beta (v - decay S^T k))^T, queries and keys of length 1 (gated delta rule).
// Without:   S = decay S + k (dt v)^T (Mamba-2). The output is S^T q + skip v.
void run_scan(Pool* pool, const Scan& scan, const Segments& segments);

}  // namespace troupe
