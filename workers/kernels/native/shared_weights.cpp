// Maps weights that processes share, on huge pages where the system has them. Called by shared_weights.py.
#include "linear.h"

#if defined(__linux__)
#include <cerrno>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // since Linux 6.1; for memory of files it is the one way, whatever the system's settings are
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
// in part is mapped as small ones. Null if the system refuses. The memory is the file's if `writes`; else nobody can
// write to it.
extern "C" void* manta_map_weights(int file, int64_t offset, int64_t bytes, int writes) {
#if defined(__linux__)
    const int64_t start = offset / HUGE_PAGE * HUGE_PAGE, span = next_huge_page(offset + bytes) - start;
    char* const place = (char*)mmap(nullptr, span + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                                    -1, 0);
    if (place == (char*)MAP_FAILED) return nullptr;
    char* const begin = (char*)next_huge_page((int64_t)place);
    if (begin > place) munmap(place, begin - place);
    munmap(begin + span, place + HUGE_PAGE - begin);
    void* const memory = mmap(begin, span, writes ? PROT_READ | PROT_WRITE : PROT_READ,
                              (writes ? MAP_SHARED : MAP_PRIVATE) | MAP_FIXED, file, start);
    if (memory != MAP_FAILED && (!writes || make_huge_pages(begin, span))) return begin + (offset - start);
    munmap(begin, span);
    return nullptr;
#else
    (void)file, (void)offset, (void)bytes, (void)writes;
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
