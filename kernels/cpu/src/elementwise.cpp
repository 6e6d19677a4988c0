#include "elementwise.h"

#include <cmath>
#include <type_traits>

#include "kv_pieces.h"

namespace troupe {

namespace {

// Call `body(first, lanes)` over [0, size) in vectors; `lanes` is below kLanes at most once, at the end.
template <class Body>
inline void for_vectors(int64_t size, const Body& body) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) body(i, kLanes);
    if (i < size) body(i, int(size - i));
}

template <class T>
inline Vec load_lanes(const T* p, int lanes) {
    return lanes == kLanes ? load(p) : load_first(p, lanes);
}

template <class T>
inline void store_lanes(T* p, Vec x, int lanes) {
    if (lanes == kLanes)
        store(p, x);
    else
        store_first(p, x, lanes);
}

template <class T>
float inverse_rms(const T* x, float eps, int64_t size) {
    Vec squares = zero();
    for_vectors(size, [&](int64_t i, int lanes) {
        Vec value = load_lanes(x + i, lanes);
        squares = fma(value, value, squares);
    });
    return 1.0f / std::sqrt(sum(squares) / float(size) + eps);
}

template <class T>
void norm_row(const T* x, const T* weight, float eps, T* out, int64_t size) {
    Vec factor = splat(inverse_rms(x, eps, size));
    for_vectors(size, [&](int64_t i, int lanes) {
        Vec value = mul(load_lanes(x + i, lanes), factor);
        store_lanes(out + i, mul(value, load_lanes(weight + i, lanes)), lanes);
    });
}

template <class T>
void add_row(const T* x, T* residual, int64_t size) {
    for_vectors(size, [&](int64_t i, int lanes) {
        store_lanes(residual + i, add(load_lanes(x + i, lanes), load_lanes(residual + i, lanes)), lanes);
    });
}

// x * sigmoid(x), or with x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)) the tanh approximation of GELU.
template <int kind, class T>
void activate_row(const T* x, T* out, int64_t size) {
    for_vectors(size, [&](int64_t i, int lanes) {
        Vec gate = load_lanes(x + i, lanes);
        Vec inner = gate;
        if (kind != kSiluMul) {
            Vec cubic = fma(mul(gate, gate), splat(0.044715f), splat(1.0f));
            inner = mul(mul(gate, splat(1.5957691216f)), cubic);
        }
        Vec result = div(gate, add(splat(1.0f), exp(sub(zero(), inner))));
        if (kind != kGelu) result = mul(result, load_lanes(x + size + i, lanes));
        store_lanes(out + i, result, lanes);
    });
}

// Norm (with a weight) and rotate one head.
template <class T, class Out>
void rope_head(const T* head, const T* norm, const RopeStore& rope, int64_t token, Out* out) {
    int64_t dim = rope.head_dim, half = dim / 2;
    const float* cos = rope.cos + token * dim;
    const float* sin = rope.sin + token * dim;
    Vec factor = splat(norm ? inverse_rms(head, rope.eps, dim) : 1.0f);
    for_vectors(half, [&](int64_t i, int lanes) {
        Vec first = mul(load_lanes(head + i, lanes), factor);
        Vec second = mul(load_lanes(head + half + i, lanes), factor);
        if (norm) {
            first = mul(first, load_lanes(norm + i, lanes));
            second = mul(second, load_lanes(norm + half + i, lanes));
        }
        Vec turned_first = fma(second, load_lanes(sin + i, lanes), mul(first, load_lanes(cos + i, lanes)));
        Vec turned_second =
            fma(first, load_lanes(sin + half + i, lanes), mul(second, load_lanes(cos + half + i, lanes)));
        store_lanes(out + i, turned_first, lanes);
        store_lanes(out + half + i, turned_second, lanes);
    });
}

// Rotate the keys of a token and write them, with its values, into the cache. In int8 keys are rounded once, from their
// float32 rotation.
template <class T, class Number>
void store_token(const RopeStore& rope, int64_t token, const T* keys, const T* norm, const T* values) {
    Pieces<Number> pieces(rope.piece_slots, rope.num_kv_heads, rope.head_dim);
    int64_t dim = rope.head_dim, slot = rope.slots[token];
    std::conditional_t<Pieces<Number>::kHasScales, float, T> rotated[kMaxHeadDim];
    for (int64_t head = 0; head < rope.num_kv_heads; ++head, keys += dim, values += dim) {
        rope_head(keys, norm ? norm + head * dim : nullptr, rope, token, rotated);
        uint8_t* key_piece = pieces.find(rope.k_cache, slot, head);
        uint8_t* value_piece = pieces.find(rope.v_cache, slot, head);
        if constexpr (Pieces<Number>::kHasScales) {
            store_rounded(pieces, slot, rotated, values, key_piece, value_piece);
        } else {
            pieces.put_key(key_piece, slot, rotated);
            if (rope.has_values()) pieces.put_value(value_piece, slot, values);
        }
    }
}

template <class T>
void rope_token(const RopeStore& rope, int64_t token) {
    int64_t dim = rope.head_dim, num_heads = rope.num_heads, num_kv_heads = rope.num_kv_heads;
    auto* heads = static_cast<const T*>(rope.heads) + token * (num_heads + (1 + rope.has_values()) * num_kv_heads) * dim;
    auto* norm = static_cast<const T*>(rope.qk_norm);
    auto* q = static_cast<T*>(rope.q) + token * num_heads * dim;
    for (int64_t head = 0; head < num_heads; ++head)
        rope_head(heads + head * dim, norm ? norm + head * dim : nullptr, rope, token, q + head * dim);
    const T *keys = heads + num_heads * dim, *values = keys + num_kv_heads * dim;
    const T* key_norm = norm ? norm + num_heads * dim : nullptr;
    auto* store = rope.is_int8 ? store_token<T, uint8_t> : store_token<T, T>;
    store(rope, token, keys, key_norm, values);
}

// Call `body` with a null pointer of the dtype's type.
template <class Body>
void with_dtype(int32_t dtype, const Body& body) {
    if (dtype == kBFloat16)
        body(static_cast<bf16*>(nullptr));
    else
        body(static_cast<float*>(nullptr));
}

template <int kind>
void activate(Pool* pool, int32_t dtype, const void* x, void* out, int64_t rows, int64_t size) {
    int64_t width = kind == kGelu ? size : 2 * size;
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        // An exponential weighs about as much as eight other operations.
        parallel_ranges(pool, rows, 8 * size, [&](int64_t first, int64_t end, int) {
            for (int64_t row = first; row < end; ++row)
                activate_row<kind>(static_cast<const T*>(x) + row * width, static_cast<T*>(out) + row * size, size);
        });
    });
}

}  // namespace

void run_rms_norm(
    Pool* pool, int32_t dtype, const void* x, const void* weight, int64_t weight_rows, float eps, void* out, int64_t rows,
    int64_t size) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_ranges(pool, rows, size, [&](int64_t first, int64_t end, int) {
            for (int64_t row = first; row < end; ++row) {
                auto* weights = static_cast<const T*>(weight) + row % weight_rows * size;
                norm_row(static_cast<const T*>(x) + row * size, weights, eps, static_cast<T*>(out) + row * size, size);
            }
        });
    });
}

void run_add_rms_norm(
    Pool* pool, int32_t dtype, const void* x, void* residual, const void* weight, float eps, void* out, int64_t rows,
    int64_t size) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_ranges(pool, rows, size, [&](int64_t first, int64_t end, int) {
            for (int64_t row = first; row < end; ++row) {
                T* sums = static_cast<T*>(residual) + row * size;
                add_row(static_cast<const T*>(x) + row * size, sums, size);
                norm_row(sums, static_cast<const T*>(weight), eps, static_cast<T*>(out) + row * size, size);
            }
        });
    });
}

void run_activation(Pool* pool, int32_t kind, int32_t dtype, const void* x, void* out, int64_t rows, int64_t size) {
    if (kind == kSiluMul)
        activate<kSiluMul>(pool, dtype, x, out, rows, size);
    else if (kind == kGeluMul)
        activate<kGeluMul>(pool, dtype, x, out, rows, size);
    else
        activate<kGelu>(pool, dtype, x, out, rows, size);
}

void run_rope_store(Pool* pool, const RopeStore& rope) {
    int64_t work = (rope.num_heads + 2 * rope.num_kv_heads) * rope.head_dim;
    with_dtype(rope.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_ranges(pool, rope.num_tokens, 4 * work, [&](int64_t first, int64_t end, int) {
            for (int64_t token = first; token < end; ++token) rope_token<T>(rope, token);
        });
    });
}

}  // namespace troupe
