// Sums and gathers between the ranks of one machine, through memory that they share: each rank copies its part into a
// slot of its own, says so, and reads the slots of all ranks once all have said so. Sums run in the order of ranks, in float32,
// and are rounded once, so that every rank has the same bits. Called by cpu_all_reduce.py and, around the linears that
// end in a sum or a gather, by decoder.cpp.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>
#if defined(__linux__)
#include <climits>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include "linear.h"
#include "parallel.h"
#include "simd.h"

namespace {

constexpr int MAX_RANKS = 64;
constexpr int64_t SLOT_BYTES = 256 << 10;  // two ranks' two slots each fit into a core's cache
constexpr int64_t SERIAL_ELEMENTS = 16384;
constexpr int SPINS = 4000;   // about 40 us: how far apart two ranks end the same product, mostly
constexpr int YIELDS = 100;   // then the core is for others, perhaps for the rank that is waited for
constexpr int SLEEP_NS = 50'000'000;  // then it sleeps, and looks after each such time whether that rank still lives

struct alignas(64) Arrived {
    std::atomic<uint32_t> round;
};

// At the front of the shared memory, which begins as zeros. After it come two slots of each rank, which rounds take in
// turn: a rank that writes for a round knows that all have read what was written two rounds before.
struct Header {
    Arrived arrived[MAX_RANKS];
    alignas(64) std::atomic<uint32_t> sleepers;
};

// One rank's end of it; mirrored in cpu_all_reduce.py.
struct SharedGroup {
    char* memory;
    int file, rank, num_ranks;
    uint32_t round;
    int dead;   // the first rank that was found dead, plus one: what follows returns at once, and Python raises
    int alone;  // sums are the rank's own: for measurements that the others take no part in

    Header& header() { return *(Header*)memory; }
    char* slot(int of) { return memory + sizeof(Header) + (2 * of + round % 2) * SLOT_BYTES; }
    bool is_over() const { return dead != 0 || alone != 0; }
};

// Each rank holds a lock on the byte of its number until its process ends, however that happens.
bool is_dead(const SharedGroup& group, int rank) {
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank;
    lock.l_len = 1;
    return fcntl(group.file, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

void sleep_until_changed(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
    const timespec timeout = {0, SLEEP_NS};
    syscall(SYS_futex, &word, FUTEX_WAIT, value, &timeout, nullptr, 0);
#else
    usleep(50);
#endif
}

void wake(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

void pause_shortly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// False if the rank died before it arrived.
bool wait_for(SharedGroup& group, int rank) {
    std::atomic<uint32_t>& word = group.header().arrived[rank].round;
    const auto arrived = [&] { return (int32_t)(word.load(std::memory_order_acquire) - group.round) >= 0; };
    for (int i = 0; i < SPINS; i++) {
        if (arrived()) return true;
        pause_shortly();
    }
    for (int i = 0; i < YIELDS; i++) {
        if (arrived()) return true;
        sched_yield();
    }
    for (;;) {
        std::atomic<uint32_t>& sleepers = group.header().sleepers;
        sleepers.fetch_add(1);
        const uint32_t value = word.load();
        if ((int32_t)(value - group.round) < 0) sleep_until_changed(word, value);
        sleepers.fetch_sub(1);
        if (arrived()) return true;
        if (is_dead(group, rank)) return arrived();
    }
}

// Says that this rank's slot holds the round's part, and waits until everybody's does.
bool meet(SharedGroup& group) {
    Header& header = group.header();
    std::atomic<uint32_t>& own = header.arrived[group.rank].round;
    own.store(group.round);
    if (header.sleepers.load() > 0) wake(own);
    for (int rank = 0; rank < group.num_ranks; rank++) {
        if (rank != group.rank && !wait_for(group, rank)) {
            group.dead = rank + 1;
            return false;
        }
    }
    return true;
}

template <class T>
void sum_slots(SharedGroup& group, T* to, int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i += LANES) {
        const int count = (int)std::min<int64_t>(LANES, end - i);
        Floats sum = {};
        for (int rank = 0; rank < group.num_ranks; rank++) sum += load_upto((const T*)group.slot(rank) + i, count);
        store_upto(to + i, sum, count);
    }
}

template <class T>
void all_reduce(SharedGroup& group, T* x, int64_t count) {
    constexpr int64_t MOST = SLOT_BYTES / sizeof(T), BLOCK = SERIAL_ELEMENTS / 4;
    for (int64_t first = 0; first < count && !group.is_over(); first += MOST) {
        const int64_t size = std::min(MOST, count - first);
        group.round++;
        memcpy(group.slot(group.rank), x + first, size * sizeof(T));
        if (!meet(group)) return;
        parallel_for((size + BLOCK - 1) / BLOCK, size < SERIAL_ELEMENTS, [&](int64_t block) {
            sum_slots(group, x + first, block * BLOCK, std::min(size, (block + 1) * BLOCK));
        });
    }
}

// Every rank's x [num_rows, width] side by side: to [num_rows, num_ranks * width]. Widths are in bytes.
void all_gather(SharedGroup& group, const char* x, char* to, int64_t num_rows, int64_t width) {
    const int64_t end = num_rows * width;
    const auto place = [&](int rank, const char* from, int64_t first, int64_t size) {
        for (int64_t done = 0, count; done < size; done += count) {
            const int64_t row = (first + done) / width, column = (first + done) % width;
            count = std::min(width - column, size - done);
            memcpy(to + (row * group.num_ranks + rank) * width + column, from + done, count);
        }
    };
    for (int rank = 0; group.alone && rank < group.num_ranks; rank++) place(rank, x, 0, end);
    for (int64_t first = 0; first < end && !group.is_over(); first += SLOT_BYTES) {
        const int64_t size = std::min(SLOT_BYTES, end - first);
        group.round++;
        memcpy(group.slot(group.rank), x + first, size);
        if (!meet(group)) return;
        for (int rank = 0; rank < group.num_ranks; rank++) place(rank, group.slot(rank), first, size);
    }
}

// A linear that holds some of a product's inputs: what is left to do is the sum over ranks.
struct RowParallel {
    void (*run)(const void* self, const void* x, void* y, int num_rows);
    const void* self;
    SharedGroup* group;
    int dtype, out_features;
};

// A linear that holds some of a product's outputs and needs all of its inputs, of which a rank has some: both are
// gathered. The widths are those of a rank's part of a row, in bytes.
struct ColumnParallel {
    void (*run)(const void* self, const void* x, void* y, int num_rows);
    const void* self;
    SharedGroup* group;
    int in_bytes, out_bytes;
};

}  // namespace

extern "C" int manta_all_reduce_layout(int which) {
    return which == 0   ? sizeof(SharedGroup)
           : which == 1 ? sizeof(RowParallel)
           : which == 2 ? sizeof(ColumnParallel)
           : which == 3 ? sizeof(Header)
           : which == 4 ? SLOT_BYTES
                        : MAX_RANKS;
}

// x [count] becomes the sum of all ranks' x. dtype 0: float32, 1: bfloat16.
extern "C" void manta_all_reduce(SharedGroup* group, int dtype, void* x, int64_t count) {
    if (dtype == 0)
        all_reduce(*group, (float*)x, count);
    else
        all_reduce(*group, (bf16*)x, count);
}

// Every rank's `x` [num_bytes] one after the other to rank 0's `to`; the others' is null.
extern "C" void manta_gather(SharedGroup* group, const char* x, char* to, int64_t num_bytes) {
    for (int64_t first = 0; first < num_bytes && !group->is_over(); first += SLOT_BYTES) {
        const int64_t size = std::min(SLOT_BYTES, num_bytes - first);
        group->round++;
        memcpy(group->slot(group->rank), x + first, size);
        if (!meet(*group)) return;
        for (int rank = 0; to != nullptr && rank < group->num_ranks; rank++)
            memcpy(to + rank * num_bytes + first, group->slot(rank), size);
    }
}

// In the form that decoder.cpp calls every linear in; `linear` is a RowParallel.
extern "C" void manta_run_row_parallel(const void* linear, const void* x, void* y, int num_rows) {
    const RowParallel& l = *(const RowParallel*)linear;
    l.run(l.self, x, y, num_rows);
    manta_all_reduce(l.group, l.dtype, y, (int64_t)num_rows * l.out_features);
}

// Every rank's x [num_rows, width] side by side: to [num_rows, num_ranks * width]. `width` is in bytes.
extern "C" void manta_all_gather(SharedGroup* group, const char* x, char* to, int64_t num_rows, int64_t width) {
    all_gather(*group, x, to, num_rows, width);
}

// As manta_run_row_parallel; `linear` is a ColumnParallel. x is the rank's part of the inputs, y all outputs.
extern "C" void manta_run_column_parallel(const void* linear, const void* x, void* y, int num_rows) {
    const ColumnParallel& l = *(const ColumnParallel*)linear;
    char* const inputs = of_thread<char, 6>((int64_t)num_rows * l.in_bytes * l.group->num_ranks);
    char* const outputs = of_thread<char, 7>((int64_t)num_rows * l.out_bytes);
    all_gather(*l.group, (const char*)x, inputs, num_rows, l.in_bytes);
    l.run(l.self, inputs, outputs, num_rows);
    all_gather(*l.group, outputs, (char*)y, num_rows, l.out_bytes);
}
