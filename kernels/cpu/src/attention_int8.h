// Tiles of keys and values in int8, see `kv_pieces.h`. Queries and weights are rounded to integers of 14 bits, so that only
// the rounding of the cache counts. Their upper and lower parts are two rows of an exact product of bytes, whose other
// operands are the lines of the cache.

#pragma once

#include "attention_tile.h"
#include "grouped_dot.h"

namespace troupe {

struct ByteProduct {
    static constexpr int kParts = 1;
    static VecInt start() { return zero_int(); }
    static VecInt weight(VecInt words, int) { return words; }
    static VecInt activation(const uint32_t* x, int) { return splat_int(int32_t(*x)); }
};

// Signed bytes of queries, unsigned bytes of keys around the zero point: sums are too large by kSurplus * sum(x).
struct KeyProduct : ByteProduct {
    static constexpr int kSurplus = kZero8;
    static VecInt product(VecInt sum, VecInt x, VecInt w) {
        if constexpr (kSurplus) return add_products(sum, w, x);
        return add_signed(sum, x, xor_int(w, splat_int(int32_t(0x80808080u))));
    }
};

// Bytes of weights in [0, 127], signed bytes of values.
struct ValueProduct : ByteProduct {
    static VecInt product(VecInt sum, VecInt x, VecInt w) { return add_products(sum, x, w); }
};

template <class T>
class Int8Tiles : public CacheTiles<uint8_t> {
    static constexpr int kWeightWords = kTileKeys / 4;

public:
    using Value = T;
    static constexpr int kMaxBlockRows = kMaxRows / 2;

    Int8Tiles(const AttentionShape& shape, const void* k_cache, const void* v_cache)
        : CacheTiles(shape, k_cache, v_cache),
          head_dim_(shape.head_dim),
          dim_words_(head_dim_ / 4),
          dim_padded_(ceil_div(head_dim_, kPanelWidth) * kPanelWidth) {}

    WorkspaceSizes sizes() const {
        int64_t widest = dim_padded_ > kTileKeys ? dim_padded_ : kTileKeys;
        return {2 * dim_words_, 2 * kWeightWords, 2 * kTileKeys + kMaxRows * widest, dim_padded_};
    }

    void prepare(const Tile& tile, TileFetcher& next, const Workspace& space) const {
        for (int piece = 0; piece < 2 * kTilePieces; ++piece) {
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
        const uint32_t* queries = space.queries + start * 2 * dim_words_;
        multiply_keys<KeyProduct>(tile, dim_words_, 2 * size, queries, products(space));
        for (int row = 0; row < size; ++row) {
            RowScale scale = space.query_scales[start + row];
            VecInt surplus = splat_int(KeyProduct::kSurplus * scale.sum);
            float* scores = space.scores + (start + row) * kTileKeys;
            for (int key = 0; key < kTileKeys; key += kLanes) {
                VecInt exact = sub_int(join(products(space) + 2 * row * kTileKeys + key, kTileKeys), surplus);
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

    void accumulate_values(const Tile& tile, const Workspace& space, int64_t start, int size) const {
        const uint32_t* weights = space.weights + start * 2 * kWeightWords;
        constexpr int groups = kPieceSlots / 4;
        multiply_values<ValueProduct>(tile, head_dim_, groups, 2 * size, weights, products(space), dim_padded_, false);
        for (int row = 0; row < size; ++row) {
            Vec scale = splat(space.weight_scales[start + row].scale);
            float* sums = space.sums + (start + row) * dim_padded_;
            for (int64_t dim = 0; dim < head_dim_; dim += kLanes) {
                VecInt exact = join(products(space) + 2 * row * dim_padded_ + dim, dim_padded_);
                store(sums + dim, fma(to_vec(exact), scale, load(sums + dim)));
            }
        }
    }

private:
    // The tile's scales of keys and values, then the exact products of a block of rows.
    static float* scales(const Workspace& space) { return reinterpret_cast<float*>(space.more); }
    static float* products(const Workspace& space) { return scales(space) + 2 * kTileKeys; }

    // A slot that no row sees holds anything, and NaN times 0 is not 0.
    void put_scales(const Tile& tile, int piece, float* out) const {
        const float* scales = pieces.scales(tile.keys(piece));
        int64_t first = tile.first_seen(piece % kTilePieces), end = tile.end_seen(piece % kTilePieces);
        for (int64_t slot = 0; slot < kPieceSlots; ++slot) out[slot] = slot >= first && slot < end ? scales[slot] : 0.0f;
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

    int64_t head_dim_, dim_words_, dim_padded_;
};

}  // namespace troupe
