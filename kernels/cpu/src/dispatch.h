// From the kind of a packed matrix, known at run time, to its arithmetic, known to the compiler.

#pragma once

#include "linear.h"
#include "panels.h"

namespace troupe {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class Body>
void with_arithmetic(int32_t kind, const Body& body) {
    switch (kind) {
        case kWeightFloat32: return body(Float32());
        case kWeightFloat32Half: return body(Float32Half());
        case kWeightBFloat16: return body(BFloat16());
        default: return body(Int8());
    }
}

// The same for a product of so many rows, on tiles where there are some.
template <class Body>
void with_product(int32_t kind, int64_t rows, const Body& body) {
#ifdef TROUPE_TILES
    if (kind == kWeightBFloat16 && has_tiles()) return body(Tiled<BFloat16>());
    // Sums of integers are exact, so few rows may use the other instructions.
    if (kind == kWeightInt8 && rows > kMaxRows && has_tiles()) return body(Tiled<Int8>());
#endif
    with_arithmetic(kind, body);
}

}  // namespace troupe
