#include "grouped.h"

#include "grouped_dot.h"

namespace troupe {

namespace {

// ---- activations -------------------------------------------------------------------------------------------------

// Round one group to bytes, zeros up to its end. A scale of NaN stands for a NaN among the values.
template <class From>
GroupFactors round_group(const From* x, int64_t count, int64_t size, int zero_point, uint8_t* bytes) {
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
    // A sum of whole numbers below 2^24 is exact in any order. It is NaN where a value is, and so is the scale.
    float total = sum(sums);
    return {scale, scale * total, total == total ? -zero_point * int32_t(total) : 0};
}

// ---- the product -------------------------------------------------------------------------------------------------

template <class Arithmetic, bool SPREAD, int ROWS>
void multiply_rows(const TileProduct& tile) {
    constexpr int64_t factor_bytes = Arithmetic::kFactorBytes;
    constexpr int words_a_unit = SPREAD ? kUnit / 4 * Arithmetic::kSpreadWords : kUnit / 4;
    int64_t num_units = tile.group_size / kUnit;
    int64_t group_bytes = factor_bytes + num_units * (SPREAD ? words_a_unit : Arithmetic::kBits) * kPanelBytes;
    Fetcher fetcher(tile.ahead, tile.num_groups * (kPanelVecs / kCodeVecs));
    for (int part = 0; part < kPanelVecs; part += kCodeVecs) {
        const uint32_t* words = tile.x;
        const GroupFactors* factors = tile.factors;
        const uint8_t* w = tile.w + factor_bytes + part * kLanes * 4;
        const uint8_t* halves = tile.w + part * kLanes * kHalfBytes;
        Vec acc[ROWS][kCodeVecs];
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
            for (int v = 0; v < kCodeVecs; ++v) acc[row][v] = zero();
        for (int64_t group = 0; group < tile.num_groups; ++group) {
            fetcher.fetch();
            Sums<ROWS> totals;
            begin<ROWS>(totals, [&](int row) { return Arithmetic::kZero ? splat_int(factors[row].start) : zero_int(); });
            add_group<Arithmetic, SPREAD, ROWS>(w, words, num_units, totals);
#pragma GCC unroll 2
            for (int v = 0; v < kCodeVecs; ++v) {
                Vec scale = load_half(halves + v * kLanes * kHalfBytes);
#pragma GCC unroll 8
                for (int row = 0; row < ROWS; ++row)
                    acc[row][v] = fma(to_vec(totals[row][v]), mul(scale, splat(factors[row].scale)), acc[row][v]);
                if constexpr (!Arithmetic::kIsCentred) {
                    Vec minimum = load_half(halves + (kPanelWidth + v * kLanes) * kHalfBytes);
#pragma GCC unroll 8
                    for (int row = 0; row < ROWS; ++row)
                        acc[row][v] = fma(minimum, splat(factors[row].offset), acc[row][v]);
                }
            }
            w += group_bytes, halves += group_bytes;
            words += num_units * words_a_unit * ROWS, factors += ROWS;
        }
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
            for (int v = 0; v < kCodeVecs; ++v) store(tile.c + row * tile.c_stride + (part + v) * kLanes, acc[row][v]);
    }
}

// ---- the layout --------------------------------------------------------------------------------------------------

constexpr uint32_t repeat(uint32_t byte) { return byte * 0x01010101u; }

// Write 32 codes of an output, which are padded with zeros, as their words in the lines of a unit.
template <class Grouped>
void put_unit(const int8_t* codes, uint8_t* lines) {
    uint32_t words[kUnit / 4], out[kUnit / 4] = {};
    std::memcpy(words, codes, kUnit);
    for (int at = 0; at < kUnit / 4; ++at) {
        // The sum of a byte and the zero changes one bit.
        uint32_t word = words[at] ^ repeat(Grouped::kZero);
        if constexpr (Grouped::kBits == 8)
            out[at] = word;
        else
            out[at / 2] |= (word & repeat(15)) << at % 2 * 4;
        if constexpr (Grouped::kBits == 6) out[4 + at / 4] |= (word >> 4 & repeat(3)) << at % 4 * 2;
    }
    for (int line = 0; line < Grouped::kBits; ++line) std::memcpy(lines + line * kPanelBytes, out + line, 4);
}

// The signed code of one of 32 inputs.
template <class Grouped>
int get_code(const uint8_t* lines, int64_t input) {
    int64_t word = input / 4, byte = input % 4;
    auto line = [&](int64_t index) { return int(lines[index * kPanelBytes + byte]); };
    if constexpr (Grouped::kBits == 8) return int8_t(line(word) - Grouped::kZero);
    int code = line(word / 2) >> word % 2 * 4 & 15;
    if constexpr (Grouped::kBits == 6) code |= (line(4 + word / 4) >> word % 4 * 2 & 3) << 4;
    return code - Grouped::kZero;
}

// Write a row of a packed matrix, float32 [in].
void unpack_row(const Linear& linear, const Groups& groups, int64_t output, float* row) {
    int64_t lane = output % kPanelWidth;
    const uint8_t* group = linear.panels + output / kPanelWidth * groups.panel_bytes();
    with_grouped(linear.kind, [&](auto grouped) {
        using Grouped = decltype(grouped);
        for (int64_t start = 0; start < linear.in_features; start += groups.size, group += groups.bytes) {
            float scale = read_half(group + lane * kHalfBytes);
            float minimum = Grouped::kIsCentred ? 0.0f : read_half(group + (kPanelWidth + lane) * kHalfBytes);
            const uint8_t* lines = group + groups.factor_bytes + lane * 4;
            int64_t left = linear.in_features - start, size = left < groups.size ? left : groups.size;
            for (int64_t i = 0; i < size; ++i) {
                const uint8_t* unit = lines + i / kUnit * Grouped::kBits * kPanelBytes;
                row[start + i] = scale * float(get_code<Grouped>(unit, i % kUnit)) + minimum;
            }
        }
    });
}

}  // namespace

template <class From>
void round_row(
    const From* x, int64_t count, int64_t group_size, int zero, uint32_t* words, GroupFactors* factors, int64_t stride) {
    for (int64_t at = 0; at < count; at += group_size, words += group_size / 4, factors += stride) {
        int64_t left = count - at;
        auto* bytes = reinterpret_cast<uint8_t*>(words);
        *factors = round_group(x + at, left < group_size ? left : group_size, group_size, zero, bytes);
    }
}
template void round_row(const float*, int64_t, int64_t, int, uint32_t*, GroupFactors*, int64_t);
template void round_row(const bf16*, int64_t, int64_t, int, uint32_t*, GroupFactors*, int64_t);

void multiply_codes(int32_t kind, const TileProduct& tile, int rows, bool is_spread) {
    with_grouped(kind, [&](auto grouped) {
        using Arithmetic = decltype(grouped);
        constexpr int kFewest = kCodeRows - 3;  // rows of a spread panel are more
        if (is_spread)
            with_rows<3>(rows - kFewest, [&](auto count) { multiply_rows<Arithmetic, true, kFewest + count>(tile); });
        else
            with_rows<kCodeRows>(rows, [&](auto count) { multiply_rows<Arithmetic, false, count>(tile); });
    });
}

void spread_panel(const Linear& linear, const uint8_t* panel, uint8_t* out) {
    Groups groups(linear);
    with_grouped(linear.kind, [&](auto grouped) {
        constexpr int BITS = grouped.kBits;
        for (int64_t group = 0; group < groups.count; ++group) {
            std::memcpy(out, panel, groups.factor_bytes);
            const uint8_t* lines = panel + groups.factor_bytes;
            out += groups.factor_bytes, panel += groups.bytes;
            for (int64_t unit = 0; unit < groups.size; unit += kUnit, lines += BITS * kPanelBytes)
#pragma GCC unroll 8
                for (int word = 0; word < kUnit / 4; ++word, out += grouped.kSpreadWords * kPanelBytes)
#pragma GCC unroll 4
                    for (int at = 0; at < kPanelBytes; at += kLanes * 4) {
                        VecInt codes = load_codes<BITS>(lines + at, word);
#ifndef TROUPE_DOT
                        if constexpr (BITS == 8) {
                            store_int(out + at, widen_even(codes));
                            store_int(out + kPanelBytes + at, widen_odd(codes));
                            continue;
                        }
#endif
                        store_int(out + at, codes);
                    }
        }
    });
}

int64_t grouped_bytes(const Linear& linear) {
    return ceil_div(linear.out_features, kPanelWidth) * Groups(linear).panel_bytes();
}

void pack_grouped(
    Pool* pool, const Linear& linear, const int8_t* codes, const float* scales, const float* minimums, uint8_t* panels) {
    Groups groups(linear);
    with_grouped(linear.kind, [&](auto grouped) {
        using Grouped = decltype(grouped);
        parallel(pool, ceil_div(linear.out_features, kPanelWidth), [&](int64_t panel, int thread) {
            uint8_t* to = panels + panel * groups.panel_bytes();
            auto* line = static_cast<int8_t*>(pool_scratch(pool, thread, kTileScratch, groups.size));
            int64_t first = panel * kPanelWidth, left = linear.out_features - first;
            int num_lanes = int(left < kPanelWidth ? left : kPanelWidth);
            for (int64_t group = 0; group < groups.count; ++group, to += groups.bytes) {
                int64_t start = group * groups.size, rest = linear.in_features - start;
                if (num_lanes < kPanelWidth) std::memset(to, 0, groups.bytes);
                for (int64_t lane = 0; lane < num_lanes; ++lane) {
                    const int8_t* source = codes + (first + lane) * linear.in_features + start;
                    int64_t factor = (first + lane) * groups.count + group;
                    write_half(to + lane * kHalfBytes, scales[factor]);
                    if (!Grouped::kIsCentred) write_half(to + (kPanelWidth + lane) * kHalfBytes, minimums[factor]);
                    if (rest < groups.size) {
                        std::memset(line, 0, groups.size);
                        std::memcpy(line, source, rest);
                        source = line;
                    }
                    uint8_t* lines = to + groups.factor_bytes + lane * 4;
                    for (int64_t unit = 0; unit < groups.size; unit += kUnit, lines += Grouped::kBits * kPanelBytes)
                        put_unit<Grouped>(source + unit, lines);
                }
            }
        });
    });
}

void unpack_grouped_rows(Pool* pool, const Linear& linear, const int64_t* ids, int64_t count, float* out) {
    Groups groups(linear);
    parallel(pool, count, [&](int64_t i, int) { unpack_row(linear, groups, ids[i], out + i * linear.in_features); });
}

}  // namespace troupe
