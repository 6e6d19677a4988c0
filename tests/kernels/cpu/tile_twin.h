// The tile registers of AMX as arrays, and each instruction as loops that follow Intel's manual.
//
// Slow: a machine without AMX can so run the products that `tiles.cpp` makes of these instructions.

#pragma once

#include <cfloat>
#include <cmath>

namespace troupe {

struct TileTwin {
    static constexpr int kTiles = 8, kRows = 16, kBytes = 64;
    uint8_t config[64] = {};
    alignas(64) uint8_t data[kTiles][kRows][kBytes] = {};

    int rows(int tile) const { return config[48 + tile]; }
    int bytes(int tile) const { return config[16 + 2 * tile] | config[17 + 2 * tile] << 8; }
    void configure(const void* source) {
        std::memcpy(config, source, 64);
        std::memset(data, 0, sizeof data);
    }
    void clear(int tile) { std::memset(data[tile], 0, sizeof data[tile]); }
    void load(int tile, const void* source, int64_t stride) {
        clear(tile);
        for (int row = 0; row < rows(tile); ++row)
            std::memcpy(data[tile][row], static_cast<const uint8_t*>(source) + row * stride, bytes(tile));
    }
    void store(int tile, void* target, int64_t stride) const {
        for (int row = 0; row < rows(tile); ++row)
            std::memcpy(static_cast<uint8_t*>(target) + row * stride, data[tile][row], bytes(tile));
    }

    // TDPBF16PS: even and odd products have sums of their own, and both are added to c. Denormals are zeros.
    void dot_bf16(int c, int a, int b) {
        for (int m = 0; m < rows(c); ++m) {
            float sums[2][kBytes / 4] = {};
            for (int k = 0; k < bytes(a) / 4; ++k)
                for (int n = 0; n < bytes(c) / 4; ++n)
                    for (int half = 0; half < 2; ++half) {
                        float x = number<bf16>(a, m, 2 * k + half), w = number<bf16>(b, k, 2 * n + half);
                        sums[half][n] = flush(std::fma(x, w, sums[half][n]));
                    }
            for (int n = 0; n < bytes(c) / 4; ++n) {
                float total = flush(number<float>(c, m, n) + flush(sums[0][n] + sums[1][n]));
                std::memcpy(data[c][m] + 4 * n, &total, 4);
            }
        }
    }

private:
    static float flush(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }

    template <class Number>
    float number(int tile, int row, int at) const {
        Number value;
        std::memcpy(&value, data[tile][row] + at * sizeof value, sizeof value);
        return flush(to_float(value));
    }
};

inline thread_local TileTwin tile_twin;

}  // namespace troupe

#define TILE_CONFIGURE(source) tile_twin.configure(source)
#define TILE_RELEASE() tile_twin = TileTwin()
#define TILE_ZERO(tile) tile_twin.clear(tile)
#define TILE_LOAD(tile, source, stride) tile_twin.load(tile, source, stride)
#define TILE_STORE(tile, target, stride) tile_twin.store(tile, target, stride)
#define TILE_DOT_BF16(c, a, b) tile_twin.dot_bf16(c, a, b)
