// Attention of a flattened batch over paged keys and values: decode, chunked prefill and verification alike.

#pragma once

#include <cstdint>

#include "linear.h"
#include "pool.h"

namespace troupe {

// The requests of one step. Read by `kernels.cpu.structs`.
struct Batch {
    const int32_t* block_tables;     // [requests, max_blocks]
    const int32_t* query_start_loc;  // [requests + 1]
    const int32_t* seq_lens;         // [requests], including the new tokens
    int64_t num_requests;
    int64_t max_blocks;
};

// One layer's view of the cache. Read by `kernels.cpu.structs`.
struct AttentionShape {
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    int64_t sliding_window;  // 0: none
    float scale;
    float soft_cap;  // 0: none
    int32_t dtype;    // of q and the result, and of the caches unless they are int8
    int32_t is_int8;
    const float* sinks;  // [num_heads] or null; scores that take part in the softmax and have no value
};

// q: [T, num_heads, head_dim], `q_stride` elements from token to token; the caches are laid out as in
// `kv_pieces.h`; out: [T, num_heads, head_dim] contiguous. Memory outside a request's context is not read.
// Slots of a piece of the cache.
inline int64_t piece_slots(int64_t block_size) { return (block_size & -block_size) < 16 ? block_size & -block_size : 16; }

void run_attention(
    Pool* pool, const Batch& batch, const AttentionShape& shape, const void* q, int64_t q_stride, const void* k_cache,
    const void* v_cache, void* out);

}  // namespace troupe
