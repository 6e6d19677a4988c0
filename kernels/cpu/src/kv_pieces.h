// The layout of a KV cache. A cache is a sequence of pieces, one for up to 16 slots and a head:
//
//     keys     number[word of the head][slot][numbers of a word]
//     values   number[word of slots][dimension][slots of a word]
//
// Where the values are the keys there is one cache, laid out as keys. Else both layouts are such
// that the lines of a piece are the operands of a product as they are. A word has 32 bits: 1 float32, 2 bfloat16 or
// 4 bytes. A piece has as many slots as the block size allows: the largest power of 2 that divides it, at most 16.
//
// In int8, keys are unsigned bytes around 128 and values are signed bytes; the float32 scale of each slot follows them.
// Each slot and head has a scale of its own: what is stored does not depend on the tokens beside it.

#pragma once

#include <cmath>

#include "simd.h"

namespace troupe {

constexpr int kPieceSlots = 16, kZeroPoint = 128;
constexpr int64_t kMaxHeadDim = 1024;  // mirrored by `kernels.ops`

template <class Number>
constexpr int kWordNumbers = 4 / sizeof(Number);

// How the pieces of one cache lie; `Number` is float, bf16 or, for int8, uint8_t.
template <class Number>
struct Pieces {
    static constexpr bool kHasScales = sizeof(Number) == 1;
    int64_t slots, num_heads, dim, bytes;

    Pieces(int64_t slots, int64_t num_heads, int64_t dim)
        : slots(slots), num_heads(num_heads), dim(dim), bytes(slots * (dim * sizeof(Number) + (kHasScales ? 4 : 0))) {}

    // The piece of a slot's head.
    uint8_t* find(void* cache, int64_t slot, int64_t head) const {
        return static_cast<uint8_t*>(cache) + (slot / slots * num_heads + head) * bytes;
    }
    const uint8_t* find(const void* cache, int64_t slot, int64_t head) const {
        return find(const_cast<void*>(cache), slot, head);
    }

    // Of the values of a piece.
    int64_t word_slots() const { return slots < kWordNumbers<Number> ? slots : kWordNumbers<Number>; }
    // The first number of a value; the next one is `word_slots` further.
    int64_t value_index(int64_t slot) const {
        int64_t lane = slot % slots, width = word_slots();
        return lane / width * dim * width + lane % width;
    }

    void put_key(uint8_t* piece, int64_t slot, const Number* key) const {
        uint8_t* target = piece + slot % slots * 4;
        for (int64_t i = 0; i < dim; i += kWordNumbers<Number>, target += slots * 4) std::memcpy(target, key + i, 4);
    }
    void put_value(uint8_t* piece, int64_t slot, const Number* value) const {
        Number* target = reinterpret_cast<Number*>(piece) + value_index(slot);
        int64_t width = word_slots();
        for (int64_t i = 0; i < dim; ++i) target[i * width] = value[i];
    }
    float* scales(uint8_t* piece) const { return reinterpret_cast<float*>(piece + slots * dim); }
    const float* scales(const uint8_t* piece) const { return scales(const_cast<uint8_t*>(piece)); }
};

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

// Round a key and a value and write them into their slot of both pieces.
template <class T>
void store_rounded(
    const Pieces<uint8_t>& pieces, int64_t slot, const float* key, const T* value, uint8_t* keys, uint8_t* values) {
    uint8_t codes[kMaxHeadDim];
    float key_scale = quantize(key, codes, pieces.dim);
    pieces.put_key(keys, slot, codes);
    float value_scale = quantize(value, codes, pieces.dim);
    for (int64_t i = 0; i < pieces.dim; ++i) codes[i] ^= kZeroPoint;
    pieces.put_value(values, slot, codes);
    // A score of NaN is what spoils the rows that see a value without a scale.
    if (!std::isfinite(value_scale)) key_scale = NAN;
    pieces.scales(keys)[slot % pieces.slots] = key_scale;
    pieces.scales(values)[slot % pieces.slots] = value_scale;
}

}  // namespace troupe
