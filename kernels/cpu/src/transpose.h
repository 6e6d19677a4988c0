// Squares of 32-bit words, turned: what makes panels out of keys that lie one after another.

#pragma once

#include "simd.h"

namespace troupe {

#ifdef TROUPE_AVX512

inline __m512i lane_numbers() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// out[i][j] = rows[j][i]
inline void transpose(VecInt rows[16]) {
    VecInt a[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    // b[4 k + c]: column c of each 128-bit lane, of rows 4 k .. 4 k + 3
    VecInt b[16];
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int c = 0; c < 4; ++c) {
        VecInt even = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x88);
        VecInt odd = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xdd);
        VecInt even_high = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x88);
        VecInt odd_high = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xdd);
        rows[c] = _mm512_shuffle_i32x4(even, even_high, 0x88);
        rows[8 + c] = _mm512_shuffle_i32x4(even, even_high, 0xdd);
        rows[4 + c] = _mm512_shuffle_i32x4(odd, odd_high, 0x88);
        rows[12 + c] = _mm512_shuffle_i32x4(odd, odd_high, 0xdd);
    }
}

// out[i] = (low[i], high[i]) for 32 values of each
inline void interleave(const bf16* low, const bf16* high, uint32_t* out) {
    // Word 2 i takes value i of the first operand, word 2 i + 1 value i of the second, numbered from 32.
    const __m512i first = _mm512_add_epi32(
        _mm512_set1_epi32(32 << 16), _mm512_mullo_epi32(lane_numbers(), _mm512_set1_epi32(0x10001)));
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(0x100010));
    __m512i a = _mm512_loadu_si512(low), b = _mm512_loadu_si512(high);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(a, first, b));
    _mm512_storeu_si512(out + 16, _mm512_permutex2var_epi16(a, second, b));
}

#else

inline void interleave(const bf16* low, const bf16* high, uint32_t* out) {
    for (int lane = 0; lane < 32; lane += 16) {
        // The halves of each 128-bit lane come out apart: bring the quarters of the input into that order first.
        __m256i a = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i*)(low + lane)), 0xd8);
        __m256i b = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i*)(high + lane)), 0xd8);
        _mm256_storeu_si256((__m256i*)(out + lane), _mm256_unpacklo_epi16(a, b));
        _mm256_storeu_si256((__m256i*)(out + lane + 8), _mm256_unpackhi_epi16(a, b));
    }
}

inline void transpose(VecInt rows[8]) {
    VecInt a[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    VecInt b[8];
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int c = 0; c < 4; ++c) {
        rows[c] = _mm256_permute2x128_si256(b[c], b[4 + c], 0x20);
        rows[4 + c] = _mm256_permute2x128_si256(b[c], b[4 + c], 0x31);
    }
}

#endif

}  // namespace troupe
