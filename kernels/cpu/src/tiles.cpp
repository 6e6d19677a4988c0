// Products on the tile registers of AMX, which hold 16 rows of 64 bytes.
//
// A panel holds two tiles of weights side by side as it is: a row of them is one group of 16 outputs. Up to 32 rows of
// activations are two tiles more, and their four products stay in registers over all inputs.

#include "panels.h"

#ifdef TROUPE_TILES

// Macros, since GCC's take the number of a tile as a piece of text.
#ifdef TROUPE_TILE_TWIN
#include "tile_twin.h"
#else
#include <sys/syscall.h>
#include <unistd.h>
#define TILE_CONFIGURE(source) _tile_loadconfig(source)
#define TILE_RELEASE() _tile_release()
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, source, stride) _tile_loadd(tile, source, stride)
#define TILE_STORE(tile, target, stride) _tile_stored(tile, target, stride)
#define TILE_DOT_BF16(c, a, b) _tile_dpbf16ps(c, a, b)
#endif

namespace troupe {

namespace {

// The operand of LDTILECFG: all eight tiles are full.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileConfig kConfig;
static_assert(sizeof(TileConfig) == 64);

// The last groups of a panel and zeros, so that no tile reads beyond the panel.
const uint8_t* fill_up(const uint8_t* weights, int64_t num_groups, uint8_t* tiles) {
    std::memcpy(tiles, weights, num_groups * kPanelBytes);
    std::memset(tiles + num_groups * kPanelBytes, 0, (kTileWords - num_groups) * kPanelBytes);
    // GCC does not know that a tile is loaded from memory.
    asm volatile("" : : "r"(tiles) : "memory");
    return tiles;
}

// One panel. What is loaded past the last row leads to sums that nobody reads.
void multiply_panel(const TileProduct& tile, int rows) {
    constexpr int64_t x_stride = kTileWords * 4;
    int64_t c_stride = tile.c_stride * 4;
    bool has_second = rows > kTileRows;
    alignas(64) uint8_t last[kTileWords * kPanelBytes];
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    Fetcher fetcher(tile.ahead, (tile.num_groups + kTileWords - 1) / kTileWords);
    for (int64_t group = 0; group < tile.num_groups; group += kTileWords) {
        const uint8_t* weights = tile.w + group * kPanelBytes;
        if (tile.num_groups - group < kTileWords) weights = fill_up(weights, tile.num_groups - group, last);
        fetcher.fetch();
        TILE_LOAD(6, weights, kPanelBytes);
        TILE_LOAD(7, weights + kPanelBytes / 2, kPanelBytes);
        TILE_LOAD(4, tile.x + group * rows, x_stride);
        TILE_DOT_BF16(0, 4, 6);
        TILE_DOT_BF16(1, 4, 7);
        if (has_second) {
            TILE_LOAD(5, tile.x + group * rows + kTileRows * kTileWords, x_stride);
            TILE_DOT_BF16(2, 5, 6);
            TILE_DOT_BF16(3, 5, 7);
        }
    }
    TILE_STORE(0, tile.c, c_stride);
    TILE_STORE(1, tile.c + kPanelWidth / 2, c_stride);
    if (has_second) {
        float* second = tile.c + kTileRows * tile.c_stride;
        TILE_STORE(2, second, c_stride);
        TILE_STORE(3, second + kPanelWidth / 2, c_stride);
    }
}

bool request_tiles() {
#ifdef TROUPE_TILE_TWIN
    return true;
#else
    // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): Linux gives the permission to the process, once.
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#endif
}

}  // namespace

bool has_tiles() {
    static const bool is_granted = request_tiles();
    return is_granted;
}

// Configured anew each time: another library may use the tiles of the same thread.
template <>
void multiply_tile<Tiled<BFloat16>>(const TileProduct& product, int rows, int panels) {
    TileProduct tile = product;
    tile.ahead.bytes /= panels;
    TILE_CONFIGURE(&kConfig);
    for (int panel = 0; panel < panels; ++panel) {
        multiply_panel(tile, rows);
        tile.w += tile.panel_stride;
        tile.c += kPanelWidth;
        tile.ahead.at += tile.ahead.bytes;
    }
    TILE_RELEASE();
}

}  // namespace troupe

#endif
