#include "linear.h"

#include "dispatch.h"

namespace troupe {

namespace {

// The rows of a product, packed: block[group][row] words, and the scale of each row for Int8.
struct PackedRows {
    uint32_t* words;
    float* scales;
    int64_t words_per_row;
};

// ---- activations -------------------------------------------------------------------------------------------------

// Scatter the words of one row into its block: `stride` words from group to group, `count` of them a group.
void place(const uint32_t* words, int64_t num_groups, int count, uint32_t* out, int64_t stride) {
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

// Quantize a row to bytes around the zero point; returns its scale, NaN where the row holds NaN.
template <class From>
float quantize(const From* x, uint8_t* out, int64_t count, int64_t padded) {
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
        for (int lane = 0; lane < n; ++lane) out[i + lane] = uint8_t(lanes[lane] + Int8::kZeroPoint);
    }
    for (i = count; i < padded; ++i) out[i] = Int8::kZeroPoint;
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

template <class Arithmetic, class From>
PackedRows pack_rows(Pool* pool, const From* x, int64_t rows, int64_t in_features) {
    int64_t num_groups = ceil_div(in_features, Arithmetic::kGroup);
    int64_t width = num_groups * Arithmetic::kWords;
    size_t bytes = (size_t(rows) * width * 4 + 63) / 64 * 64;
    auto* memory = static_cast<uint8_t*>(pool_scratch(pool, 0, kInputScratch, bytes + rows * 4));
    PackedRows packed{reinterpret_cast<uint32_t*>(memory), reinterpret_cast<float*>(memory + bytes), width};
    RowBlocks blocks(rows);
    parallel_ranges(pool, blocks.num_blocks, kMaxRows * in_features, [&](int64_t first, int64_t end, int thread) {
        auto* line = static_cast<uint32_t*>(pool_scratch(pool, thread, kTileScratch, width * 4));
        for (int64_t block = first; block < end; ++block) {
            int64_t start = blocks.start(block);
            int size = blocks.size(block);
            for (int row = 0; row < size; ++row) {
                const From* source = x + (start + row) * in_features;
                packed.scales[start + row] =
                    to_words(Arithmetic(), source, line, in_features, num_groups * Arithmetic::kGroup);
                uint32_t* target = packed.words + start * width + row * Arithmetic::kWords;
                place(line, num_groups, Arithmetic::kWords, target, int64_t(size) * Arithmetic::kWords);
            }
        }
    });
    return packed;
}

// ---- the product -------------------------------------------------------------------------------------------------

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

// Tiles are pairs of panels, and single ones at the end, so that the threads finish together.
struct PanelTiles {
    int64_t num_pairs, num_singles;
    PanelTiles(int64_t num_panels, int num_threads) {
        int64_t wished = num_threads > 1 ? 2 * num_threads : num_panels % 2;
        num_singles = kMaxPanels == 1 || wished > num_panels ? num_panels : wished;
        num_singles += (num_panels - num_singles) % 2;
        num_pairs = (num_panels - num_singles) / 2;
    }
    int64_t count() const { return num_pairs + num_singles; }
};

template <class Arithmetic, class To>
void run_panels(Pool* pool, const Linear& linear, const PackedRows& packed, To* y, int64_t rows) {
    RowBlocks blocks(rows);
    PanelTiles tiles(ceil_div(linear.out_features, kPanelWidth), pool_threads(pool));
    Epilogue epilogue{linear, linear.kind == kWeightInt8};
    int64_t num_groups = ceil_div(linear.in_features, Arithmetic::kGroup);
    int64_t panel_stride = num_groups * kPanelBytes;
    parallel(pool, tiles.count(), [&](int64_t tile, int) {
        alignas(64) float sums[kMaxRows * kMaxPanels * kPanelWidth];
        int panels = tile < tiles.num_pairs ? 2 : 1;
        int64_t panel = panels == 2 ? 2 * tile : tiles.num_pairs + tile;
        int64_t width = panels * kPanelWidth;
        const uint8_t* weights = linear.panels + panel * panel_stride;
        for (int64_t block = 0; block < blocks.num_blocks; ++block) {
            int64_t row = blocks.start(block);
            int size = blocks.size(block);
            const uint32_t* x = packed.words + row * packed.words_per_row;
            multiply_tile<Arithmetic>({x, weights, panel_stride, num_groups, sums, width, false}, size, panels);
            To* target = y + row * linear.out_features;
            write_tile(epilogue, sums, packed.scales + row, target, size, panel * kPanelWidth, width);
        }
    });
}

}  // namespace

void run_linear(Pool* pool, const Linear& linear, const void* x, int32_t x_dtype, void* y, int32_t y_dtype, int64_t rows) {
    if (rows == 0) return;
    with_arithmetic(linear.kind, [&](auto arithmetic) {
        using Arithmetic = decltype(arithmetic);
        PackedRows packed = x_dtype == kBFloat16
            ? pack_rows<Arithmetic>(pool, static_cast<const bf16*>(x), rows, linear.in_features)
            : pack_rows<Arithmetic>(pool, static_cast<const float*>(x), rows, linear.in_features);
        if (y_dtype == kBFloat16)
            run_panels<Arithmetic>(pool, linear, packed, static_cast<bf16*>(y), rows);
        else
            run_panels<Arithmetic>(pool, linear, packed, static_cast<float*>(y), rows);
    });
}

}  // namespace troupe
