// Paged causal attention with online softmax (FlashAttention, Dao et al., 2022), long contexts split over threads
// (FlashDecoding, Dao et al., 2023). Called by cpu.cpp only.
//
// The rows of a task are the (token, query head) pairs that share a KV head, so that grouped-query attention reads each
// key and value once. Keys are handled in blocks of KEY_BLOCK: packed, multiplied, exponentiated, times packed values.
// Splits and blocks lie at fixed positions of a sequence, so that a row's result does not depend on its batchmates.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <type_traits>
#include <vector>

#include "tiles.h"

template <class T>
struct Attention {
    const T* qkv;  // [num_tokens, qkv_stride], of which the first num_heads * head_dim are the queries
    const T* k_cache;  // [slots, num_kv_heads, head_dim]
    const T* v_cache;
    T* output;  // [num_tokens, num_heads * head_dim]
    const int32_t* query_start;
    const int32_t* context_lens;
    const int32_t* block_tables;
    int64_t qkv_stride;
    int num_sequences;
    int max_blocks;
    int block_size;
    int num_heads;
    int num_kv_heads;
    int head_dim;
    int window;  // visible positions; INT32_MAX without a sliding window
    float scale;
};

constexpr int SPLIT_KEYS = 512;  // keys of one unit of work where the query is short
constexpr int SHORT_QUERY = 8;  // tokens; longer queries have enough tiles to keep all threads busy
constexpr int TILE_QUERY_ROWS = 96;  // rows of a prefill tile, which share the packing of a key block
constexpr int KV_RUN_BYTES = 512;  // heads of one token read together, so that the prefetcher sees runs
constexpr int PACKING_ROWS = 32;  // packing a key costs about as much as this many rows' products with it
constexpr int64_t PARALLEL_COST = 3'000'000;  // row-key-dimension products below which one thread is faster
constexpr float LOWEST = -1e30f;  // a maximum before any key: finite, so that differences are never NaN
constexpr float LOG2_E = 1.44269504088896340736f;

// Query tokens [first_token, first_token + num_tokens) of a sequence's step, for KV heads [first_head, first_head +
// num_heads)
struct Task {
    int sequence;
    int first_token;
    int num_tokens;
    int first_head;
    int num_heads;
    int first_key;
    int end_key;
    int num_splits;
    int remaining;  // splits not yet done: whoever finishes the last one merges
    size_t partial;  // of the first split, in floats
};

struct Unit {
    int task;
    int split;
    int64_t cost;
};

inline int round_up(int value, int multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

struct KeyRange {
    int first;
    int end;
};

// Offsets of a block's keys (and values) into the caches
struct KeyBlock {
    int num_keys;
    size_t offsets[KEY_BLOCK];
};

// Memory that one thread reuses from call to call
class Scratch {
  public:
    ~Scratch() {
        free(memory_);
    }
    char* reserve(size_t bytes) {
        if (bytes > capacity_) {
            free(memory_);
            capacity_ = (bytes * 3 / 2 + 4095) / 4096 * 4096;
            memory_ = static_cast<char*>(aligned_alloc(4096, capacity_));
        }
        return memory_;
    }

  private:
    char* memory_ = nullptr;
    size_t capacity_ = 0;
};

// One row of softmax over `vectors` * LANES scores, of which [low, high) are visible: turns scores into probabilities
// relative to the running maximum, and rescales what the row has gathered where that maximum grows
template <bool MASKED, class E>
MANTA_INLINE void softmax_row(
    const float* scores, E* probabilities, int vectors, int low, int high, float factor, float& running_max,
    float* running_sum, float* gathered, int width
) {
    constexpr bool coarse = !std::is_same<E, float>::value;
    Floats logits[KEY_BLOCK / LANES];
    Ints visible[KEY_BLOCK / LANES];
    Floats best = splat(LOWEST);
    for (int i = 0; i < vectors; i++) {
        logits[i] = load(scores + i * LANES);
        if (MASKED) {
            const Ints key = lane_index() + i * LANES;
            visible[i] = (key >= low) & (key < high);
            logits[i] = visible[i] ? logits[i] : splat(LOWEST);
        }
        best = maximum(best, logits[i]);
    }
    const float maximum_now = std::max(running_max, reduce_max(best) * factor);
    Floats sum = load(running_sum);
    if (maximum_now > running_max) {
        const Floats shrink = exp2_of<false>(splat(running_max - maximum_now));
        for (int i = 0; i < width; i += LANES) store(gathered + i, load(gathered + i) * shrink);
        sum *= shrink;
        running_max = maximum_now;
    }
    for (int i = 0; i < vectors; i++) {
        Floats probability = exp2_of<coarse>(logits[i] * factor - maximum_now);
        if (MASKED) probability = visible[i] ? probability : splat(0);
        sum += probability;
        store(probabilities + i * LANES, probability);
    }
    store(running_sum, sum);
}

// Runs units of work; E is the element of the packed operands (bf16 or float)
template <class T, class E>
class AttentionWorker {
  public:
    AttentionWorker(const Attention<T>& call, float* partials)
        : call_(call),
          partials_(partials),
          group_(call.num_heads / call.num_kv_heads),
          width_(width_of(call.head_dim)) {}

    // Runs a split of a task; asks for the first keys of the split that comes after it, where there is one
    void run(const Task& task, int split, const Task* next_task, int next_split, Scratch& scratch) {
        rows_ = task.num_tokens * group_;
        padded_rows_ = round_up(rows_, 16);
        reserve(task, scratch);
        load_queries(task);
        const KeyRange range = range_of(task, split);
        KeyBlock blocks[2];
        locate(task, range.first, range.end, blocks[0]);
        for (int key = range.first, i = 0; key < range.end; key += KEY_BLOCK, i ^= 1) {
            KeyBlock& next = blocks[i ^ 1];
            const Task* owner = &task;
            if (key + KEY_BLOCK < range.end) {
                locate(task, key + KEY_BLOCK, range.end, next);
            } else {
                owner = next_task;
                const KeyRange next_range = owner ? range_of(*owner, next_split) : KeyRange{0, 0};
                locate(owner ? *owner : task, next_range.first, next_range.end, next);
            }
            const char* rows[2 * KEY_BLOCK];
            Prefetcher prefetcher = prefetcher_of(owner ? *owner : task, next, rows, task.num_heads);
            attend(task, key, blocks[i], prefetcher);
        }
        if (task.num_splits > 1) {
            store_partial(task, split);
        } else {
            store_output(task);
        }
    }

    // Combines the splits of a task, in their order
    void merge(const Task& task) {
        const int rows = task.num_tokens * group_;
        const size_t stride = partial_size(call_, task);
        for (int row = 0; row < task.num_heads * rows; row++) {
            const float* first = partials_ + task.partial + size_t(row) * (width_ + 2);
            float best = LOWEST;
            for (int i = 0; i < task.num_splits; i++) best = std::max(best, first[i * stride + width_]);
            float total = 0;
            for (int i = 0; i < task.num_splits; i++) {
                total += first[i * stride + width_ + 1] * exp2f(first[i * stride + width_] - best);
            }
            T* to = output_row(task, row / rows, row % rows);
            for (int dim = 0; dim < call_.head_dim; dim += LANES) {
                Floats sum = splat(0);
                for (int i = 0; i < task.num_splits; i++) {
                    const float* partial = first + i * stride;
                    sum += output_columns<E>(partial, dim) * (exp2f(partial[width_] - best) / total);
                }
                store(to + dim, sum);
            }
        }
    }

    // Floats of one split: each row's gathered values, maximum and sum
    static size_t partial_size(const Attention<T>& call, const Task& task) {
        const size_t rows = size_t(task.num_tokens) * (call.num_heads / call.num_kv_heads);
        return task.num_heads * rows * (width_of(call.head_dim) + 2);
    }

    static int width_of(int head_dim) {
        return round_up(head_dim, GRANULE);
    }

    // Around the units of one thread: other code in the process configures the tiles for itself
    void begin() {
#if MANTA_AMX
        if (PAIRS && tiles_granted()) configure_tiles();
#endif
    }

    void end() {
#if MANTA_AMX
        if (PAIRS && tiles_granted()) _tile_release();
#endif
    }

  private:
    static constexpr bool PAIRS = !std::is_same<E, float>::value;
    static constexpr int GRANULE = PAIRS ? 32 : LANES;  // head_dim and keys are padded to a multiple

    void reserve(const Task& task, Scratch& scratch) {
        const size_t heads = task.num_heads;
        const size_t sizes[] = {
            heads * padded_rows_ * width_ * sizeof(E),
            size_t(padded_rows_) * KEY_BLOCK * sizeof(float),
            size_t(padded_rows_) * KEY_BLOCK * sizeof(E),
            size_t(width_) * KEY_BLOCK * sizeof(E),
            heads * padded_rows_ * width_ * sizeof(float),
            heads * padded_rows_ * LANES * sizeof(float),
            heads * padded_rows_ * sizeof(float),
            call_.head_dim * sizeof(T),
        };
        char* starts[8];
        size_t total = 0;
        for (size_t size : sizes) total += (size + 63) / 64 * 64;
        char* next = scratch.reserve(total);
        for (int i = 0; i < 8; i++) {
            starts[i] = next;
            next += (sizes[i] + 63) / 64 * 64;
        }
        queries_ = reinterpret_cast<E*>(starts[0]);
        scores_ = reinterpret_cast<float*>(starts[1]);
        probabilities_ = reinterpret_cast<E*>(starts[2]);
        packed_ = reinterpret_cast<E*>(starts[3]);
        gathered_ = reinterpret_cast<float*>(starts[4]);
        sums_ = reinterpret_cast<float*>(starts[5]);
        maxima_ = reinterpret_cast<float*>(starts[6]);
        zeros_ = reinterpret_cast<T*>(starts[7]);
        memset(gathered_, 0, sizes[4]);
        memset(sums_, 0, sizes[5]);
        memset(zeros_, 0, sizes[7]);
        std::fill(maxima_, maxima_ + heads * padded_rows_, LOWEST);
    }

    void load_queries(const Task& task) {
        for (int head = 0; head < task.num_heads; head++) {
            E* to = queries_ + size_t(head) * padded_rows_ * width_;
            for (int token = 0; token < task.num_tokens; token++) {
                const int64_t row = call_.query_start[task.sequence] + task.first_token + token;
                const T* from = call_.qkv + row * call_.qkv_stride;
                from += size_t(task.first_head + head) * group_ * call_.head_dim;
                for (int i = 0; i < group_; i++) {
                    pack_query(from + i * call_.head_dim, call_.head_dim, to);
                    to += width_;
                }
            }
        }
    }

    static KeyRange range_of(const Task& task, int split) {
        if (task.num_splits == 1) return {task.first_key, task.end_key};
        const int first = (task.first_key / SPLIT_KEYS + split) * SPLIT_KEYS;
        return {std::max(task.first_key, first), std::min(task.end_key, first + SPLIT_KEYS)};
    }

    // The rows of a block's keys, then of its values, to be asked for over `num_heads` rounds of packing
    Prefetcher prefetcher_of(const Task& task, const KeyBlock& block, const char** rows, int num_heads) const {
        const size_t base = size_t(task.first_head) * call_.head_dim;
        for (int i = 0; i < block.num_keys; i++) {
            rows[i] = reinterpret_cast<const char*>(call_.k_cache + block.offsets[i] + base);
            rows[block.num_keys + i] = reinterpret_cast<const char*>(call_.v_cache + block.offsets[i] + base);
        }
        const int num_rows = 2 * block.num_keys;
        const int packs = KEY_BLOCK / LANES * (width_ / GRANULE) * num_heads;
        return {rows, num_rows, int(task.num_heads * call_.head_dim * sizeof(T)), num_rows / 3 / packs + 1};
    }

    // Where the keys [key, key + KEY_BLOCK) lie, as far as they come before `end`
    void locate(const Task& task, int key, int end, KeyBlock& block) const {
        const int32_t* table = call_.block_tables + size_t(task.sequence) * call_.max_blocks;
        const size_t slot_size = size_t(call_.num_kv_heads) * call_.head_dim;
        block.num_keys = std::max(0, std::min(KEY_BLOCK, end - key));
        for (int i = 0; i < block.num_keys;) {
            const int offset = (key + i) % call_.block_size;
            const size_t slot = size_t(table[(key + i) / call_.block_size]) * call_.block_size + offset;
            const int run = std::min(call_.block_size - offset, block.num_keys - i);
            for (int j = 0; j < run; j++) block.offsets[i + j] = (slot + j) * slot_size;
            i += run;
        }
    }

    // The first `span` rows of a block, zeros past its last key
    void point(const T* cache, const KeyBlock& block, int span, const T** rows) const {
        for (int i = 0; i < block.num_keys; i++) rows[i] = cache + block.offsets[i];
        for (int i = block.num_keys; i < span; i++) rows[i] = zeros_;
    }

    void attend(const Task& task, int key, const KeyBlock& block, Prefetcher& prefetcher) {
        const int span = round_up(block.num_keys, GRANULE);
        const T* rows[KEY_BLOCK];
        for (int head = 0; head < task.num_heads; head++) {
            const size_t base = size_t(task.first_head + head) * call_.head_dim;
            point(call_.k_cache + base, block, span, rows);
            for (int i = 0; i < span; i += LANES) pack_keys(rows + i, call_.head_dim, packed_ + i * width_, prefetcher);
            const size_t row = size_t(head) * padded_rows_;
            product<false>(queries_ + row * width_, width_, packed_, width_, scores_, KEY_BLOCK, span / LANES);
            softmax(task, head, key, span, prefetcher);
            point(call_.v_cache + base, block, span, rows);
            pack_values(rows, span, call_.head_dim, packed_, prefetcher);
            product<true>(probabilities_, KEY_BLOCK, packed_, span, gathered_ + row * width_, width_, width_ / LANES);
        }
    }

    template <bool ACCUMULATE>
    void product(const E* a, int lda, const E* b, int depth, float* c, int ldc, int panels) {
#if MANTA_AMX
        if constexpr (PAIRS) {
            if (tiles_granted()) return multiply_amx<ACCUMULATE>(a, lda, b, depth, c, ldc, padded_rows_, panels);
        }
#endif
        multiply<ACCUMULATE>(a, lda, b, depth, c, ldc, rows_, panels);
    }

    void softmax(const Task& task, int head, int key, int span, Prefetcher& prefetcher) {
        const int length = call_.query_start[task.sequence + 1] - call_.query_start[task.sequence];
        const int first_position = call_.context_lens[task.sequence] - length + task.first_token;
        const float factor = call_.scale * LOG2_E;
        constexpr int full = KEY_BLOCK / LANES;
        for (int row = 0; row < rows_; row++) {
            prefetcher.ask(1);
            const int64_t position = first_position + row / group_;
            const int high = int(std::min<int64_t>(span, position + 1 - key));
            const int low = int(std::max<int64_t>(0, position + 1 - call_.window - key));
            const size_t state = size_t(head) * padded_rows_ + row;
            const float* scores = scores_ + row * KEY_BLOCK;
            E* probabilities = probabilities_ + row * KEY_BLOCK;
            float* sum = sums_ + state * LANES;
            float* gathered = gathered_ + state * width_;
            float& best = maxima_[state];
            if (high <= low) {
                memset(static_cast<void*>(probabilities), 0, span * sizeof(E));
            } else if (low == 0 && high == KEY_BLOCK) {
                softmax_row<false>(scores, probabilities, full, low, high, factor, best, sum, gathered, width_);
            } else if (span == KEY_BLOCK) {
                softmax_row<true>(scores, probabilities, full, low, high, factor, best, sum, gathered, width_);
            } else {
                softmax_row<true>(scores, probabilities, span / LANES, low, high, factor, best, sum, gathered, width_);
            }
        }
    }

    T* output_row(const Task& task, int head, int row) const {
        const int64_t token = call_.query_start[task.sequence] + task.first_token + row / group_;
        const int query_head = (task.first_head + head) * group_ + row % group_;
        return call_.output + (token * call_.num_heads + query_head) * call_.head_dim;
    }

    void store_output(const Task& task) {
        for (int head = 0; head < task.num_heads; head++) {
            for (int row = 0; row < rows_; row++) {
                const size_t state = size_t(head) * padded_rows_ + row;
                const float inverse = 1.0f / reduce_add(load(sums_ + state * LANES));
                const float* gathered = gathered_ + state * width_;
                T* to = output_row(task, head, row);
                for (int dim = 0; dim < call_.head_dim; dim += LANES) {
                    store(to + dim, output_columns<E>(gathered, dim) * inverse);
                }
            }
        }
    }

    void store_partial(const Task& task, int split) {
        float* to = partials_ + task.partial + split * partial_size(call_, task);
        for (int head = 0; head < task.num_heads; head++) {
            for (int row = 0; row < rows_; row++, to += width_ + 2) {
                const size_t state = size_t(head) * padded_rows_ + row;
                memcpy(to, gathered_ + state * width_, width_ * sizeof(float));
                to[width_] = maxima_[state];
                to[width_ + 1] = reduce_add(load(sums_ + state * LANES));
            }
        }
    }

    const Attention<T>& call_;
    float* partials_;
    const int group_;  // query heads of a KV head
    const int width_;  // head_dim, padded
    int rows_ = 0;
    int padded_rows_ = 0;
    E* queries_ = nullptr;  // [heads][padded_rows][width]
    float* scores_ = nullptr;  // [padded_rows][KEY_BLOCK]
    E* probabilities_ = nullptr;  // [padded_rows][KEY_BLOCK]
    E* packed_ = nullptr;  // keys, then values, of one block and head
    float* gathered_ = nullptr;  // [heads][padded_rows][width]: probabilities times values, still to be divided
    float* sums_ = nullptr;  // [heads][padded_rows][LANES]
    float* maxima_ = nullptr;  // [heads][padded_rows]
    T* zeros_ = nullptr;  // stands for the keys past the end of a context
};

// Cuts a call into tasks and units, the most expensive first where they differ much; returns the total cost
template <class T>
int64_t plan(const Attention<T>& call, int width, int threads, std::vector<Task>& tasks, std::vector<Unit>& units) {
    const int group = call.num_heads / call.num_kv_heads;
    const int run_heads = std::max(1, KV_RUN_BYTES / int(call.head_dim * sizeof(T)));
    size_t partial = 0;
    int64_t total = 0;
    // Heads of a token lie together and are best read together, unless that leaves threads without work
    int64_t num_splits = 0;
    for (int i = 0; i < call.num_sequences; i++) num_splits += (call.context_lens[i] - 1) / SPLIT_KEYS + 1;
    const int heads_together = num_splits >= 2 * threads ? std::min(run_heads, call.num_kv_heads) : 1;
    bool uneven = false;
    tasks.clear();
    units.clear();
    for (int sequence = 0; sequence < call.num_sequences; sequence++) {
        const int length = call.query_start[sequence + 1] - call.query_start[sequence];
        const int start = call.context_lens[sequence] - length;
        const bool is_short = length <= SHORT_QUERY;
        const int tile = is_short ? length : std::max(1, TILE_QUERY_ROWS / group);
        const int heads = is_short ? heads_together : 1;
        uneven |= !is_short;
        for (int token = 0; token < length; token += tile) {
            Task task;
            task.sequence = sequence;
            task.first_token = token;
            task.num_tokens = std::min(tile, length - token);
            task.end_key = start + token + task.num_tokens;
            const int64_t first_visible = std::max<int64_t>(0, int64_t(start) + token + 1 - call.window);
            task.first_key = int(first_visible) / KEY_BLOCK * KEY_BLOCK;
            task.num_splits = is_short ? (task.end_key - 1) / SPLIT_KEYS - task.first_key / SPLIT_KEYS + 1 : 1;
            task.remaining = task.num_splits;
            for (int head = 0; head < call.num_kv_heads; head += heads) {
                task.first_head = head;
                task.num_heads = std::min(heads, call.num_kv_heads - head);
                task.partial = partial;
                const int64_t rows = int64_t(task.num_tokens) * group;
                if (task.num_splits > 1) partial += task.num_splits * task.num_heads * rows * (width + 2);
                const int64_t cost = (rows + PACKING_ROWS) * task.num_heads * (task.end_key - task.first_key) * width;
                total += cost;
                for (int split = 0; split < task.num_splits; split++) {
                    units.push_back({int(tasks.size()), split, cost / task.num_splits});
                }
                tasks.push_back(task);
            }
        }
    }
    if (uneven) {
        std::stable_sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) { return a.cost > b.cost; });
    }
    return total;
}

template <class T, class E>
void attend_all(const Attention<T>& call) {
    static thread_local std::vector<Task> task_memory;
    static thread_local std::vector<Unit> unit_memory;
    static thread_local Scratch partial_memory;
    std::vector<Task>& tasks = task_memory;  // a thread-local name would mean each worker's own inside the region
    std::vector<Unit>& units = unit_memory;
    const int width = AttentionWorker<T, E>::width_of(call.head_dim);
    const int64_t cost = plan(call, width, omp_get_max_threads(), tasks, units);
    size_t partial_size = 0;
    for (const Task& task : tasks) {
        if (task.num_splits == 1) continue;
        partial_size = task.partial + task.num_splits * AttentionWorker<T, E>::partial_size(call, task);
    }
    float* partials = reinterpret_cast<float*>(partial_memory.reserve(partial_size * sizeof(float)));
    const int num_units = int(units.size());
    int next_unit = 0;
#pragma omp parallel if (cost > PARALLEL_COST && num_units > 1)
    {
        static thread_local Scratch scratch;
        AttentionWorker<T, E> worker(call, partials);
        worker.begin();
        int i = __atomic_fetch_add(&next_unit, 1, __ATOMIC_RELAXED);
        while (i < num_units) {
            const int upcoming = __atomic_fetch_add(&next_unit, 1, __ATOMIC_RELAXED);
            const Unit* next = upcoming < num_units ? &units[upcoming] : nullptr;
            Task& task = tasks[units[i].task];
            worker.run(task, units[i].split, next ? &tasks[next->task] : nullptr, next ? next->split : 0, scratch);
            i = upcoming;
            if (task.num_splits == 1) continue;
            if (__atomic_sub_fetch(&task.remaining, 1, __ATOMIC_ACQ_REL) == 0) worker.merge(task);
        }
        worker.end();
    }
}
