// A tile of keys and values on its way from the pages of the cache to the panels of a product, and the memory for it.

#pragma once

#include "dispatch.h"
#include "pool.h"
#include "transpose.h"

namespace troupe {

constexpr int kTileKeys = 64;

template <class T>
struct ArithmeticOf;
template <>
struct ArithmeticOf<float> {
    using type = Float32;
};
template <>
struct ArithmeticOf<bf16> {
    using type = BFloat16;
};

// Where a tile's keys and values are; zeros where no row of the work may look.
template <class T>
struct Tile {
    const T *keys[kTileKeys], *values[kTileKeys];
};

// Asks for the memory of a tile little by little: a core waits when it has asked for much at once.
template <class T>
class TileFetcher {
public:
    TileFetcher(const Tile<T>& tile, int64_t head_dim) : tile_(tile), bytes_(head_dim * sizeof(T)) {}

    // Ask for the next `count` heads, first all keys, then all values.
    void fetch(int count) {
        for (int end = at_ + count < 2 * kTileKeys ? at_ + count : 2 * kTileKeys; at_ < end; ++at_) {
            auto* head = reinterpret_cast<const char*>(at_ < kTileKeys ? tile_.keys[at_] : tile_.values[at_ - kTileKeys]);
            for (int64_t byte = 0; byte < bytes_; byte += 64) _mm_prefetch(head + byte, _MM_HINT_T0);
        }
    }

private:
    const Tile<T>& tile_;
    int64_t bytes_;
    int at_ = 0;
};

template <class T>
class TilePacker {
    static constexpr int kGroup = ArithmeticOf<T>::type::kGroup;

public:
    explicit TilePacker(int64_t head_dim) : head_dim_(head_dim), dim_words_(head_dim / kGroup) {}

    // panel[word of the head][key]: the keys are the outputs.
    void pack_keys(const Tile<T>& tile, TileFetcher<T>& next, uint32_t* panels) const {
        for (int key = 0; key < kTileKeys; key += kLanes) {
            uint32_t* panel = panels + key / kPanelWidth * dim_words_ * kPanelWidth + key % kPanelWidth;
            next.fetch(14 * kLanes / 16);
            int64_t word = 0;
            for (; word + kLanes <= dim_words_; word += kLanes) {
                VecInt square[kLanes];
#pragma GCC unroll 16
                for (int lane = 0; lane < kLanes; ++lane) square[lane] = load_int(tile.keys[key + lane] + word * kGroup);
                transpose(square);
#pragma GCC unroll 16
                for (int row = 0; row < kLanes; ++row) store_int(panel + (word + row) * kPanelWidth, square[row]);
            }
            if (word < dim_words_) pack_last_words(tile.keys + key, word, panel);
        }
    }

    // panel[group of keys][dimension]: the dimensions are the outputs.
    void pack_values(const Tile<T>& tile, TileFetcher<T>& next, uint32_t* panels) const {
        constexpr int64_t panel_words = kTileKeys / kGroup * kPanelWidth;
        int64_t whole = head_dim_ / kPanelWidth * kPanelWidth;
        int rest = int(head_dim_ - whole);
        for (int key = 0; key < kTileKeys; key += kGroup) {
            const T* const* sources = tile.values + key;
            uint32_t* target = panels + key / kGroup * kPanelWidth;
            if (key % (2 * kGroup) == 0) next.fetch(2);
            for (int64_t dim = 0; dim < whole; dim += kPanelWidth, target += panel_words) put_values(sources, dim, target);
            if (rest) {
                T padded[kGroup][kPanelWidth] = {};
                const T* lines[kGroup];
                for (int member = 0; member < kGroup; ++member) {
                    lines[member] = padded[member];
                    std::memcpy(padded[member], sources[member] + whole, rest * sizeof(T));
                }
                put_values(lines, 0, target);
            }
        }
    }

private:
    static void put_values(const float* const* sources, int64_t dim, uint32_t* target) {
        for (int lane = 0; lane < kPanelWidth; lane += kLanes) store_int(target + lane, load_int(sources[0] + dim + lane));
    }

    static void put_values(const bf16* const* sources, int64_t dim, uint32_t* target) {
        interleave(sources[0] + dim, sources[1] + dim, target);
    }

    void pack_last_words(const T* const* keys, int64_t word, uint32_t* panel) const {
        VecInt square[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) {
            auto* source = reinterpret_cast<const int32_t*>(keys[lane]);
            square[lane] = load_int_first(source + word, int(dim_words_ - word));
        }
        transpose(square);
        for (int row = 0; row < dim_words_ - word; ++row) store_int(panel + (word + row) * kPanelWidth, square[row]);
    }

    int64_t head_dim_, dim_words_;
};

// Where everything of one piece of work lies in its thread's memory; sizes in 32-bit words.
struct Workspace {
    uint32_t *queries, *keys, *values, *weights, *zeros;
    float *scores, *result, *maximum, *total;

    Workspace(
        Pool* pool, int thread, int64_t rows, int64_t num_heads, int64_t dim_words, int64_t dim_padded, int key_group)
        : rows_(rows), dim_words_(dim_words), dim_padded_(dim_padded) {
        int64_t all_rows = rows * num_heads;
        int64_t sizes[] = {
            all_rows * dim_words, dim_words * kTileKeys,      kTileKeys / key_group * dim_padded, rows * kTileKeys / key_group,
            rows * kTileKeys,     all_rows * dim_padded, all_rows, all_rows, dim_padded,
        };
        int64_t total_words = 0;
        for (int64_t& size : sizes) total_words += size = ceil_div(size, 16) * 16;
        auto* memory = static_cast<uint32_t*>(pool_scratch(pool, thread, kTileScratch, total_words * 4));
        uint32_t* parts[9];
        for (int part = 0; part < 9; memory += sizes[part++]) parts[part] = memory;
        queries = parts[0], keys = parts[1], values = parts[2], weights = parts[3];
        scores = reinterpret_cast<float*>(parts[4]), result = reinterpret_cast<float*>(parts[5]);
        maximum = reinterpret_cast<float*>(parts[6]), total = reinterpret_cast<float*>(parts[7]);
        zeros = parts[8];
        std::memset(zeros, 0, dim_padded * 4);
    }

    // The same with the queries and sums of another head.
    Workspace at(int64_t head) const {
        Workspace other = *this;
        other.queries += head * rows_ * dim_words_;
        other.result += head * rows_ * dim_padded_;
        other.maximum += head * rows_, other.total += head * rows_;
        return other;
    }

private:
    int64_t rows_, dim_words_, dim_padded_;
};

}  // namespace troupe
