#include "linear.h"

#include "grouped.h"
#include "products.h"

namespace troupe {

namespace {

// The rows of a product, packed in blocks of words, and the scale of each row for Int8.
struct PackedRows {
    uint32_t* words;
    float* scales;
    int64_t words_per_row;
};

template <class Arithmetic, class From>
PackedRows pack_rows(Pool* pool, const From* x, int64_t rows, int64_t in_features) {
    int64_t width = words_per_row<Arithmetic>(in_features);
    size_t bytes = ((size_t(rows) * width + kSpareWords<Arithmetic>) * 4 + 63) / 64 * 64;
    auto* memory = static_cast<uint8_t*>(pool_scratch(pool, 0, kInputScratch, bytes + rows * 4));
    PackedRows packed{reinterpret_cast<uint32_t*>(memory), reinterpret_cast<float*>(memory + bytes), width};
    RowBlocks blocks(rows, kBlockRows<Arithmetic>);
    parallel_ranges(pool, blocks.num_blocks, kBlockRows<Arithmetic> * in_features, [&](int64_t first, int64_t end, int thread) {
        auto* line = static_cast<uint32_t*>(pool_scratch(pool, thread, kTileScratch, width * 4));
        for (int64_t block = first; block < end; ++block) {
            int64_t start = blocks.start(block);
            auto row = [&](int i) { return x + (start + i) * in_features; };
            uint32_t* words = packed.words + start * width;
            pack_block<Arithmetic>(row, blocks.size(block), in_features, line, words, packed.scales + start);
        }
    });
    return packed;
}

// Tiles are pairs of panels, and single ones at the end, so that the threads finish together.
struct PanelTiles {
    int64_t num_pairs, num_singles;
    PanelTiles(int64_t num_panels, int num_threads) {
        int64_t wished = num_threads > 1 ? 2 * num_threads : num_panels % 2;
        num_singles = kMaxPanels == 1 || wished > num_panels ? num_panels : wished;
        num_singles += (num_panels - num_singles) % 2;
        num_pairs = (num_panels - num_singles) / 2;
    }
    int64_t count() const { return num_pairs + num_singles; }
};

template <class Arithmetic, class To>
void run_panels(Pool* pool, const Linear& linear, const PackedRows& packed, To* y, int64_t rows) {
    RowBlocks blocks(rows, kBlockRows<Arithmetic>);
    PanelTiles tiles(ceil_div(linear.out_features, kPanelWidth), pool_threads(pool));
    Epilogue epilogue{linear, linear.kind == kWeightInt8};
    int64_t num_groups = ceil_div(linear.in_features, Arithmetic::kGroup);
    int64_t panel_stride = num_groups * kPanelBytes;
    parallel(pool, tiles.count(), [&](int64_t tile, int) {
        alignas(64) float sums[kBlockRows<Arithmetic> * kMaxPanels * kPanelWidth];
        int panels = tile < tiles.num_pairs ? 2 : 1;
        int64_t panel = panels == 2 ? 2 * tile : tiles.num_pairs + tile;
        int64_t width = panels * kPanelWidth;
        const uint8_t* weights = linear.panels + panel * panel_stride;
        for (int64_t block = 0; block < blocks.num_blocks; ++block) {
            int64_t row = blocks.start(block);
            int size = blocks.size(block);
            const uint32_t* x = packed.words + row * packed.words_per_row;
            multiply_tile<Arithmetic>({x, weights, panel_stride, num_groups, sums, width, false}, size, panels);
            To* target = y + row * linear.out_features;
            write_tile(epilogue, sums, packed.scales + row, target, size, panel * kPanelWidth, width);
        }
    });
}

}  // namespace

void run_linear(Pool* pool, const Linear& linear, const void* x, int32_t x_dtype, void* y, int32_t y_dtype, int64_t rows) {
    if (rows == 0) return;
    if (is_grouped(linear.kind)) return run_grouped(pool, linear, x, x_dtype, y, y_dtype, rows);
    with_product(linear.kind, rows, [&](auto arithmetic) {
        using Arithmetic = decltype(arithmetic);
        PackedRows packed = x_dtype == kBFloat16
            ? pack_rows<Arithmetic>(pool, static_cast<const bf16*>(x), rows, linear.in_features)
            : pack_rows<Arithmetic>(pool, static_cast<const float*>(x), rows, linear.in_features);
        if (y_dtype == kBFloat16)
            run_panels<Arithmetic>(pool, linear, packed, static_cast<bf16*>(y), rows);
        else
            run_panels<Arithmetic>(pool, linear, packed, static_cast<float*>(y), rows);
    });
}

}  // namespace troupe
