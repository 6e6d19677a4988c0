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

#include "attention_tile.h"

namespace troupe {

namespace {

constexpr int kMaxWorkRows = 48;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct Work {
    int32_t request, first_query, num_queries, first_head, num_heads;
};

template <class T>
class Attention {
    using Arithmetic = typename ArithmeticOf<T>::type;
    static constexpr int kGroup = Arithmetic::kGroup;

public:
    Attention(
        const Batch& batch, const AttentionShape& shape, const T* q, int64_t q_stride, const T* k_cache, const T* v_cache,
        T* out)
        : batch_(batch),
          shape_(shape),
          q_(q),
          q_stride_(q_stride),
          k_cache_(k_cache),
          v_cache_(v_cache),
          out_(out),
          group_size_(shape.num_heads / shape.num_kv_heads),
          dim_words_(shape.head_dim / kGroup),
          dim_panels_(ceil_div(shape.head_dim, kPanelWidth)) {}

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

        Workspace space(pool, thread, rows, work.num_heads, dim_words_, dim_panels_ * kPanelWidth, kGroup);
        for (int64_t head = 0; head < work.num_heads; ++head) start(space.at(head), token, rows, work.first_head + head);
        // While one tile of one head is worked on the next one is on its way from memory.
        TilePacker<T> packer(shape_.head_dim);
        Tile<T> tiles[2];
        auto* zeros = reinterpret_cast<const T*>(space.zeros);
        int64_t first_tile = first_key / kTileKeys, count = (last / kTileKeys - first_tile + 1) * work.num_heads;
        auto find = [&](int64_t step, Tile<T>& tile) {
            int64_t start = (first_tile + step / work.num_heads) * kTileKeys;
            find_keys(work.request, work.first_head + step % work.num_heads, start, first_key, last, zeros, tile);
        };
        find(0, tiles[0]);
        TileFetcher<T>(tiles[0], shape_.head_dim).fetch(2 * kTileKeys);
        for (int64_t step = 0; step < count; ++step) {
            const Tile<T>& now = tiles[step % 2];
            Tile<T>& next = tiles[(step + 1) % 2];
            find(step + 1 < count ? step + 1 : step, next);
            TileFetcher<T> fetcher(next, shape_.head_dim);
            packer.pack_keys(now, fetcher, space.keys);
            packer.pack_values(now, fetcher, space.values);
            int64_t tile_start = (first_tile + step / work.num_heads) * kTileKeys;
            attend_tile(space.at(step % work.num_heads), rows, first, tile_start, fetcher);
            fetcher.fetch(2 * kTileKeys);
        }
        for (int64_t head = 0; head < work.num_heads; ++head)
            write_result(space.at(head), token, rows, work.first_head + head);
    }

private:
    // Pack the queries of one head, and clear its sums.
    void start(const Workspace& space, int64_t token, int64_t rows, int64_t kv_head) const {
        pack_queries(space, token, rows, kv_head);
        std::memset(space.result, 0, rows * dim_panels_ * kPanelWidth * sizeof(float));
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

    void pack_queries(const Workspace& space, int64_t token, int64_t rows, int64_t kv_head) const {
        RowBlocks blocks(rows);
        for (int64_t block = 0; block < blocks.num_blocks; ++block) {
            int64_t start = blocks.start(block);
            int size = blocks.size(block);
            for (int row = 0; row < size; ++row) {
                const T* source = query(token, start + row, kv_head);
                uint32_t* target = space.queries + start * dim_words_ + row;
                for (int64_t word = 0; word < dim_words_; ++word)
                    std::memcpy(target + word * size, source + word * kGroup, 4);
            }
        }
    }

    void attend_tile(const Workspace& space, int64_t rows, int64_t first, int64_t tile_start, TileFetcher<T>& next) const {
        RowBlocks blocks(rows);
        for (int64_t block = 0; block < blocks.num_blocks; ++block) {
            int64_t start = blocks.start(block);
            int size = blocks.size(block);
            score(space, start, size);
            next.fetch(8);
            for (int row = 0; row < size; ++row) {
                int64_t position = first + (start + row) / group_size_;
                soften(space, start, row, size, position, tile_start);
                next.fetch(8);
            }
            gather(space, start, size);
        }
    }

    void find_keys(
        int64_t request, int64_t kv_head, int64_t tile_start, int64_t first_key, int64_t last, const T* zeros,
        Tile<T>& tile) const {
        const int32_t* blocks = batch_.block_tables + request * batch_.max_blocks;
        int64_t stride = shape_.num_kv_heads * shape_.head_dim;
        int64_t block = tile_start / shape_.block_size, offset = tile_start % shape_.block_size;
        for (int key = 0; key < kTileKeys; ++block, offset = 0) {
            int64_t run = shape_.block_size - offset < kTileKeys - key ? shape_.block_size - offset : kTileKeys - key;
            bool is_seen = tile_start + key <= last && tile_start + key + run > first_key;
            int64_t at = is_seen ? (blocks[block] * shape_.block_size + offset) * stride + kv_head * shape_.head_dim : 0;
            if (tile_start + key >= first_key && tile_start + key + run - 1 <= last) {
                // All keys are seen, as almost always: a loop without conditions.
                for (int64_t i = 0; i < run; ++i) {
                    tile.keys[key + i] = k_cache_ + at + i * stride;
                    tile.values[key + i] = v_cache_ + at + i * stride;
                }
                key += run;
                continue;
            }
            for (int64_t end = key + run; key < end; ++key, at += stride) {
                bool is_there = tile_start + key >= first_key && tile_start + key <= last;
                tile.keys[key] = is_there ? k_cache_ + at : zeros;
                tile.values[key] = is_there ? v_cache_ + at : zeros;
            }
        }
    }

    void score(const Workspace& space, int64_t start, int size) const {
        int64_t panel_stride = dim_words_ * kPanelBytes;
        auto* panels = reinterpret_cast<const uint8_t*>(space.keys);
        for (int key = 0; key < kTileKeys; key += kMaxPanels * kPanelWidth) {
            const uint8_t* first = panels + key / kPanelWidth * panel_stride;
            float* scores = space.scores + start * kTileKeys + key;
            const uint32_t* queries = space.queries + start * dim_words_;
            multiply_tile<Arithmetic>(
                {queries, first, panel_stride, dim_words_, scores, kTileKeys, false}, size, kMaxPanels);
        }
    }

    // Turn one row's scores of a tile into weights, and let its result shrink to the new maximum.
    void soften(const Workspace& space, int64_t start, int row, int size, int64_t position, int64_t tile_start) const {
        int64_t end = position + 1 - tile_start;
        int64_t begin = shape_.sliding_window ? end - shape_.sliding_window : 0;
        if (end > kTileKeys) end = kTileKeys;
        if (begin < 0) begin = 0;
        float* scores = space.scores + (start + row) * kTileKeys;
        if (begin >= end) {
            for (int key = 0; key < kTileKeys; key += kLanes) store(scores + key, zero());
            return put_weights(space, scores, start, row, size);
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
        float& maximum = space.maximum[start + row];
        float& total = space.total[start + row];
        float before = maximum, found = max_of(highest);
        if (found > before) {
            maximum = found;
            shrink(space, start + row, exp_one(before - found));
        }
        Vec sums = zero();
        for (int key = 0; key < kTileKeys; key += kLanes) {
            Vec weight = exp(sub(load(scores + key), splat(maximum)));
            store(scores + key, weight);
            sums = add(sums, weight);
        }
        total += sum(sums);
        put_weights(space, scores, start, row, size);
    }

    void shrink(const Workspace& space, int64_t row, float factor) const {
        space.total[row] *= factor;
        float* result = space.result + row * dim_panels_ * kPanelWidth;
        for (int64_t dim = 0; dim < dim_panels_ * kPanelWidth; dim += kLanes)
            store(result + dim, mul(load(result + dim), splat(factor)));
    }

    static int clamp_lanes(int64_t lanes) { return int(lanes < 0 ? 0 : lanes > kLanes ? kLanes : lanes); }

    static float exp_one(float x) {
        float lanes[kLanes];
        store(lanes, exp(splat(x)));
        return lanes[0];
    }

    // The weights of a row become its words in the packed block of rows.
    void put_weights(const Workspace& space, const float* scores, int64_t start, int row, int size) const {
        constexpr int words = kTileKeys / kGroup;
        T narrow[kTileKeys];
        for (int key = 0; key < kTileKeys; key += kLanes) store(narrow + key, load(scores + key));
        uint32_t* target = space.weights + start * words + row;
        for (int word = 0; word < words; ++word) std::memcpy(target + word * size, narrow + word * kGroup, 4);
    }

    void gather(const Workspace& space, int64_t start, int size) const {
        constexpr int words = kTileKeys / kGroup;
        constexpr int64_t panel_stride = words * kPanelBytes;
        auto* panels = reinterpret_cast<const uint8_t*>(space.values);
        int64_t width = dim_panels_ * kPanelWidth;
        for (int64_t panel = 0; panel < dim_panels_;) {
            int count = int(dim_panels_ - panel < kMaxPanels ? dim_panels_ - panel : kMaxPanels);
            float* result = space.result + start * width + panel * kPanelWidth;
            const uint32_t* weights = space.weights + start * words;
            const uint8_t* first = panels + panel * panel_stride;
            multiply_tile<Arithmetic>({weights, first, panel_stride, words, result, width, true}, size, count);
            panel += count;
        }
    }

    void write_result(const Workspace& space, int64_t token, int64_t rows, int64_t kv_head) const {
        for (int64_t row = 0; row < rows; ++row) {
            int64_t head = kv_head * group_size_ + row % group_size_;
            T* out = out_ + ((token + row / group_size_) * shape_.num_heads + head) * shape_.head_dim;
            const float* result = space.result + row * dim_panels_ * kPanelWidth;
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
    const T *k_cache_, *v_cache_;
    T* out_;
    int64_t group_size_, dim_words_, dim_panels_;
};

template <class T>
void run(
    Pool* pool, const Batch& batch, const AttentionShape& shape, const T* q, int64_t q_stride, const T* k_cache,
    const T* v_cache, T* out) {
    Attention<T> attention(batch, shape, q, q_stride, k_cache, v_cache, out);
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
    if (shape.dtype == kBFloat16)
        run(pool, batch, shape, static_cast<const bf16*>(q), q_stride, static_cast<const bf16*>(k_cache),
            static_cast<const bf16*>(v_cache), static_cast<bf16*>(out));
    else
        run(pool, batch, shape, static_cast<const float*>(q), q_stride, static_cast<const float*>(k_cache),
            static_cast<const float*>(v_cache), static_cast<float*>(out));
}

}  // namespace troupe
