// The same functions on the same dtypes as the single ops, one after another: results are equal bit for bit.

#include "layers.h"

#include <vector>

#include "elementwise.h"

namespace troupe {

namespace {

// The tensors between the ops of a layer, one piece of memory for the whole step.
struct Buffers {
    uint8_t *normed, *heads, *queries, *attended, *product, *gate_up, *inner;

    Buffers(Pool* pool, const Decoder& decoder, int64_t num_tokens) {
        int64_t q_size = decoder.num_heads * decoder.head_dim;
        int64_t kv_size = decoder.num_kv_heads * decoder.head_dim;
        int64_t widths[] = {
            decoder.hidden_size, q_size + 2 * kv_size,   q_size, q_size, decoder.hidden_size, 2 * decoder.inner_size,
            decoder.inner_size,
        };
        int64_t element = decoder.dtype == kBFloat16 ? 2 : 4;
        int64_t total = 0;
        for (int64_t& width : widths) total += width = (width * num_tokens * element + 63) / 64 * 64;
        auto* memory = static_cast<uint8_t*>(pool_scratch(pool, 0, kStepScratch, total));
        uint8_t** parts[] = {&normed, &heads, &queries, &attended, &product, &gate_up, &inner};
        for (int part = 0; part < 7; memory += widths[part++]) *parts[part] = memory;
    }
};

enum Matrix { kQkv, kOutput, kGateUp, kDown, kNumMatrices };

// One product of a layer, with the changes of adapters.
void run_matrix(
    Pool* pool, const Decoder& decoder, const Step& step, int64_t layer, Matrix which, const Linear& linear, const void* x,
    void* y) {
    run_linear(pool, linear, x, decoder.dtype, y, decoder.dtype, step.num_tokens);
    if (!step.lora) return;
    std::vector<LoraSegment> segments;
    for (int64_t index = 0; index < step.lora->num_segments; ++index) {
        const LoraLayersSegment& segment = step.lora->segments[index];
        const Lora* lora = segment.matrices[layer * kNumMatrices + which];
        if (lora) segments.push_back({lora, segment.first, segment.count});
    }
    if (!segments.empty())
        run_lora(pool, step.lora->rows, segments.data(), segments.size(), x, decoder.dtype, y, decoder.dtype);
}

void run_attention_block(
    Pool* pool, const Decoder& decoder, int64_t index, const Batch& batch, const Step& step, const Buffers& buffers) {
    const Layer& layer = decoder.layers[index];
    void *k_cache = step.caches[2 * index], *v_cache = step.caches[2 * index + 1];
    int64_t tokens = step.num_tokens;
    int32_t dtype = decoder.dtype;
    run_matrix(pool, decoder, step, index, kQkv, layer.qkv, buffers.normed, buffers.heads);
    RopeStore rope{
        buffers.heads,     layer.qk_norm,        step.cos,         step.sin,    k_cache, v_cache, step.slots, buffers.queries, tokens,
        decoder.num_heads, decoder.num_kv_heads, decoder.head_dim, decoder.eps, dtype,
        decoder.is_int8,   int32_t(piece_slots(decoder.block_size))};
    run_rope_store(pool, rope);
    AttentionShape shape{
        decoder.num_heads, decoder.num_kv_heads, decoder.head_dim, decoder.block_size, layer.sliding_window,
        decoder.scale,     0.0f,                 dtype,            decoder.is_int8,    nullptr,
        nullptr};
    int64_t q_stride = decoder.num_heads * decoder.head_dim;
    run_attention(pool, batch, shape, buffers.queries, q_stride, k_cache, v_cache, buffers.attended);
    run_matrix(pool, decoder, step, index, kOutput, layer.output, buffers.attended, buffers.product);
}

void run_mlp(Pool* pool, const Decoder& decoder, int64_t index, const Step& step, const Buffers& buffers) {
    const Layer& layer = decoder.layers[index];
    run_matrix(pool, decoder, step, index, kGateUp, layer.gate_up, buffers.normed, buffers.gate_up);
    int64_t tokens = step.num_tokens;
    run_activation(pool, kSiluMul, decoder.dtype, buffers.gate_up, buffers.inner, tokens, decoder.inner_size);
    run_matrix(pool, decoder, step, index, kDown, layer.down, buffers.inner, buffers.product);
}

}  // namespace

void run_layers(Pool* pool, const Decoder& decoder, const Batch& batch, const Step& step) {
    Buffers buffers(pool, decoder, step.num_tokens);
    int64_t tokens = step.num_tokens, size = decoder.hidden_size;
    int32_t dtype = decoder.dtype;
    float eps = decoder.eps;
    auto add_norm = [&](const void* weight, void* out) {
        run_add_rms_norm(pool, dtype, buffers.product, step.hidden, weight, eps, out, tokens, size);
    };
    for (int64_t index = 0; index < decoder.num_layers; ++index) {
        const Layer& layer = decoder.layers[index];
        if (index == 0)
            run_rms_norm(pool, dtype, step.hidden, layer.input_norm, 1, eps, buffers.normed, tokens, size);
        else
            add_norm(layer.input_norm, buffers.normed);
        run_attention_block(pool, decoder, index, batch, step, buffers);
        add_norm(layer.post_attention_norm, buffers.normed);
        run_mlp(pool, decoder, index, step, buffers);
    }
    add_norm(decoder.final_norm, step.out);
}

}  // namespace troupe
