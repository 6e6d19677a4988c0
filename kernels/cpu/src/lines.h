// The inner loop of products with matrices, keys and values: a few rows of packed words times some vectors of lanes.
//
// The loops over rows, vectors and parts are unrolled, so that every accumulator is a register.

#pragma once

#include "panels.h"

namespace troupe {

constexpr int kLineVecs = 4;  // vectors of one product
constexpr int kLineParts = 4;

// Where the operands of a product lie: `parts` times `groups` groups of lines, `stride` bytes from group to group. A
// product with one vector reads `lanes` lanes of it.
struct Lines {
    const uint8_t* at[kLineParts][kLineVecs];  // vector v of a part's first group
    int64_t parts, groups, stride;
    int lanes = kLanes;
    Ahead ahead = {};
};

inline void store_sums(float* c, Vec sums, bool adds) { store(c, adds ? add(load(c), sums) : sums); }
inline void store_sums(float* c, VecInt sums, bool) { store_int(c, sums); }

// c[row][lane] = x[row][:] . lines[:][lane], or += where `adds`, for ROWS packed rows, x[group][row][word].
template <class Product, int ROWS, int VECS>
__attribute__((noinline, noclone)) void multiply_lines(
    const uint32_t* x, const Lines& lines, float* c, int64_t c_stride, bool adds) {
    decltype(Product::start()) sums[ROWS][VECS];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) sums[row][v] = Product::start();
    Fetcher fetcher(lines.ahead, lines.groups);
    for (int64_t part = 0; part < lines.parts; ++part) {
        const uint8_t* at[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) at[v] = lines.at[part][v];
        for (int64_t offset = 0, end = lines.groups * lines.stride; offset < end; offset += lines.stride, x += ROWS * Product::kWords) {
            fetcher.fetch();
            VecInt words[VECS];
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v)
                words[v] = VECS == 1 ? load_int_first(at[v] + offset, lines.lanes) : load_int(at[v] + offset);
#pragma GCC unroll 2
            for (int half = 0; half < Product::kParts; ++half)
#pragma GCC unroll 8
                for (int row = 0; row < ROWS; ++row) {
                    auto factor = Product::activation(x + row * Product::kWords, half);
#pragma GCC unroll 4
                    for (int v = 0; v < VECS; ++v)
                        sums[row][v] = Product::product(sums[row][v], factor, Product::weight(words[v], half));
                }
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) store_sums(c + row * c_stride + v * kLanes, sums[row][v], adds);
}

template <class Product, int VECS>
void multiply_lines(int rows, const uint32_t* x, const Lines& lines, float* c, int64_t c_stride, bool adds) {
    with_rows<kMaxRows>(rows, [&](auto count) { multiply_lines<Product, count, VECS>(x, lines, c, c_stride, adds); });
}

}  // namespace troupe
