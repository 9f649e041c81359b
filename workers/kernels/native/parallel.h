// Runs a function on several threads at once. If the compiler has OpenMP, they are OpenMP's, so that torch and these
// kernels share one pool; else (Apple's clang, a compiler from pip) they are our own. Included by every kernel.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(_OPENMP)
#include <omp.h>
#else
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
#endif

inline std::atomic<int> configured_threads{0};  // 0: as many as the pool has

inline int max_threads() {
    const int configured = configured_threads.load(std::memory_order_relaxed);
    if (configured > 0) return configured;
#if defined(_OPENMP)
    return omp_get_max_threads();
#else
    return std::max(1u, std::thread::hardware_concurrency());
#endif
}

#if !defined(_OPENMP)
// Threads that wait for work. They stay awake for a moment first, because the next call mostly comes within
// microseconds.
class Pool {
  public:
    static Pool& get() {
        static Pool* const pool = new Pool;  // never deleted: its threads may outlive other static objects
        return *pool;
    }

    // call(argument, thread) for each thread; all on the caller's thread if the pool is busy with another caller.
    void run(int threads, void (*call)(const void*, int), const void* argument) {
        std::unique_lock<std::mutex> serving(serving_, std::try_to_lock);
        if (!serving || threads == 1) {
            for (int thread = 0; thread < threads; thread++) call(argument, thread);
            return;
        }
        while ((int)workers_.size() < threads - 1) {
            const int thread = (int)workers_.size() + 1;
            workers_.emplace_back([this, thread, seen = round_.load()] { work(thread, seen); });
        }
        call_ = call, argument_ = argument, threads_ = threads;
        running_.store((int)workers_.size(), std::memory_order_relaxed);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            round_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        call(argument, 0);
        while (running_.load(std::memory_order_acquire) > 0) std::this_thread::yield();
    }

  private:
    static constexpr int AWAKE = 2000;  // how often a thread looks for work before it sleeps

    void work(int thread, uint64_t seen) {
        for (;;) {
            for (int i = 0; i < AWAKE && round_.load(std::memory_order_acquire) == seen; i++) std::this_thread::yield();
            if (round_.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != seen; });
            }
            seen = round_.load(std::memory_order_acquire);
            if (thread < threads_) call_(argument_, thread);
            running_.fetch_sub(1, std::memory_order_release);
        }
    }

    std::mutex serving_, mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    std::atomic<uint64_t> round_{0};
    std::atomic<int> running_{0};
    void (*call_)(const void*, int) = nullptr;
    const void* argument_ = nullptr;
    int threads_ = 0;
};
#endif

// body(thread) for each thread in [0, threads), at once if there are so many; a single one runs on the caller's thread.
template <class Body>
inline void parallel(int threads, const Body& body) {
    if (threads <= 1) return body(0);
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
    for (int thread = omp_get_thread_num(); thread < threads; thread += omp_get_num_threads()) body(thread);
#else
    Pool::get().run(
        threads, [](const void* argument, int thread) { (*static_cast<const Body*>(argument))(thread); }, &body
    );
#endif
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
