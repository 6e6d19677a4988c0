// Eight float32 lanes in two registers of 64-bit ARM. In this order of sums the results are those of AVX2.

#pragma once

#include <arm_neon.h>

namespace troupe {

constexpr int kLanes = 8;
struct Vec {
    float32x4_t low, high;
};
struct VecInt {
    int32x4_t low, high;
};

inline float32x4_t as_float(int32x4_t x) { return vreinterpretq_f32_s32(x); }
inline int32x4_t as_int(float32x4_t x) { return vreinterpretq_s32_f32(x); }
inline int32x4_t as_int(uint32x4_t x) { return vreinterpretq_s32_u32(x); }
inline int8x16_t as_bytes(int32x4_t x) { return vreinterpretq_s8_s32(x); }
inline uint16x8_t as_halves(int32x4_t x) { return vreinterpretq_u16_s32(x); }

inline Vec splat(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline Vec zero() { return splat(0.0f); }
inline Vec load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline void store(float* p, Vec x) { vst1q_f32(p, x.low), vst1q_f32(p + 4, x.high); }
inline Vec add(Vec a, Vec b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline Vec sub(Vec a, Vec b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline Vec mul(Vec a, Vec b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
inline Vec div(Vec a, Vec b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
// The second operand where either is NaN, unlike the instructions of these names.
inline float32x4_t max(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline float32x4_t min(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline Vec max(Vec a, Vec b) { return {max(a.low, b.low), max(a.high, b.high)}; }
inline Vec min(Vec a, Vec b) { return {min(a.low, b.low), min(a.high, b.high)}; }
inline Vec abs(Vec a) { return {vabsq_f32(a.low), vabsq_f32(a.high)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
inline Vec round(Vec a) { return {vrndnq_f32(a.low), vrndnq_f32(a.high)}; }
inline Vec floor(Vec a) { return {vrndmq_f32(a.low), vrndmq_f32(a.high)}; }

inline float32x4_t scale_by_power(float32x4_t a, float32x4_t n) {
    int32x4_t whole = vcvtnq_s32_f32(n), half = vshrq_n_s32(whole, 1), bias = vdupq_n_s32(127);
    float32x4_t first = as_float(vshlq_n_s32(vaddq_s32(half, bias), 23));
    float32x4_t second = as_float(vshlq_n_s32(vaddq_s32(vsubq_s32(whole, half), bias), 23));
    return vmulq_f32(vmulq_f32(a, first), second);
}
inline Vec scale_by_power(Vec a, Vec n) { return {scale_by_power(a.low, n.low), scale_by_power(a.high, n.high)}; }

inline float sum(Vec a) {
    float32x4_t four = vaddq_f32(a.low, a.high);
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float max_of(Vec a) {
    float32x4_t four = max(a.low, a.high);
    four = max(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(max(four, vextq_f32(four, four, 1)), 0);
}

// a where the mask is set, else b.
inline Vec choose(uint32x4_t low, uint32x4_t high, Vec a, Vec b) {
    return {vbslq_f32(low, a.low, b.low), vbslq_f32(high, a.high, b.high)};
}
inline Vec keep_first(Vec x, int n, float fill) {
    const int32_t lanes[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7};
    int32x4_t count = vdupq_n_s32(n);
    return choose(vcgtq_s32(count, vld1q_s32(lanes)), vcgtq_s32(count, vld1q_s32(lanes + 4)), x, splat(fill));
}
inline Vec drop_first(Vec x, int n, float fill) {
    const int32_t lanes[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7};
    int32x4_t count = vdupq_n_s32(n);
    return choose(vcgtq_s32(count, vld1q_s32(lanes)), vcgtq_s32(count, vld1q_s32(lanes + 4)), splat(fill), x);
}
inline Vec zero_below(Vec result, Vec x, float limit) {
    float32x4_t least = vdupq_n_f32(limit);
    return choose(vcltq_f32(x.low, least), vcltq_f32(x.high, least), zero(), result);
}

inline uint16x4_t narrow(float32x4_t x) {
    uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    rounded = vbslq_u32(vceqq_f32(x, x), rounded, vorrq_u32(bits, vdupq_n_u32(0x400000)));
    return vshrn_n_u32(rounded, 16);
}
inline Vec load(const bf16* p) {
    uint16x8_t x = vld1q_u16(&p->bits);
    return {as_float(as_int(vshll_n_u16(vget_low_u16(x), 16))), as_float(as_int(vshll_high_n_u16(x, 16)))};
}
inline void store(bf16* p, Vec x) { vst1q_u16(&p->bits, vcombine_u16(narrow(x.low), narrow(x.high))); }

inline VecInt splat_int(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
inline VecInt zero_int() { return splat_int(0); }
inline VecInt load_int(const void* p) {
    auto* words = static_cast<const int32_t*>(p);
    return {vld1q_s32(words), vld1q_s32(words + 4)};
}
inline VecInt load_int_first(const void* p, int n) {
    int32_t lanes[kLanes] = {};
    std::memcpy(lanes, p, n * 4);
    return load_int(lanes);
}
inline void store_int(void* p, VecInt x) {
    auto* words = static_cast<int32_t*>(p);
    vst1q_s32(words, x.low), vst1q_s32(words + 4, x.high);
}
inline Vec to_vec(VecInt x) { return {vcvtq_f32_s32(x.low), vcvtq_f32_s32(x.high)}; }
inline VecInt to_int(Vec x) { return {vcvtnq_s32_f32(x.low), vcvtnq_s32_f32(x.high)}; }
inline VecInt add_int(VecInt a, VecInt b) { return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)}; }
inline VecInt sub_int(VecInt a, VecInt b) { return {vsubq_s32(a.low, b.low), vsubq_s32(a.high, b.high)}; }
inline VecInt max_int(VecInt a, VecInt b) { return {vmaxq_s32(a.low, b.low), vmaxq_s32(a.high, b.high)}; }
inline Vec as_float(VecInt x) { return {as_float(x.low), as_float(x.high)}; }
inline VecInt as_int(Vec x) { return {as_int(x.low), as_int(x.high)}; }
inline VecInt and_int(VecInt a, VecInt b) { return {vandq_s32(a.low, b.low), vandq_s32(a.high, b.high)}; }
inline VecInt or_int(VecInt a, VecInt b) { return {vorrq_s32(a.low, b.low), vorrq_s32(a.high, b.high)}; }
inline VecInt xor_int(VecInt a, VecInt b) { return {veorq_s32(a.low, b.low), veorq_s32(a.high, b.high)}; }
inline VecInt shift_left_7(VecInt x) { return {vshlq_n_s32(x.low, 7), vshlq_n_s32(x.high, 7)}; }
inline VecInt shift_left_16(VecInt x) { return {vshlq_n_s32(x.low, 16), vshlq_n_s32(x.high, 16)}; }
inline VecInt upper_16(VecInt x) { return and_int(x, splat_int(int32_t(0xffff0000u))); }
// Of 16-bit numbers.
template <int COUNT>
inline int32x4_t shift_right(int32x4_t x) { return vreinterpretq_s32_u16(vshrq_n_u16(as_halves(x), COUNT)); }
template <int COUNT>
inline int32x4_t shift_left(int32x4_t x) { return vreinterpretq_s32_u16(vshlq_n_u16(as_halves(x), COUNT)); }
template <int COUNT>
inline VecInt shift_right(VecInt x) { return {shift_right<COUNT>(x.low), shift_right<COUNT>(x.high)}; }
template <int COUNT>
inline VecInt shift_left(VecInt x) { return {shift_left<COUNT>(x.low), shift_left<COUNT>(x.high)}; }

inline Vec load_half(const uint8_t* p) {
    float16x8_t x = vreinterpretq_f16_u8(vld1q_u8(p));
    return {vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x)};
}
inline float read_half(const uint8_t* p) {
    __fp16 half;
    std::memcpy(&half, p, 2);
    return half;
}
inline void write_half(uint8_t* p, float value) {
    __fp16 half = __fp16(value);
    std::memcpy(p, &half, 2);
}
inline void store_bytes(uint8_t* p, Vec x) {
    VecInt whole = to_int(x);
    vst1_s8(reinterpret_cast<int8_t*>(p), vqmovn_s16(vcombine_s16(vqmovn_s32(whole.low), vqmovn_s32(whole.high))));
}

// Four products of signed bytes in each lane. Codes that other processors take as unsigned are below 128.
#define TROUPE_DOT 1
constexpr bool kDotIsSigned = true;
inline int32x4_t add_products(int32x4_t sum, int8x16_t a, int8x16_t b) {
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(sum, a, b);
#else
    int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
    return vpadalq_s16(sum, vpaddq_s16(low, high));
#endif
}
inline VecInt add_products(VecInt sum, VecInt a, VecInt b) {
    return {add_products(sum.low, as_bytes(a.low), as_bytes(b.low)), add_products(sum.high, as_bytes(a.high), as_bytes(b.high))};
}

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define TROUPE_BF16 1
inline bfloat16x8_t as_bf16(int32x4_t x) { return vreinterpretq_bf16_s32(x); }
inline Vec add_bf16_products(Vec sum, VecInt x, VecInt w) {
    return {vbfdotq_f32(sum.low, as_bf16(x.low), as_bf16(w.low)), vbfdotq_f32(sum.high, as_bf16(x.high), as_bf16(w.high))};
}
#endif

}  // namespace troupe
