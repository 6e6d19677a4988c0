#include "blocks.h"

#include <cmath>
#include <cstring>
#include <initializer_list>

#include "dispatch.h"
#include "simd.h"

namespace troupe {

namespace {

constexpr int kGroup = 32;  // values with one scale

float round_to_half(float value) {
    uint8_t half[2];
    write_half(half, value);
    return read_half(half);
}

// Round a group of COUNT values, or `count` if that is 0, to codes around 0. Returns the scale, NaN where the group has a NaN.
template <int COUNT = 0>
float round_group(const float* values, int64_t count, float greatest, int8_t* codes) {
    if (COUNT) count = COUNT;
    // The bits of magnitudes are in the order of their values, and those of NaN are above infinity's.
    alignas(64) int32_t bits[kLanes], whole[kLanes];
    auto for_each_vec = [&](auto body) {
        for (int64_t i = 0; i < count; i += kLanes)
            body(i, load_first(values + i, int(count - i < kLanes ? count - i : kLanes)));
    };
    VecInt largest = zero_int();
    for_each_vec([&](int64_t, Vec value) { largest = max_int(largest, as_int(abs(value))); });
    store_int(bits, largest);
    int32_t most = 0;
    for (int32_t each : bits) most = each > most ? each : most;
    float magnitude;
    std::memcpy(&magnitude, &most, 4);
    float scale = round_to_half(magnitude / greatest);
    Vec divisor = splat(scale == 0.0f ? 1.0f : scale), limit = splat(greatest), floor = splat(-greatest);
    for_each_vec([&](int64_t i, Vec value) {
        // NaN stays one in the second operands, and becomes the integer whose lowest byte is 0.
        store_int(whole, to_int(min(limit, max(floor, round(div(value, divisor))))));
        int8_t bytes[kLanes];
        for (int at = 0; at < kLanes; ++at) bytes[at] = int8_t(whole[at]);
        std::memcpy(codes + i, bytes, count - i < kLanes ? count - i : kLanes);
    });
    return scale;
}

// Add what `leaf` returns for 32 numbers: halves to halves, until one is left.
template <int FIRST = 0, int STEP = 1, class Leaf>
__attribute__((always_inline)) inline Vec add_halves(const Leaf& leaf) {
    if constexpr (STEP == kGroup) return leaf(FIRST);
    else return add(add_halves<FIRST, 2 * STEP>(leaf), add_halves<FIRST + STEP, 2 * STEP>(leaf));
}

template <class Leaf>
__attribute__((always_inline)) inline Vec add_all(int64_t size, const Leaf& leaf) {
    Vec total = zero();
    for (int64_t start = 0; start < size; start += kGroup)
        total = add(total, add_halves([&](int i) __attribute__((always_inline)) { return leaf(start + i); }));
    return total;
}

inline Vec find_code(Vec value, Vec inverse, Vec minimum) {
    return min(splat(15.0f), max(zero(), round(mul(sub(value, minimum), inverse))));  // NaN stays NaN
}

// Round a group in each lane, values and codes [size, kLanes], by the operations of `_round_4` in kernels/grouped.py, in its order.
void round_lanes(const float* values, int64_t size, float* codes, float* scales, float* minimums) {
    auto value = [&](int64_t i) __attribute__((always_inline)) { return load(values + i * kLanes); };
    Vec low = value(0), high = low, total = add_all(size, value), count = splat(float(size));
    for (int64_t i = 1; i < size; ++i) low = min(low, value(i)), high = max(high, value(i));
    low = add(low, mul(total, zero()));
    alignas(64) float least[kLanes], errors[kLanes], scale_found[kLanes], minimum_found[kLanes];
    store(least, splat(INFINITY));
    store(scales, sub(high, low));
    store(minimums, low);
    for (float levels : {14.0f, 14.5f, 15.0f, 15.5f, 16.0f, 16.5f}) {
        Vec scale = div(sub(high, low), splat(levels)), minimum = low;
        for (int turn = 0; turn < 3; ++turn) {
            Vec inverse = div(splat(1.0f), scale), ones = zero(), squares = zero();
            Vec products = add_all(size, [&](int64_t i) __attribute__((always_inline)) {
                Vec code = find_code(value(i), inverse, minimum);
                store(codes + i * kLanes, code);
                ones = add(ones, code);
                squares = fma(code, code, squares);
                return mul(code, value(i));
            });
            Vec determinant = sub(mul(count, squares), mul(ones, ones));
            scale = div(sub(mul(count, products), mul(total, ones)), determinant);
            minimum = div(sub(mul(squares, total), mul(ones, products)), determinant);
        }
        store(errors, add_all(size, [&](int64_t i) __attribute__((always_inline)) {
            Vec error = sub(add(mul(load(codes + i * kLanes), scale), minimum), value(i));
            return mul(error, error);
        }));
        store(scale_found, scale);
        store(minimum_found, minimum);
        for (int lane = 0; lane < kLanes; ++lane) {
            bool is_better = errors[lane] < least[lane];
            least[lane] = is_better ? errors[lane] : least[lane];
            scales[lane] = is_better ? scale_found[lane] : scales[lane];
            minimums[lane] = is_better ? minimum_found[lane] : minimums[lane];
        }
    }
    alignas(64) float inverses[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
        scales[lane] = round_to_half(scales[lane]);
        minimums[lane] = round_to_half(minimums[lane]);
        inverses[lane] = scales[lane] == 0.0f ? 0.0f : 1.0f / scales[lane];
    }
    Vec inverse = load(inverses), minimum = load(minimums);
    for (int64_t i = 0; i < size; ++i)
        store(codes + i * kLanes, max(find_code(value(i), inverse, minimum), zero()));  // NaN becomes 0
}

void round_rows_4(
    Pool* pool, const float* values, int64_t rows, int64_t columns, int64_t group_size, int8_t* codes, float* scales,
    float* minimums) {
    int64_t groups = ceil_div(columns, group_size), count = rows * groups;
    parallel(pool, ceil_div(count, kLanes), [&](int64_t tile, int thread) {
        int64_t size = group_size * kLanes, first = tile * kLanes;
        int num_lanes = int(count - first < kLanes ? count - first : kLanes);
        float* lanes = static_cast<float*>(pool_scratch(pool, thread, kTileScratch, 2 * size * sizeof(float)));
        alignas(64) float found[2][kLanes];
        std::memset(lanes, 0, size * sizeof(float));
        auto for_each_number = [&](auto body) {
            for (int lane = 0; lane < num_lanes; ++lane) {
                int64_t row = (first + lane) / groups, start = (first + lane) % groups * group_size;
                int64_t left = columns - start, here = left < group_size ? left : group_size;
                for (int64_t i = 0; i < here; ++i) body(row * columns + start + i, i * kLanes + lane);
            }
        };
        for_each_number([&](int64_t at, int64_t place) { lanes[place] = values[at]; });
        round_lanes(lanes, group_size, lanes + size, found[0], found[1]);
        for_each_number([&](int64_t at, int64_t place) { codes[at] = int8_t(lanes[size + place]); });
        std::memcpy(scales + first, found[0], num_lanes * sizeof(float));
        std::memcpy(minimums + first, found[1], num_lanes * sizeof(float));
    });
}

// Where the groups of a block go; `minimums` is null for kinds without.
struct Target {
    int8_t* codes;
    float* scales;
    float* minimums;
};

template <int COUNT, int CENTRE>
void split_nibbles(const uint8_t* bytes, int8_t* codes) {
    for (int i = 0; i < COUNT; ++i) codes[i] = int8_t((bytes[i] & 15) - CENTRE);
    for (int i = 0; i < COUNT; ++i) codes[COUNT + i] = int8_t((bytes[i] >> 4) - CENTRE);
}

// Q4_0, Q4_1, Q5_0 and Q5_1: scale, minimum, fifth bits, 16 bytes of two codes.
template <bool HAS_MINIMUM, bool HAS_FIFTH>
struct Small {
    static constexpr int kValues = kGroup, kBytes = 2 + 2 * HAS_MINIMUM + 4 * HAS_FIFTH + 16;
    static void split(const uint8_t* block, Target to) {
        constexpr int centre = HAS_MINIMUM ? 0 : HAS_FIFTH ? 16 : 8;
        to.scales[0] = read_half(block);
        if (HAS_MINIMUM) to.minimums[0] = read_half(block + 2);
        const uint8_t* fifth = block + 2 + 2 * HAS_MINIMUM;
        split_nibbles<16, centre>(fifth + 4 * HAS_FIFTH, to.codes);
        if (HAS_FIFTH)
            for (int i = 0; i < kGroup; ++i) to.codes[i] += int8_t((fifth[i / 8] >> (i % 8) & 1) << 4);
    }
};

struct Q8_0 {
    static constexpr int kValues = kGroup, kBytes = 34;
    static void split(const uint8_t* block, Target to) {
        to.scales[0] = read_half(block);
        std::memcpy(to.codes, block + 2, kGroup);
    }
};

// Numbers of a table: IQ4_NL with a scale of float16, and MXFP4 with an exponent, whose table has twice the numbers.
template <bool IS_MXFP4>
struct Table {
    static constexpr int kValues = kGroup, kBytes = (IS_MXFP4 ? 1 : 2) + 16;
    static void split(const uint8_t* block, Target to) {
        static constexpr int8_t numbers[2][16] = {
            {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
            {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};
        to.scales[0] = IS_MXFP4 ? std::ldexp(1.0f, block[0] - 128) : read_half(block);
        split_nibbles<16, 0>(block + kBytes - 16, to.codes);
        for (int i = 0; i < kGroup; ++i) to.codes[i] = numbers[IS_MXFP4][to.codes[i]];
    }
};

// Q4_K and Q5_K: scale, scale of minimums, 8 scales and minimums of 6 bits, fifth bits, 128 bytes of two codes.
template <bool HAS_FIFTH>
struct Large {
    static constexpr int kValues = 256, kBytes = 16 + 32 * HAS_FIFTH + 128;
    static void split(const uint8_t* block, Target to) {
        float scale = read_half(block), minimum = read_half(block + 2);
        const uint8_t *low = block + 4, *middle = block + 8, *high = block + 12;
        for (int i = 0; i < 4; ++i) {
            to.scales[i] = scale * float(low[i] & 63);
            to.scales[4 + i] = scale * float((high[i] & 15) | (low[i] >> 6) << 4);
            to.minimums[i] = -(minimum * float(middle[i] & 63));
            to.minimums[4 + i] = -(minimum * float(high[i] >> 4 | (middle[i] >> 6) << 4));
        }
        const uint8_t* codes = block + 16 + 32 * HAS_FIFTH;
        for (int pair = 0; pair < 4; ++pair) split_nibbles<32, 0>(codes + 32 * pair, to.codes + 64 * pair);
        if (HAS_FIFTH)
            for (int group = 0; group < 8; ++group)
                for (int i = 0; i < kGroup; ++i)
                    to.codes[group * kGroup + i] += int8_t((block[16 + i] >> group & 1) << 4);
    }
};

// Low halves, high quarters, 16 scales, their scale. Each has a scale per 16 values, so groups of 32 are rounded.
struct Q6_K {
    static constexpr int kValues = 256, kBytes = 210;
    static void split(const uint8_t* block, Target to) {
        float scale = read_half(block + 208), values[kGroup];
        int8_t numbers[kValues];
        for (int half = 0; half < 2; ++half)
            for (int i = 0; i < 32; ++i) {
                const uint8_t* low = block + half * 64 + i;
                uint8_t high = block[128 + half * 32 + i];
                int8_t* number = numbers + half * 128 + i;
                number[0] = int8_t(((low[0] & 15) | (high & 3) << 4) - 32);
                number[32] = int8_t(((low[32] & 15) | (high >> 2 & 3) << 4) - 32);
                number[64] = int8_t((low[0] >> 4 | (high >> 4 & 3) << 4) - 32);
                number[96] = int8_t((low[32] >> 4 | (high >> 6) << 4) - 32);
            }
        for (int group = 0; group < 8; ++group) {
            for (int part = 0; part < kGroup; part += 16) {
                float own = scale * float(int8_t(block[192 + group * 2 + part / 16]));
                for (int i = part; i < part + 16; ++i) values[i] = own * float(numbers[group * kGroup + i]);
            }
            to.scales[group] = round_group<kGroup>(values, kGroup, 127.0f, to.codes + group * kGroup);
        }
    }
};

template <class Kind>
void split_all(Pool* pool, const uint8_t* blocks, int64_t num_values, Target to) {
    int64_t count = num_values / Kind::kValues;
    constexpr int64_t groups = Kind::kValues / kGroup, step = 4096 / Kind::kValues;
    parallel(pool, ceil_div(count, step), [&](int64_t tile, int) {
        for (int64_t i = tile * step; i < count && i < (tile + 1) * step; ++i)
            Kind::split(
                blocks + i * Kind::kBytes,
                {to.codes + i * Kind::kValues, to.scales + i * groups, to.minimums ? to.minimums + i * groups : nullptr});
    });
}

}  // namespace

bool split_blocks(
    Pool* pool, int32_t type, const uint8_t* blocks, int64_t num_values, int8_t* codes, float* scales, float* minimums) {
    Target to{codes, scales, minimums};
    switch (type) {
        case 2: split_all<Small<false, false>>(pool, blocks, num_values, to); return true;
        case 3: split_all<Small<true, false>>(pool, blocks, num_values, to); return true;
        case 6: split_all<Small<false, true>>(pool, blocks, num_values, to); return true;
        case 7: split_all<Small<true, true>>(pool, blocks, num_values, to); return true;
        case 8: split_all<Q8_0>(pool, blocks, num_values, to); return true;
        case 12: split_all<Large<false>>(pool, blocks, num_values, to); return true;
        case 13: split_all<Large<true>>(pool, blocks, num_values, to); return true;
        case 14: split_all<Q6_K>(pool, blocks, num_values, to); return true;
        case 20: split_all<Table<false>>(pool, blocks, num_values, to); return true;
        case 39: split_all<Table<true>>(pool, blocks, num_values, to); return true;
        default: return false;
    }
}

void round_rows(
    Pool* pool, const float* values, int64_t rows, int64_t columns, int64_t group_size, int bits, int8_t* codes, float* scales,
    float* minimums) {
    if (bits == 4) return round_rows_4(pool, values, rows, columns, group_size, codes, scales, minimums);
    int64_t groups = ceil_div(columns, group_size);
    float greatest = float((1 << (bits - 1)) - 1);
    parallel(pool, rows, [&](int64_t row, int) {
        for (int64_t group = 0; group < groups; ++group) {
            int64_t at = row * columns + group * group_size, left = columns - group * group_size;
            bool is_usual = group_size == kGroup && left >= kGroup;
            scales[row * groups + group] = is_usual ? round_group<kGroup>(values + at, kGroup, greatest, codes + at)
                : round_group(values + at, left < group_size ? left : group_size, greatest, codes + at);
        }
    });
}

}  // namespace troupe
