// Two loops over the pool: x A^T of all segments into scratch ("low"), then low B^T into y.

#include "lora.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "dispatch.h"

namespace troupe {

namespace {

constexpr int kRows = kLanes == 16 ? 4 : 2;  // rows that share what is read of A and B
constexpr int kRanks = 4;
constexpr int kVecs = kLoraPanelWidth / kLanes;
// Rows of a tile, and its ranks of A or panels of B.
constexpr int64_t kTileRows = 32, kTileRanks = 8, kTilePanels = 8;

struct Tile {
    int64_t segment, part, first_row, num_rows, first, end;  // ranks, or panels of the part
};

void add_tiles(std::vector<Tile>& tiles, int64_t segment, int64_t part, int64_t rows, int64_t size, int64_t step) {
    for (int64_t row = 0; row < rows; row += kTileRows)
        for (int64_t first = 0; first < size; first += step)
            tiles.push_back({segment, part, row, std::min(kTileRows, rows - row), first, std::min(first + step, size)});
}

// The dot products of some rows of x with some rows of A. Each has one accumulator, so its order of sums is fixed.
template <int Rows, int Ranks, class Weight, class X>
void multiply_low(const Weight* a, int64_t size, const X* const* x, const float* scales, float* low, int64_t stride) {
    Vec sums[Rows][Ranks];
    for (auto& line : sums)
        for (Vec& each : line) each = zero();
    auto step = [&](auto read, int64_t at) {
        Vec weights[Ranks];
        for (int rank = 0; rank < Ranks; ++rank) weights[rank] = read(a + rank * size + at);
        for (int row = 0; row < Rows; ++row) {
            Vec value = read(x[row] + at);
            for (int rank = 0; rank < Ranks; ++rank) sums[row][rank] = fma(value, weights[rank], sums[row][rank]);
        }
    };
    int64_t at = 0;
    for (; at + kLanes <= size; at += kLanes) step([](auto* p) { return load(p); }, at);
    if (at < size) step([&](auto* p) { return load_first(p, int(size - at)); }, at);
    for (int row = 0; row < Rows; ++row)
        for (int rank = 0; rank < Ranks; ++rank) low[row * stride + rank] = sum(sums[row][rank]) * scales[rank];
}

// Add low B^T of one panel to some rows of y.
template <int Rows, class Weight, class Y>
void add_panel(const LoraPart& part, int64_t panel, const float* low, int64_t stride, Y* const* y) {
    auto* b = static_cast<const Weight*>(part.b) + panel * part.rank * kLoraPanelWidth;
    Vec sums[Rows][kVecs];
    for (auto& line : sums)
        for (Vec& each : line) each = zero();
    for (int64_t rank = 0; rank < part.rank; ++rank, b += kLoraPanelWidth) {
        Vec weights[kVecs];
        for (int at = 0; at < kVecs; ++at) weights[at] = load(b + at * kLanes);
        for (int row = 0; row < Rows; ++row) {
            Vec value = splat(low[row * stride + rank]);
            for (int at = 0; at < kVecs; ++at) sums[row][at] = fma(value, weights[at], sums[row][at]);
        }
    }
    for (int at = 0; at < kVecs; ++at) {
        int64_t output = panel * kLoraPanelWidth + at * kLanes;
        if (output >= part.width) return;
        int lanes = int(std::min<int64_t>(kLanes, part.width - output));
        for (int row = 0; row < Rows; ++row) {
            Y* target = y[row] + part.start + output;
            Vec value = add(lanes == kLanes ? load(target) : load_first(target, lanes), sums[row][at]);
            if (part.factor) value = mul(value, load_first(part.factor + output, lanes));
            if (part.offset) value = add(value, load_first(part.offset + output, lanes));
            lanes == kLanes ? store(target, value) : store_first(target, value, lanes);
        }
    }
}

// Call `body(integral constant rows, first row)` for blocks of at most kRows rows.
template <class Body>
void for_row_blocks(int64_t num_rows, const Body& body) {
    for (int64_t row = 0; row < num_rows; row += kRows)
        with_rows<kRows>(int(std::min<int64_t>(kRows, num_rows - row)), [&](auto count) { body(count, row); });
}

template <class Weight, class X>
void run_low(const Lora& lora, const Tile& tile, const int64_t* rows, const X* x, float* low) {
    auto* a = static_cast<const Weight*>(lora.a);
    int64_t size = lora.in_features;
    for_row_blocks(tile.num_rows, [&](auto count, int64_t row) {
        constexpr int kCount = decltype(count)::value;
        const X* inputs[kCount];
        for (int i = 0; i < kCount; ++i) inputs[i] = x + rows[row + i] * size;
        float* out = low + row * lora.num_ranks;
        int64_t rank = tile.first;
        for (; rank + kRanks <= tile.end; rank += kRanks)
            multiply_low<kCount, kRanks>(a + rank * size, size, inputs, lora.scales + rank, out + rank, lora.num_ranks);
        for (; rank < tile.end; ++rank)
            multiply_low<kCount, 1>(a + rank * size, size, inputs, lora.scales + rank, out + rank, lora.num_ranks);
    });
}

template <class Weight, class Y>
void run_panels(const Lora& lora, const Tile& tile, const int64_t* rows, Y* y, const float* low) {
    const LoraPart& part = lora.parts[tile.part];
    for_row_blocks(tile.num_rows, [&](auto count, int64_t row) {
        constexpr int kCount = decltype(count)::value;
        Y* outputs[kCount];
        for (int i = 0; i < kCount; ++i) outputs[i] = y + rows[row + i] * lora.out_features;
        const float* ranks = low + row * lora.num_ranks + part.first_rank;
        for (int64_t panel = tile.first; panel < tile.end; ++panel)
            add_panel<kCount, Weight>(part, panel, ranks, lora.num_ranks, outputs);
    });
}

template <class Body>
void with_dtypes(int32_t weights, int32_t values, const Body& body) {
    if (weights == kBFloat16)
        values == kBFloat16 ? body(bf16(), bf16()) : body(bf16(), float());
    else
        values == kBFloat16 ? body(float(), bf16()) : body(float(), float());
}

}  // namespace

void run_lora(
    Pool* pool, const int64_t* rows, const LoraSegment* segments, int64_t num_segments, const void* x, int32_t x_dtype,
    void* y, int32_t y_dtype) {
    std::vector<Tile> low_tiles, tiles;
    std::vector<int64_t> starts(num_segments);  // of each segment's numbers in `low`
    int64_t total = 0;
    for (int64_t index = 0; index < num_segments; ++index) {
        const Lora& lora = *segments[index].lora;
        int64_t count = segments[index].count;
        starts[index] = total;
        total += count * lora.num_ranks;
        add_tiles(low_tiles, index, 0, count, lora.num_ranks, kTileRanks);
        for (int64_t part = 0; part < lora.num_parts; ++part) {
            int64_t panels = (lora.parts[part].width + kLoraPanelWidth - 1) / kLoraPanelWidth;
            add_tiles(tiles, index, part, count, panels, kTilePanels);
        }
    }
    auto* low = static_cast<float*>(pool_scratch(pool, 0, kInputScratch, total * sizeof(float)));
    auto run = [&](const std::vector<Tile>& list, int32_t dtype, const auto& body) {
        parallel(pool, int64_t(list.size()), [&](int64_t index, int) {
            const Tile& tile = list[index];
            const LoraSegment& segment = segments[tile.segment];
            const Lora& lora = *segment.lora;
            const int64_t* places = rows + segment.first + tile.first_row;
            float* part = low + starts[tile.segment] + tile.first_row * lora.num_ranks;
            with_dtypes(lora.dtype, dtype, [&](auto weight, auto value) { body(weight, value, lora, tile, places, part); });
        });
    };
    run(low_tiles, x_dtype, [&](auto weight, auto value, auto& lora, auto& tile, auto* places, float* part) {
        run_low<decltype(weight)>(lora, tile, places, static_cast<const decltype(value)*>(x), part);
    });
    run(tiles, y_dtype, [&](auto weight, auto value, auto& lora, auto& tile, auto* places, float* part) {
        run_panels<decltype(weight)>(lora, tile, places, static_cast<decltype(value)*>(y), part);
    });
}

}  // namespace troupe
