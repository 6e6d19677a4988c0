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

}  // namespace troupe
