// The memory of one piece of attention, its tiles of keys and values in a cache, and the products with their lines.

#pragma once

#include "attention.h"
#include "dispatch.h"
#include "kv_pieces.h"
#include "lines.h"
#include "pool.h"

namespace troupe {

constexpr int kTileKeys = 64;
constexpr int kTilePieces = kTileKeys / kPieceSlots;
static_assert(kTilePieces <= kLineParts);

// Asks for the memory of a tile little by little: a core waits when it has asked for much at once. The tile comes into the
// second-level cache, which has room for it and lets more requests be under way than the first.
class TileFetcher {
public:
    // `pieces` of `bytes` each hold the tile, in the order in which they are needed; `parts` calls ask for all of it.
    TileFetcher(const void* const* pieces, int num_pieces, int64_t bytes, int64_t parts)
        : pieces_(pieces), lines_(int(ceil_div(bytes, 64))), total_(num_pieces * lines_), share_(int(ceil_div(total_, parts))) {}

    // Ask for the next part.
    void fetch() {
        int end = at_ + share_ < total_ ? at_ + share_ : total_;
        for (; at_ < end; ++at_, ++line_) {
            if (line_ == lines_) line_ = 0, ++piece_;
            __builtin_prefetch(static_cast<const char*>(pieces_[piece_]) + line_ * 64, 0, 2);
        }
    }

private:
    const void* const* pieces_;
    int lines_, total_, share_, at_ = 0, piece_ = 0, line_ = 0;
};

// A row of numbers as integers: its scale, and the sum of the integers. Rows that need neither leave it empty.
struct RowScale {
    float scale;
    int32_t sum;
};

// Sizes of a Workspace in 32-bit words.
struct WorkspaceSizes {
    int64_t query, weights;  // a row's queries, a row's weights of a tile
    int64_t more;            // whatever else the tiles need
    int64_t dim_padded;      // a row's result
};

// A row's softmax so far: the largest score, and, relative to it, the sum of the exponentials.
struct RowTotal {
    float maximum, total;
};

// Where everything of one piece of work lies in its thread's memory. `sums` and `totals` are those of the current span of
// keys, `result` and `result_totals` those of all spans before it.
struct Workspace {
    uint32_t *queries, *weights, *more;
    float *scores, *sums, *result;
    RowTotal *totals, *result_totals;
    RowScale *query_scales, *weight_scales;

    Workspace(Pool* pool, int thread, int64_t rows, int64_t num_heads, const WorkspaceSizes& sizes)
        : rows_(rows), query_words_(sizes.query), dim_padded_(sizes.dim_padded) {
        int64_t all_rows = rows * num_heads;
        int64_t words[] = {
            all_rows * sizes.query,  rows * sizes.weights,    sizes.more,   rows * kTileKeys, all_rows * dim_padded_,
            all_rows * dim_padded_,  2 * all_rows,            2 * all_rows, 2 * all_rows,     2 * rows,
        };
        int64_t total_words = 0;
        for (int64_t& size : words) total_words += size = ceil_div(size, 16) * 16;
        auto* memory = static_cast<uint32_t*>(pool_scratch(pool, thread, kTileScratch, total_words * 4));
        uint32_t* parts[10];
        for (int part = 0; part < 10; memory += words[part++]) parts[part] = memory;
        queries = parts[0], weights = parts[1], more = parts[2];
        scores = reinterpret_cast<float*>(parts[3]), sums = reinterpret_cast<float*>(parts[4]);
        result = reinterpret_cast<float*>(parts[5]);
        totals = reinterpret_cast<RowTotal*>(parts[6]), result_totals = reinterpret_cast<RowTotal*>(parts[7]);
        query_scales = reinterpret_cast<RowScale*>(parts[8]), weight_scales = reinterpret_cast<RowScale*>(parts[9]);
    }

    // The same with the queries and sums of another head.
    Workspace at(int64_t head) const {
        Workspace other = *this;
        int64_t first = head * rows_;
        other.queries += first * query_words_;
        other.sums += first * dim_padded_, other.result += first * dim_padded_;
        other.totals += first, other.result_totals += first, other.query_scales += first;
        return other;
    }

private:
    int64_t rows_, query_words_, dim_padded_;
};

// Where a tile lies: its request's blocks, its head, its first position, and the keys [first_key, last] that rows see.
struct TilePlace {
    const int32_t* blocks;
    int64_t head, start, first_key, last;
};

// The pieces of a tile's keys, then those of its values.
struct Tile {
    TilePlace place;
    const void* pieces[2 * kTilePieces];
    int64_t begin, end;  // of the keys that some row sees, counted from the tile's start
    const uint8_t* keys(int piece) const { return static_cast<const uint8_t*>(pieces[piece]); }
    const uint8_t* values(int piece) const { return keys(kTilePieces + piece); }
    // The seen slots [first_seen, end_seen) of a piece.
    int64_t first_seen(int piece) const { return clamp(begin - piece * kPieceSlots); }
    int64_t end_seen(int piece) const { return clamp(end - piece * kPieceSlots); }
    bool is_seen(int piece) const { return first_seen(piece) < end_seen(piece); }

private:
    static int64_t clamp(int64_t slot) { return slot < 0 ? 0 : slot > kPieceSlots ? kPieceSlots : slot; }
};

// The caches of one layer, cut into tiles.
template <class Number>
class CacheTiles {
public:
    CacheTiles(const AttentionShape& shape, const void* k_cache, const void* v_cache)
        : pieces(piece_slots(shape.block_size), shape.num_kv_heads, shape.head_dim),
          k_cache_(k_cache),
          v_cache_(v_cache),
          block_size_(shape.block_size) {}

    TileFetcher fetcher(const Tile& tile, int64_t parts) const {
        return {tile.pieces, has_values() ? 2 * kTilePieces : kTilePieces, pieces.bytes, parts};
    }

    void find(const TilePlace& place, Tile& tile) const {
        tile.place = place;
        tile.begin = place.first_key - place.start, tile.end = place.last + 1 - place.start;
        for (int piece = 0; piece < kTilePieces; ++piece) {
            // Without a seen key it is a piece of the null block, which holds anything.
            int64_t slot = tile.is_seen(piece) ? find_slot(tile, piece * kPieceSlots + tile.first_seen(piece)) : 0;
            tile.pieces[piece] = pieces.find(k_cache_, slot, place.head);
            tile.pieces[kTilePieces + piece] = pieces.find(v_cache_, slot, place.head);
        }
    }

    // The slot of a seen key, counted from the tile's start.
    int64_t find_slot(const Tile& tile, int64_t key) const {
        int64_t position = tile.place.start + key;
        return int64_t(tile.place.blocks[position / block_size_]) * block_size_ + position % block_size_;
    }

    const uint8_t* find_keys(const Tile& tile, int64_t slot) const { return pieces.find(k_cache_, slot, tile.place.head); }
    const uint8_t* find_values(const Tile& tile, int64_t slot) const { return pieces.find(v_cache_, slot, tile.place.head); }

    // Else the values are made from the keys.
    bool has_values() const { return v_cache_ != k_cache_; }

    const Pieces<Number> pieces;

private:
    const void *k_cache_, *v_cache_;
    int64_t block_size_;
};

// Scores of a tile: `words` of the head times all keys.
template <class Product>
void multiply_keys(const Tile& tile, int64_t words, int rows, const uint32_t* queries, float* scores) {
    for (int key = 0; key < kTileKeys; key += kLineVecs * kLanes) {
        Lines lines{{}, 1, words, kPieceSlots * 4};
        for (int v = 0; v < kLineVecs; ++v) {
            int at = key + v * kLanes;
            lines.at[0][v] = tile.keys(at / kPieceSlots) + at % kPieceSlots * 4;
        }
        multiply_lines<Product, kLineVecs>(rows, queries, lines, scores + key, kTileKeys, false);
    }
}

// The weighted sums of the values of a tile's seen pieces; `groups` words of slots in a piece.
template <class Product>
void multiply_values(
    const Tile& tile, int64_t dim, int groups, int rows, const uint32_t* weights, float* sums, int64_t stride, bool adds) {
    int first = 0, end = kTilePieces;
    while (first < end && !tile.is_seen(first)) ++first;
    while (first < end && !tile.is_seen(end - 1)) --end;
    for (int64_t at = 0; at < dim;) {
        Lines lines{{}, end - first, groups, dim * 4};
        for (int piece = first; piece < end; ++piece)
            for (int v = 0; v < kLineVecs; ++v) lines.at[piece - first][v] = tile.values(piece) + (at + v * kLanes) * 4;
        bool is_wide = dim - at >= kLineVecs * kLanes;
        if (dim - at < kLanes) lines.lanes = int(dim - at);
        auto* multiply = is_wide ? multiply_lines<Product, kLineVecs> : multiply_lines<Product, 1>;
        multiply(rows, weights + first * groups * rows * Product::kWords, lines, sums + at, stride, adds);
        at += (is_wide ? kLineVecs : 1) * kLanes;
    }
}

}  // namespace troupe
