// Penalties, masks and draws of tokens, with the tokens of `kernels.torch.sampling`.

#pragma once

#include <cstdint>

#include "pool.h"

namespace troupe {

// Instead of a token. kUndecided: two tokens are so close that the rounding of a logarithm chooses between them.
enum NoToken : int64_t { kBrokenLogits = -1, kNoTokenLeft = -2, kUndecided = -3 };

// Rows that draw; mirrored by `kernels.cpu.structs`.
struct Draw {
    float* logits;  // [rows, vocab]; forbidden tokens become -inf
    int64_t rows, vocab;
    const uint32_t* keys;      // [rows, 2], of the noise
    const float* temperature;  // [rows]; 0: greedy
    const int64_t* top_k;      // [rows]; at least `vocab`: off
    const float* top_p;        // [rows]; above 1: off
    const float* log_min_p;    // [rows]; -inf: off
    const uint32_t* bitmask;   // [rows, words], bit 1 = allowed; null: no row has a mask
    int64_t words;
    int64_t* token_ids;  // [rows]
};

// Each row is computed by one thread; its token does not depend on the others.
void run_draw(Pool* pool, const Draw& draw);

// Apply repetition, frequency and presence penalties to the logits of the rows at `places`.
// counts: [slots, vocab], how often a token is in the output, and 1 << 30 if it is in the prompt.
void run_penalise(
    Pool* pool, float* logits, int64_t vocab, const int64_t* places, int64_t num_places, const int32_t* counts,
    const int64_t* slots, const float* penalties);

}  // namespace troupe
