// Tiles of keys and values in int8, see `kv_int8.h`. Queries and weights are rounded to integers of 14 bits, so that only
// the rounding of the cache counts. Their upper and lower parts are two rows of an exact product of bytes, whose other
// operands are the lines of the cache.

#pragma once

#include "attention.h"
#include "attention_tile.h"
#include "grouped_dot.h"
#include "kv_int8.h"

namespace troupe {

// Signed bytes of queries, unsigned bytes of keys around the zero point: sums are too large by kSurplus * sum(x).
struct KeyProduct {
#if defined(TROUPE_AVX512) && defined(__AVX512VNNI__)
    static constexpr int kSurplus = kZeroPoint;
    static VecInt add(VecInt sum, VecInt x, VecInt w) { return _mm512_dpbusd_epi32(sum, w, x); }
#else
    static constexpr int kSurplus = 0;
    // |x| times w with the sign of x, so that pairs stay within 16 bits.
    static VecInt add(VecInt sum, VecInt x, VecInt w) {
        w = xor_int(w, splat_int(int32_t(0x80808080u)));
#ifdef TROUPE_AVX512
        VecInt turned = _mm512_mask_sub_epi8(w, _mm512_movepi8_mask(x), zero_int(), w);
        VecInt pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(x), turned);
        return add_int(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#else
        VecInt pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(w, x));
        return add_int(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
    }
#endif
};

// Bytes of weights in [0, 127], signed bytes of values.
struct ValueProduct {
    static VecInt add(VecInt sum, VecInt x, VecInt w) {
#if defined(TROUPE_AVX512) && defined(__AVX512VNNI__)
        return _mm512_dpbusd_epi32(sum, x, w);
#elif defined(TROUPE_AVX512)
        return add_int(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(x, w), _mm512_set1_epi16(1)));
#else
        return add_int(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(x, w), _mm256_set1_epi16(1)));
#endif
    }
};

constexpr int kLineVecs = 4;  // vectors of one product

// Where the operands of a product lie: `parts` times `groups` groups of lines, `stride` bytes from group to group.
struct Lines {
    const uint8_t* at[kTileKeys / kPieceSlots][kLineVecs];  // vector v of a part's first group
    int64_t parts, groups, stride;
};

// c[row][lane] = x[row][:] . lines[:][lane] for ROWS packed rows, x[group][row].
template <class Product, int ROWS, int VECS>
__attribute__((noinline, noclone)) void multiply_lines(const uint32_t* x, const Lines& lines, float* c, int64_t c_stride) {
    VecInt sums[ROWS][VECS];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) sums[row][v] = zero_int();
    for (int64_t part = 0; part < lines.parts; ++part) {
        const uint8_t* at[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) at[v] = lines.at[part][v];
        for (int64_t offset = 0, end = lines.groups * lines.stride; offset < end; offset += lines.stride, x += ROWS) {
            VecInt w[VECS];
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v) w[v] = load_int(at[v] + offset);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row) {
                VecInt word = splat_int(int32_t(x[row]));
#pragma GCC unroll 4
                for (int v = 0; v < VECS; ++v) sums[row][v] = Product::add(sums[row][v], word, w[v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) store_int(c + row * c_stride + v * kLanes, sums[row][v]);
}

template <class Product, int VECS>
void multiply_lines(int rows, const uint32_t* x, const Lines& lines, float* c, int64_t c_stride) {
    switch (rows) {
        case 2: return multiply_lines<Product, 2, VECS>(x, lines, c, c_stride);
#ifdef TROUPE_AVX512
        case 4: return multiply_lines<Product, 4, VECS>(x, lines, c, c_stride);
        case 6: return multiply_lines<Product, 6, VECS>(x, lines, c, c_stride);
#endif
        default: __builtin_unreachable();
    }
}

template <class T>
class Int8Tiles {
    static constexpr int kPieces = kTileKeys / kPieceSlots;
    static constexpr int kWeightWords = kTileKeys / 4;

public:
    using Value = T;
    static constexpr int kMaxBlockRows = kMaxRows / 2;

    // The pieces of the keys, then those of the values.
    struct Tile {
        const void* pieces[2 * kPieces];
        int64_t begin, end;  // of the keys that some row sees, counted from the tile's start
        const uint8_t* keys(int piece) const { return static_cast<const uint8_t*>(pieces[piece]); }
        const uint8_t* values(int piece) const { return keys(kPieces + piece); }
    };

    Int8Tiles(const AttentionShape& shape, const void* k_cache, const void* v_cache)
        : shape_(shape),
          k_cache_(const_cast<void*>(k_cache)),
          v_cache_(const_cast<void*>(v_cache)),
          head_dim_(shape.head_dim),
          dim_words_(head_dim_ / 4),
          dim_padded_(ceil_div(head_dim_, kPanelWidth) * kPanelWidth) {}

    WorkspaceSizes sizes() const {
        int64_t widest = dim_padded_ > kTileKeys ? dim_padded_ : kTileKeys;
        return {2 * dim_words_, 2 * kWeightWords, 0, 0, 2 * kTileKeys + kMaxRows * widest, dim_padded_};
    }

    void start(const Workspace&) const {}

    TileFetcher fetcher(const Tile& tile) const { return {tile.pieces, 2 * kPieces, piece_bytes(head_dim_)}; }

    void find(const TilePlace& place, const Workspace&, Tile& tile) const {
        tile.begin = place.first_key - place.start, tile.end = place.last + 1 - place.start;
        for (int piece = 0; piece < kPieces; ++piece) {
            int64_t key = piece * kPieceSlots, position = place.start + key;
            // Without a seen key it is a piece of the null block, whose scales are not read.
            bool is_seen = key < tile.end && key + kPieceSlots > tile.begin;
            int64_t block = is_seen ? place.blocks[position / shape_.block_size] : 0;
            int64_t slot = block * shape_.block_size + position % shape_.block_size;
            tile.pieces[piece] = find_piece(k_cache_, slot, place.head, shape_.num_kv_heads, head_dim_);
            tile.pieces[kPieces + piece] = find_piece(v_cache_, slot, place.head, shape_.num_kv_heads, head_dim_);
        }
    }

    void pack(const Tile& tile, TileFetcher& next, const Workspace& space) const {
        for (int piece = 0; piece < 2 * kPieces; ++piece) {
            put_scales(tile, piece, scales(space) + piece * kPieceSlots);
            next.fetch(8);
        }
    }

    // Round to scale * (128 * upper + lower), upper in [-127, 127], lower in [0, 127].
    void pack_query(const T* query, const Workspace& space, int64_t start, int row, int size) const {
        constexpr float limit = 127 * 128;
        Vec largest = zero(), spoiled = zero(), sums = zero();
        for (int64_t i = 0; i < head_dim_; i += kLanes) {
            Vec value = load_some(query + i, head_dim_ - i);
            largest = max(largest, abs(value));
            spoiled = fma(value, zero(), spoiled);
        }
        float most = max_of(largest);
        Vec inverse = splat(most > 0 ? limit / most : 0.0f);
        for (int64_t i = 0; i < head_dim_; i += kLanes) {
            Vec whole = round(mul(load_some(query + i, head_dim_ - i), inverse));
            sums = add(sums, whole);
            int64_t words = dim_words_ - i / 4 < kLanes / 4 ? dim_words_ - i / 4 : kLanes / 4;
            put_words(whole, space.queries + start * 2 * dim_words_ + i / 4 * 2 * size + 2 * row, words, 2 * size);
        }
        space.query_scales[start + row] = {(most + sum(spoiled)) / limit, int32_t(sum(sums))};
    }

    void score(const Tile& tile, const Workspace& space, int64_t start, int size) const {
        for (int key = 0; key < kTileKeys; key += kLineVecs * kLanes) {
            Lines lines{{}, 1, dim_words_, kPieceSlots * 4};
            for (int v = 0; v < kLineVecs; ++v) {
                int at = key + v * kLanes;
                lines.at[0][v] = tile.keys(at / kPieceSlots) + at % kPieceSlots * 4;
            }
            const uint32_t* queries = space.queries + start * 2 * dim_words_;
            multiply_lines<KeyProduct, kLineVecs>(2 * size, queries, lines, sums(space) + key, kTileKeys);
        }
        for (int row = 0; row < size; ++row) {
            RowScale scale = space.query_scales[start + row];
            VecInt surplus = splat_int(KeyProduct::kSurplus * scale.sum);
            float* scores = space.scores + (start + row) * kTileKeys;
            for (int key = 0; key < kTileKeys; key += kLanes) {
                VecInt exact = sub_int(join(sums(space) + 2 * row * kTileKeys + key, kTileKeys), surplus);
                store(scores + key, mul(mul(to_vec(exact), splat(scale.scale)), load(scales(space) + key)));
            }
        }
    }

    // The same with weights times the scales of their values; nothing is negative.
    void put_weights(float* weights, const Workspace& space, int64_t start, int row, int size) const {
        constexpr float limit = 127 * 128 + 127;
        const float* value_scales = scales(space) + kTileKeys;
        Vec scaled[kTileKeys / kLanes], largest = zero();
        for (int i = 0; i < kTileKeys / kLanes; ++i) {
            scaled[i] = mul(load(weights + i * kLanes), load(value_scales + i * kLanes));
            largest = max(largest, scaled[i]);
        }
        float most = max_of(largest);
        Vec inverse = splat(most > 0 ? limit / most : 0.0f);
        uint32_t* target = space.weights + start * 2 * kWeightWords + 2 * row;
        for (int i = 0; i < kTileKeys / kLanes; ++i)
            put_words(round(mul(scaled[i], inverse)), target + i * kLanes / 4 * 2 * size, kLanes / 4, 2 * size);
        space.weight_scales[start + row] = {most / limit, 0};
    }

    void gather(const Tile& tile, const Workspace& space, int64_t start, int size) const {
        const uint32_t* weights = space.weights + start * 2 * kWeightWords;
        for (int64_t dim = 0; dim < head_dim_;) {
            // The last vector of a head may reach into the line behind it, whose sums are not used.
            Lines lines{{}, kPieces, kPieceSlots / 4, head_dim_ * 4};
            for (int piece = 0; piece < kPieces; ++piece)
                for (int v = 0; v < kLineVecs; ++v) lines.at[piece][v] = tile.values(piece) + (dim + v * kLanes) * 4;
            bool is_whole = head_dim_ - dim > (kLineVecs - 1) * kLanes;
            auto* multiply = is_whole ? multiply_lines<ValueProduct, kLineVecs> : multiply_lines<ValueProduct, 1>;
            multiply(2 * size, weights, lines, sums(space) + dim, dim_padded_);
            dim += (is_whole ? kLineVecs : 1) * kLanes;
        }
        for (int row = 0; row < size; ++row) {
            Vec scale = splat(space.weight_scales[start + row].scale);
            float* result = space.result + (start + row) * dim_padded_;
            for (int64_t dim = 0; dim < head_dim_; dim += kLanes) {
                VecInt exact = join(sums(space) + 2 * row * dim_padded_ + dim, dim_padded_);
                store(result + dim, fma(to_vec(exact), scale, load(result + dim)));
            }
        }
    }

private:
    // The tile's scales of keys and values, then the integer sums of a block of rows.
    static float* scales(const Workspace& space) { return reinterpret_cast<float*>(space.more); }
    static float* sums(const Workspace& space) { return scales(space) + 2 * kTileKeys; }

    // A slot that no row sees holds anything, and NaN times 0 is not 0.
    void put_scales(const Tile& tile, int piece, float* out) const {
        const float* scales = piece_scales(tile.keys(piece), head_dim_);
        int64_t first = piece % kPieces * kPieceSlots, begin = tile.begin - first, end = tile.end - first;
        if (begin <= 0 && end >= kPieceSlots) {
            std::memcpy(out, scales, kPieceSlots * sizeof(float));
            return;
        }
        for (int64_t slot = 0; slot < kPieceSlots; ++slot) out[slot] = slot >= begin && slot < end ? scales[slot] : 0.0f;
    }

    // Bytes of the upper and lower part of whole numbers, a word of each side by side, `stride` words from pair to pair.
    static void put_words(Vec whole, uint32_t* target, int64_t count, int64_t stride) {
        uint32_t upper[kLanes / 4], lower[kLanes / 4];
        Vec high = floor(mul(whole, splat(1.0f / 128)));
        store_bytes(reinterpret_cast<uint8_t*>(upper), high);
        store_bytes(reinterpret_cast<uint8_t*>(lower), fma(high, splat(-128.0f), whole));
        for (int64_t word = 0; word < count; ++word, target += stride) {
            uint64_t pair = upper[word] | uint64_t(lower[word]) << 32;
            std::memcpy(target, &pair, 8);
        }
    }

    template <class From>
    static Vec load_some(const From* x, int64_t left) {
        return left >= kLanes ? load(x) : load_first(x, int(left));
    }

    // The sums of a row from those of its two parts, `stride` words apart.
    static VecInt join(const float* parts, int64_t stride) {
        return add_int(shift_left_7(load_int(parts)), load_int(parts + stride));
    }

    const AttentionShape& shape_;
    void *k_cache_, *v_cache_;
    int64_t head_dim_, dim_words_, dim_padded_;
};

}  // namespace troupe
