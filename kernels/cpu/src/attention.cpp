// One piece of work is a few queries of one request, all heads of one group, against the request's whole context:
//
//     rows   = queries x heads of the group, packed in blocks as for a linear layer
//     tiles  = 64 keys; tile t of a request is positions [64 t, 64 t + 64), whoever asks
//
//     keys of a tile, turned into panels   scores = rows . panels          (multiply_tile)
//     softmax with a running maximum       weights = exp(scores - maximum)
//     values of a tile, as panels          result = result * shrink + weights . panels
//
// Tiles start at fixed positions and each row walks them in order, so a query's result is the same bit for bit
// whether it comes alone (decode), in a chunk of any length, or beside other requests. A tile or key that a row does
// not see adds exact zeros.

#include "attention.h"

#include <cmath>
#include <limits>

#include "attention_int8.h"
#include "attention_plain.h"

namespace troupe {

namespace {

constexpr int kMaxWorkRows = 48;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct Work {
    int32_t request, first_query, num_queries, first_head, num_heads;
};

template <class Tiles>
class Attention {
    using T = typename Tiles::Value;

public:
    Attention(
        const Batch& batch, const AttentionShape& shape, const void* q, int64_t q_stride, const void* k_cache,
        const void* v_cache, void* out)
        : batch_(batch),
          shape_(shape),
          q_(static_cast<const T*>(q)),
          q_stride_(q_stride),
          out_(static_cast<T*>(out)),
          tiles_(shape, k_cache, v_cache),
          group_size_(shape.num_heads / shape.num_kv_heads),
          dim_padded_(ceil_div(shape.head_dim, kPanelWidth) * kPanelWidth) {}

    int64_t queries_per_work() const { return group_size_ >= kMaxWorkRows ? 1 : kMaxWorkRows / group_size_; }

    // How many KV heads one piece of work takes. All of them together read whole blocks, which are faster to come by than
    // pieces of them; more rows than these would not stay in the cache.
    int64_t heads_per_work(int64_t num_queries, bool is_wide) const {
        bool fits = num_queries * group_size_ * shape_.num_kv_heads <= kMaxWorkRows;
        return is_wide && fits ? shape_.num_kv_heads : 1;
    }

    void run(Pool* pool, int thread, const Work& work) const {
        int64_t rows = work.num_queries * group_size_;
        int64_t token = batch_.query_start_loc[work.request];
        int64_t query_len = batch_.query_start_loc[work.request + 1] - token;
        token += work.first_query;
        // Positions of the first and last query; keys [first_key, last] are seen by some row.
        int64_t first = batch_.seq_lens[work.request] - query_len + work.first_query;
        int64_t last = first + work.num_queries - 1;
        int64_t first_key = 0;
        if (shape_.sliding_window && first - shape_.sliding_window + 1 > 0) first_key = first - shape_.sliding_window + 1;

        Workspace space(pool, thread, rows, work.num_heads, tiles_.sizes());
        tiles_.start(space);
        for (int64_t head = 0; head < work.num_heads; ++head) start(space.at(head), token, rows, work.first_head + head);
        // While one tile of one head is worked on the next one is on its way from memory.
        typename Tiles::Tile tiles[2];
        int64_t first_tile = first_key / kTileKeys, count = (last / kTileKeys - first_tile + 1) * work.num_heads;
        const int32_t* blocks = batch_.block_tables + work.request * batch_.max_blocks;
        auto find = [&](int64_t step, typename Tiles::Tile& tile) {
            int64_t start = (first_tile + step / work.num_heads) * kTileKeys;
            tiles_.find({blocks, work.first_head + step % work.num_heads, start, first_key, last}, space, tile);
        };
        find(0, tiles[0]);
        tiles_.fetcher(tiles[0]).fetch(kTileParts);
        for (int64_t step = 0; step < count; ++step) {
            typename Tiles::Tile& next = tiles[(step + 1) % 2];
            find(step + 1 < count ? step + 1 : step, next);
            TileFetcher fetcher = tiles_.fetcher(next);
            tiles_.pack(tiles[step % 2], fetcher, space);
            int64_t tile_start = (first_tile + step / work.num_heads) * kTileKeys;
            attend_tile(tiles[step % 2], space.at(step % work.num_heads), rows, first, tile_start, fetcher);
            fetcher.fetch(kTileParts);
        }
        for (int64_t head = 0; head < work.num_heads; ++head)
            write_result(space.at(head), token, rows, work.first_head + head);
    }

private:
    // Pack the queries of one head, and clear its sums.
    void start(const Workspace& space, int64_t token, int64_t rows, int64_t kv_head) const {
        RowBlocks blocks(rows, Tiles::kMaxBlockRows);
        for (int64_t block = 0; block < blocks.num_blocks; ++block) {
            int64_t start = blocks.start(block);
            int size = blocks.size(block);
            for (int row = 0; row < size; ++row)
                tiles_.pack_query(query(token, start + row, kv_head), space, start, row, size);
        }
        std::memset(space.result, 0, rows * dim_padded_ * sizeof(float));
        for (int64_t row = 0; row < rows; ++row) {
            const float* sink = shape_.sinks ? shape_.sinks + kv_head * group_size_ + row % group_size_ : nullptr;
            space.maximum[row] = sink ? *sink : kNothing;
            space.total[row] = sink ? 1.0f : 0.0f;
        }
    }

    // Row r is query r / group_size, head r % group_size of the group.
    const T* query(int64_t token, int64_t row, int64_t kv_head) const {
        int64_t head = kv_head * group_size_ + row % group_size_;
        return q_ + (token + row / group_size_) * q_stride_ + head * shape_.head_dim;
    }

    void attend_tile(
        const typename Tiles::Tile& tile, const Workspace& space, int64_t rows, int64_t first, int64_t tile_start,
        TileFetcher& next) const {
        RowBlocks blocks(rows, Tiles::kMaxBlockRows);
        for (int64_t block = 0; block < blocks.num_blocks; ++block) {
            int64_t start = blocks.start(block);
            int size = blocks.size(block);
            tiles_.score(tile, space, start, size);
            next.fetch(8);
            for (int row = 0; row < size; ++row) {
                int64_t position = first + (start + row) / group_size_;
                soften(space, start + row, position, tile_start);
                tiles_.put_weights(space.scores + (start + row) * kTileKeys, space, start, row, size);
                next.fetch(8);
            }
            tiles_.gather(tile, space, start, size);
        }
    }

    // Turn one row's scores of a tile into weights, and let its result shrink to the new maximum.
    void soften(const Workspace& space, int64_t row, int64_t position, int64_t tile_start) const {
        int64_t end = position + 1 - tile_start;
        int64_t begin = shape_.sliding_window ? end - shape_.sliding_window : 0;
        if (end > kTileKeys) end = kTileKeys;
        if (begin < 0) begin = 0;
        float* scores = space.scores + row * kTileKeys;
        if (begin >= end) {
            for (int key = 0; key < kTileKeys; key += kLanes) store(scores + key, zero());
            return;
        }
        Vec highest = splat(kNothing);
        for (int key = 0; key < kTileKeys; key += kLanes) {
            Vec x = mul(load(scores + key), splat(shape_.scale));
            if (shape_.soft_cap > 0) x = mul(splat(shape_.soft_cap), tanh(mul(x, splat(1.0f / shape_.soft_cap))));
            x = keep_first(x, clamp_lanes(end - key), kNothing);
            if (begin > key) x = drop_first(x, clamp_lanes(begin - key), kNothing);
            store(scores + key, x);
            highest = max(x, highest);
        }
        float& maximum = space.maximum[row];
        float& total = space.total[row];
        float before = maximum, found = max_of(highest);
        if (found > before) {
            maximum = found;
            shrink(space, row, exp_one(before - found));
        }
        Vec sums = zero();
        for (int key = 0; key < kTileKeys; key += kLanes) {
            Vec weight = exp(sub(load(scores + key), splat(maximum)));
            store(scores + key, weight);
            sums = add(sums, weight);
        }
        total += sum(sums);
    }

    void shrink(const Workspace& space, int64_t row, float factor) const {
        space.total[row] *= factor;
        float* result = space.result + row * dim_padded_;
        for (int64_t dim = 0; dim < dim_padded_; dim += kLanes)
            store(result + dim, mul(load(result + dim), splat(factor)));
    }

    static int clamp_lanes(int64_t lanes) { return int(lanes < 0 ? 0 : lanes > kLanes ? kLanes : lanes); }

    static float exp_one(float x) {
        float lanes[kLanes];
        store(lanes, exp(splat(x)));
        return lanes[0];
    }

    void write_result(const Workspace& space, int64_t token, int64_t rows, int64_t kv_head) const {
        for (int64_t row = 0; row < rows; ++row) {
            int64_t head = kv_head * group_size_ + row % group_size_;
            int64_t place = (token + row / group_size_) * shape_.num_heads + head;
            T* out = out_ + place * shape_.head_dim;
            if (shape_.log_sums) shape_.log_sums[place] = space.maximum[row] + std::log(space.total[row]);
            const float* result = space.result + row * dim_padded_;
            Vec inverse = splat(1.0f / space.total[row]);
            for (int64_t dim = 0; dim < shape_.head_dim; dim += kLanes) {
                int64_t left = shape_.head_dim - dim;
                Vec value = mul(load(result + dim), inverse);
                if (left >= kLanes)
                    store(out + dim, value);
                else
                    store_first(out + dim, value, int(left));
            }
        }
    }

    const Batch& batch_;
    const AttentionShape& shape_;
    const T* q_;
    int64_t q_stride_;
    T* out_;
    Tiles tiles_;
    int64_t group_size_, dim_padded_;
};

template <class Tiles>
void run(
    Pool* pool, const Batch& batch, const AttentionShape& shape, const void* q, int64_t q_stride, const void* k_cache,
    const void* v_cache, void* out) {
    Attention<Tiles> attention(batch, shape, q, q_stride, k_cache, v_cache, out);
    int64_t step = attention.queries_per_work();
    int64_t num_tokens = batch.query_start_loc[batch.num_requests];
    int64_t num_heads = shape.num_kv_heads;
    size_t bytes = (num_tokens / step + batch.num_requests + 1) * num_heads * sizeof(Work);
    auto* works = static_cast<Work*>(pool_scratch(pool, 0, kPlanScratch, bytes));
    // With few requests the heads are what the threads share.
    bool is_wide = batch.num_requests >= 2 * pool_threads(pool);
    int64_t count = 0;
    for (int64_t request = 0; request < batch.num_requests; ++request) {
        int64_t query_len = batch.query_start_loc[request + 1] - batch.query_start_loc[request];
        for (int64_t first = 0; first < query_len; first += step) {
            int64_t length = query_len - first < step ? query_len - first : step;
            int64_t heads = attention.heads_per_work(length, is_wide);
            for (int64_t head = 0; head < num_heads; head += heads)
                works[count++] = {int32_t(request), int32_t(first), int32_t(length), int32_t(head), int32_t(heads)};
        }
    }
    parallel(pool, count, [&](int64_t tile, int thread) { attention.run(pool, thread, works[tile]); });
}

}  // namespace

void run_attention(
    Pool* pool, const Batch& batch, const AttentionShape& shape, const void* q, int64_t q_stride, const void* k_cache,
    const void* v_cache, void* out) {
    auto run_tiles = [&](auto* attend) { attend(pool, batch, shape, q, q_stride, k_cache, v_cache, out); };
    bool is_narrow = shape.dtype == kBFloat16;
    if (shape.is_int8)
        run_tiles(is_narrow ? run<Int8Tiles<bf16>> : run<Int8Tiles<float>>);
    else
        run_tiles(is_narrow ? run<PlainTiles<bf16>> : run<PlainTiles<float>>);
}

}  // namespace troupe
