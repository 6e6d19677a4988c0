// A few threads that share one caller's loops.
//
// A loop is cut into small tiles; caller and workers each take a run of neighbouring tiles, one by one, and then those
// left in the runs of others. The caller waits only for tiles that somebody has taken, never for a thread: a worker
// whose core was given to a neighbour takes no tiles and holds nobody up. Idle workers watch for some microseconds, then sleep on a futex.
//
// Who computes a tile does not change what is computed, so results do not depend on the number of threads.

#pragma once

#include <cstddef>
#include <cstdint>

namespace troupe {

using TileFunction = void (*)(void* context, int64_t tile, int thread);

class Pool;

Pool* make_pool(int num_threads);
void free_pool(Pool* pool);
int pool_threads(const Pool* pool);

// Call `function(context, tile, thread)` for each tile in [0, num_tiles), in any order, on any thread; the caller
// is thread 0. The caller holds the pool's lock.
void pool_run(Pool* pool, int64_t num_tiles, TileFunction function, void* context);

// Memory of one thread, 64-byte aligned, with its old contents lost: valid until the same slot is asked for again.
enum ScratchSlot { kStepScratch, kPlanScratch, kInputScratch, kTileScratch, kNumScratchSlots };
void* pool_scratch(Pool* pool, int thread, ScratchSlot slot, size_t bytes);

// One caller at a time: held by every exported function while it computes.
class PoolLock {
public:
    explicit PoolLock(Pool* pool);
    ~PoolLock();
    PoolLock(const PoolLock&) = delete;

private:
    Pool* pool_;
};

// `body(tile, thread)` for each tile; a single tile runs where it is.
template <class Body>
void parallel(Pool* pool, int64_t num_tiles, const Body& body) {
    auto call = [](void* context, int64_t tile, int thread) { (*static_cast<const Body*>(context))(tile, thread); };
    pool_run(pool, num_tiles, call, const_cast<void*>(static_cast<const void*>(&body)));
}

// `body(first, end, thread)` over [0, num_items) in pieces of about `work_per_piece`; small work stays on the caller.
template <class Body>
void parallel_ranges(Pool* pool, int64_t num_items, int64_t work_per_item, const Body& body) {
    constexpr int64_t work_per_piece = 16384;
    int64_t step = work_per_piece / (work_per_item > 0 ? work_per_item : 1);
    if (step < 1) step = 1;
    int64_t num_tiles = (num_items + step - 1) / step;
    parallel(pool, num_tiles, [&](int64_t tile, int thread) {
        int64_t first = tile * step;
        int64_t end = first + step < num_items ? first + step : num_items;
        body(first, end, thread);
    });
}

}  // namespace troupe
