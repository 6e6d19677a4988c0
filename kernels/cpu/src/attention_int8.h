// Tiles of keys and values in int8, see `kv_pieces.h`. Queries and weights are rounded to integers of 14 bits, so that only
// the rounding of the cache counts. Where an instruction adds products of bytes, their upper and lower parts are two rows of
// an exact product with the lines of the cache. Elsewhere the lines become 16 bits wide, first those of even numbers.

#pragma once

#include "attention_tile.h"
#include "grouped_dot.h"

namespace troupe {

struct WholeProduct {
    static VecInt start() { return zero_int(); }
    static VecInt activation(const uint32_t* x, int part) { return splat_int(int32_t(x[part])); }
};

// Unsigned bytes of keys are around the zero point: sums are too large by kSurplus * sum(x).
#ifdef TROUPE_DOT
struct KeyProduct : WholeProduct {
    static constexpr int kRows = 2, kParts = 1, kWords = 1, kSurplus = kZero8;
    static VecInt weight(VecInt words, int) { return kSurplus ? words : xor_int(words, splat_int(int32_t(0x80808080u))); }
    static VecInt product(VecInt sum, VecInt x, VecInt w) { return add_products(sum, w, x); }
};

// Bytes of weights in [0, 127], signed bytes of values.
struct ValueProduct : KeyProduct {
    static VecInt weight(VecInt words, int) { return words; }
    static VecInt product(VecInt sum, VecInt x, VecInt w) { return add_products(sum, x, w); }
};
#else
struct KeyProduct : WholeProduct {
    static constexpr int kRows = 1, kParts = 2, kWords = 2, kSurplus = kZeroPoint;
    static VecInt weight(VecInt words, int part) {
        return part ? shift_right<8>(words) : and_int(words, splat_int(0x00ff00ff));
    }
    static VecInt product(VecInt sum, VecInt x, VecInt w) { return now(add_int(sum, multiply_wide(w, x))); }
};

struct ValueProduct : KeyProduct {
    static VecInt weight(VecInt words, int part) { return part ? widen_odd(words) : widen_even(words); }
};
#endif

template <class T>
class Int8Tiles : public CacheTiles<uint8_t> {
    static constexpr int kWeightWords = kTileKeys / 4, kRows = KeyProduct::kRows;

public:
    using Value = T;
    static constexpr int kMaxBlockRows = kMaxRows / kRows;

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
        }
        next.fetch();
    }

    // Round to scale * whole, whole = 128 * upper + lower with upper in [-127, 127], lower in [0, 127].
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
        multiply_keys<KeyProduct>(tile, dim_words_, kRows * size, queries, products(space));
        for (int row = 0; row < size; ++row) {
            RowScale scale = space.query_scales[start + row];
            VecInt surplus = splat_int(KeyProduct::kSurplus * scale.sum);
            float* scores = space.scores + (start + row) * kTileKeys;
            for (int key = 0; key < kTileKeys; key += kLanes) {
                VecInt exact = sub_int(join(products(space) + kRows * row * kTileKeys + key, kTileKeys), surplus);
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
        multiply_values<ValueProduct>(tile, head_dim_, groups, kRows * size, weights, products(space), dim_padded_, false);
        for (int row = 0; row < size; ++row) {
            Vec scale = splat(space.weight_scales[start + row].scale);
            float* sums = space.sums + (start + row) * dim_padded_;
            for (int64_t dim = 0; dim < head_dim_; dim += kLanes) {
                VecInt exact = join(products(space) + kRows * row * dim_padded_ + dim, dim_padded_);
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

    // Each four whole numbers as two words, bytes of the upper and of the lower parts, or 16 bits of the even and of the odd
    // ones; `stride` words from pair to pair.
    static void put_words(Vec whole, uint32_t* target, int64_t count, int64_t stride) {
#ifdef TROUPE_DOT
        uint32_t upper[kLanes / 4], lower[kLanes / 4];
        Vec high = floor(mul(whole, splat(1.0f / 128)));
        store_bytes(reinterpret_cast<uint8_t*>(upper), high);
        store_bytes(reinterpret_cast<uint8_t*>(lower), fma(high, splat(-128.0f), whole));
        for (int64_t word = 0; word < count; ++word, target += stride) {
            uint64_t pair = upper[word] | uint64_t(lower[word]) << 32;
            std::memcpy(target, &pair, 8);
        }
#else
        constexpr uint64_t mask = 0x0000ffff0000ffffu;
        uint64_t numbers[kLanes / 2];
        store_int(numbers, to_int(whole));
        for (int64_t word = 0; word < count; ++word, target += stride) {
            uint64_t pair = (numbers[2 * word] & mask) | (numbers[2 * word + 1] & mask) << 16;
            std::memcpy(target, &pair, 8);
        }
#endif
    }

    template <class From>
    static Vec load_some(const From* x, int64_t left) {
        return left >= kLanes ? load(x) : load_first(x, int(left));
    }

    // The sums of a row, of two parts `stride` words apart.
    static VecInt join(const float* parts, int64_t stride) {
        return kRows == 1 ? load_int(parts) : add_int(shift_left_7(load_int(parts)), load_int(parts + stride));
    }

    int64_t head_dim_, dim_words_, dim_padded_;
};

}  // namespace troupe
