#include "linear.h"

#include "products.h"

namespace troupe {

namespace {

template <class Arithmetic, class From>
PackedRows pack_rows(Pool* pool, const Linear& linear, const From* x, int64_t rows) {
    Operands<Arithmetic> operands(linear);
    auto packed = PackedRows::allocate(pool, operands, rows);
    RowBlocks blocks(rows, kBlockRows<Arithmetic>);
    int64_t work = kBlockRows<Arithmetic> * linear.in_features;
    parallel_ranges(pool, blocks.num_blocks, work, [&](int64_t first, int64_t end, int thread) {
        auto* line = static_cast<uint32_t*>(pool_scratch(pool, thread, kTileScratch, operands.row_words * 4));
        for (int64_t block = first; block < end; ++block) {
            int64_t start = blocks.start(block);
            auto row = [&](int i) { return x + (start + i) * linear.in_features; };
            pack_block(operands, linear, row, start, blocks.size(block), line, packed);
        }
    });
    return packed;
}

// Tiles are pairs of panels, and single ones at the end, so that the threads finish together.
struct PanelTiles {
    int64_t num_pairs, num_singles;
    PanelTiles(int64_t num_panels, int most_panels, int num_threads) {
        int64_t wished = num_threads > 1 ? 2 * num_threads : num_panels % 2;
        num_singles = most_panels == 1 || wished > num_panels ? num_panels : wished;
        num_singles += (num_panels - num_singles) % 2;
        num_pairs = (num_panels - num_singles) / 2;
    }
    int64_t count() const { return num_pairs + num_singles; }
};

// Every pair of panels reads all rows. Beside a matrix that stays in the cache, so do the rows of one turn.
constexpr int64_t kCachedMatrixBytes = 4 << 20, kCachedRowBytes = 1 << 19, kRowMultiple = 96;

template <class Arithmetic>
int64_t count_rows_at_once(const Operands<Arithmetic>& operands, const Linear& linear, int64_t rows) {
    if (ceil_div(linear.out_features, kPanelWidth) * operands.panel_bytes > kCachedMatrixBytes) return rows;
    int64_t fitting = kCachedRowBytes / (operands.row_words * 4) / kRowMultiple;
    return (fitting > 1 ? fitting : 1) * kRowMultiple;
}

int64_t size_of(int32_t dtype) { return dtype == kBFloat16 ? 2 : 4; }

template <class Arithmetic, class To>
void run_panels(Pool* pool, const Linear& linear, const PackedRows& packed, To* y, int64_t rows) {
    Operands<Arithmetic> operands(linear);
    RowBlocks blocks(rows, kBlockRows<Arithmetic>);
    PanelTiles tiles(ceil_div(linear.out_features, kPanelWidth), kPanels<Arithmetic>, pool_threads(pool));
    parallel(pool, tiles.count(), [&](int64_t tile, int thread) {
        alignas(64) float sums[kBlockRows<Arithmetic> * kPanels<Arithmetic> * kPanelWidth];
        int panels = tile < tiles.num_pairs ? 2 : 1;
        int64_t panel = panels == 2 ? 2 * tile : tiles.num_pairs + tile;
        int64_t width = panels * kPanelWidth;
        const uint8_t *stored = linear.panels + panel * operands.panel_bytes, *weights = stored;
        if constexpr (std::is_same_v<Arithmetic, SpreadCodes>) {
            Groups groups(linear);
            void* spread = pool_scratch(pool, thread, kTileScratch, groups.count * groups.spread_bytes);
            spread_panel(linear, stored, static_cast<uint8_t*>(spread));
            weights = static_cast<const uint8_t*>(spread);
        }
        for (int64_t block = 0; block < blocks.num_blocks; ++block) {
            int64_t row = blocks.start(block);
            int size = blocks.size(block);
            Ahead next = share_next(stored, panels * operands.panel_bytes, block, blocks.num_blocks);
            multiply_block(operands, linear, packed, row, size, weights, operands.panel_bytes, panels, sums, width, next);
            write_tile(linear, sums, y + row * linear.out_features, size, panel * kPanelWidth, width);
        }
    });
}

}  // namespace

void run_linear(Pool* pool, const Linear& linear, const void* x, int32_t x_dtype, void* y, int32_t y_dtype, int64_t rows) {
    if (rows == 0) return;
    auto run = [&](auto arithmetic) {
        using Arithmetic = decltype(arithmetic);
        int64_t step = count_rows_at_once(Operands<Arithmetic>(linear), linear, rows);
        int64_t x_bytes = linear.in_features * size_of(x_dtype), y_bytes = linear.out_features * size_of(y_dtype);
        for (int64_t start = 0; start < rows; start += step) {
            int64_t size = rows - start < step ? rows - start : step;
            auto* from = static_cast<const uint8_t*>(x) + start * x_bytes;
            auto* to = static_cast<uint8_t*>(y) + start * y_bytes;
            PackedRows packed = x_dtype == kBFloat16 ? pack_rows<Arithmetic>(pool, linear, reinterpret_cast<const bf16*>(from), size)
                                                     : pack_rows<Arithmetic>(pool, linear, reinterpret_cast<const float*>(from), size);
            if (y_dtype == kBFloat16)
                run_panels<Arithmetic>(pool, linear, packed, reinterpret_cast<bf16*>(to), size);
            else
                run_panels<Arithmetic>(pool, linear, packed, reinterpret_cast<float*>(to), size);
        }
    };
    if (is_grouped(linear.kind) && is_spread(linear.kind, rows))
        run(SpreadCodes());
    else
        with_product(linear.kind, run);
}

}  // namespace troupe
