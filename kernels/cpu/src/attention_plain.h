// Tiles of keys and values in the dtype of the model.

#pragma once

#include "attention_tile.h"
#include "transpose.h"

namespace troupe {

template <class T>
class PlainTiles : public CacheTiles<T> {
    using Product = std::conditional_t<std::is_same_v<T, float>, Float32, BFloat16>;
    static constexpr int kWord = kWordNumbers<T>, kGroups = kPieceSlots / kWord, kWeightWords = kTileKeys / kWord;
    using Base = CacheTiles<T>;
    using Base::pieces;

public:
    using Value = T;
    static constexpr int kMaxBlockRows = kMaxRows;

    PlainTiles(const AttentionShape& shape, const void* k_cache, const void* v_cache)
        : Base(shape, k_cache, v_cache), dim_(shape.head_dim), dim_padded_(ceil_div(dim_, kPanelWidth) * kPanelWidth) {}

    WorkspaceSizes sizes() const { return {dim_ / kWord, kWeightWords, 2 * kTilePieces * piece_words(), dim_padded_}; }

    // Copy the pieces that are no operands as they are: shorter ones, and values that no row sees and that may be NaN.
    void prepare(Tile& tile, TileFetcher& next, const Workspace& space) const {
        bool is_short = pieces.slots < kPieceSlots;
        for (int piece = 0; piece < kTilePieces; ++piece) {
            int64_t first = tile.first_seen(piece), end = tile.end_seen(piece);
            if (first == end) continue;
            bool is_copied = is_short || end - first < kPieceSlots;
            if (!this->has_values() && !is_copied)
                turn_piece(tile, piece, space);
            else if (is_copied)
                copy_values(tile, piece, space);
            if (is_short) copy_keys(tile, piece, space);
        }
        next.fetch();
    }

    // Row `row` of a block of `size` rows that starts at `start`.
    void pack_query(const T* query, const Workspace& space, int64_t start, int row, int size) const {
        uint32_t* target = space.queries + start * (dim_ / kWord) + row;
        for (int64_t word = 0; word < dim_ / kWord; ++word) std::memcpy(target + word * size, query + word * kWord, 4);
    }

    void score(const Tile& tile, const Workspace& space, int64_t start, int size) const {
        const uint32_t* queries = space.queries + start * (dim_ / kWord);
        multiply_keys<Product>(tile, dim_ / kWord, size, queries, space.scores + start * kTileKeys);
    }

    // The weights of a row become its words in the packed block of rows.
    void put_weights(float* weights, const Workspace& space, int64_t start, int row, int size) const {
        T narrow[kTileKeys];
        for (int key = 0; key < kTileKeys; key += kLanes) store(narrow + key, load(weights + key));
        uint32_t* target = space.weights + start * kWeightWords + row;
        for (int word = 0; word < kWeightWords; ++word) std::memcpy(target + word * size, narrow + word * kWord, 4);
    }

    // sums += weights . values
    void accumulate_values(const Tile& tile, const Workspace& space, int64_t start, int size) const {
        const uint32_t* weights = space.weights + start * kWeightWords;
        float* sums = space.sums + start * dim_padded_;
        multiply_values<Product>(tile, dim_, kGroups, size, weights, sums, dim_padded_, true);
    }

private:
    int64_t piece_words() const { return kPieceSlots * dim_ / kWord; }

    void copy_keys(Tile& tile, int piece, const Workspace& space) const {
        uint32_t* out = space.more + piece * piece_words();
        for (int64_t key = tile.first_seen(piece); key < tile.end_seen(piece); ++key) {
            int64_t slot = this->find_slot(tile, piece * kPieceSlots + key);
            const uint8_t* source = this->find_keys(tile, slot) + slot % pieces.slots * 4;
            for (int64_t word = 0; word < dim_ / kWord; ++word)
                std::memcpy(out + word * kPieceSlots + key, source + word * pieces.slots * 4, 4);
        }
        tile.pieces[piece] = out;
    }

    void copy_values(Tile& tile, int piece, const Workspace& space) const {
        T* out = reinterpret_cast<T*>(space.more + (kTilePieces + piece) * piece_words());
        std::memset(out, 0, piece_words() * 4);
        for (int64_t key = tile.first_seen(piece); key < tile.end_seen(piece); ++key) {
            int64_t slot = this->find_slot(tile, piece * kPieceSlots + key), width = pieces.word_slots();
            auto* piece_values = reinterpret_cast<const T*>(this->find_values(tile, slot));
            T* target = out + key / kWord * dim_ * kWord + key % kWord;
            if (this->has_values()) {
                const T* source = piece_values + pieces.value_index(slot);
                for (int64_t i = 0; i < dim_; ++i) target[i * kWord] = source[i * width];
            } else {
                const T* source = piece_values + slot % pieces.slots * kWord;
                for (int64_t i = 0; i < dim_; ++i)
                    target[i * kWord] = source[i / kWord * pieces.slots * kWord + i % kWord];
            }
        }
        tile.pieces[kTilePieces + piece] = out;
    }

    void turn_piece(Tile& tile, int piece, const Workspace& space) const {
        uint32_t* out = space.more + (kTilePieces + piece) * piece_words();
        turn_keys<T>(static_cast<const uint32_t*>(tile.pieces[piece]), dim_, out);
        tile.pieces[kTilePieces + piece] = out;
    }

    int64_t dim_, dim_padded_;
};

}  // namespace troupe
