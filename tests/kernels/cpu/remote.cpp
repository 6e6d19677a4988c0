// Runs the functions of a library for another processor, under an emulator, on the memory of the process that asks.
//
//     remote LIBRARY PID      stdin: Request after Request      stdout: the result of each, 64 bits
//
// Pages of that process are fetched when they are first touched, at their own addresses. After each call the bytes that
// changed are written back.

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

struct Request {
    char name[32];
    int64_t integers[12];
    float number;
    int32_t padding;
};

constexpr int64_t kPage = 4096, kMostPages = 1 << 18;
int memory;
uint8_t* fetched;  // as the pages were
uint64_t pages[kMostPages];
int64_t num_pages = 0;
std::atomic_flag is_busy = ATOMIC_FLAG_INIT;

void* map(int64_t bytes) {
    return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

// Another thread may have brought the page meanwhile.
bool is_there(uint64_t page) {
    for (int64_t at = num_pages - 1; at >= 0 && at > num_pages - 1000; --at)
        if (pages[at] == page) return true;
    return false;
}

void fetch(int, siginfo_t* info, void*) {
    uint64_t page = uint64_t(info->si_addr) / kPage * kPage;
    while (is_busy.test_and_set()) {}
    if (!is_there(page)) {
        uint8_t* copy = fetched + num_pages * kPage;
        if (num_pages == kMostPages || pread(memory, copy, kPage, page) != kPage) {
            fprintf(stderr, "no memory at %p\n", info->si_addr);
            _exit(1);
        }
        void* fresh = map(kPage);
        memcpy(fresh, copy, kPage);
        if (mremap(fresh, kPage, kPage, MREMAP_MAYMOVE | MREMAP_FIXED, page) != (void*)page) _exit(2);
        pages[num_pages++] = page;
    }
    is_busy.clear();
}

void give_back() {
    for (int64_t at = 0; at < num_pages; ++at) {
        auto* now = reinterpret_cast<uint8_t*>(pages[at]);
        const uint8_t* before = fetched + at * kPage;
        for (int64_t first = 0, end; first < kPage; first = end) {
            for (end = first; end < kPage && (now[end] != before[end]) == (now[first] != before[first]);) ++end;
            if (now[first] != before[first] && pwrite(memory, now + first, end - first, pages[at] + first) != end - first)
                _exit(3);
        }
        munmap(now, kPage);
    }
    num_pages = 0;
}

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) fprintf(stderr, "%s\n", dlerror());
    memory = open(("/proc/" + std::string(arguments[2]) + "/mem").c_str(), O_RDWR);
    fetched = static_cast<uint8_t*>(map(kMostPages * kPage));
    struct sigaction action = {};
    action.sa_sigaction = fetch;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    Request request;
    while (library && memory >= 0 && read(0, &request, sizeof(request)) == sizeof(request)) {
        auto* i = request.integers;
        auto* function = reinterpret_cast<int64_t (*)(
            int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
            float)>(dlsym(library, request.name));
        int64_t result = function(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], request.number);
        give_back();
        if (write(1, &result, sizeof(result)) != sizeof(result)) return 1;
    }
}
