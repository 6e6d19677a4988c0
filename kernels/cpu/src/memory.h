// Advice to the kernel about large pieces of memory.

#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace troupe {

// Let memory that is yet to be written come in pages of 2 MiB: reading through it then misses the TLB 512 times less.
inline void advise_huge_pages(void* memory, size_t bytes) {
    constexpr uintptr_t page = 4096;
    uintptr_t start = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
    uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / page * page;
    if (end > start) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
}

}  // namespace troupe
