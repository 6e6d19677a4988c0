// Matrices into panels and back.

#include "dispatch.h"
#include "grouped.h"

namespace troupe {

namespace {

inline void put(Float32, float value, uint8_t* word, int) { std::memcpy(word, &value, 4); }
inline void put(Float32Half, float value, uint8_t* word, int at) {
    bf16 half = to_bf16(value);
    std::memcpy(word + 2 * at, &half, 2);
}
inline void put(BFloat16, float value, uint8_t* word, int at) { put(Float32Half(), value, word, at); }

inline float get(Float32, const uint8_t* word, int) {
    float value;
    std::memcpy(&value, word, 4);
    return value;
}
inline float get(Float32Half, const uint8_t* word, int at) {
    bf16 half;
    std::memcpy(&half, word + 2 * at, 2);
    return to_float(half);
}
inline float get(BFloat16, const uint8_t* word, int at) { return get(Float32Half(), word, at); }

// Write an input into the words of its output; of a Split the high number, the same again, and the low one.
template <class Arithmetic>
void put_input(float value, uint8_t* words, int64_t input, int64_t ins) {
    constexpr int GROUP = Arithmetic::kGroup;
    auto put_at = [&](int64_t i, float part) { put(Arithmetic(), part, words + i / GROUP * kPanelBytes, int(i % GROUP)); };
    put_at(input, value);
    if constexpr (kIsSplit<Arithmetic>) {
        put_at(ins + input, value);
        put_at(2 * ins + input, value - to_float(to_bf16(value)));
    }
}

template <class Arithmetic, class From>
void pack_panel(const From* weight, int64_t panel, int64_t outs, int64_t ins, uint8_t* panels) {
    constexpr int GROUP = Arithmetic::kGroup;
    int64_t num_groups = ceil_div(kRepeats<Arithmetic> * ins, GROUP);
    uint8_t* target = panels + panel * num_groups * kPanelBytes;
    std::memset(target, 0, num_groups * kPanelBytes);
    for (int lane = 0; lane < kPanelWidth && panel * kPanelWidth + lane < outs; ++lane) {
        int64_t output = panel * kPanelWidth + lane;
        const From* row = weight + output * ins;
        for (int64_t i = 0; i < ins; ++i)
            put_input<Arithmetic>(to_float(row[i]), target + lane * 4, i, ins);
    }
}

// Write a row of a packed matrix, float32 [in].
template <class Arithmetic>
void unpack_row(const Linear& linear, int64_t output, float* row) {
    constexpr int GROUP = Arithmetic::kGroup;
    int64_t panel_bytes = ceil_div(kRepeats<Arithmetic> * linear.in_features, GROUP) * kPanelBytes;
    const uint8_t* source = linear.panels + output / kPanelWidth * panel_bytes + output % kPanelWidth * 4;
    auto get_at = [&](int64_t i) { return get(Arithmetic(), source + i / GROUP * kPanelBytes, int(i % GROUP)); };
    for (int64_t i = 0; i < linear.in_features; ++i)
        row[i] = get_at(i) + (kIsSplit<Arithmetic> ? get_at(2 * linear.in_features + i) : 0.0f);
}

}  // namespace

int64_t packed_bytes(int32_t kind, int64_t out_features, int64_t in_features) {
    int64_t bytes = 0;
    with_plain(kind, [&](auto arithmetic) {
        bytes = ceil_div(out_features, kPanelWidth) * ceil_div(kRepeats<decltype(arithmetic)> * in_features, decltype(arithmetic)::kGroup) * kPanelBytes;
    });
    return bytes;
}

void pack_weight(
    Pool* pool, int32_t kind, const void* weight, int32_t dtype, int64_t out_features, int64_t in_features,
    uint8_t* panels) {
    with_plain(kind, [&](auto arithmetic) {
        using Arithmetic = decltype(arithmetic);
        parallel(pool, ceil_div(out_features, kPanelWidth), [&](int64_t panel, int) {
            if (dtype == kBFloat16)
                pack_panel<Arithmetic>(static_cast<const bf16*>(weight), panel, out_features, in_features, panels);
            else
                pack_panel<Arithmetic>(static_cast<const float*>(weight), panel, out_features, in_features, panels);
        });
    });
}

void unpack_rows(Pool* pool, const Linear& linear, const int64_t* ids, int64_t count, float* out) {
    if (is_grouped(linear.kind)) return unpack_grouped_rows(pool, linear, ids, count, out);
    with_plain(linear.kind, [&](auto arithmetic) {
        parallel(pool, count, [&](int64_t i, int) {
            unpack_row<decltype(arithmetic)>(linear, ids[i], out + i * linear.in_features);
        });
    });
}

bool fits_bfloat16(Pool* pool, const float* values, int64_t count) {
    constexpr int64_t step = 1 << 16;
    uint32_t lost = 0;
    parallel(pool, ceil_div(count, step), [&](int64_t tile, int) {
        int64_t end = (tile + 1) * step < count ? (tile + 1) * step : count;
        uint32_t low = 0;
        for (int64_t i = tile * step; i < end; ++i) {
            uint32_t bits;
            std::memcpy(&bits, values + i, 4);
            low |= bits & 0xffff;
        }
        __atomic_fetch_or(&lost, low, __ATOMIC_RELAXED);
    });
    return lost == 0;
}

}  // namespace troupe
