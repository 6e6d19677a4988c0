// Pairs of (token, expert) are sorted by expert. Each expert's matrices are read once for all of its rows, panel by
// panel; the values between the two products stay in scratch memory.

#include "experts.h"

#include "products.h"

namespace troupe {

namespace {

// Bounds the scratch memory. More tokens read the matrices again, which costs little beside their products.
constexpr int64_t kMaxTokens = 512;

// A few rows of one expert, at most kBlockRows.
struct Block {
    int64_t start;  // in sorted order
    int32_t size;
};

struct Segment {
    int64_t expert, first_block, num_blocks;
};

// The pairs (token, slot) of a step, sorted by expert; pair = token * top_k + slot.
struct Grouping {
    int64_t num_pairs, num_segments = 0, num_blocks = 0;
    int64_t* pairs;   // [num_pairs], by place in sorted order
    int64_t* places;  // [num_pairs], the inverse
    Segment* segments;
    Block* blocks;

    Grouping(Pool* pool, const int64_t* ids, int64_t count, int64_t num_experts, int block_rows) : num_pairs(count) {
        int64_t most_segments = count < num_experts ? count : num_experts;
        size_t bytes = (2 * count + num_experts + 1) * 8 + most_segments * sizeof(Segment) + count * sizeof(Block);
        pairs = static_cast<int64_t*>(pool_scratch(pool, 0, kPlanScratch, bytes));
        places = pairs + count;
        int64_t* ends = places + count;
        segments = reinterpret_cast<Segment*>(ends + num_experts + 1);
        blocks = reinterpret_cast<Block*>(segments + most_segments);
        std::memset(ends, 0, (num_experts + 1) * 8);
        for (int64_t pair = 0; pair < count; ++pair) ++ends[ids[pair] + 1];
        for (int64_t expert = 0; expert < num_experts; ++expert) {
            int64_t size = ends[expert + 1];
            if (size > 0) add_segment(expert, ends[expert], RowBlocks(size, block_rows));
            ends[expert + 1] += ends[expert];
        }
        for (int64_t pair = 0; pair < count; ++pair) {
            int64_t place = ends[ids[pair]]++;
            pairs[place] = pair;
            places[pair] = place;
        }
    }

private:
    void add_segment(int64_t expert, int64_t start, const RowBlocks& rows) {
        segments[num_segments++] = {expert, num_blocks, rows.num_blocks};
        for (int64_t block = 0; block < rows.num_blocks; ++block)
            blocks[num_blocks++] = {start + rows.start(block), rows.size(block)};
    }
};

// Pack rows in sorted order for a product with `linear`, or another matrix of its kind and shape. `row(place)` points to
// the numbers of a row.
template <class Arithmetic, class Row>
PackedRows pack_sorted(Pool* pool, const Grouping& grouping, const Linear& linear, const Row& row) {
    Operands<Arithmetic> operands(linear);
    auto packed = PackedRows::allocate(pool, operands, grouping.num_pairs);
    int64_t work = kBlockRows<Arithmetic> * linear.in_features;
    parallel_ranges(pool, grouping.num_blocks, work, [&](int64_t first, int64_t end, int thread) {
        auto* line = static_cast<uint32_t*>(pool_scratch(pool, thread, kTileScratch, operands.row_words * 4));
        for (int64_t index = first; index < end; ++index) {
            Block block = grouping.blocks[index];
            auto source = [&](int i) { return row(block.start + i); };
            pack_block(operands, linear, source, block.start, block.size, line, packed);
        }
    });
    return packed;
}

Vec activate(Vec gate, Vec up, const Experts& experts) {
    if (experts.limit > 0) {
        // The second operand stays where it is NaN.
        Vec limit = splat(experts.limit), floor = splat(-experts.limit);
        gate = min(limit, gate);
        up = add(max(floor, min(limit, up)), splat(1.0f));
    }
    Vec exponential = exp(sub(zero(), mul(splat(experts.alpha), gate)));
    return mul(div(gate, add(splat(1.0f), exponential)), up);
}

// inner = activation(x gate^T, x up^T): a panel of gate and the same one of up are multiplied together.
template <class Arithmetic, class T>
void run_gate_up(Pool* pool, const Experts& experts, const Grouping& grouping, const PackedRows& x, T* inner) {
    int64_t size = experts.gate->out_features, num_panels = ceil_div(size, kPanelWidth);
    Operands<Arithmetic> operands(*experts.gate);
    parallel(pool, grouping.num_segments * num_panels, [&](int64_t tile, int) {
        constexpr int64_t width = 2 * kPanelWidth;
        alignas(64) float sums[kBlockRows<Arithmetic> * width];
        Segment segment = grouping.segments[tile / num_panels];
        int64_t panel = tile % num_panels;
        const Linear &gate = experts.gate[segment.expert], &up = experts.up[segment.expert];
        const uint8_t* gate_panel = gate.panels + panel * operands.panel_bytes;
        const uint8_t* up_panel = up.panels + panel * operands.panel_bytes;
        auto multiply = [&](int64_t index, Block block, const uint8_t* weights, int panels, float* target) {
            Ahead next = share_next(weights, operands.panel_bytes, index, segment.num_blocks);
            multiply_block(operands, gate, x, block.start, block.size, weights, up_panel - gate_panel, panels, target, width, next);
        };
        for (int64_t index = 0; index < segment.num_blocks; ++index) {
            Block block = grouping.blocks[segment.first_block + index];
            multiply(index, block, gate_panel, kPanels<Arithmetic>, sums);
            if (kPanels<Arithmetic> == 1) multiply(index, block, up_panel, 1, sums + kPanelWidth);
            for (int row = 0; row < block.size; ++row) {
                for (int64_t at = 0; at < kPanelWidth && panel * kPanelWidth + at < size; at += kLanes) {
                    int64_t output = panel * kPanelWidth + at;
                    int lanes = int(size - output < kLanes ? size - output : kLanes);
                    const float* source = sums + row * width + at;
                    Vec left = finish_sums(gate, source, output, lanes);
                    Vec right = finish_sums(up, source + kPanelWidth, output, lanes);
                    store_first(inner + (block.start + row) * size + output, activate(left, right, experts), lanes);
                }
            }
        }
    });
}

template <class Arithmetic>
void run_down(Pool* pool, const Experts& experts, const Grouping& grouping, const PackedRows& inner, float* results) {
    constexpr int most_panels = kPanels<Arithmetic>;
    int64_t size = experts.down->out_features, num_panels = ceil_div(size, kPanelWidth);
    Operands<Arithmetic> operands(*experts.down);
    int64_t num_tiles = ceil_div(num_panels, most_panels);
    parallel(pool, grouping.num_segments * num_tiles, [&](int64_t tile, int) {
        alignas(64) float sums[kBlockRows<Arithmetic> * most_panels * kPanelWidth];
        Segment segment = grouping.segments[tile / num_tiles];
        int64_t panel = tile % num_tiles * most_panels;
        int panels = num_panels - panel < most_panels ? 1 : most_panels;
        const Linear& down = experts.down[segment.expert];
        const uint8_t* weights = down.panels + panel * operands.panel_bytes;
        int64_t width = panels * kPanelWidth;
        for (int64_t index = 0; index < segment.num_blocks; ++index) {
            Block block = grouping.blocks[segment.first_block + index];
            Ahead next = share_next(weights, panels * operands.panel_bytes, index, segment.num_blocks);
            multiply_block(operands, down, inner, block.start, block.size, weights, operands.panel_bytes, panels, sums, width, next);
            write_tile(down, sums, results + block.start * size, block.size, panel * kPanelWidth, width);
        }
    });
}

// out = sum of each token's results times their weights, in the order of its slots.
template <class T>
void combine(
    Pool* pool, const Grouping& grouping, const float* results, const float* weights, int64_t tokens, int64_t top_k,
    int64_t size, T* out) {
    parallel_ranges(pool, tokens, top_k * size, [&](int64_t first, int64_t end, int) {
        for (int64_t token = first; token < end; ++token) {
            for (int64_t i = 0; i < size; i += kLanes) {
                int lanes = int(size - i < kLanes ? size - i : kLanes);
                Vec total = zero();
                for (int64_t pair = token * top_k; pair < (token + 1) * top_k; ++pair)
                    total = fma(splat(weights[pair]), load_first(results + grouping.places[pair] * size + i, lanes), total);
                store_first(out + token * size + i, total, lanes);
            }
        }
    });
}

template <class T, class Out>
void run_chunk(
    Pool* pool, const Experts& experts, const T* x, const int64_t* ids, const float* weights, int64_t tokens,
    int64_t top_k, Out* out) {
    int block_rows = 0;
    with_product(experts.gate->kind, [&](auto arithmetic) { block_rows = kBlockRows<decltype(arithmetic)>; });
    Grouping grouping(pool, ids, tokens * top_k, experts.num_experts, block_rows);
    int64_t hidden = experts.gate->in_features, inner_size = experts.gate->out_features;
    size_t inner_bytes = (grouping.num_pairs * inner_size * sizeof(T) + 63) / 64 * 64;
    size_t result_bytes = grouping.num_pairs * hidden * sizeof(float);
    auto* memory = static_cast<uint8_t*>(pool_scratch(pool, 0, kStepScratch, inner_bytes + result_bytes));
    T* inner = reinterpret_cast<T*>(memory);
    auto* results = reinterpret_cast<float*>(memory + inner_bytes);
    with_product(experts.gate->kind, [&](auto arithmetic) {
        using Arithmetic = decltype(arithmetic);
        auto row = [&](int64_t place) { return x + grouping.pairs[place] / top_k * hidden; };
        run_gate_up<Arithmetic>(pool, experts, grouping, pack_sorted<Arithmetic>(pool, grouping, *experts.gate, row), inner);
    });
    with_product(experts.down->kind, [&](auto arithmetic) {
        using Arithmetic = decltype(arithmetic);
        auto row = [&](int64_t place) { return inner + place * inner_size; };
        run_down<Arithmetic>(pool, experts, grouping, pack_sorted<Arithmetic>(pool, grouping, *experts.down, row), results);
    });
    combine(pool, grouping, results, weights, tokens, top_k, hidden, out);
}

}  // namespace

void run_experts(
    Pool* pool, const Experts& experts, const void* x, int32_t dtype, const int64_t* ids, const float* weights,
    int64_t tokens, int64_t top_k, void* out, int32_t out_dtype) {
    int64_t hidden = experts.gate->in_features;
    for (int64_t first = 0; first < tokens; first += kMaxTokens) {
        int64_t count = tokens - first < kMaxTokens ? tokens - first : kMaxTokens;
        const int64_t* chunk_ids = ids + first * top_k;
        const float* chunk_weights = weights + first * top_k;
        auto run = [&](auto* source, auto* target) {
            int64_t offset = first * hidden;
            run_chunk(pool, experts, source + offset, chunk_ids, chunk_weights, count, top_k, target + offset);
        };
        if (dtype == kFloat32)
            run(static_cast<const float*>(x), static_cast<float*>(out));
        else if (out_dtype == kFloat32)
            run(static_cast<const bf16*>(x), static_cast<float*>(out));
        else
            run(static_cast<const bf16*>(x), static_cast<bf16*>(out));
    }
}

}  // namespace troupe
