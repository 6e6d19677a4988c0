#include "panels.h"

namespace troupe {

namespace {

// The loops over rows, vectors and parts are unrolled, so that every accumulator is a register.
template <class Arithmetic, int ROWS, int PANELS>
void multiply(const TileProduct& tile) {
    constexpr int VECS = PANELS * kPanelVecs;
    constexpr int WORDS = Arithmetic::kWords;
    const uint32_t* x = tile.x;
    const uint8_t* w = tile.w;
    Vec acc[ROWS][VECS];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int v = 0; v < VECS; ++v) acc[row][v] = tile.adds ? load(tile.c + row * tile.c_stride + v * kLanes) : zero();
    for (int64_t group = 0; group < tile.num_groups; ++group) {
#pragma GCC unroll 2
        for (int part = 0; part < Arithmetic::kParts; ++part) {
            decltype(Arithmetic::weight(w, 0)) weights[VECS];
#pragma GCC unroll 8
            for (int v = 0; v < VECS; ++v) {
                const uint8_t* source = w + (v / kPanelVecs) * tile.panel_stride + (v % kPanelVecs) * kLanes * 4;
                weights[v] = Arithmetic::weight(source, part);
            }
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row) {
                auto broadcast = Arithmetic::activation(x + row * WORDS, part);
#pragma GCC unroll 8
                for (int v = 0; v < VECS; ++v) acc[row][v] = Arithmetic::product(acc[row][v], broadcast, weights[v]);
            }
        }
        w += kPanelBytes;
        x += ROWS * WORDS;
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int v = 0; v < VECS; ++v) store(tile.c + row * tile.c_stride + v * kLanes, acc[row][v]);
}

template <class Arithmetic, int PANELS>
void multiply_rows(const TileProduct& tile, int rows) {
    switch (rows) {
        case 1: return multiply<Arithmetic, 1, PANELS>(tile);
        case 2: return multiply<Arithmetic, 2, PANELS>(tile);
        case 3: return multiply<Arithmetic, 3, PANELS>(tile);
#ifdef TROUPE_AVX512
        case 4: return multiply<Arithmetic, 4, PANELS>(tile);
        case 5: return multiply<Arithmetic, 5, PANELS>(tile);
        case 6: return multiply<Arithmetic, 6, PANELS>(tile);
#endif
        default: __builtin_unreachable();
    }
}

}  // namespace

template <class Arithmetic>
void multiply_tile(const TileProduct& tile, int rows, int panels) {
    if (panels == kMaxPanels) return multiply_rows<Arithmetic, kMaxPanels>(tile, rows);
    multiply_rows<Arithmetic, 1>(tile, rows);
}

template void multiply_tile<Float32>(const TileProduct&, int, int);
template void multiply_tile<Float32Half>(const TileProduct&, int, int);
template void multiply_tile<BFloat16>(const TileProduct&, int, int);

}  // namespace troupe
