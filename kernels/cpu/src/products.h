// What products share beside the inner loop: rows of activations into words, panels, sums into values.

#pragma once

#include "grouped.h"

namespace troupe {

// How a product reads a matrix and its packed rows.
template <class Arithmetic>
struct Operands {
    int64_t num_groups, panel_bytes;
    int64_t row_words;    // of one packed row: activations in groups of the arithmetic, the last group filled up
    int64_t row_factors;  // groups of a row that have factors

    explicit Operands(const Linear& linear) {
        if constexpr (kIsCodes<Arithmetic>) {
            Groups groups(linear);
            num_groups = row_factors = groups.count;
            panel_bytes = groups.panel_bytes();
            row_words = groups.count * groups.size / 4 * (std::is_same_v<Arithmetic, SpreadCodes> ? groups.spread_words : 1);
        } else {
            int64_t inputs = kRepeats<Arithmetic> * linear.in_features;
            num_groups = ceil_div(inputs, Arithmetic::kGroup);
            panel_bytes = num_groups * kPanelBytes;
            row_words = ceil_div(inputs, kRowInputs<Arithmetic>) * kRowWords<Arithmetic>;
            row_factors = 0;
        }
    }
};

// The rows of a product, packed in blocks.
struct PackedRows {
    uint32_t* words;
    GroupFactors* factors;

    template <class Arithmetic>
    static PackedRows allocate(Pool* pool, const Operands<Arithmetic>& operands, int64_t rows) {
        size_t bytes = (size_t(rows) * operands.row_words + kSpareWords<Arithmetic>) * 4;
        bytes = (bytes + 63) / 64 * 64;
        size_t factors = rows * operands.row_factors * sizeof(GroupFactors);
        auto* memory = static_cast<uint8_t*>(pool_scratch(pool, 0, kInputScratch, bytes + factors));
        return {reinterpret_cast<uint32_t*>(memory), reinterpret_cast<GroupFactors*>(memory + bytes)};
    }
};

// Scatter the words of one row into its block: `stride` words from group to group, `count` of them a group.
inline void place(const uint32_t* words, int64_t num_groups, int64_t count, uint32_t* out, int64_t stride) {
    if (count == 1) {
        for (int64_t group = 0; group < num_groups; ++group) out[group * stride] = words[group];
        return;
    }
    for (int64_t group = 0; group < num_groups; ++group)
        std::memcpy(out + group * stride, words + group * count, count * 4);
}

// The same for bytes that become 16 bits wide: those of even inputs in one word, those of odd ones in the next.
inline void place_wide(const uint32_t* words, int64_t count, uint32_t* out, int64_t stride) {
    for (int64_t i = 0; i < count; ++i, out += 2 * stride) {
        auto wide = [&](int byte) { return uint32_t(uint16_t(int8_t(words[i] >> 8 * byte))); };
        out[0] = wide(0) | wide(2) << 16;
        out[stride] = wide(1) | wide(3) << 16;
    }
}

// Convert a row to float32, or to bfloat16, with zeros up to the end of its last group.
template <class From, class To>
void convert(const From* x, To* out, int64_t count, int64_t padded) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(out + i, load(x + i));
    if (i < count) store_first(out + i, load_first(x + i, int(count - i)), int(count - i));
    for (i = count; i < padded; ++i) from_float(0.0f, out + i);
}

// A row's high numbers, its low ones, and the high ones again, with zeros up to the end of its last group.
template <class From>
void split(const From* x, bf16* out, int64_t count, int64_t padded) {
    for (int64_t i = 0; i < count; i += kLanes) {
        int lanes = int(count - i < kLanes ? count - i : kLanes);
        Vec value = load_first(x + i, lanes);
        store_first(out + i, value, lanes);
        store_first(out + count + i, sub(value, load_first(out + i, lanes)), lanes);
    }
    std::memcpy(out + 2 * count, out, count * sizeof(bf16));
    std::memset(out + 3 * count, 0, (padded - 3 * count) * sizeof(bf16));
}

// Pack rows [start, start + size), a block of a product, in the order of the arithmetic. `row(i)` points to the numbers
// of row i of the block; `line` has room for the words of one row.
template <class Arithmetic, class Row>
void pack_block(
    const Operands<Arithmetic>& operands, const Linear& linear, const Row& row, int64_t start, int size, uint32_t* line,
    const PackedRows& packed) {
    uint32_t* words = packed.words + start * operands.row_words;
    GroupFactors* factors = packed.factors + start * operands.row_factors;
    for (int i = 0; i < size; ++i) {
        if constexpr (kIsCodes<Arithmetic>) {
            Groups groups(linear);
            round_row(row(i), linear.in_features, linear.group_size, zero_of(linear.kind), line, factors + i, size);
            int64_t count = groups.count * groups.size / 4;
            if (count == operands.row_words)
                place(line, count, 1, words + i, size);
            else
                place_wide(line, count, words + i, size);
        } else {
            constexpr int WORDS = kRowWords<Arithmetic>, INPUTS = kRowInputs<Arithmetic>;
            int64_t num_groups = operands.row_words / WORDS;
            using Word = std::conditional_t<std::is_base_of_v<BFloat16, Arithmetic>, bf16, float>;
            if constexpr (kIsSplit<Arithmetic>)
                split(row(i), reinterpret_cast<Word*>(line), linear.in_features, num_groups * INPUTS);
            else
                convert(row(i), reinterpret_cast<Word*>(line), linear.in_features, num_groups * INPUTS);
            place(line, num_groups, WORDS, words + i * WORDS, int64_t(size) * WORDS);
        }
    }
}

// What the product of one of `count` blocks of rows asks for: its share of the next panel or panels.
inline Ahead share_next(const uint8_t* panel, int64_t panel_bytes, int64_t block, int64_t count) {
    int64_t share = ceil_div(panel_bytes, count);
    return {panel + panel_bytes + block * share, share};
}

// sums[row][output] of `panels` neighbouring panels, `width` words a row.
template <class Arithmetic>
void multiply_block(
    const Operands<Arithmetic>& operands, const Linear& linear, const PackedRows& packed, int64_t start, int size,
    const uint8_t* weights, int64_t panel_stride, int panels, float* sums, int64_t width, Ahead ahead) {
    TileProduct product{packed.words + start * operands.row_words, weights, panel_stride, operands.num_groups, sums, width,
        packed.factors + start * operands.row_factors, linear.group_size, ahead};
    if constexpr (kIsCodes<Arithmetic>)
        multiply_codes(linear.kind, product, size, std::is_same_v<Arithmetic, SpreadCodes>);
    else if constexpr (kIsSplit<Arithmetic>)
        multiply_tile<std::conditional_t<kIsTiled<Arithmetic>, Tiled<BFloat16>, BFloat16>>(product, size, panels);
    else
        multiply_tile<Arithmetic>(product, size, panels);
}

// A vector of sums with the bias of their outputs.
inline Vec finish_sums(const Linear& linear, const float* sums, int64_t output, int lanes) {
    return linear.bias ? add(load(sums), load_first(linear.bias + output, lanes)) : load(sums);
}

template <class To>
void write_tile(const Linear& linear, const float* sums, To* y, int rows, int64_t first, int64_t width) {
    int64_t outs = linear.out_features;
    for (int row = 0; row < rows; ++row) {
        for (int64_t at = 0; at < width && first + at < outs; at += kLanes) {
            int64_t left = outs - first - at;
            int lanes = int(left < kLanes ? left : kLanes);
            Vec value = finish_sums(linear, sums + row * width + at, first + at, lanes);
            To* target = y + row * outs + first + at;
            if (lanes == kLanes)
                store(target, value);
            else
                store_first(target, value, lanes);
        }
    }
}

}  // namespace troupe
