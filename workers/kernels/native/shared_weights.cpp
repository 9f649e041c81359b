// Maps weights that processes share, on huge pages where the system has them. Called by shared_weights.py.
#include "linear.h"

#if defined(__linux__)
#include <cerrno>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // since Linux 6.1; for memory of files it is the one way, whatever the system's settings are
#endif

// Makes huge pages of those that lie in the memory whole, each of which needs some page to begin with. Returns whether
// the system can do that; there may be too few just now.
static bool make_huge_pages(char* memory, int64_t bytes) {
    const int64_t whole = bytes / HUGE_PAGE * HUGE_PAGE;
    for (int64_t at = 0; at < whole; at += HUGE_PAGE) memory[at] = 0;
    return !whole || madvise(memory, whole, MADV_COLLAPSE) == 0 || errno != EINVAL;
}
#endif

// `bytes` of a file from `offset` on, which is a multiple of HUGE_PAGE, as the address is too: huge pages need both. Null
// if the system refuses. The memory is the file's if `writes`; else nobody can write to it.
extern "C" void* manta_map_weights(int file, int64_t offset, int64_t bytes, int writes) {
#if defined(__linux__)
    const int64_t span = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    char* const place = (char*)mmap(nullptr, span + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                                    -1, 0);
    if (place == (char*)MAP_FAILED) return nullptr;
    char* const begin = (char*)(((uintptr_t)place + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    if (begin > place) munmap(place, begin - place);
    munmap(begin + span, place + HUGE_PAGE - begin);
    void* const memory = mmap(begin, bytes, writes ? PROT_READ | PROT_WRITE : PROT_READ,
                              (writes ? MAP_SHARED : MAP_PRIVATE) | MAP_FIXED, file, offset);
    if (memory != MAP_FAILED && (!writes || make_huge_pages(begin, bytes))) return begin;
    munmap(begin, span);
    return nullptr;
#else
    (void)file, (void)offset, (void)bytes, (void)writes;
    return nullptr;
#endif
}

extern "C" void manta_unmap_weights(void* memory, int64_t bytes) {
#if defined(__linux__)
    munmap(memory, (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
#else
    (void)memory, (void)bytes;
#endif
}
