// What products share beside the inner loop: rows of activations into words, accumulators into values.

#pragma once

#include "dispatch.h"

namespace troupe {

// Words of one packed row: activations in groups of the arithmetic, the last group filled up.
template <class Arithmetic>
int64_t words_per_row(int64_t in_features) {
    return ceil_div(in_features, kRowInputs<Arithmetic>) * kRowWords<Arithmetic>;
}

// Scatter the words of one row into its block: `stride` words from group to group, `count` of them a group.
inline void place(const uint32_t* words, int64_t num_groups, int count, uint32_t* out, int64_t stride) {
    if (count == 1) {
        for (int64_t group = 0; group < num_groups; ++group) out[group * stride] = words[group];
        return;
    }
    for (int64_t group = 0; group < num_groups; ++group)
        std::memcpy(out + group * stride, words + group * count, count * 4);
}

// Convert a row to float32, or to bfloat16, with zeros up to the end of its last group.
template <class From, class To>
void convert(const From* x, To* out, int64_t count, int64_t padded) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(out + i, load(x + i));
    if (i < count) store_first(out + i, load_first(x + i, int(count - i)), int(count - i));
    for (i = count; i < padded; ++i) from_float(0.0f, out + i);
}

// Quantize a row to bytes around `zero_point`; returns its scale, NaN where the row holds NaN.
template <class From>
float quantize(const From* x, uint8_t* out, int64_t count, int64_t padded, int zero_point = Int8::kZeroPoint) {
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
        for (int lane = 0; lane < n; ++lane) out[i + lane] = uint8_t(lanes[lane] + zero_point);
    }
    for (i = count; i < padded; ++i) out[i] = uint8_t(zero_point);
    return (limit + sum(spoiled)) / 127.0f;
}

template <class From>
float to_words(Float32, const From* x, uint32_t* out, int64_t count, int64_t padded) {
    convert(x, reinterpret_cast<float*>(out), count, padded);
    return 1.0f;
}
template <class From>
float to_words(Float32Half, const From* x, uint32_t* out, int64_t count, int64_t padded) {
    convert(x, reinterpret_cast<float*>(out), count, padded);
    return 1.0f;
}
template <class From>
float to_words(BFloat16, const From* x, uint32_t* out, int64_t count, int64_t padded) {
    convert(x, reinterpret_cast<bf16*>(out), count, padded);
    return 1.0f;
}
template <class From>
float to_words(Int8, const From* x, uint32_t* out, int64_t count, int64_t padded) {
    return quantize(x, reinterpret_cast<uint8_t*>(out), count, padded);
}
// Tiles multiply signed bytes as well, so their zero point is what the corrections of the weights expect.
template <class From>
float to_words(Tiled<Int8>, const From* x, uint32_t* out, int64_t count, int64_t padded) {
    return quantize(x, reinterpret_cast<uint8_t*>(out), count, padded, Int8::kSurplus);
}

// Pack rows [0, size) of a block in the order of the arithmetic, and note their scales. `row(i)` points to the numbers of
// row i; `line` has room for the words of one row.
template <class Arithmetic, class Row>
void pack_block(const Row& row, int size, int64_t in_features, uint32_t* line, uint32_t* words, float* scales) {
    constexpr int WORDS = kRowWords<Arithmetic>, INPUTS = kRowInputs<Arithmetic>;
    int64_t num_groups = ceil_div(in_features, INPUTS);
    for (int i = 0; i < size; ++i) {
        scales[i] = to_words(Arithmetic(), row(i), line, in_features, num_groups * INPUTS);
        place(line, num_groups, WORDS, words + i * WORDS, int64_t(size) * WORDS);
    }
}

// Turn the accumulators of one row and one vector of outputs into their values.
struct Epilogue {
    const Linear& linear;
    bool is_int8;

    Vec apply(const float* sums, float row_scale, int64_t output, int lanes) const {
        Vec value;
        if (is_int8) {
            VecInt exact = sub_int(load_int(sums), load_int_first(linear.corrections + output, lanes));
            value = mul(to_vec(exact), mul(splat(row_scale), load_first(linear.scales + output, lanes)));
        } else {
            value = load(sums);
        }
        return linear.bias ? add(value, load_first(linear.bias + output, lanes)) : value;
    }
};

template <class To>
void write_tile(
    const Epilogue& epilogue, const float* sums, const float* row_scales, To* y, int rows, int64_t first, int64_t width) {
    int64_t outs = epilogue.linear.out_features;
    for (int row = 0; row < rows; ++row) {
        for (int64_t at = 0; at < width && first + at < outs; at += kLanes) {
            int64_t left = outs - first - at;
            int lanes = int(left < kLanes ? left : kLanes);
            Vec value = epilogue.apply(sums + row * width + at, row_scales[row], first + at, lanes);
            To* target = y + row * outs + first + at;
            if (lanes == kLanes)
                store(target, value);
            else
                store_first(target, value, lanes);
        }
    }
}

}  // namespace troupe
