// How the pieces of one call are shared out among its threads. Each thread has its own range and takes pieces from its
// front, in order, which suits the processor's prefetchers. A thread that has finished takes pieces from the back of
// the range with most left. If another process, or a neighbour on the same machine, holds up a thread, the call then
// waits for the one piece in its hands, not for its whole range. Called by linear.cpp only.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

class Shares {
  public:
    Shares(int pieces, int threads) : count_(std::min(threads, MAX)) {
        for (int i = 0; i < count_; i++)
            ranges_[i].bounds.store(pack(int64_t(pieces) * i / count_, int64_t(pieces) * (i + 1) / count_), RELAXED);
    }

    // Takes up to `count` pieces from the front of a thread's own range: [first, last). False if none is left.
    bool take_own(int thread, int count, int& first, int& last) {
        return thread < count_ && take(ranges_[thread], count, true, first, last);
    }

    bool take_from_others(int count, int& first, int& last) {
        for (;;) {
            int most = 0;
            for (int i = 1; i < count_; i++)
                if (left(ranges_[i]) > left(ranges_[most])) most = i;
            if (take(ranges_[most], count, false, first, last)) return true;
            if (left(ranges_[most]) == 0) return false;
        }
    }

  private:
    static constexpr int MAX = 64;
    static constexpr auto RELAXED = std::memory_order_relaxed;  // the parallel region's barrier orders the results

    struct alignas(64) Range {
        std::atomic<uint64_t> bounds;  // the first piece and the one after the last
    };

    static uint64_t pack(uint64_t first, uint64_t last) { return first << 32 | last; }

    static int left(const Range& range) {
        const uint64_t bounds = range.bounds.load(RELAXED);
        return int(uint32_t(bounds)) - int(bounds >> 32);
    }

    static bool take(Range& range, int count, bool front, int& first, int& last) {
        uint64_t bounds = range.bounds.load(RELAXED), rest;
        do {
            first = int(bounds >> 32), last = int(uint32_t(bounds));
            if (first >= last) return false;
            const int taken = std::min(count, last - first);
            if (front) {
                rest = pack(first + taken, last);
                last = first + taken;
            } else {
                rest = pack(first, last - taken);
                first = last - taken;
            }
        } while (!range.bounds.compare_exchange_weak(bounds, rest, RELAXED));
        return true;
    }

    int count_;
    Range ranges_[MAX];
};

// The pieces [first, last) that one thread has taken.
struct Share {
    Shares& shares;
    int thread;
    int first = 0, last = 0;

    // Takes the thread's next pieces, from its own range or another's.
    bool take(int count) {
        return shares.take_own(thread, count, first, last) || shares.take_from_others(count, first, last);
    }
    // Takes the thread's whole range at once, so that no other thread gets pieces of it.
    bool take_own() { return shares.take_own(thread, INT32_MAX, first, last); }
};
