// One piece of work is a few queries of one request, all heads of one group, against the request's whole context:
//
//     rows   = queries x heads of the group, packed in blocks as for a linear layer
//     tiles  = 64 keys; tile t of a request is positions [64 t, 64 t + 64), whoever asks
//     spans  = some tiles, with fixed borders; each has a softmax of its own
//
//     scores = rows . keys of a tile          (multiply_keys)
//     softmax with a running maximum          weights = exp(scores - maximum)
//     sums   = sums * shrink + weights . values
//     after each span: result = result * shrink + sums * shrink
//
// Tiles and spans start at fixed positions, each row walks the tiles of a span in order, and spans are added in order. So
// a query's result is the same bit for bit whether it comes alone (decode), in a chunk of any length, or beside other
// requests, and whether one thread computes all of its spans or several do. A tile or key that a row does not see adds
// exact zeros. Source: Dao et al., 2023 (FlashDecoding).

#include "attention.h"

#include <limits>
#include <vector>

#include "attention_int8.h"
#include "attention_plain.h"

namespace troupe {

namespace {

constexpr int kMaxWorkRows = 48;
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
// Work on fewer keys is not worth another task.
constexpr int64_t kMinTaskKeys = 512;
// Tasks for each thread, so that all end at about the same time.
constexpr int64_t kThreadTasks = 4;

// The end of the span of keys that holds a position. Spans grow, so that long contexts have few.
int64_t span_end(int64_t position) {
    int64_t width = position < 4096 ? 256 : position < 16384 ? 1024 : 4096;
    return (position / width + 1) * width;
}

struct Work {
    int32_t request, first_query, num_queries, first_head, num_heads;
    int32_t num_spans;  // where several tasks share the work, else 0
    float* parts;       // of the spans
};

// A thread's share of a work: the keys [start, end), whole spans, from span `span` on.
struct Task {
    int32_t work, span;
    int64_t start, end;
};

inline float exp_one(float x) {
    float lanes[kLanes];
    store(lanes, exp(splat(x)));
    return lanes[0];
}

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

    // The keys [start, end) that some row of a work sees.
    struct Keys {
        int64_t start, end;
    };
    Keys find_keys(const Work& work) const {
        int64_t first = first_position(work);
        int64_t start = shape_.sliding_window ? first - shape_.sliding_window + 1 : 0;
        return {start > 0 ? start : 0, first + work.num_queries};
    }

    // Words of one span's sums and totals.
    int64_t part_words(const Work& work) const { return count_rows(work) * work.num_heads * (dim_padded_ + 2); }

    void run(Pool* pool, int thread, const Work& work, const Task& task) const {
        int64_t rows = count_rows(work), token = first_token(work), first = first_position(work);
        Keys keys = find_keys(work);
        Workspace space(pool, thread, rows, work.num_heads, tiles_.sizes());
        for (int64_t head = 0; head < work.num_heads; ++head) {
            pack_queries(space.at(head), token, rows, work.first_head + head);
            start_result(space.at(head), rows, work.first_head + head);
        }
        // While one tile of one head is worked on the next one is on its way from memory.
        Tile tiles[2];
        int64_t first_tile = task.start / kTileKeys;
        int64_t count = (ceil_div(task.end, kTileKeys) - first_tile) * work.num_heads;
        const int32_t* blocks = batch_.block_tables + work.request * batch_.max_blocks;
        auto find = [&](int64_t step, Tile& tile) {
            int64_t start = (first_tile + step / work.num_heads) * kTileKeys;
            tiles_.find({blocks, work.first_head + step % work.num_heads, start, keys.start, keys.end - 1}, tile);
        };
        find(0, tiles[0]);
        tiles_.fetcher(tiles[0], 1).fetch();
        // Once for a tile, twice for a block of rows and for each row.
        int64_t parts = 1 + 2 * (RowBlocks(rows, Tiles::kMaxBlockRows).num_blocks + rows);
        int64_t span = task.span, border = span_end(task.start);
        for (int64_t step = 0; step < count; ++step) {
            Tile& tile = tiles[step % 2];
            Tile& next = tiles[(step + 1) % 2];
            find(step + 1 < count ? step + 1 : step, next);
            TileFetcher fetcher = tiles_.fetcher(next, parts);
            tiles_.prepare(tile, fetcher, space);
            int64_t head = step % work.num_heads;
            attend_tile(tile, space.at(head), rows, first, fetcher);
            int64_t end = tile.place.start + kTileKeys;
            if (end < border && end < task.end) continue;
            if (work.num_spans)
                write_part(space.at(head), rows, work, head, span);
            else
                fold(space.at(head), rows, space.at(head).sums, space.at(head).totals);
            clear_sums(space.at(head), rows);
            if (head == work.num_heads - 1) border = span_end(end), ++span;
        }
        if (work.num_spans) return;
        for (int64_t head = 0; head < work.num_heads; ++head)
            write_result(space.at(head), token, rows, work.first_head + head);
    }

    // Add the spans of a work that several tasks shared.
    void finish(Pool* pool, int thread, const Work& work) const {
        int64_t rows = count_rows(work), words = part_words(work) / work.num_heads;
        Workspace space(pool, thread, rows, 1, tiles_.sizes());
        for (int64_t head = 0; head < work.num_heads; ++head) {
            start_result(space, rows, work.first_head + head);
            for (int64_t span = 0; span < work.num_spans; ++span) {
                const float* part = work.parts + (span * work.num_heads + head) * words;
                fold(space, rows, part, reinterpret_cast<const RowTotal*>(part + rows * dim_padded_));
            }
            write_result(space, first_token(work), rows, work.first_head + head);
        }
    }

private:
    int64_t count_rows(const Work& work) const { return work.num_queries * group_size_; }
    int64_t first_token(const Work& work) const { return batch_.query_start_loc[work.request] + work.first_query; }
    int64_t first_position(const Work& work) const {
        return batch_.seq_lens[work.request] - batch_.query_start_loc[work.request + 1] + first_token(work);
    }

    void pack_queries(const Workspace& space, int64_t token, int64_t rows, int64_t kv_head) const {
        RowBlocks blocks(rows, Tiles::kMaxBlockRows);
        for (int64_t block = 0; block < blocks.num_blocks; ++block) {
            int64_t start = blocks.start(block);
            int size = blocks.size(block);
            for (int row = 0; row < size; ++row)
                tiles_.pack_query(query(token, start + row, kv_head), space, start, row, size);
        }
    }

    void start_result(const Workspace& space, int64_t rows, int64_t kv_head) const {
        std::memset(space.result, 0, rows * dim_padded_ * sizeof(float));
        for (int64_t row = 0; row < rows; ++row) {
            const float* sink = shape_.sinks ? shape_.sinks + kv_head * group_size_ + row % group_size_ : nullptr;
            space.result_totals[row] = sink ? RowTotal{*sink, 1.0f} : RowTotal{kNegativeInfinity, 0.0f};
        }
        clear_sums(space, rows);
    }

    void clear_sums(const Workspace& space, int64_t rows) const {
        std::memset(space.sums, 0, rows * dim_padded_ * sizeof(float));
        for (int64_t row = 0; row < rows; ++row) space.totals[row] = {kNegativeInfinity, 0.0f};
    }

    // Row r is query r / group_size, head r % group_size of the group.
    const T* query(int64_t token, int64_t row, int64_t kv_head) const {
        int64_t head = kv_head * group_size_ + row % group_size_;
        return q_ + (token + row / group_size_) * q_stride_ + head * shape_.head_dim;
    }

    void attend_tile(const Tile& tile, const Workspace& space, int64_t rows, int64_t first, TileFetcher& next) const {
        RowBlocks blocks(rows, Tiles::kMaxBlockRows);
        for (int64_t block = 0; block < blocks.num_blocks; ++block) {
            int64_t start = blocks.start(block);
            int size = blocks.size(block);
            tiles_.score(tile, space, start, size);
            next.fetch();
            for (int row = 0; row < size; ++row) {
                int64_t position = first + (start + row) / group_size_;
                softmax_tile(space, start + row, position, tile.place.start);
                next.fetch();
                tiles_.put_weights(space.scores + (start + row) * kTileKeys, space, start, row, size);
                next.fetch();
            }
            tiles_.accumulate_values(tile, space, start, size);
            next.fetch();
        }
    }

    // Turn one row's scores of a tile into weights, and rescale its sums if the maximum grew.
    void softmax_tile(const Workspace& space, int64_t row, int64_t position, int64_t tile_start) const {
        int64_t end = position + 1 - tile_start;
        int64_t begin = shape_.sliding_window ? end - shape_.sliding_window : 0;
        if (end > kTileKeys) end = kTileKeys;
        if (begin < 0) begin = 0;
        float* scores = space.scores + row * kTileKeys;
        if (begin >= end) {
            for (int key = 0; key < kTileKeys; key += kLanes) store(scores + key, zero());
            return;
        }
        Vec highest = splat(kNegativeInfinity);
        for (int key = 0; key < kTileKeys; key += kLanes) {
            Vec x = mul(load(scores + key), splat(shape_.scale));
            if (shape_.soft_cap > 0) x = mul(splat(shape_.soft_cap), tanh(mul(x, splat(1.0f / shape_.soft_cap))));
            x = keep_first(x, clamp_lanes(end - key), kNegativeInfinity);
            if (begin > key) x = drop_first(x, clamp_lanes(begin - key), kNegativeInfinity);
            store(scores + key, x);
            highest = max(x, highest);
        }
        RowTotal& total = space.totals[row];
        float before = total.maximum, found = max_of(highest);
        if (found > before) {
            float factor = exp_one(before - found);
            total = {found, total.total * factor};
            float* sums = space.sums + row * dim_padded_;
            for (int64_t dim = 0; dim < dim_padded_; dim += kLanes)
                store(sums + dim, mul(load(sums + dim), splat(factor)));
        }
        Vec exponentials = zero();
        for (int key = 0; key < kTileKeys; key += kLanes) {
            Vec weight = exp(sub(load(scores + key), splat(total.maximum)));
            store(scores + key, weight);
            exponentials = add(exponentials, weight);
        }
        total.total += sum(exponentials);
    }

    static int clamp_lanes(int64_t lanes) { return int(lanes < 0 ? 0 : lanes > kLanes ? kLanes : lanes); }

    // Add the sums of a span to the result.
    void fold(const Workspace& space, int64_t rows, const float* sums, const RowTotal* totals) const {
        for (int64_t row = 0; row < rows; ++row, sums += dim_padded_) {
            RowTotal span = totals[row], &total = space.result_totals[row];
            if (span.total == 0) continue;  // the row sees no key of it
            float maximum = span.maximum > total.maximum ? span.maximum : total.maximum;
            float old_factor = exp_one(total.maximum - maximum), factor = exp_one(span.maximum - maximum);
            total = {maximum, total.total * old_factor + span.total * factor};
            float* result = space.result + row * dim_padded_;
            for (int64_t dim = 0; dim < dim_padded_; dim += kLanes) {
                Vec added = mul(load(sums + dim), splat(factor));
                store(result + dim, fma(load(result + dim), splat(old_factor), added));
            }
        }
    }

    void write_part(const Workspace& space, int64_t rows, const Work& work, int64_t head, int64_t span) const {
        float* part = work.parts + (span * work.num_heads + head) * (part_words(work) / work.num_heads);
        std::memcpy(part, space.sums, rows * dim_padded_ * sizeof(float));
        std::memcpy(part + rows * dim_padded_, space.totals, rows * sizeof(RowTotal));
    }

    void write_result(const Workspace& space, int64_t token, int64_t rows, int64_t kv_head) const {
        for (int64_t row = 0; row < rows; ++row) {
            int64_t head = kv_head * group_size_ + row % group_size_;
            int64_t place = (token + row / group_size_) * shape_.num_heads + head;
            T* out = out_ + place * shape_.head_dim;
            RowTotal total = space.result_totals[row];
            const float* result = space.result + row * dim_padded_;
            Vec inverse = splat(1.0f / total.total);
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
    std::vector<Work> works;
    // With few requests the heads are what the threads share.
    bool is_wide = batch.num_requests >= 2 * pool_threads(pool);
    int64_t step = attention.queries_per_work(), num_heads = shape.num_kv_heads;
    for (int64_t request = 0; request < batch.num_requests; ++request) {
        int64_t query_len = batch.query_start_loc[request + 1] - batch.query_start_loc[request];
        for (int64_t first = 0; first < query_len; first += step) {
            int64_t length = query_len - first < step ? query_len - first : step;
            int64_t heads = attention.heads_per_work(length, is_wide);
            for (int64_t head = 0; head < num_heads; head += heads)
                works.push_back({int32_t(request), int32_t(first), int32_t(length), int32_t(head), int32_t(heads), 0, nullptr});
        }
    }
    // With few works, several tasks share the spans of each.
    int64_t num_works = works.empty() ? 1 : works.size();
    int64_t num_tasks = pool_threads(pool) == 1 ? 1 : ceil_div(kThreadTasks * pool_threads(pool), num_works);
    std::vector<Task> tasks;
    int64_t part_words = 0;
    for (int32_t index = 0; index < int32_t(works.size()); ++index) {
        Work& work = works[index];
        auto [start, end] = attention.find_keys(work);
        int64_t least = ceil_div(end - start, num_tasks);
        if (least < kMinTaskKeys) least = kMinTaskKeys;
        size_t first_task = tasks.size();
        int32_t span = 0, task_span = 0;
        for (int64_t border = span_end(start); start < end; border = span_end(border), ++span) {
            if (border < end && border - start < least) continue;
            tasks.push_back({index, task_span, start, border < end ? border : end});
            start = border, task_span = span + 1;
        }
        if (tasks.size() == first_task + 1) continue;
        work.num_spans = span;
        part_words += span * attention.part_words(work);
    }
    auto* parts = static_cast<float*>(pool_scratch(pool, 0, kPlanScratch, part_words * sizeof(float)));
    std::vector<const Work*> shared;
    for (Work& work : works) {
        if (!work.num_spans) continue;
        work.parts = parts, parts += work.num_spans * attention.part_words(work);
        shared.push_back(&work);
    }
    parallel(pool, tasks.size(), [&](int64_t task, int thread) {
        attention.run(pool, thread, works[tasks[task].work], tasks[task]);
    });
    parallel(pool, shared.size(), [&](int64_t index, int thread) { attention.finish(pool, thread, *shared[index]); });
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
