// The C interface that `kernels.cpu.library` loads. Pointers are to contiguous memory that the caller keeps alive.

#include <utility>

#include "attention.h"
#include "blocks.h"
#include "elementwise.h"
#include "experts.h"
#include "grouped.h"
#include "linear.h"
#include "lora.h"
#include "panels.h"
#include "pool.h"
#include "sampling.h"
#include "states.h"

using namespace troupe;

#define EXPORT extern "C" __attribute__((visibility("default")))

// The instruction set of the products, an index into `_ISA_NAMES` of `kernels.cpu.library`.
// Called when the library is loaded: the permission for AMX is there before the first thread.
EXPORT int troupe_isa() {
#ifdef TROUPE_TILES
    if (has_tiles()) return 3;
#endif
#if defined(__aarch64__) && defined(TROUPE_BF16)
    return 5;
#elif defined(__aarch64__)
    return 4;
#elif defined(TROUPE_AVX512) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
    return 2;
#elif defined(TROUPE_AVX512)
    return 1;
#else
    return 0;
#endif
}

EXPORT Pool* troupe_make_pool(int num_threads) { return make_pool(num_threads); }
EXPORT void troupe_free_pool(Pool* pool) { free_pool(pool); }

EXPORT int64_t troupe_packed_bytes(int32_t kind, int64_t out_features, int64_t in_features) {
    return packed_bytes(kind, out_features, in_features);
}

EXPORT void troupe_pack_weight(
    Pool* pool, int32_t kind, const void* weight, int32_t dtype, int64_t out_features, int64_t in_features,
    uint8_t* panels) {
    PoolLock lock(pool);
    pack_weight(pool, kind, weight, dtype, out_features, in_features, panels);
}

EXPORT int64_t troupe_grouped_bytes(const Linear* linear) { return grouped_bytes(*linear); }

EXPORT void troupe_pack_grouped(
    Pool* pool, const Linear* linear, const int8_t* codes, const float* scales, const float* minimums, uint8_t* panels) {
    PoolLock lock(pool);
    pack_grouped(pool, *linear, codes, scales, minimums, panels);
}

EXPORT int troupe_split_blocks(
    Pool* pool, int32_t type, const uint8_t* blocks, int64_t count, int8_t* codes, float* scales, float* minimums) {
    PoolLock lock(pool);
    return split_blocks(pool, type, blocks, count, codes, scales, minimums);
}

EXPORT void troupe_round_rows(
    Pool* pool, const float* values, int64_t rows, int64_t columns, int64_t group_size, int32_t bits, int8_t* codes,
    float* scales, float* minimums) {
    PoolLock lock(pool);
    round_rows(pool, values, rows, columns, group_size, bits, codes, scales, minimums);
}

EXPORT void troupe_unpack_rows(Pool* pool, const Linear* linear, const int64_t* ids, int64_t count, float* out) {
    PoolLock lock(pool);
    unpack_rows(pool, *linear, ids, count, out);
}

EXPORT int troupe_fits_bfloat16(Pool* pool, const float* values, int64_t count) {
    PoolLock lock(pool);
    return fits_bfloat16(pool, values, count);
}

EXPORT void troupe_linear(
    Pool* pool, const Linear* linear, const void* x, int32_t x_dtype, void* y, int32_t y_dtype, int64_t rows) {
    PoolLock lock(pool);
    run_linear(pool, *linear, x, x_dtype, y, y_dtype, rows);
}

EXPORT void troupe_lora(
    Pool* pool, const int64_t* rows, const LoraSegment* segments, int64_t num_segments, const void* x, int32_t x_dtype,
    void* y, int32_t y_dtype) {
    PoolLock lock(pool);
    run_lora(pool, rows, segments, num_segments, x, x_dtype, y, y_dtype);
}

EXPORT void troupe_experts(
    Pool* pool, const Experts* experts, const void* x, int32_t dtype, const int64_t* ids, const float* weights,
    int64_t tokens, int64_t top_k, void* out, int32_t out_dtype) {
    PoolLock lock(pool);
    run_experts(pool, *experts, x, dtype, ids, weights, tokens, top_k, out, out_dtype);
}

EXPORT void troupe_attention(
    Pool* pool, const Batch* batch, const AttentionShape* shape, const void* q, int64_t q_stride, const void* k_cache,
    const void* v_cache, void* out) {
    PoolLock lock(pool);
    run_attention(pool, *batch, *shape, q, q_stride, k_cache, v_cache, out);
}

EXPORT void troupe_rms_norm(
    Pool* pool, int32_t dtype, const void* x, const void* weight, int64_t weight_rows, float eps, void* out, int64_t rows,
    int64_t size) {
    PoolLock lock(pool);
    run_rms_norm(pool, dtype, x, weight, weight_rows, eps, out, rows, size);
}

EXPORT void troupe_add_rms_norm(
    Pool* pool, int32_t dtype, const void* x, void* residual, const void* weight, float eps, void* out, int64_t rows,
    int64_t size) {
    PoolLock lock(pool);
    run_add_rms_norm(pool, dtype, x, residual, weight, eps, out, rows, size);
}

EXPORT void troupe_activate(
    Pool* pool, int32_t kind, int32_t dtype, const void* x, void* out, int64_t rows, int64_t size) {
    PoolLock lock(pool);
    run_activation(pool, kind, dtype, x, out, rows, size);
}

EXPORT void troupe_rope_store(Pool* pool, const RopeStore* rope) {
    PoolLock lock(pool);
    run_rope_store(pool, *rope);
}

EXPORT void troupe_conv(Pool* pool, const Conv* conv, const Segments* segments) {
    PoolLock lock(pool);
    run_conv(pool, *conv, *segments);
}

EXPORT void troupe_scan(Pool* pool, const Scan* scan, const Segments* segments) {
    PoolLock lock(pool);
    run_scan(pool, *scan, *segments);
}

EXPORT void troupe_draw(Pool* pool, const Draw* draw) {
    PoolLock lock(pool);
    run_draw(pool, *draw);
}

EXPORT void troupe_penalise(
    Pool* pool, float* logits, int64_t vocab, const int64_t* places, int64_t num_places, const int32_t* counts,
    const int64_t* slots, const float* penalties) {
    PoolLock lock(pool);
    run_penalise(pool, logits, vocab, places, num_places, counts, slots, penalties);
}

// A call of a tape. Mirrored by `kernels.cpu.structs`.
constexpr int kMaxArguments = 9;
union Argument {
    int64_t integer;  // or a pointer
    float number;
};
struct Call {
    int64_t function;
    Argument arguments[kMaxArguments];
};

template <class T>
T take(const Argument& argument) {
    if constexpr (std::is_pointer_v<T>)
        return reinterpret_cast<T>(argument.integer);
    else if constexpr (std::is_same_v<T, float>)
        return argument.number;
    else
        return T(argument.integer);
}

template <class... Types, size_t... Indices>
void call(void (*function)(Pool*, Types...), Pool* pool, const Argument* arguments, std::index_sequence<Indices...>) {
    static_assert(sizeof...(Types) <= kMaxArguments);
    function(pool, take<Types>(arguments[Indices])...);
}

template <class... Types>
constexpr std::index_sequence_for<Types...> indices_of(void (*)(Pool*, Types...)) {
    return {};
}

template <auto function>
void replay(Pool* pool, const Argument* arguments) {
    call(function, pool, arguments, indices_of(function));
}

// In the order of `kernels.cpu.library.TAPE_FUNCTIONS`.
constexpr void (*kReplays[])(Pool*, const Argument*) = {
    replay<troupe_linear>,   replay<troupe_lora>,         replay<troupe_experts>,  replay<troupe_attention>,
    replay<troupe_rms_norm>, replay<troupe_add_rms_norm>, replay<troupe_activate>, replay<troupe_rope_store>,
    replay<troupe_conv>,     replay<troupe_scan>,
};

EXPORT void troupe_replay(Pool* pool, const Call* calls, int64_t count) {
    for (int64_t index = 0; index < count; ++index) kReplays[calls[index].function](pool, calls[index].arguments);
}

// Read memory as fast as the pool can, for the benchmark's bandwidth; the result only keeps the reads alive.
EXPORT int32_t troupe_read(Pool* pool, const void* memory, int64_t bytes) {
    PoolLock lock(pool);
    constexpr int64_t piece = 1 << 20;
    int32_t result = 0;
    parallel(pool, bytes / piece, [&](int64_t tile, int) {
        auto* start = static_cast<const uint8_t*>(memory) + tile * piece;
        VecInt sums[4] = {zero_int(), zero_int(), zero_int(), zero_int()};
        constexpr int64_t width = sizeof(VecInt);
        for (int64_t at = 0; at < piece; at += 4 * width)
            for (int lane = 0; lane < 4; ++lane) sums[lane] = or_int(sums[lane], load_int(start + at + lane * width));
        int32_t lanes[kLanes];
        store_int(lanes, or_int(or_int(sums[0], sums[1]), or_int(sums[2], sums[3])));
        __atomic_fetch_or(&result, lanes[0], __ATOMIC_RELAXED);
    });
    return result;
}
