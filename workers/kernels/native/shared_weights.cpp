// Maps weights that processes share, on huge pages where the system has them. Called by shared_weights.py.
#include <atomic>

#include "linear.h"

// What a part of a file is mapped for.
enum { SHARES, FILLS, READS_A_DISK };

#if defined(__linux__)
#include <cerrno>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // since Linux 6.1; for memory of files it is the one way, whatever the system's settings are
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // since Linux 5.14
#endif

// Makes huge pages of `memory`, each of which needs some page to begin with. Returns whether the system can do that;
// there may be too few just now.
static bool make_huge_pages(char* memory, int64_t bytes) {
    for (volatile char* page = memory; page < memory + bytes; page += HUGE_PAGE) *page = *page;
    return madvise(memory, bytes, MADV_COLLAPSE) == 0 || errno != EINVAL;
}
#endif

static int64_t next_huge_page(int64_t at) { return (at + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE; }

// `bytes` of a file from `offset` on, with the rest of the huge pages that they begin and end in: a page that is mapped
// in part is mapped as small ones. Null if the system refuses. Only what one `FILLS` can be written to. It is put on
// huge pages, which stay the file's; a file on a disk has none.
extern "C" void* manta_map_weights(int file, int64_t offset, int64_t bytes, int use) {
#if defined(__linux__)
    const int64_t start = offset / HUGE_PAGE * HUGE_PAGE, span = next_huge_page(offset + bytes) - start;
    char* const place = (char*)mmap(nullptr, span + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                                    -1, 0);
    if (place == (char*)MAP_FAILED) return nullptr;
    char* const begin = (char*)next_huge_page((int64_t)place);
    if (begin > place) munmap(place, begin - place);
    munmap(begin + span, place + HUGE_PAGE - begin);
    void* const memory = mmap(begin, span, use == FILLS ? PROT_READ | PROT_WRITE : PROT_READ,
                              (use == SHARES ? MAP_PRIVATE : MAP_SHARED) | MAP_FIXED, file, start);
    if (memory != MAP_FAILED && (use != FILLS || make_huge_pages(begin, span))) return begin + (offset - start);
    munmap(begin, span);
    return nullptr;
#else
    (void)file, (void)offset, (void)bytes, (void)use;
    return nullptr;
#endif
}

extern "C" void manta_unmap_weights(void* memory, int64_t bytes) {
#if defined(__linux__)
    char* const begin = (char*)((uintptr_t)memory / HUGE_PAGE * HUGE_PAGE);
    munmap(begin, next_huge_page((int64_t)memory + bytes) - (int64_t)begin);
#else
    (void)memory, (void)bytes;
#endif
}

// A checksum of a huge page. Each word goes through steps that can be undone, so that no change of one word is missed.
static uint64_t checksum_of(const char* page) {
    constexpr int LANES_EACH = 8;
    constexpr uint64_t FACTOR = 0x9E3779B97F4A7C15;
    uint64_t lanes[LANES_EACH], sum = 0;
    for (int i = 0; i < LANES_EACH; i++) lanes[i] = FACTOR * (i + 1);
    for (int64_t at = 0; at < HUGE_PAGE; at += sizeof lanes) {
        uint64_t words[LANES_EACH];
        memcpy(words, page + at, sizeof words);
        for (int i = 0; i < LANES_EACH; i++) {
            lanes[i] = (lanes[i] ^ words[i]) * FACTOR;
            lanes[i] ^= lanes[i] >> 32;
        }
    }
    for (const uint64_t lane : lanes) {
        sum = (sum ^ lane) * FACTOR;
        sum ^= sum >> 32;
    }
    return sum;
}

// Writes the checksums of `count` huge pages of a mapped file to `sums`, and leaves their memory mapped. Returns whether
// all of them could be read: a file may have been cut off since, and a disk may fail.
extern "C" int manta_checksum_weights(void* memory, int64_t count, uint64_t* sums) {
#if defined(__linux__)
    std::atomic<bool> is_readable{true};
    madvise(memory, count * HUGE_PAGE, MADV_WILLNEED);
    parallel_each(count, [&](int64_t i) {
        char* const page = (char*)memory + i * HUGE_PAGE;
        if (madvise(page, HUGE_PAGE, MADV_POPULATE_READ) == 0) sums[i] = checksum_of(page);
        else is_readable = false;  // touching it would end the process
    });
    return is_readable;
#else
    (void)memory, (void)count, (void)sums;
    return 0;
#endif
}

// Puts mapped memory in the place of other memory of the same size, for all threads at once: those that read it see the
// old bytes or the new ones. Both begin with a huge page. Returns whether the system has done it.
extern "C" int manta_replace_weights(void* place, void* memory, int64_t bytes) {
#if defined(__linux__)
    return mremap(memory, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, place) != MAP_FAILED;
#else
    (void)place, (void)memory, (void)bytes;
    return 0;
#endif
}
