#include "blocks.h"

#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "dispatch.h"

namespace troupe {

namespace {

constexpr int kGroup = 32;  // values with one scale

float read_half(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}

float round_to_half(float value) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT)));
}

// Round a group of COUNT values, or `count` if that is 0, to bytes around 0. Returns the scale, NaN where the group has a NaN.
template <int COUNT>
float round_group(const float* values, int64_t count, int8_t* codes) {
    if (COUNT) count = COUNT;
    // The bits of magnitudes are in the order of their values, and those of NaN are above infinity's.
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, values + i, 4);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    float magnitude;
    std::memcpy(&magnitude, &largest, 4);
    float scale = round_to_half(magnitude / 127.0f);
    float divisor = scale == 0.0f ? 1.0f : scale;
    for (int64_t i = 0; i < count; ++i) {
        float code = std::nearbyint(values[i] / divisor);
        code = code < -127.0f ? -127.0f : code > 127.0f ? 127.0f : code;
        codes[i] = code == code ? int8_t(code) : int8_t(0);
    }
    return scale;
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
        for (int group = 0; group < 8; ++group) {
            int half = group / 4, quarter = group % 4;
            const uint8_t *low = block + half * 64 + quarter % 2 * 32, *high = block + 128 + half * 32;
            int low_shift = quarter / 2 * 4, high_shift = quarter * 2;
            for (int part = 0; part < 2; ++part) {
                float own = scale * float(int8_t(block[192 + group * 2 + part]));
                for (int i = part * 16; i < part * 16 + 16; ++i)
                    values[i] = own * float(((low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4) - 32);
            }
            to.scales[group] = round_group<kGroup>(values, kGroup, to.codes + group * kGroup);
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
        default: return false;
    }
}

void round_rows(Pool* pool, const float* values, int64_t rows, int64_t columns, int64_t group_size, int8_t* codes, float* scales) {
    int64_t groups = ceil_div(columns, group_size);
    parallel(pool, rows, [&](int64_t row, int) {
        for (int64_t group = 0; group < groups; ++group) {
            int64_t at = row * columns + group * group_size, left = columns - group * group_size;
            bool is_usual = group_size == kGroup && left >= kGroup;
            scales[row * groups + group] = is_usual ? round_group<kGroup>(values + at, kGroup, codes + at)
                : round_group<0>(values + at, left < group_size ? left : group_size, codes + at);
        }
    });
}

}  // namespace troupe
