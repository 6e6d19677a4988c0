#include "panels.h"

#include "lines.h"

namespace troupe {

template <class Arithmetic>
void multiply_tile(const TileProduct& tile, int rows, int panels) {
    Lines lines{{}, 1, tile.num_groups, kPanelBytes, kLanes, tile.ahead};
    for (int v = 0; v < panels * kPanelVecs; ++v)
        lines.at[0][v] = tile.w + v / kPanelVecs * tile.panel_stride + v % kPanelVecs * kLanes * 4;
    auto* multiply = panels == kMaxPanels ? multiply_lines<Arithmetic, kMaxPanels * kPanelVecs> : multiply_lines<Arithmetic, kPanelVecs>;
    multiply(rows, tile.x, lines, tile.c, tile.c_stride, false);
}

template void multiply_tile<Float32>(const TileProduct&, int, int);
template void multiply_tile<Float32Half>(const TileProduct&, int, int);
template void multiply_tile<BFloat16>(const TileProduct&, int, int);

}  // namespace troupe
