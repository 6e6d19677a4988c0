// The small ops between the products: norms, RoPE with the cache write, the gated activation.
// Arithmetic is float32; each result is rounded once to its dtype.

#pragma once

#include <cstdint>

#include "linear.h"
#include "pool.h"

namespace troupe {

// out = x / rms(x) * weight for each row of x [rows, size]; row r has weight row r % weight_rows.
void run_rms_norm(
    Pool* pool, int32_t dtype, const void* x, const void* weight, int64_t weight_rows, float eps, void* out, int64_t rows,
    int64_t size);

// residual += x, rounded to its dtype; out = norm of the sum. All [rows, size].
void run_add_rms_norm(
    Pool* pool, int32_t dtype, const void* x, void* residual, const void* weight, float eps, void* out, int64_t rows,
    int64_t size);

// silu(gate) * up, gelu(gate) * up, gelu(x); GELU is the tanh approximation. Mirrored by `kernels.cpu.native_ops`.
enum Activation : int32_t { kSiluMul, kGeluMul, kGelu };

// x: [rows, 2 size], gate first, or [rows, size] without a second factor; out: [rows, size].
void run_activation(Pool* pool, int32_t kind, int32_t dtype, const void* x, void* out, int64_t rows, int64_t size);

// Read by `kernels.cpu.structs`.
struct RopeStore {
    const void* heads;    // [tokens, num_heads + 2 num_kv_heads, head_dim], contiguous
    const void* qk_norm;  // [num_heads + num_kv_heads, head_dim] or null
    const float* cos;     // [tokens, head_dim], both halves alike
    const float* sin;     // [tokens, head_dim], the first half negated
    void* k_cache;        // in pieces, see `kv_pieces.h`
    void* v_cache;
    const int64_t* slots;  // [tokens]
    void* q;               // [tokens, num_heads, head_dim], may be the place of no other operand
    int64_t num_tokens, num_heads, num_kv_heads, head_dim;
    float eps;
    int32_t dtype;
    int32_t is_int8;
    int32_t piece_slots;
    // Else the caches are one, and `heads` has no values.
    bool has_values() const { return k_cache != v_cache; }
};

void run_rope_store(Pool* pool, const RopeStore& rope);

}  // namespace troupe
