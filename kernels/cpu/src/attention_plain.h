// Tiles of keys and values in the dtype of the model, one slot after another.

#pragma once

#include "attention.h"
#include "attention_tile.h"
#include "transpose.h"

namespace troupe {

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

template <class T>
class PlainTiles {
    using Arithmetic = typename ArithmeticOf<T>::type;
    static constexpr int kGroup = Arithmetic::kGroup;

public:
    using Value = T;
    static constexpr int kMaxBlockRows = kMaxRows;

    // Where each head is, first all keys, then all values; zeros where no row of the work may look.
    struct Tile {
        const void* pieces[2 * kTileKeys];
        const T* key(int64_t index) const { return static_cast<const T*>(pieces[index]); }
    };

    PlainTiles(const AttentionShape& shape, const void* k_cache, const void* v_cache)
        : shape_(shape),
          k_cache_(static_cast<const T*>(k_cache)),
          v_cache_(static_cast<const T*>(v_cache)),
          head_dim_(shape.head_dim),
          dim_words_(head_dim_ / kGroup),
          dim_panels_(ceil_div(head_dim_, kPanelWidth)) {}

    WorkspaceSizes sizes() const {
        int64_t padded = dim_panels_ * kPanelWidth;
        return {dim_words_, kTileKeys / kGroup, dim_words_ * kTileKeys, kTileKeys / kGroup * padded, padded, padded};
    }

    void start(const Workspace& space) const { std::memset(space.more, 0, dim_panels_ * kPanelWidth * 4); }

    TileFetcher fetcher(const Tile& tile) const { return {tile.pieces, 2 * kTileKeys, int64_t(head_dim_ * sizeof(T))}; }

    void find(const TilePlace& place, const Workspace& space, Tile& tile) const {
        int64_t stride = shape_.num_kv_heads * head_dim_, size = shape_.block_size;
        int64_t block = place.start / size, offset = place.start % size;
        for (int key = 0; key < kTileKeys; ++block, offset = 0) {
            int64_t run = size - offset < kTileKeys - key ? size - offset : kTileKeys - key;
            int64_t first = place.start + key;
            bool is_seen = first <= place.last && first + run > place.first_key;
            int64_t at = is_seen ? (place.blocks[block] * size + offset) * stride + place.head * head_dim_ : 0;
            if (first >= place.first_key && first + run - 1 <= place.last) {
                // All keys are seen, as almost always: a loop without conditions.
                for (int64_t i = 0; i < run; ++i) {
                    tile.pieces[key + i] = k_cache_ + at + i * stride;
                    tile.pieces[kTileKeys + key + i] = v_cache_ + at + i * stride;
                }
                key += run;
                continue;
            }
            for (int64_t end = key + run; key < end; ++key, at += stride) {
                bool is_there = place.start + key >= place.first_key && place.start + key <= place.last;
                tile.pieces[key] = is_there ? static_cast<const void*>(k_cache_ + at) : space.more;
                tile.pieces[kTileKeys + key] = is_there ? static_cast<const void*>(v_cache_ + at) : space.more;
            }
        }
    }

    void pack(const Tile& tile, TileFetcher& next, const Workspace& space) const {
        pack_keys(tile, next, space.keys);
        pack_values(tile, next, space.values);
    }

    // Row `row` of a block of `size` rows that starts at `start`.
    void pack_query(const T* query, const Workspace& space, int64_t start, int row, int size) const {
        uint32_t* target = space.queries + start * dim_words_ + row;
        for (int64_t word = 0; word < dim_words_; ++word) std::memcpy(target + word * size, query + word * kGroup, 4);
    }

    void score(const Tile&, const Workspace& space, int64_t start, int size) const {
        int64_t panel_stride = dim_words_ * kPanelBytes;
        auto* panels = reinterpret_cast<const uint8_t*>(space.keys);
        for (int key = 0; key < kTileKeys; key += kMaxPanels * kPanelWidth) {
            const uint8_t* first = panels + key / kPanelWidth * panel_stride;
            float* scores = space.scores + start * kTileKeys + key;
            const uint32_t* queries = space.queries + start * dim_words_;
            multiply_tile<Arithmetic>(
                {queries, first, panel_stride, dim_words_, scores, kTileKeys, false}, size, kMaxPanels);
        }
    }

    // The weights of a row become its words in the packed block of rows.
    void put_weights(float* weights, const Workspace& space, int64_t start, int row, int size) const {
        constexpr int words = kTileKeys / kGroup;
        T narrow[kTileKeys];
        for (int key = 0; key < kTileKeys; key += kLanes) store(narrow + key, load(weights + key));
        uint32_t* target = space.weights + start * words + row;
        for (int word = 0; word < words; ++word) std::memcpy(target + word * size, narrow + word * kGroup, 4);
    }

    // result += weights . values
    void gather(const Tile&, const Workspace& space, int64_t start, int size) const {
        constexpr int words = kTileKeys / kGroup;
        constexpr int64_t panel_stride = words * kPanelBytes;
        auto* panels = reinterpret_cast<const uint8_t*>(space.values);
        int64_t width = dim_panels_ * kPanelWidth;
        for (int64_t panel = 0; panel < dim_panels_;) {
            int count = int(dim_panels_ - panel < kMaxPanels ? dim_panels_ - panel : kMaxPanels);
            float* result = space.result + start * width + panel * kPanelWidth;
            const uint32_t* weights = space.weights + start * words;
            const uint8_t* first = panels + panel * panel_stride;
            multiply_tile<Arithmetic>({weights, first, panel_stride, words, result, width, true}, size, count);
            panel += count;
        }
    }

private:
    // panel[word of the head][key]: the keys are the outputs.
    void pack_keys(const Tile& tile, TileFetcher& next, uint32_t* panels) const {
        for (int key = 0; key < kTileKeys; key += kLanes) {
            uint32_t* panel = panels + key / kPanelWidth * dim_words_ * kPanelWidth + key % kPanelWidth;
            next.fetch(14 * kLanes / 16);
            int64_t word = 0;
            for (; word + kLanes <= dim_words_; word += kLanes) {
                VecInt square[kLanes];
#pragma GCC unroll 16
                for (int lane = 0; lane < kLanes; ++lane) square[lane] = load_int(tile.key(key + lane) + word * kGroup);
                transpose(square);
#pragma GCC unroll 16
                for (int row = 0; row < kLanes; ++row) store_int(panel + (word + row) * kPanelWidth, square[row]);
            }
            if (word < dim_words_) pack_last_words(tile.pieces + key, word, panel);
        }
    }

    // panel[group of keys][dimension]: the dimensions are the outputs.
    void pack_values(const Tile& tile, TileFetcher& next, uint32_t* panels) const {
        constexpr int64_t panel_words = kTileKeys / kGroup * kPanelWidth;
        int64_t whole = head_dim_ / kPanelWidth * kPanelWidth;
        int rest = int(head_dim_ - whole);
        for (int key = 0; key < kTileKeys; key += kGroup) {
            const T* sources[kGroup];
            for (int member = 0; member < kGroup; ++member) sources[member] = tile.key(kTileKeys + key + member);
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

    static void put_values(const float* const* sources, int64_t dim, uint32_t* target) {
        for (int lane = 0; lane < kPanelWidth; lane += kLanes) store_int(target + lane, load_int(sources[0] + dim + lane));
    }

    static void put_values(const bf16* const* sources, int64_t dim, uint32_t* target) {
        interleave(sources[0] + dim, sources[1] + dim, target);
    }

    void pack_last_words(const void* const* keys, int64_t word, uint32_t* panel) const {
        VecInt square[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) {
            auto* source = static_cast<const int32_t*>(keys[lane]);
            square[lane] = load_int_first(source + word, int(dim_words_ - word));
        }
        transpose(square);
        for (int row = 0; row < dim_words_ - word; ++row) store_int(panel + (word + row) * kPanelWidth, square[row]);
    }

    const AttentionShape& shape_;
    const T *k_cache_, *v_cache_;
    int64_t head_dim_, dim_words_, dim_panels_;
};

}  // namespace troupe
