// The one inner loop: a few rows of activations times panels of 32 outputs.
//
// A matrix [out, in] is stored as panels of 32 outputs. Within a panel the inputs come in groups of as many as one
// 32-bit word holds (1 float32, 2 bfloat16), one word per output:
//
//     panel[group][output 0..31][input of the group]          128 bytes a group
//
// so that a vector load brings the same inputs of 16 (or 8) neighbouring outputs, and the matching word of an
// activation row is broadcast against it. Rows come packed in blocks of up to kMaxRows: block[group][row].
//
// Each output sums its products group after group in one accumulator, whatever the number of rows or panels at
// work beside it. That is the promise on which "same result alone and in a batch" rests: keep it.

#pragma once

#include <type_traits>

#include "simd.h"

namespace troupe {

constexpr int kPanelWidth = 32;
constexpr int kPanelBytes = kPanelWidth * 4;  // of one group
constexpr int kPanelVecs = kPanelWidth / kLanes;

#if defined(TROUPE_TILE_TWIN) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__))
#define TROUPE_TILES 1
#endif

#ifdef TROUPE_AVX512
// 6 rows x 4 vectors of accumulators, 4 vectors of weights, 1 of activations: 29 of 32 registers
constexpr int kMaxRows = 6;
constexpr int kMaxPanels = 2;
#else
// 3 rows x 4 vectors of accumulators: 12 of 16 registers
constexpr int kMaxRows = 3;
constexpr int kMaxPanels = 1;
#endif
// Codes have two vectors of outputs at a time, and sums of 16 bits without an instruction that adds products in 32.
constexpr int kCodeRows = kMaxRows < 4 ? 4 : kMaxRows;

// Call `body(integral constant rows)`.
template <int MOST, class Body>
inline void with_rows(int rows, const Body& body) {
    if constexpr (MOST > 1)
        if (rows < MOST) return with_rows<MOST - 1>(rows, body);
    body(std::integral_constant<int, MOST>());
}

// An arithmetic says how a word of weights meets a word of activations. `kParts` counts the passes over the words of
// a group; `kWords` the 32-bit words per row and group of packed activations.

// float32 activations and weights; groups of 1.
struct Float32 {
    static constexpr int kGroup = 1, kParts = 1, kWords = 1;
    static Vec start() { return zero(); }
    static Vec weight(VecInt words, int) { return as_float(words); }
    static Vec activation(const uint32_t* x, int part) { return splat(reinterpret_cast<const float*>(x)[part]); }
    static Vec product(Vec acc, Vec x, Vec w) { return fma(x, w, acc); }
};

// float32 activations, weights that bfloat16 holds exactly; groups of 2. The sums are those of Float32, bit for bit.
struct Float32Half : Float32 {
    static constexpr int kGroup = 2, kParts = 2, kWords = 2;
    static Vec weight(VecInt words, int part) { return as_float(part ? upper_16(words) : shift_left_16(words)); }
};

// bfloat16 activations and weights; groups of 2.
#ifdef TROUPE_BF16
struct BFloat16 : Float32 {
    static constexpr int kGroup = 2, kParts = 1, kWords = 1;
    static VecInt weight(VecInt words, int) { return words; }
    static VecInt activation(const uint32_t* x, int) { return splat_int(int32_t(*x)); }
    static Vec product(Vec acc, VecInt x, VecInt w) { return add_bf16_products(acc, x, w); }
};
#else
struct BFloat16 : Float32Half {
    static constexpr int kWords = 1;
    static Vec activation(const uint32_t* x, int part) { return weight(splat_int(int32_t(*x)), part); }
};
#endif

// float32 activations and weights, each as the sum of two numbers of bfloat16, high and low. Of their four products
// high * high, low * high and high * low are one product of bfloat16 with three times the inputs; low * low is less than
// 2^-16 of the result, and left out.
struct Split : BFloat16 {};
template <class Arithmetic>
constexpr bool kIsSplit = std::is_base_of_v<Split, Arithmetic>;
// How often an input of a product comes in its words.
template <class Arithmetic>
constexpr int kRepeats = kIsSplit<Arithmetic> ? 3 : 1;

// Codes in groups of inputs, see `grouped.h`.
struct Codes {
    static constexpr int kGroup = 4, kWords = 1;
};
// The same for many rows: the codes of a panel are spread once, see `grouped.h`.
struct SpreadCodes : Codes {};
template <class Arithmetic>
constexpr bool kIsCodes = std::is_base_of_v<Codes, Arithmetic>;

// An arithmetic on the tile registers of AMX, see `tiles.cpp`. 16 words of a row lie together: block[group / 16][row][16].
template <class Base>
struct Tiled : Base {};
template <class Arithmetic>
constexpr bool kIsTiled = false;
template <class Base>
constexpr bool kIsTiled<Tiled<Base>> = true;

constexpr int kTileRows = 16, kTileWords = 16;

// How many rows are packed together at most, and panels multiplied at once; how many words of a row lie together, and the inputs in them; how many
// words past the last one a product may read.
template <class Arithmetic>
constexpr int kBlockRows = kIsTiled<Arithmetic> ? 2 * kTileRows : kIsCodes<Arithmetic> ? kCodeRows : kMaxRows;
template <class Arithmetic>
constexpr int kPanels = kIsCodes<Arithmetic> ? 1 : kMaxPanels;
template <class Arithmetic>
constexpr int kRowWords = kIsTiled<Arithmetic> ? kTileWords : Arithmetic::kWords;
template <class Arithmetic>
constexpr int kRowInputs = kIsTiled<Arithmetic> ? kTileWords * Arithmetic::kGroup : Arithmetic::kGroup;
template <class Arithmetic>
constexpr int kSpareWords = kIsTiled<Arithmetic> ? (kTileRows - 1) * kTileWords : 0;

// What a row's group of bytes stands for; the sums of the unsigned codes begin with `start`.
struct GroupFactors {
    float scale, offset;  // offset: scale * sum of the bytes
    int32_t start;
};

// Memory that is read soon.
struct Ahead {
    const uint8_t* at = nullptr;
    int64_t bytes = 0;
};

// Asks for it in even shares, so that the memory is at work during a whole product.
class Fetcher {
public:
    Fetcher(Ahead ahead, int64_t calls) : asked_(ahead.at), end_(ahead.at), share_(ahead.bytes ? ahead.bytes / calls + 1 : 0) {}

    void fetch() {
        for (end_ += share_; asked_ < end_; asked_ += 64) __builtin_prefetch(asked_, 0, 2);
    }

private:
    const uint8_t *asked_, *end_;
    int64_t share_;
};

// c[row][output] = x[row][:] . w[output][:] for `rows` rows packed together (at most kBlockRows) and `panels` neighbouring
// panels (at most kPanels). Tiles write whole: they overwrite rows of c up to the next multiple of kTileRows.
struct TileProduct {
    const uint32_t* x;
    const uint8_t* w;
    int64_t panel_stride;  // bytes
    int64_t num_groups;
    float* c;
    int64_t c_stride;  // words from row to row
    const GroupFactors* factors = nullptr;  // [group][row], for codes only
    int64_t group_size = 0;
    Ahead ahead = {};
};

template <class Arithmetic>
void multiply_tile(const TileProduct& tile, int rows, int panels);

extern template void multiply_tile<Float32>(const TileProduct&, int, int);
extern template void multiply_tile<Float32Half>(const TileProduct&, int, int);
extern template void multiply_tile<BFloat16>(const TileProduct&, int, int);

#ifdef TROUPE_TILES
template <>
void multiply_tile<Tiled<BFloat16>>(const TileProduct&, int, int);

// Whether this process may use the tiles; the first call asks Linux for the permission.
bool has_tiles();
#endif

// How M rows are cut into blocks of at most `limit`, all nearly alike.
struct RowBlocks {
    int64_t num_rows, num_blocks;
    explicit RowBlocks(int64_t rows, int limit = kMaxRows) : num_rows(rows), num_blocks((rows + limit - 1) / limit) {}
    int64_t start(int64_t block) const {
        int64_t base = num_rows / num_blocks, extra = num_rows % num_blocks;
        return block * base + (block < extra ? block : extra);
    }
    int size(int64_t block) const { return int(start(block + 1) - start(block)); }
};

}  // namespace troupe
