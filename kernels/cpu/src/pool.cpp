#include "pool.h"

#include <pthread.h>
#include <time.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <climits>
#include <cstdlib>
#include <new>

namespace troupe {

namespace {

// How long a thread watches memory before it goes to sleep: about the length of the serial parts of a step.
constexpr int64_t kWorkerSpinNanoseconds = 40'000;
constexpr int64_t kCallerSpinNanoseconds = 60'000;

constexpr uint64_t kTileBits = 32;
constexpr uint64_t kTileMask = (uint64_t(1) << kTileBits) - 1;

int64_t now_nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

#ifdef __linux__
void futex_wait(std::atomic<uint32_t>* word, uint32_t expected) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>* word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}
#else
// What libc++ waits with on macOS: operation 1 compares 32 bits, 0x100 wakes all.
extern "C" int __ulock_wait(uint32_t operation, void* address, uint64_t expected, uint32_t microseconds);
extern "C" int __ulock_wake(uint32_t operation, void* address, uint64_t unused);

void futex_wait(std::atomic<uint32_t>* word, uint32_t expected) { __ulock_wait(1, word, expected, 0); }
void futex_wake(std::atomic<uint32_t>* word, int) { __ulock_wake(0x101, word, 0); }
#endif

void relax() {
#ifdef __aarch64__
    asm volatile("isb");
#else
    __builtin_ia32_pause();
#endif
}

// Spin on `is_over` for at most the given time; whether it came true.
template <class Predicate>
bool watch(int64_t nanoseconds, const Predicate& is_over) {
    int64_t end = 0;
    for (int round = 0;; ++round) {
        if (is_over()) return true;
        relax();
        if (round % 64 == 63) {
            int64_t now = now_nanoseconds();
            if (!end) end = now + nanoseconds;
            if (now >= end) return false;
        }
    }
}

struct Scratch {
    void* memory[kNumScratchSlots] = {};
    size_t size[kNumScratchSlots] = {};
};

}  // namespace

// One loop at a time. Each thread has a run of neighbouring tiles, so that it reads weights in order: pieces of 18 KiB
// read in turn by two cores take a quarter longer. A run's ticket is (number of the loop, next tile), so that taking a
// tile of an older loop fails; the other fields of a loop are written before its tickets and stay until every tile is
// done.
class Pool {
public:
    explicit Pool(int num_threads) : num_threads_(num_threads), scratch_(new Scratch[num_threads]), runs_(new Run[num_threads]) {
        pthread_mutex_init(&mutex, nullptr);
        for (int thread = 1; thread < num_threads; ++thread) {
            starts_[thread] = {this, thread};
            // With fewer threads than wished for, the others do more.
            if (pthread_create(&handles_[num_workers_], nullptr, worker_main, &starts_[thread]) != 0) break;
            ++num_workers_;
        }
    }

    ~Pool() {
        is_closed_.store(true);
        epoch_.fetch_add(1);
        futex_wake(&epoch_, INT_MAX);
        for (int worker = 0; worker < num_workers_; ++worker) pthread_join(handles_[worker], nullptr);
        for (int thread = 0; thread < num_threads_; ++thread)
            for (void* memory : scratch_[thread].memory) free(memory);
        delete[] scratch_;
        delete[] runs_;
        pthread_mutex_destroy(&mutex);
    }

    int num_threads() const { return num_threads_; }

    void run(int64_t num_tiles, TileFunction function, void* context) {
        if (num_tiles <= 1 || num_workers_ == 0) {
            for (int64_t tile = 0; tile < num_tiles; ++tile) function(context, tile, 0);
            return;
        }
        uint64_t loop = runs_[0].ticket.load(std::memory_order_relaxed) >> kTileBits;
        // No tile of the last loop can be taken once a field of this one can be seen.
        for (int run = 0; run < num_threads_; ++run)
            runs_[run].ticket.store(loop << kTileBits | kTileMask, std::memory_order_seq_cst);
        function_.store(function, std::memory_order_release);
        context_.store(context, std::memory_order_release);
        num_tiles_.store(num_tiles, std::memory_order_release);
        num_done_.store(0, std::memory_order_release);
        for (int run = 0; run < num_threads_; ++run)
            runs_[run].ticket.store((loop + 1) << kTileBits | first_tile(run, num_tiles), std::memory_order_seq_cst);
        epoch_.fetch_add(1, std::memory_order_seq_cst);
        if (num_sleeping_.load(std::memory_order_seq_cst) > 0) futex_wake(&epoch_, int(num_tiles - 1));
        take_tiles(0);
        wait_for(uint32_t(num_tiles));
    }

    void* scratch(int thread, ScratchSlot slot, size_t bytes) {
        Scratch& own = scratch_[thread];
        if (own.size[slot] < bytes) {
            free(own.memory[slot]);
            own.size[slot] = (bytes + bytes / 4 + 4095) / 4096 * 4096;
            own.memory[slot] = aligned_alloc(4096, own.size[slot]);
            if (!own.memory[slot]) abort();
        }
        return own.memory[slot];
    }

    pthread_mutex_t mutex;

private:
    struct alignas(64) Run {
        std::atomic<uint64_t> ticket{0};
    };

    struct Start {
        Pool* pool;
        int thread;
    };

    static void* worker_main(void* argument) {
        auto* start = static_cast<Start*>(argument);
        start->pool->work(start->thread);
        return nullptr;
    }

    void work(int thread) {
        while (!is_closed_.load(std::memory_order_relaxed)) {
            uint32_t seen = epoch_.load(std::memory_order_seq_cst);
            take_tiles(thread);
            auto has_news = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
            if (watch(kWorkerSpinNanoseconds, has_news)) continue;
            num_sleeping_.fetch_add(1, std::memory_order_seq_cst);
            // Between the addition and the sleep a caller may have come: then the word has changed and nobody sleeps.
            futex_wait(&epoch_, seen);
            num_sleeping_.fetch_sub(1, std::memory_order_seq_cst);
        }
    }

    int64_t first_tile(int run, int64_t num_tiles) const { return num_tiles * run / num_threads_; }

    // Take tiles of the current loop until there are none left, first those of the thread's own run.
    void take_tiles(int thread) {
        for (int offset = 0; offset < num_threads_; ++offset) take_run((thread + offset) % num_threads_, thread);
    }

    void take_run(int run, int thread) {
        std::atomic<uint64_t>& next = runs_[run].ticket;
        uint64_t ticket = next.load(std::memory_order_acquire);
        for (;;) {
            TileFunction function = function_.load(std::memory_order_acquire);
            void* context = context_.load(std::memory_order_acquire);
            int64_t num_tiles = num_tiles_.load(std::memory_order_acquire);
            int64_t tile = int64_t(ticket & kTileMask);
            if (tile >= first_tile(run + 1, num_tiles)) {
                // Either the run has no tiles left, or a new loop's fields were read beside an old ticket.
                uint64_t again = next.load(std::memory_order_acquire);
                if (again == ticket) return;
                ticket = again;
                continue;
            }
            // Succeeds only while the loop of this ticket is unfinished, so what was read above belongs to it.
            if (!next.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire))
                continue;
            function(context, tile, thread);
            uint32_t done = num_done_.fetch_add(1, std::memory_order_seq_cst) + 1;
            if (done == uint32_t(num_tiles) && is_caller_asleep_.load(std::memory_order_seq_cst))
                futex_wake(&num_done_, 1);
            ticket = next.load(std::memory_order_acquire);
        }
    }

    void wait_for(uint32_t num_tiles) {
        auto is_done = [&] { return num_done_.load(std::memory_order_acquire) == num_tiles; };
        if (watch(kCallerSpinNanoseconds, is_done)) return;
        is_caller_asleep_.store(true, std::memory_order_seq_cst);
        for (uint32_t done; (done = num_done_.load(std::memory_order_seq_cst)) != num_tiles;) futex_wait(&num_done_, done);
        is_caller_asleep_.store(false, std::memory_order_relaxed);
    }

    static constexpr int kMaxThreads = 256;

    alignas(64) std::atomic<uint32_t> num_done_{0};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::atomic<TileFunction> function_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::atomic<int64_t> num_tiles_{0};
    std::atomic<int> num_sleeping_{0};
    std::atomic<bool> is_caller_asleep_{false};
    std::atomic<bool> is_closed_{false};
    int num_threads_;
    int num_workers_ = 0;
    Start starts_[kMaxThreads] = {};
    pthread_t handles_[kMaxThreads] = {};
    Scratch* scratch_;
    Run* runs_;

    friend Pool* make_pool(int num_threads);
};

Pool* make_pool(int num_threads) {
    if (num_threads < 1 || num_threads > Pool::kMaxThreads) return nullptr;
    return new Pool(num_threads);
}

void free_pool(Pool* pool) { delete pool; }

int pool_threads(const Pool* pool) { return pool->num_threads(); }

void pool_run(Pool* pool, int64_t num_tiles, TileFunction function, void* context) {
    pool->run(num_tiles, function, context);
}

void* pool_scratch(Pool* pool, int thread, ScratchSlot slot, size_t bytes) {
    return pool->scratch(thread, slot, bytes);
}

PoolLock::PoolLock(Pool* pool) : pool_(pool) { pthread_mutex_lock(&pool_->mutex); }
PoolLock::~PoolLock() { pthread_mutex_unlock(&pool_->mutex); }

}  // namespace troupe
