// Work in phases, each of which needs the results of the one before, in one parallel region. Threads then meet at the end
// of a phase, which takes less time than to begin a region. Used by experts.cpp.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "parallel.h"
#include "shares.h"

struct Phase {
    int num_units;
    std::function<void(int)> run;    // does a unit; each is done once, by any thread
    std::function<void(int)> fetch;  // fetches what a unit begins to read; or none
};

class PhaseInProgress {
  public:
    PhaseInProgress(const Phase& phase, int threads) : phase_(phase), shares_(phase.num_units, threads) {}

    // Does the thread's units, then others' that nobody has begun.
    void run(int thread) {
        Share share{shares_, thread};
        int num_done = 0;
        for (; share.take(1); num_done++) phase_.run(share.first);
        num_done_.fetch_add(num_done, std::memory_order_acq_rel);
    }
    // Units that are not done yet are in the hands of running threads. So a thread that has not begun keeps nobody waiting.
    void wait() const {
        constexpr int SPINS = 1000;  // a few microseconds
        for (int i = 0; num_done_.load(std::memory_order_acquire) < phase_.num_units; i++)
            if (i > SPINS) std::this_thread::yield();
    }
    void fetch(int thread, int threads) const {
        const int first = int(int64_t(phase_.num_units) * thread / threads);
        if (phase_.fetch && first < phase_.num_units) phase_.fetch(first);
    }

  private:
    const Phase& phase_;
    Shares shares_;
    alignas(64) std::atomic<int> num_done_{0};
};

// All phases, one after the other.
inline void parallel_phases(int threads, const std::vector<Phase>& phases) {
    std::deque<PhaseInProgress> all;
    for (const Phase& phase : phases) all.emplace_back(phase, threads);
    parallel(threads, [&](int thread) {
        for (size_t i = 0; i < all.size(); i++) {
            all[i].run(thread);
            if (i + 1 < all.size()) all[i + 1].fetch(thread, threads);
            all[i].wait();
        }
    });
}
