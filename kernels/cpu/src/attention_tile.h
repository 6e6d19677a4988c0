// The memory of one piece of attention, and how it asks for the keys and values of its next tile.

#pragma once

#include "dispatch.h"
#include "pool.h"

namespace troupe {

constexpr int kTileKeys = 64;
constexpr int kTileParts = 128;  // in which a tile is fetched

// Asks for the memory of a tile little by little: a core waits when it has asked for much at once. The tile comes into the
// second-level cache, which has room for it and lets more requests be under way than the first.
class TileFetcher {
public:
    // `pieces` of `bytes` each hold the tile, in the order in which they are needed.
    TileFetcher(const void* const* pieces, int num_pieces, int64_t bytes)
        : pieces_(pieces), lines_(int(ceil_div(bytes, 64))), total_(num_pieces * lines_) {}

    // Ask for the next `parts` of kTileParts.
    void fetch(int parts) {
        int end = at_ + (parts * total_ + kTileParts - 1) / kTileParts;
        if (end > total_) end = total_;
        for (; at_ < end; ++at_, ++line_) {
            if (line_ == lines_) line_ = 0, ++piece_;
            _mm_prefetch(static_cast<const char*>(pieces_[piece_]) + line_ * 64, _MM_HINT_T1);
        }
    }

private:
    const void* const* pieces_;
    int lines_, total_, at_ = 0, piece_ = 0, line_ = 0;
};

// A row of numbers as integers: its scale, and the sum of the integers. Rows that need neither leave it empty.
struct RowScale {
    float scale;
    int32_t sum;
};

// Sizes of a Workspace in 32-bit words.
struct WorkspaceSizes {
    int64_t query, weights;  // a row's queries, a row's weights of a tile
    int64_t keys, values;    // a tile's
    int64_t more;            // whatever else the tiles need
    int64_t dim_padded;      // a row's result
};

// Where everything of one piece of work lies in its thread's memory.
struct Workspace {
    uint32_t *queries, *keys, *values, *weights, *more;
    float *scores, *result, *maximum, *total;
    RowScale *query_scales, *weight_scales;

    Workspace(Pool* pool, int thread, int64_t rows, int64_t num_heads, const WorkspaceSizes& sizes)
        : rows_(rows), query_words_(sizes.query), dim_padded_(sizes.dim_padded) {
        int64_t all_rows = rows * num_heads;
        int64_t words[] = {
            all_rows * sizes.query, sizes.keys, sizes.values, rows * sizes.weights, sizes.more, rows * kTileKeys,
            all_rows * dim_padded_, all_rows,   all_rows,     2 * all_rows,         2 * rows,
        };
        int64_t total_words = 0;
        for (int64_t& size : words) total_words += size = ceil_div(size, 16) * 16;
        auto* memory = static_cast<uint32_t*>(pool_scratch(pool, thread, kTileScratch, total_words * 4));
        uint32_t* parts[11];
        for (int part = 0; part < 11; memory += words[part++]) parts[part] = memory;
        queries = parts[0], keys = parts[1], values = parts[2], weights = parts[3], more = parts[4];
        scores = reinterpret_cast<float*>(parts[5]), result = reinterpret_cast<float*>(parts[6]);
        maximum = reinterpret_cast<float*>(parts[7]), total = reinterpret_cast<float*>(parts[8]);
        query_scales = reinterpret_cast<RowScale*>(parts[9]), weight_scales = reinterpret_cast<RowScale*>(parts[10]);
    }

    // The same with the queries and sums of another head.
    Workspace at(int64_t head) const {
        Workspace other = *this;
        int64_t first = head * rows_;
        other.queries += first * query_words_;
        other.result += first * dim_padded_;
        other.maximum += first, other.total += first, other.query_scales += first;
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

}  // namespace troupe
