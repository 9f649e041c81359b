// Runs a function on several threads at once. The threads are one pool of the process's, whoever calls: OpenMP has a
// pool for each calling thread, and when the pools together have more threads than there are cores, its threads sleep
// at every barrier. Included by every kernel.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

inline std::atomic<int> configured_threads{0};  // 0: as many as this process has cores

inline int max_threads() {
    const int configured = configured_threads.load(std::memory_order_relaxed);
    return configured > 0 ? configured : std::max(1u, std::thread::hardware_concurrency());
}

// Threads that wait for work. A call's parts have a thread each, which knows the caches that it filled last time. But
// the caller waits only for those that have begun: the part of a thread that is asleep, or that another process keeps
// from running, it does itself.
class Pool {
  public:
    static Pool& get() {
        static Pool* const pool = new Pool;  // never deleted: its threads may outlive other static objects
        return *pool;
    }

    // call(argument, part) for each part in [0, parts); all by the caller if the pool is busy with another one.
    void run(int parts, void (*call)(const void*, int), const void* argument) {
        const std::unique_lock<std::mutex> serving(serving_, std::try_to_lock);
        if (!serving) {
            for (int part = 0; part < parts; part++) call(argument, part);
            return;
        }
        while ((int)workers_.size() < parts - 1) add_worker();
        call_ = call, argument_ = argument;
        const uint64_t round = ++num_rounds_;
        announce(round << PARTS_BITS | (uint64_t)parts);
        call(argument, 0);
        for (int part = 1; part < parts; part++)
            if (workers_[part - 1]->claim(round)) {
                call(argument, part);
                workers_[part - 1]->end(round);
            }
        for (int part = 1; part < parts; part++)
            while (!workers_[part - 1]->has_ended(round)) std::this_thread::yield();
    }

  private:
    static constexpr int PARTS_BITS = 16;
    static constexpr auto AWAKE = std::chrono::microseconds(200);  // how long a thread looks for work before it sleeps

    // A thread's part of a round: who claims it first, the thread or the caller, does it.
    class alignas(64) Worker {
      public:
        bool claim(uint64_t round) {
            uint64_t before = state_.load(std::memory_order_relaxed);
            return before < 2 * round && state_.compare_exchange_strong(before, 2 * round, std::memory_order_acq_rel);
        }
        void end(uint64_t round) { state_.store(2 * round + 1, std::memory_order_release); }
        bool has_ended(uint64_t round) const { return state_.load(std::memory_order_acquire) > 2 * round; }

      private:
        std::atomic<uint64_t> state_{0};  // twice the round that was claimed last, and 1 if that part has ended
    };

    void add_worker() {
        workers_.push_back(std::make_unique<Worker>());
        const int part = (int)workers_.size();
        std::thread([this, part, worker = workers_.back().get(), seen = announced_.load()] {
            work(part, *worker, seen);
        }).detach();
    }

    void announce(uint64_t round_and_parts) {
        announced_.store(round_and_parts);
        if (num_asleep_.load() == 0) return;  // in this order, as `sleep` has the opposite one
        { const std::lock_guard<std::mutex> lock(mutex_); }
        wake_.notify_all();
    }

    [[noreturn]] void work(int part, Worker& worker, uint64_t seen) {
        for (;;) {
            seen = next(seen);
            const uint64_t round = seen >> PARTS_BITS;
            if (part >= int(seen & ((1 << PARTS_BITS) - 1)) || !worker.claim(round)) continue;
            call_(argument_, part);  // the round cannot end before this part does, so they are the round's own
            worker.end(round);
        }
    }

    uint64_t next(uint64_t seen) {
        const auto until = std::chrono::steady_clock::now() + AWAKE;
        do {
            const uint64_t announced = announced_.load(std::memory_order_acquire);
            if (announced != seen) return announced;
            std::this_thread::yield();
        } while (std::chrono::steady_clock::now() < until);
        std::unique_lock<std::mutex> lock(mutex_);
        num_asleep_.fetch_add(1);
        wake_.wait(lock, [&] { return announced_.load() != seen; });
        num_asleep_.fetch_sub(1);
        return announced_.load(std::memory_order_acquire);
    }

    std::mutex serving_, mutex_;
    std::condition_variable wake_;
    std::vector<std::unique_ptr<Worker>> workers_;  // of parts 1, 2, ...
    uint64_t num_rounds_ = 0;
    std::atomic<uint64_t> announced_{0};  // the latest round and the number of its parts
    std::atomic<int> num_asleep_{0};
    void (*call_)(const void*, int) = nullptr;
    const void* argument_ = nullptr;
};

// body(thread) for each thread in [0, threads), at once if there are so many; a single one runs on the caller's thread.
template <class Body>
inline void parallel(int threads, const Body& body) {
    if (threads <= 1) return body(0);
    Pool::get().run(
        threads, [](const void* argument, int thread) { (*static_cast<const Body*>(argument))(thread); }, &body
    );
}

// body(i) for each i in [0, count), split evenly among the threads.
template <class Body>
inline void parallel_for(int64_t count, bool serial, const Body& body) {
    const int threads = serial ? 1 : (int)std::min<int64_t>(count, max_threads());
    parallel(threads, [&](int thread) {
        const int64_t last = count * (thread + 1) / std::max(threads, 1);
        for (int64_t i = count * thread / std::max(threads, 1); i < last; i++) body(i);
    });
}

// The same for i that take unequal time: a thread takes the next i when it is done with one.
template <class Body>
inline void parallel_each(int64_t count, const Body& body) {
    std::atomic<int64_t> next{0};
    parallel((int)std::min<int64_t>(count, max_threads()), [&](int) {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
    });
}
