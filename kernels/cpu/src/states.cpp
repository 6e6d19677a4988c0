#include "states.h"

#include <cmath>
#include <cstring>

#include "dispatch.h"
#include "simd.h"

namespace troupe {

namespace {

constexpr int64_t kConvBlock = 4 * kLanes;  // channels of a tile
constexpr int64_t kColumns = 2 * kLanes;    // values of a head that one pass updates
constexpr int64_t kMaxTokens = 32;          // tokens whose keys and queries are prepared at once

inline Vec load_some(const float* p, int64_t lanes) { return lanes >= kLanes ? load(p) : load_first(p, int(lanes)); }

inline void store_some(float* p, Vec x, int64_t lanes) {
    if (lanes >= kLanes)
        store(p, x);
    else
        store_first(p, x, int(lanes));
}

template <int width>
void conv_lanes(const Conv& conv, const Segments& segments, int64_t begin, int64_t end, int64_t channel, int64_t lanes) {
    Vec weight[width];
    for (int tap = 0; tap < width; ++tap) weight[tap] = load_some(conv.weight + tap * conv.channels + channel, lanes);
    Vec bias = conv.bias ? load_some(conv.bias + channel, lanes) : zero();
    constexpr int kept = width - 1;
    for (int64_t segment = begin; segment < end; ++segment) {
        Vec past[kept];
        int64_t source = segments.source[segment];
        for (int tap = 0; tap < kept; ++tap)
            past[tap] = source < 0 ? zero() : load_some(conv.states + (source * kept + tap) * conv.channels + channel, lanes);
        int64_t last = segments.first[segment] + segments.count[segment];
        for (int64_t token = segments.first[segment]; token < last; ++token) {
            Vec x = load_some(conv.x + token * conv.stride + channel, lanes);
            Vec sum = bias;
            for (int tap = 0; tap < kept; ++tap) sum = fma(past[tap], weight[tap], sum);
            sum = fma(x, weight[kept], sum);
            for (int tap = 0; tap + 1 < kept; ++tap) past[tap] = past[tap + 1];
            past[kept - 1] = x;
            if (conv.has_silu) sum = div(sum, add(splat(1.0f), exp(sub(zero(), sum))));
            store_some(conv.out + token * conv.channels + channel, sum, lanes);
        }
        float* target = conv.states + segments.target[segment] * kept * conv.channels + channel;
        for (int tap = 0; tap < kept; ++tap) store_some(target + tap * conv.channels, past[tap], lanes);
    }
}

template <int width>
void conv_runs(Pool* pool, const Conv& conv, const Segments& segments) {
    int64_t blocks = ceil_div(conv.channels, kConvBlock);
    parallel(pool, segments.num_runs * blocks, [&](int64_t tile, int) {
        int64_t run = tile / blocks, first = tile % blocks * kConvBlock;
        int64_t begin = run ? segments.run_ends[run - 1] : 0;
        for (int64_t channel = first; channel < conv.channels && channel < first + kConvBlock; channel += kLanes)
            conv_lanes<width>(conv, segments, begin, segments.run_ends[run], channel, conv.channels - channel);
    });
}

// What some tokens of one head need, whatever the column of values.
struct Tokens {
    float* queries;  // [tokens, key_size]
    float* keys;
    float decay[kMaxTokens], factor[kMaxTokens], overlap[kMaxTokens];  // overlap: query times key
};

float dot(const float* a, const float* b, int64_t size) {
    Vec total = zero();
    for (int64_t i = 0; i < size; i += kLanes) total = fma(load_some(a + i, size - i), load_some(b + i, size - i), total);
    return sum(total);
}

void scaled(const float* x, float factor, float* out, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes) store_some(out + i, mul(load_some(x + i, size - i), splat(factor)), size - i);
}

template <bool is_delta>
void prepare(const Scan& scan, int64_t head, int64_t first, int64_t count, Tokens& tokens) {
    int64_t size = scan.key_size, group = head / (scan.num_heads / scan.num_groups);
    for (int64_t t = 0; t < count; ++t) {
        const float* row = scan.mixed + (first + t) * scan.stride + group * size;
        const float *query = row + scan.query_at, *key = row + scan.key_at;
        float *queries = tokens.queries + t * size, *keys = tokens.keys + t * size;
        float query_factor = 1.0f, key_factor = 1.0f;
        if (is_delta) {
            query_factor = 1.0f / std::sqrt((dot(query, query, size) + 1e-6f) * float(size));
            key_factor = 1.0f / std::sqrt(dot(key, key, size) + 1e-6f);
        }
        scaled(query, query_factor, queries, size);
        scaled(key, key_factor, keys, size);
        tokens.overlap[t] = dot(queries, keys, size);
        int64_t place = (first + t) * scan.num_heads + head;
        float x = scan.dt[place] + scan.dt_bias[head];
        float dt = x > 20.0f ? x : std::log1p(std::exp(x));
        tokens.decay[t] = std::exp(-std::exp(scan.a_log[head]) * dt);
        tokens.factor[t] = is_delta ? 1.0f / (1.0f + std::exp(-scan.beta[place])) : dt;
    }
}

// Run tokens through `state` [key_size, kColumns], the columns `column` to `column + width` of a head. One pass over
// the state per token: it applies the update of the token before and reads with this one's key and query.
template <bool is_delta>
void scan_columns(
    const Scan& scan, int64_t head, int64_t first, int64_t count, const Tokens& tokens, int64_t column, int64_t width,
    float* state) {
    int64_t size = scan.key_size;
    Vec skip = splat(scan.skip ? scan.skip[head] : 0.0f);
    Vec change[2] = {zero(), zero()}, decay = splat(1.0f);
    const float* last_key = tokens.keys;  // of the first token, whose change is 0
    for (int64_t t = 0; t <= count; ++t) {
        bool is_end = t == count;
        const float* key = is_end ? last_key : tokens.keys + t * size;
        const float* query = is_end ? last_key : tokens.queries + t * size;
        Vec by_key[2] = {zero(), zero()}, by_query[2] = {zero(), zero()};
        for (int64_t i = 0; i < size; ++i) {
            Vec last = splat(last_key[i]), k = splat(key[i]), q = splat(query[i]);
            for (int part = 0; part < 2; ++part) {
                float* place = state + i * kColumns + part * kLanes;
                Vec value = fma(last, change[part], mul(load(place), decay));
                store(place, value);
                if (is_delta) by_key[part] = fma(k, value, by_key[part]);
                by_query[part] = fma(q, value, by_query[part]);
            }
        }
        if (is_end) return;
        last_key = key;
        decay = splat(tokens.decay[t]);
        Vec factor = splat(tokens.factor[t]), overlap = splat(tokens.overlap[t]);
        const float* row = scan.mixed + (first + t) * scan.stride + scan.value_at + head * scan.value_size + column;
        float* out = scan.out + ((first + t) * scan.num_heads + head) * scan.value_size + column;
        for (int part = 0; part < 2; ++part) {
            int64_t lanes = width - part * kLanes;
            if (lanes <= 0) continue;
            Vec value = load_some(row + part * kLanes, lanes);
            Vec error = is_delta ? sub(value, mul(decay, by_key[part])) : value;
            change[part] = mul(error, factor);
            Vec result = fma(overlap, change[part], mul(decay, by_query[part]));
            store_some(out + part * kLanes, fma(skip, value, result), lanes);
        }
    }
}

// Copy columns of a head's state [key_size, value_size] to or from `tile` [key_size, kColumns].
void read_columns(const float* state, int64_t key_size, int64_t value_size, int64_t width, float* tile) {
    for (int64_t i = 0; i < key_size; ++i)
        for (int part = 0; part < 2; ++part) {
            int64_t lanes = width - part * kLanes;
            Vec value = state && lanes > 0 ? load_some(state + i * value_size + part * kLanes, lanes) : zero();
            store(tile + i * kColumns + part * kLanes, value);
        }
}

void write_columns(const float* tile, int64_t key_size, int64_t value_size, int64_t width, float* state) {
    for (int64_t i = 0; i < key_size; ++i)
        for (int64_t part = 0, lanes = width; lanes > 0; ++part, lanes -= kLanes)
            store_some(state + i * value_size + part * kLanes, load(tile + i * kColumns + part * kLanes), lanes);
}

template <bool is_delta>
void scan_segment(const Scan& scan, const Segments& segments, int64_t segment, int64_t head, float* scratch) {
    int64_t key_size = scan.key_size, value_size = scan.value_size, size = key_size * value_size;
    Tokens tokens;
    tokens.queries = scratch;
    tokens.keys = scratch + kMaxTokens * key_size;
    float* tile = tokens.keys + kMaxTokens * key_size;
    int64_t source = segments.source[segment], target = segments.target[segment];
    const float* state = source < 0 ? nullptr : scan.states + (source * scan.num_heads + head) * size;
    float* result = scan.states + (target * scan.num_heads + head) * size;
    int64_t done = 0, count = segments.count[segment];
    do {
        int64_t length = count - done < kMaxTokens ? count - done : kMaxTokens;
        int64_t first = segments.first[segment] + done;
        if (length) prepare<is_delta>(scan, head, first, length, tokens);
        for (int64_t column = 0; column < value_size; column += kColumns) {
            int64_t width = value_size - column < kColumns ? value_size - column : kColumns;
            read_columns(state ? state + column : nullptr, key_size, value_size, width, tile);
            if (length) scan_columns<is_delta>(scan, head, first, length, tokens, column, width, tile);
            write_columns(tile, key_size, value_size, width, result + column);
        }
        state = result;
        done += length;
    } while (done < count);
}

}  // namespace

void run_conv(Pool* pool, const Conv& conv, const Segments& segments) {
    switch (conv.width) {
        case 2: return conv_runs<2>(pool, conv, segments);
        case 3: return conv_runs<3>(pool, conv, segments);
        default: return conv_runs<4>(pool, conv, segments);
    }
}

void run_scan(Pool* pool, const Scan& scan, const Segments& segments) {
    size_t bytes = (2 * kMaxTokens + kColumns) * scan.key_size * sizeof(float);
    parallel(pool, segments.num_runs * scan.num_heads, [&](int64_t tile, int thread) {
        int64_t run = tile / scan.num_heads, head = tile % scan.num_heads;
        auto* scratch = static_cast<float*>(pool_scratch(pool, thread, kTileScratch, bytes));
        for (int64_t segment = run ? segments.run_ends[run - 1] : 0; segment < segments.run_ends[run]; ++segment)
            if (scan.beta)
                scan_segment<true>(scan, segments, segment, head, scratch);
            else
                scan_segment<false>(scan, segments, segment, head, scratch);
    });
}

}  // namespace troupe
