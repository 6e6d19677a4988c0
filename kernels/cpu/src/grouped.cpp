#include "grouped.h"

#include <type_traits>

#include "dispatch.h"
#include "grouped_dot.h"

namespace troupe {

namespace {

constexpr int64_t kHalfBytes = 2;
constexpr int64_t kFactorBytes = 2 * kPanelWidth * kHalfBytes;  // the scales and minimums of a panel's group

int bits_of(int32_t kind) { return kind == kWeightGrouped4 ? 4 : 8; }

// The sizes of a packed matrix.
struct Groups {
    int64_t count, units, bytes;

    Groups(int bits, int64_t in_features, int64_t group_size)
        : count(ceil_div(in_features, group_size)),
          units(group_size / kUnit),
          bytes(kFactorBytes + group_size * bits / 32 * kPanelBytes) {}
    explicit Groups(const Linear& linear) : Groups(bits_of(linear.kind), linear.in_features, linear.group_size) {}
    int64_t words() const { return count * units * (kUnit / 4); }
    int64_t panel_bytes() const { return count * bytes; }
};

// Rows of activations: words[block][word][row], and factors[block][group][row] = (scale, scale * sum of the bytes).
struct CodedRows {
    uint32_t* words;
    float* factors;
};

// ---- activations -------------------------------------------------------------------------------------------------

// Round one group of a row to bytes, zeros up to its end. A scale of NaN stands for a NaN among the values.
template <class From>
void round_group(const From* x, int64_t count, int64_t size, uint8_t* bytes, float* factors) {
    Vec largest = zero(), spoiled = zero();
    for (int64_t i = 0; i < count; i += kLanes) {
        Vec value = load_first(x + i, int(count - i < kLanes ? count - i : kLanes));
        largest = max(largest, abs(value));
        spoiled = fma(value, zero(), spoiled);
    }
    float limit = max_of(largest);
    Vec inverse = splat(limit > 0 ? 127.0f / limit : 0.0f);
    Vec sums = zero();
    for (int64_t i = 0; i < size; i += kLanes) {
        int64_t left = count - i;
        Vec value = left <= 0 ? zero() : load_first(x + i, int(left < kLanes ? left : kLanes));
        Vec rounded = round(mul(value, inverse));
        store_bytes(bytes + i, rounded);
        sums = add(sums, rounded);
    }
    float scale = (limit + sum(spoiled)) / 127.0f;
    factors[0] = scale;
    // A sum of whole numbers below 2^24 is exact in any order.
    factors[1] = scale * sum(sums);
}

template <class From>
CodedRows code_rows(Pool* pool, const Linear& linear, const From* x, int64_t rows) {
    Groups groups(linear);
    int64_t in_features = linear.in_features, group_size = linear.group_size;
    int64_t width = groups.words();
    size_t bytes = (size_t(rows) * width * 4 + 63) / 64 * 64;
    auto* memory = static_cast<uint8_t*>(pool_scratch(pool, 0, kInputScratch, bytes + rows * groups.count * 2 * sizeof(float)));
    CodedRows coded{reinterpret_cast<uint32_t*>(memory), reinterpret_cast<float*>(memory + bytes)};
    RowBlocks blocks(rows);
    parallel_ranges(pool, blocks.num_blocks, kMaxRows * in_features, [&](int64_t first, int64_t end, int thread) {
        auto* line = static_cast<uint32_t*>(pool_scratch(pool, thread, kTileScratch, group_size));
        for (int64_t block = first; block < end; ++block) {
            int64_t start = blocks.start(block);
            int size = blocks.size(block);
            for (int64_t item = 0; item < size * groups.count; ++item) {
                int64_t row = item % size, group = item / size;
                int64_t at = group * group_size;
                int64_t count = in_features - at < group_size ? in_features - at : group_size;
                float* factors = coded.factors + 2 * (start * groups.count + item);
                auto* line_bytes = reinterpret_cast<uint8_t*>(line);
                round_group(x + (start + row) * in_features + at, count, group_size, line_bytes, factors);
                uint32_t* target = coded.words + start * width + at / 4 * size + row;
                for (int64_t word = 0; word < group_size / 4; ++word) target[word * size] = line[word];
            }
        }
    });
    return coded;
}

// ---- the product -------------------------------------------------------------------------------------------------

// sums[row][output] of one panel for `ROWS` rows.
template <int BITS, int ROWS>
void multiply_codes(const Groups& groups, const uint32_t* x, const float* factors, const uint8_t* panel, float* sums) {
    for (int part = 0; part < kPanelVecs; part += kCodeVecs) {
        const uint32_t* words = x;
        const float* factor = factors;
        const uint8_t* w = panel + part * kLanes * 4;
        const uint8_t* halves = panel + part * kLanes * kHalfBytes;
        Vec acc[ROWS][kCodeVecs];
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
            for (int v = 0; v < kCodeVecs; ++v) acc[row][v] = zero();
        for (int64_t group = 0; group < groups.count; ++group) {
            Sums<ROWS> totals;
            clear<ROWS>(totals);
            add_group<BITS, ROWS>(w + kFactorBytes, words, groups.units, totals);
#pragma GCC unroll 2
            for (int v = 0; v < kCodeVecs; ++v) {
                Vec scale = load_half(halves + v * kLanes * kHalfBytes);
                Vec minimum = load_half(halves + kFactorBytes / 2 + v * kLanes * kHalfBytes);
#pragma GCC unroll 8
                for (int row = 0; row < ROWS; ++row) {
                    Vec value = fma(to_vec(totals[row][v]), mul(scale, splat(factor[2 * row])), acc[row][v]);
                    acc[row][v] = fma(minimum, splat(factor[2 * row + 1]), value);
                }
            }
            w += groups.bytes, halves += groups.bytes;
            words += groups.units * (kUnit / 4) * ROWS, factor += 2 * ROWS;
        }
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
            for (int v = 0; v < kCodeVecs; ++v) store(sums + row * kPanelWidth + (part + v) * kLanes, acc[row][v]);
    }
}

template <int BITS>
void multiply_codes(
    const Groups& groups, const uint32_t* x, const float* factors, const uint8_t* panel, float* sums, int rows) {
    switch (rows) {
        case 1: return multiply_codes<BITS, 1>(groups, x, factors, panel, sums);
        case 2: return multiply_codes<BITS, 2>(groups, x, factors, panel, sums);
        case 3: return multiply_codes<BITS, 3>(groups, x, factors, panel, sums);
#ifdef TROUPE_AVX512
        case 4: return multiply_codes<BITS, 4>(groups, x, factors, panel, sums);
        case 5: return multiply_codes<BITS, 5>(groups, x, factors, panel, sums);
        case 6: return multiply_codes<BITS, 6>(groups, x, factors, panel, sums);
#endif
        default: __builtin_unreachable();
    }
}

template <class To>
void write_row(const Linear& linear, const float* sums, int64_t first, To* y) {
    for (int at = 0; at < kPanelWidth && first + at < linear.out_features; at += kLanes) {
        int64_t left = linear.out_features - first - at;
        int lanes = int(left < kLanes ? left : kLanes);
        Vec value = load(sums + at);
        if (linear.bias) value = add(value, load_first(linear.bias + first + at, lanes));
        if (lanes == kLanes)
            store(y + first + at, value);
        else
            store_first(y + first + at, value, lanes);
    }
}

template <int BITS, class To>
void run_code_panels(Pool* pool, const Linear& linear, const CodedRows& coded, To* y, int64_t rows) {
    Groups groups(linear);
    RowBlocks blocks(rows);
    parallel(pool, ceil_div(linear.out_features, kPanelWidth), [&](int64_t tile, int) {
        alignas(64) float sums[kMaxRows * kPanelWidth];
        const uint8_t* panel = linear.panels + tile * groups.panel_bytes();
        for (int64_t block = 0; block < blocks.num_blocks; ++block) {
            int64_t start = blocks.start(block);
            int size = blocks.size(block);
            const float* factors = coded.factors + 2 * start * groups.count;
            multiply_codes<BITS>(groups, coded.words + start * groups.words(), factors, panel, sums, size);
            for (int row = 0; row < size; ++row)
                write_row(linear, sums + row * kPanelWidth, tile * kPanelWidth, y + (start + row) * linear.out_features);
        }
    });
}

// ---- the layout --------------------------------------------------------------------------------------------------

// The byte and the shift of an input's code within its group of one output.
struct CodePlace {
    int64_t byte;
    int shift;

    CodePlace(int bits, int64_t input, int lane) {
        int64_t word = bits == 4 ? input / 8 : input / 4;
        byte = kFactorBytes + word * kPanelBytes + lane * 4 + input % 4;
        shift = bits == 4 && input % 8 >= 4 ? 4 : 0;
    }
};

void put_half(uint8_t* p, float value) {
    uint16_t half = uint16_t(_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT), 0));
    std::memcpy(p, &half, 2);
}

float get_half(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}

// Write a row of a packed matrix, float32 [in].
void unpack_row(const Linear& linear, const Groups& groups, int64_t output, float* row) {
    int bits = bits_of(linear.kind), lane = int(output % kPanelWidth), mask = bits == 4 ? 15 : 255;
    const uint8_t* group = linear.panels + output / kPanelWidth * groups.panel_bytes();
    for (int64_t start = 0; start < linear.in_features; start += linear.group_size, group += groups.bytes) {
        float scale = get_half(group + lane * kHalfBytes);
        float minimum = get_half(group + kFactorBytes / 2 + lane * kHalfBytes);
        int64_t left = linear.in_features - start;
        for (int64_t input = 0; input < (left < linear.group_size ? left : linear.group_size); ++input) {
            CodePlace place(bits, input, lane);
            row[start + input] = scale * float((group[place.byte] >> place.shift) & mask) + minimum;
        }
    }
}

// f(constant) for the number of bits.
template <class F>
void with_bits(int32_t kind, F f) {
    if (kind == kWeightGrouped4)
        f(std::integral_constant<int, 4>());
    else
        f(std::integral_constant<int, 8>());
}

}  // namespace

int64_t grouped_bytes(int32_t kind, int64_t out_features, int64_t in_features, int64_t group_size) {
    return ceil_div(out_features, kPanelWidth) * Groups(bits_of(kind), in_features, group_size).panel_bytes();
}

void pack_grouped(
    Pool* pool, int32_t kind, const uint8_t* codes, const float* scales, const float* minimums, int64_t out_features,
    int64_t in_features, int64_t group_size, uint8_t* panels) {
    int bits = bits_of(kind);
    Groups groups(bits, in_features, group_size);
    parallel(pool, ceil_div(out_features, kPanelWidth), [&](int64_t panel, int) {
        uint8_t* target = panels + panel * groups.panel_bytes();
        std::memset(target, 0, groups.panel_bytes());
        for (int lane = 0; lane < kPanelWidth && panel * kPanelWidth + lane < out_features; ++lane) {
            int64_t output = panel * kPanelWidth + lane;
            for (int64_t group = 0; group < groups.count; ++group) {
                uint8_t* to = target + group * groups.bytes;
                put_half(to + lane * kHalfBytes, scales[output * groups.count + group]);
                put_half(to + kFactorBytes / 2 + lane * kHalfBytes, minimums[output * groups.count + group]);
                const uint8_t* from = codes + output * in_features + group * group_size;
                int64_t left = in_features - group * group_size;
                int64_t count = left < group_size ? left : group_size, input = 0;
                // Whole words of the panel; the rest code by code.
                for (; input + 32 / bits <= count; input += 32 / bits) {
                    uint32_t low, high = 0;
                    std::memcpy(&low, from + input, 4);
                    if (bits == 4) std::memcpy(&high, from + input + 4, 4);
                    low |= high << 4;
                    std::memcpy(to + CodePlace(bits, input, lane).byte, &low, 4);
                }
                for (; input < count; ++input) {
                    CodePlace place(bits, input, lane);
                    to[place.byte] |= uint8_t(from[input] << place.shift);
                }
            }
        }
    });
}

void unpack_grouped(Pool* pool, const Linear& linear, float* weight) {
    Groups groups(linear);
    parallel(pool, ceil_div(linear.out_features, kPanelWidth), [&](int64_t panel, int) {
        for (int64_t output = panel * kPanelWidth; output < linear.out_features && output < (panel + 1) * kPanelWidth; ++output)
            unpack_row(linear, groups, output, weight + output * linear.in_features);
    });
}

void unpack_grouped_rows(Pool* pool, const Linear& linear, const int64_t* ids, int64_t count, float* out) {
    Groups groups(linear);
    parallel(pool, count, [&](int64_t i, int) { unpack_row(linear, groups, ids[i], out + i * linear.in_features); });
}

void run_grouped(Pool* pool, const Linear& linear, const void* x, int32_t x_dtype, void* y, int32_t y_dtype, int64_t rows) {
    CodedRows coded = x_dtype == kBFloat16 ? code_rows(pool, linear, static_cast<const bf16*>(x), rows)
                                           : code_rows(pool, linear, static_cast<const float*>(x), rows);
    with_bits(linear.kind, [&](auto bits) {
        if (y_dtype == kBFloat16)
            run_code_panels<bits>(pool, linear, coded, static_cast<bf16*>(y), rows);
        else
            run_code_panels<bits>(pool, linear, coded, static_cast<float*>(y), rows);
    });
}

}  // namespace troupe
