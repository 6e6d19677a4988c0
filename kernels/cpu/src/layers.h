// All layers of a decoder over one step, in one call.

#pragma once

#include "attention.h"
#include "linear.h"
#include "lora.h"
#include "pool.h"

namespace troupe {

// Mirrored by `kernels.cpu.structs`. Norm weights are of the model's dtype.
struct Layer {
    const void* input_norm;
    const void* post_attention_norm;
    const void* qk_norm;  // or null
    Linear qkv, output, gate_up, down;
    int64_t sliding_window;  // 0: none
};

// Mirrored by `kernels.cpu.structs`.
struct Decoder {
    const Layer* layers;
    const void* final_norm;
    int64_t num_layers, num_heads, num_kv_heads, head_dim, block_size, hidden_size, inner_size;
    float eps, scale;
    int32_t dtype;
    int32_t is_int8;  // the caches
};

// Mirrored by `kernels.cpu.structs`.
struct Step {
    void* hidden;  // [tokens, hidden_size], the embedded tokens; overwritten
    void* out;     // [tokens, hidden_size]
    const float *cos, *sin;
    const int64_t* slots;
    void* const* caches;  // k_cache and v_cache of each layer, in turn
    int64_t num_tokens;
    const LoraStep* lora;  // or null
};

void run_layers(Pool* pool, const Decoder& decoder, const Batch& batch, const Step& step);

}  // namespace troupe
