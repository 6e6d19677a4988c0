// The layout of a KV cache in int8. A cache is a sequence of pieces, one for 16 slots and a head:
//
//     keys     code[word of the head][slot][4 dimensions]   unsigned bytes around 128
//     values   code[4 slots of 16][dimension][slot]         signed bytes
//     both     then the float32 scale of each slot
//
// so that the lines of a piece are the operands of a product as they are. Each slot and head has a scale of its own: what
// is stored does not depend on the tokens beside it.

#pragma once

#include <cmath>

#include "simd.h"

namespace troupe {

constexpr int kPieceSlots = 16, kZeroPoint = 128;
constexpr int64_t kMaxInt8HeadDim = 1024;  // mirrored by `kernels.ops`

inline int64_t piece_bytes(int64_t head_dim) { return kPieceSlots * (head_dim + 4); }

inline const float* piece_scales(const uint8_t* piece, int64_t head_dim) {
    return reinterpret_cast<const float*>(piece + kPieceSlots * head_dim);
}

// The piece of a slot's head.
inline uint8_t* find_piece(void* cache, int64_t slot, int64_t head, int64_t num_kv_heads, int64_t head_dim) {
    return static_cast<uint8_t*>(cache) + (slot / kPieceSlots * num_kv_heads + head) * piece_bytes(head_dim);
}

// Unsigned bytes of a row around the zero point; returns its scale, NaN where the row holds NaN.
template <class From>
float quantize(const From* x, uint8_t* out, int64_t count) {
    // The maximum passes over NaN, which has no byte; `spoiled` is 0, or NaN where a value is.
    Vec largest = zero(), spoiled = zero();
    int64_t i = 0;
    auto look = [&](Vec value) {
        largest = max(largest, abs(value));
        spoiled = fma(value, zero(), spoiled);
    };
    for (; i + kLanes <= count; i += kLanes) look(load(x + i));
    if (i < count) look(load_first(x + i, int(count - i)));
    float limit = max_of(largest);
    Vec inverse = splat(limit > 0 ? 127.0f / limit : 0.0f);
    int32_t lanes[kLanes];
    for (i = 0; i < count; i += kLanes) {
        int n = int(count - i < kLanes ? count - i : kLanes);
        store_int(lanes, to_int(mul(load_first(x + i, n), inverse)));
        for (int lane = 0; lane < n; ++lane) out[i + lane] = uint8_t(lanes[lane] + kZeroPoint);
    }
    return (limit + sum(spoiled)) / 127.0f;
}

// Round a key and a value of `dim` numbers and write them into their slot of both pieces.
template <class T>
void store_slot(const float* key, const T* value, int64_t dim, int64_t slot, uint8_t* keys, uint8_t* values) {
    uint8_t codes[kMaxInt8HeadDim];
    int64_t lane = slot % kPieceSlots;
    float key_scale = quantize(key, codes, dim);
    for (int64_t word = 0; word < dim / 4; ++word) std::memcpy(keys + (word * kPieceSlots + lane) * 4, codes + word * 4, 4);
    float value_scale = quantize(value, codes, dim);
    uint8_t* target = values + lane / 4 * dim * 4 + lane % 4;
    for (int64_t i = 0; i < dim; ++i) target[i * 4] = codes[i] ^ kZeroPoint;
    // A score of NaN is what spoils the rows that see a value without a scale.
    if (!std::isfinite(value_scale)) key_scale = NAN;
    std::memcpy(keys + kPieceSlots * dim + lane * 4, &key_scale, 4);
    std::memcpy(values + kPieceSlots * dim + lane * 4, &value_scale, 4);
}

}  // namespace troupe
