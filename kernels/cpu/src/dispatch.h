// From the kind of a packed matrix, known at run time, to its arithmetic, known to the compiler.

#pragma once

#include "linear.h"
#include "panels.h"

namespace troupe {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class Body>
void with_plain(int32_t kind, const Body& body) {
    switch (kind) {
        case kWeightFloat32: return body(Float32());
        case kWeightFloat32Half: return body(Float32Half());
        case kWeightSplit: return body(Split());
        default: return body(BFloat16());
    }
}

// The arithmetic of a product, on tiles where there are some.
template <class Body>
void with_product(int32_t kind, const Body& body) {
#ifdef TROUPE_TILES
    if (kind == kWeightBFloat16 && has_tiles()) return body(Tiled<BFloat16>());
    if (kind == kWeightSplit && has_tiles()) return body(Tiled<Split>());
#endif
    if (is_grouped(kind)) return body(Codes());
    with_plain(kind, body);
}

}  // namespace troupe
