#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "simd.h"

// Masses have the same bits as torch's, which rounds each product and each sum.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

namespace troupe {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kWord = 32;   // tokens of a word of the mask
constexpr int kBlock = 64;  // tokens computed together
constexpr int32_t kInfinityBits = 0x7f800000;
constexpr int32_t kInPrompt = 1 << 30;

// The noise of a token is computed in float64, torch's in float32. Sums of score and noise lie below 32, where two of
// torch's are off by less than this together, so a token that leads by more is torch's token too.
constexpr double kLead = 2e-5;
constexpr float kLeastNoise = -2.92f;
// Of the bound of the noise, which is computed in float32.
constexpr float kBoundError = 1e-3f;
constexpr float kUniformScale = 0x1.fffffep-32f;  // as UNIFORM_SCALE of `kernels.torch.sampling`

// As in `kernels.torch.sampling.compute_mass`.
constexpr float kLog2E = 1.44269504f;
constexpr float kPowers[] = {0x1.d52664p-10f, 0x1.2d5c5ep-7f, 0x1.c7f4aep-5f, 0x1.ebf194p-3f, 0x1.62e43ep-1f};
constexpr float kLeastPower = -63;
constexpr float kMassOne = 0x1p40f;
// Scores are sorted into bins by their distance to the best. The last bin holds all tokens without mass.
constexpr int kBinsPerUnit = 32;
constexpr int kBins = 29 * kBinsPerUnit;

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline uint64_t mass_of(float score) {
    float power = score * kLog2E;
    power = power < kLeastPower ? kLeastPower : power;
    float whole = std::floor(power), rest = power - whole, value = 0;
    for (float factor : kPowers) value = (value + factor) * rest;
    return uint64_t((value + 1) * kMassOne) >> uint64_t(-whole);
}

inline uint32_t hash_of(uint32_t id, const uint32_t* key) {
    uint32_t hash = id ^ key[0];
    hash ^= hash >> 17;
    hash = hash * 0xED5AD4BBu + key[1];
    hash ^= hash >> 11;
    hash *= 0xAC4C1B51u;
    hash ^= hash >> 15;
    hash *= 0x31848BABu;
    hash ^= hash >> 14;
    return hash & 0x7FFFFFFFu;
}

double noise_of(uint32_t hash) {
    return -std::log(-std::log1p(double((float(int32_t(hash)) + 0.5f) * -kUniformScale)));
}

// Order of tokens: ascending keys are descending scores, then ascending ids. Scores are at most 0.
inline uint64_t key_of(float score, int64_t id) { return uint64_t(bits_of(0.0f - score)) << 32 | uint64_t(id); }

inline float score_of(uint64_t key) {
    uint32_t bits = uint32_t(key >> 32);
    float distance;
    std::memcpy(&distance, &bits, 4);
    return 0.0f - distance;
}

// The token with the largest sum of score and noise among those that it is shown.
class Race {
public:
    explicit Race(const uint32_t* key) : key_(key) {}

    // Sums below it cannot win.
    float bar() const { return float(best_) - kBoundError; }

    void enter(float score, uint32_t hash, int64_t id) {
        double sum = double(score) + noise_of(hash);
        if (sum > best_) {
            second_ = best_;
            best_ = sum;
            winner_ = id;
        } else {
            second_ = std::max(second_, sum);
        }
    }

    void enter(uint64_t key) {
        uint32_t id = uint32_t(key);
        enter(score_of(key), hash_of(id, key_), id);
    }

    int64_t winner() const { return best_ - second_ < kLead ? int64_t(kUndecided) : winner_; }

private:
    const uint32_t* key_;
    double best_ = kLeastNoise, second_ = -kInfinity;  // the best token has score 0
    int64_t winner_ = kUndecided;
};

class Row {
public:
    Row(const Draw& draw, int64_t row, Pool* pool, int thread)
        : logits_(draw.logits + row * draw.vocab), vocab_(draw.vocab), key_(draw.keys + 2 * row),
          temperature_(draw.temperature[row]), top_k_(draw.top_k[row]), top_p_(draw.top_p[row]),
          log_min_p_(draw.log_min_p[row]), words_(draw.bitmask ? draw.bitmask + row * draw.words : nullptr),
          num_words_(draw.words), pool_(pool), thread_(thread) {}

    int64_t draw() {
        if (!mask()) return kBrokenLogits;
        if (!(largest_ > -kInfinity)) return words_ ? kNoTokenLeft : kBrokenLogits;
        if (temperature_ == 0) return find_largest();
        if (top_k_ < vocab_) return draw_top_k();
        uint64_t last = key_of(log_min_p_, UINT32_MAX);
        return draw_up_to(top_p_ < 1 ? std::min(find_nucleus(), last) : last);
    }

private:
    uint32_t word(int64_t index) const { return index < num_words_ ? words_[index] : 0; }

    // Forbid tokens, and find the largest logit of the others. Returns false if the logits are not sound.
    bool mask() {
        Vec all = splat(-kInfinity), allowed = all;
        VecInt magnitude = zero_int();  // a NaN has the largest
        int64_t first = 0;
        for (; first + kWord <= vocab_; first += kWord) {
            float* x = logits_ + first;
            for (int i = 0; i < kWord; i += kLanes) {
                all = max(load(x + i), all);
                magnitude = max_int(as_int(abs(load(x + i))), magnitude);
            }
            uint32_t bits = words_ ? word(first / kWord) : ~0u;
            if (!bits) {
                for (int i = 0; i < kWord; i += kLanes) store(x + i, splat(-kInfinity));
                continue;
            }
            if (~bits)
                for (int i = 0; i < kWord; ++i) x[i] = bits >> i & 1 ? x[i] : -kInfinity;
            for (int i = 0; i < kWord; i += kLanes) allowed = max(load(x + i), allowed);
        }
        float largest = max_of(all);
        int32_t magnitudes[kLanes];
        store_int(magnitudes, magnitude);
        bool has_nan = *std::max_element(magnitudes, magnitudes + kLanes) > kInfinityBits;
        largest_ = max_of(allowed);
        for (; first < vocab_; ++first) {
            float& x = logits_[first];
            largest = std::max(largest, x);
            has_nan |= x != x;
            if (words_ && !(word(first / kWord) >> first % kWord & 1)) x = -kInfinity;
            largest_ = std::max(largest_, x);
        }
        return std::isfinite(largest) && !has_nan;
    }

    int64_t find_largest() const {
        for (int64_t first = 0; first < vocab_; first += kBlock) {
            int64_t count = std::min<int64_t>(kBlock, vocab_ - first);
            bool is_here = false;
            for (int64_t i = 0; i < count; ++i) is_here |= logits_[first + i] == largest_;
            if (is_here) return std::find(logits_ + first, logits_ + first + count, largest_) - logits_;
        }
        return kNoTokenLeft;
    }

    // Call `body(first, scores)` for the blocks of tokens of which some may be allowed.
    template <class Body>
    void for_blocks(const Body& body) const {
        float scores[kBlock];
        for (int64_t first = 0; first < vocab_; first += kBlock) {
            int count = int(std::min<int64_t>(kBlock, vocab_ - first));
            if (words_ && !(word(first / kWord) | word(first / kWord + 1))) continue;
            const float* x = logits_ + first;
            if (count == kBlock)
                for (int i = 0; i < kBlock; ++i) scores[i] = (x[i] - largest_) / temperature_;
            else
                for (int i = 0; i < kBlock; ++i) scores[i] = i < count ? (x[i] - largest_) / temperature_ : -kInfinity;
            body(first, scores);
        }
    }

    static float find_max(const float* values) {
        Vec best = load(values);
        for (int i = kLanes; i < kBlock; i += kLanes) best = max(best, load(values + i));
        return max_of(best);
    }

    // Draw among the tokens up to a key.
    int64_t draw_up_to(uint64_t last) const {
        Race race(key_);
        for_blocks([&](int64_t first, const float* scores) {
            uint32_t hashes[kBlock];
            float bounds[kBlock];
            for (int i = 0; i < kBlock; ++i) hashes[i] = hash_of(uint32_t(first) + i, key_);
            // -log(-log(1 - u)) <= -log(u), and log2(u) is at least what the bits of the float say as one number.
            for (int i = 0; i < kBlock; ++i) {
                float uniform = float(int32_t(hashes[i])) + 0.5f;
                int32_t bits;
                std::memcpy(&bits, &uniform, 4);
                bounds[i] = scores[i] + (158.0f - float(bits) * 0x1p-23f) * 0.69314718f;
            }
            if (find_max(bounds) < race.bar()) return;
            for (int i = 0; i < kBlock; ++i)
                if (bounds[i] >= race.bar() && key_of(scores[i], first + i) <= last)
                    race.enter(scores[i], hashes[i], first + i);
        });
        return race.winner();
    }

    // Return the key of the last token that top-p keeps.
    uint64_t find_nucleus() const {
        uint64_t bins[kBins] = {}, total = 0;
        for_blocks([&](int64_t, const float* scores) {
            uint64_t masses[kBlock];
            int32_t places[kBlock];
            for (int i = 0; i < kBlock; ++i) masses[i] = mass_of(scores[i]);
            for (int i = 0; i < kBlock; ++i) places[i] = bin_of(scores[i]);
            for (int i = 0; i < kBlock; ++i) bins[places[i]] += masses[i];
        });
        for (uint64_t mass : bins) total += mass;
        double target = double(top_p_) * double(int64_t(total));
        uint64_t before = 0;
        int border = 0;
        while (border < kBins - 1 && double(int64_t(before + bins[border])) < target) before += bins[border++];
        auto* keys = scratch(vocab_);
        int64_t count = 0;
        for_blocks([&](int64_t first, const float* scores) {
            for (int i = 0; i < kBlock; ++i)
                if (bin_of(scores[i]) == border && scores[i] > -kInfinity) keys[count++] = key_of(scores[i], first + i);
        });
        std::sort(keys, keys + count);
        // Tokens of earlier bins start below the target. One token is kept at least.
        uint64_t last = border ? key_of(-float(border) / kBinsPerUnit, 0) - 1 : 0;
        for (int64_t i = 0; i < count && (double(int64_t(before)) < target || (!border && !i)); ++i) {
            last = keys[i];
            before += mass_of(score_of(last));
        }
        return last;
    }

    // Tokens at the border of two bins are in the later one.
    static int bin_of(float score) {
        float distance = score * -float(kBinsPerUnit);
        return int(distance < kBins - 1 ? distance : float(kBins - 1));
    }

    int64_t draw_top_k() const {
        int64_t capacity = 2 * top_k_ + 4096, count = 0;
        auto* keys = scratch(capacity);
        float least = -kInfinity;  // tokens up to it have better ones before them
        for_blocks([&](int64_t first, const float* scores) {
            if (!(find_max(scores) > least)) return;
            for (int i = 0; i < kBlock; ++i)
                if (scores[i] > least) keys[count++] = key_of(scores[i], first + i);
            if (count + kBlock > capacity) {
                std::nth_element(keys, keys + top_k_ - 1, keys + count);
                count = top_k_;
                least = score_of(keys[count - 1]);
            }
        });
        if (count > top_k_) std::nth_element(keys, keys + top_k_ - 1, keys + count);
        count = std::min(count, top_k_);
        std::sort(keys, keys + count);
        uint64_t total = 0, before = 0;
        for (int64_t i = 0; i < count; ++i) total += mass_of(score_of(keys[i]));
        double target = double(top_p_) * double(int64_t(total));
        Race race(key_);
        for (int64_t i = 0; i < count; ++i) {
            float score = score_of(keys[i]);
            if (i && (!(double(int64_t(before)) < target) || score < log_min_p_)) break;
            before += mass_of(score);
            race.enter(keys[i]);
        }
        return race.winner();
    }

    uint64_t* scratch(int64_t count) const {
        return static_cast<uint64_t*>(pool_scratch(pool_, thread_, kTileScratch, size_t(count) * sizeof(uint64_t)));
    }

    float* logits_;
    int64_t vocab_;
    const uint32_t* key_;
    float temperature_;
    int64_t top_k_;
    float top_p_, log_min_p_;
    const uint32_t* words_;
    int64_t num_words_;
    Pool* pool_;
    int thread_;
    float largest_ = -kInfinity;  // of the allowed tokens
};

void penalise_row(float* logits, int64_t vocab, const int32_t* counts, const float* penalties) {
    float repetition = penalties[0], frequency = penalties[1], presence = penalties[2];
    for (int64_t first = 0; first < vocab; first += kBlock) {
        int64_t end = std::min(first + kBlock, vocab);
        int32_t any = 0;
        for (int64_t id = first; id < end; ++id) any |= counts[id];
        if (!any) continue;
        for (int64_t id = first; id < end; ++id) {
            if (!counts[id]) continue;
            float& x = logits[id];
            x = x > 0 ? x / repetition : x * repetition;
            int32_t seen = counts[id] & (kInPrompt - 1);
            if (seen) x = x - float(seen) * frequency - presence;
        }
    }
}

}  // namespace

void run_draw(Pool* pool, const Draw& draw) {
    // Small rows share a tile.
    parallel_ranges(pool, draw.rows, draw.vocab, [&](int64_t first, int64_t end, int thread) {
        for (int64_t row = first; row < end; ++row) draw.token_ids[row] = Row(draw, row, pool, thread).draw();
    });
}

void run_penalise(
    Pool* pool, float* logits, int64_t vocab, const int64_t* places, int64_t num_places, const int32_t* counts,
    const int64_t* slots, const float* penalties) {
    parallel_ranges(pool, num_places, vocab, [&](int64_t first, int64_t end, int) {
        for (int64_t i = first; i < end; ++i)
            penalise_row(logits + places[i] * vocab, vocab, counts + slots[i] * vocab, penalties + 3 * i);
    });
}

}  // namespace troupe
