// Paged causal attention with online softmax (FlashAttention, Dao et al., 2022), long contexts split over threads
// (FlashDecoding, Dao et al., 2023). Called by cpu.cpp only.
//
// The rows of a task are the (token, query head) pairs that share a KV head, so grouped-query attention reads each key
// and value once. For each block of KEY_BLOCK keys: pack the keys, multiply them with the queries, exponentiate the
// scores, multiply with the packed values. Splits and blocks begin at fixed positions of a sequence, so a row's result
// does not depend on the rest of the batch, nor on whether its query is a whole prompt or one token.
//
// With packed operands in float every form gives the same bits: each product is one sum over the head's dimensions or
// over the keys in their order, rounded once a term, and the sum of a row's probabilities runs in SUM_LANES lanes.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "attention_plan.h"
#include "byte_products.h"
#include "nibbles.h"
#include "parallel.h"
#include "quantized_floats.h"
#include "rotation.h"
#include "scratch.h"
#include "softmax.h"

constexpr int64_t PARALLEL_COST = 3'000'000;  // with fewer row-key-dimension products one thread is faster
constexpr int ROW_BLOCK = 96;  // rows multiplied at a time: their scores and probabilities stay in the L1 cache

struct KeyRange {
    int first;
    int end;
};

// Offsets of a block's keys (and values) into the caches
struct KeyBlock {
    int first;  // position of the first key
    int num_unseen;  // leading keys that are not read
    int num_keys;
    size_t offsets[KEY_BLOCK];
};

// Runs units of work; T and C as in `Attention`, E is the element of the packed operands: float, bf16, or int8_t for a
// cache of four bits. Numbers of a rounded cache stay whole when packed: scales are applied to scores and probabilities,
// of which there are fewer. If it is rotated, queries are rotated too, and results rotated back. EMULATES_FUSED:
// products are rounded as if the processor fused them with sums.
template <class T, class C, class E, bool EMULATES_FUSED>
class AttentionWorker {
  public:
    AttentionWorker(const Attention<T, C>& call, Plan& plan, float* results)
        : call_(call),
          plan_(plan),
          results_(results),
          group_(call.num_heads / call.num_kv_heads),
          width_(width_of(call.head_dim)),
          query_size_(width_ + (SUMS_BYTES ? sizeof(RoundedQuery) : 0)) {}

    // Runs a unit, and prefetches the first keys of the next unit, if there is one
    void run(const Unit& unit, const Unit* next, Scratch& scratch, Scratch& member_scratch) {
        Task& task = plan_.tasks[unit.task];
        const Task* next_task = next ? &plan_.tasks[next->task] : nullptr;
        const int next_split = next ? next->split : 0;
        begin_rows(task, scratch);
        if (task.goes_on) {
            run_members(task, next_task, next_split, member_scratch);
        } else if (task.num_members) {
            attend_split(task, unit.split, next_task, next_split);
            hand_over(task, unit.split);
        } else {
            attend_split(task, unit.split, next_task, next_split);
            finish_split(task, unit.split);
        }
    }

    static int width_of(int head_dim) {
        return round_up(head_dim, WIDTH_GRANULE);
    }

    // Called before and after the units of one thread, because other code in the process configures the tiles for
    // itself
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
    static constexpr bool PAIRS = std::is_same<E, bf16>::value;
    static constexpr bool SUMS_BYTES = std::is_same<E, int8_t>::value;
    static constexpr bool IS_ROTATED = CacheLayout<C>::IS_ROTATED;
    static constexpr int GRANULE = std::is_same<E, float>::value ? SUM_LANES : 32;  // keys are padded to a multiple
    static constexpr int WIDTH_GRANULE = IS_ROTATED ? NIBBLE_GROUP : GRANULE;  // head_dim is padded to a multiple
    static constexpr int WEIGHTS = KEY_BLOCK + (SUMS_BYTES ? sizeof(float) : 0);  // elements of a row's probabilities

    // Computes the shared keys for the rows of all members, then continues each member's rows with its first own split
    void run_members(const Task& task, const Task* next_task, int next_split, Scratch& member_scratch) {
        const Task* first_own = &plan_.member_task(task.sequence, task.first_head);
        for (int split = 0; split < task.num_splits; split++) {
            const bool is_last = split + 1 == task.num_splits;
            attend_split(task, split, is_last ? first_own : &task, is_last ? 0 : split + 1);
            if (range_of(task, split).end % SPLIT_KEYS) continue;  // the members go on in this split
            hand_over(task, split);
            clear_rows(task);
        }
        const bool is_fresh = is_fresh_;
        const float* gathered = gathered_;
        const float* sums = sums_;
        const float* maxima = maxima_;
        for (int i = 1; i <= task.num_members; i++) {
            Task& own = plan_.member_task(call_.members[task.first_member + i - 1], task.first_head);
            begin_rows(own, member_scratch);
            if (!is_fresh) {
                is_fresh_ = false;
                memcpy(gathered_, gathered, rows_ * width_ * sizeof(float));
                memcpy(sums_, sums, rows_ * SUM_LANES * sizeof(float));
                memcpy(maxima_, maxima, rows_ * sizeof(float));
            }
            gathered += rows_ * width_;
            sums += rows_ * SUM_LANES;
            maxima += rows_;
            if (i < task.num_members) {
                attend_split(own, 0, &plan_.member_task(call_.members[task.first_member + i], task.first_head), 0);
            } else {
                attend_split(own, 0, next_task, next_split);
            }
            finish_split(own, 0);
        }
    }

    void attend_split(const Task& task, int split, const Task* next_task, int next_split) {
        const KeyRange range = range_of(task, split);
        KeyBlock blocks[2];
        locate(task, range.first, range.end, blocks[0]);
        for (int key = range.first, i = 0; key < range.end; key += KEY_BLOCK, i ^= 1) {
            if (key > range.first && key % SPLIT_KEYS == 0) fold_rows(task);
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
    }

    void begin_rows(const Task& task, Scratch& scratch) {
        rows_ = task.num_tokens * group_;
        padded_rows_ = round_up(rows_, 16);
        reserve(task, scratch);
        load_queries(task);
        clear_rows(task);
        memset(folded_sums_, 0, size_t(task.num_heads) * padded_rows_ * sizeof(float));
    }

    // A unit goes on from one split to the next
    void fold_rows(const Task& task) {
        for (int head = 0; head < task.num_heads; head++) {
            for (int row = 0; row < rows_; row++) fold_row(size_t(head) * padded_rows_ + row);
        }
        clear_rows(task);
    }

    RowState fold_row(size_t state) {
        RowState folded = {folded_ + state * width_, folded_maxima_[state], folded_sums_[state]};
        fold(folded, row_state(state), width_);
        folded_maxima_[state] = folded.maximum;
        folded_sums_[state] = folded.sum;
        return folded;
    }

    // What a row has gathered in the split under way
    RowState row_state(size_t state) const {
        return {gathered_ + state * width_, maxima_[state], total_of(sums_ + state * SUM_LANES)};
    }

    void clear_rows(const Task& task) {
        const size_t rows = size_t(task.num_heads) * padded_rows_;
        is_fresh_ = true;
        memset(sums_, 0, rows * SUM_LANES * sizeof(float));
        std::fill(maxima_, maxima_ + rows, LOWEST);
    }

    void reserve(const Task& task, Scratch& scratch) {
        const size_t heads = task.num_heads;
        const size_t sizes[] = {
            heads * padded_rows_ * query_size_ * sizeof(E),
            size_t(std::min(padded_rows_, ROW_BLOCK)) * KEY_BLOCK * sizeof(float),
            size_t(std::min(padded_rows_, ROW_BLOCK)) * WEIGHTS * sizeof(E),
            size_t(width_) * KEY_BLOCK * sizeof(E) * 2,
            heads * padded_rows_ * width_ * sizeof(float),
            heads * padded_rows_ * SUM_LANES * sizeof(float),
            heads * padded_rows_ * sizeof(float),
            call_.head_dim * sizeof(C),
            width_ * sizeof(float),
            heads * padded_rows_ * width_ * sizeof(float),
            heads * padded_rows_ * sizeof(float),
            heads * padded_rows_ * sizeof(float),
            IS_ROTATED ? 2 * rotated_size() * sizeof(float) : 0,
        };
        constexpr int count = sizeof(sizes) / sizeof(*sizes);
        char* starts[count];
        size_t total = 0;
        for (size_t size : sizes) total += (size + 63) / 64 * 64;
        char* next = scratch.reserve(total);
        for (int i = 0; i < count; i++) {
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
        zeros_ = reinterpret_cast<C*>(starts[7]);
        merged_ = reinterpret_cast<float*>(starts[8]);
        folded_ = reinterpret_cast<float*>(starts[9]);
        folded_maxima_ = reinterpret_cast<float*>(starts[10]);
        folded_sums_ = reinterpret_cast<float*>(starts[11]);
        rotated_ = reinterpret_cast<float*>(starts[12]);
        memset(zeros_, 0, sizes[7]);
    }

    void load_queries(const Task& task) {
        for (int head = 0; head < task.num_heads; head++) {
            E* to = queries_ + size_t(head) * padded_rows_ * query_size_;
            const int64_t query_head = int64_t(task.first_head + head) * group_;
            if (task.num_members == 0) {
                load_tokens(call_.query_start[task.sequence] + task.first_token, task.num_tokens, query_head, to);
            }
            for (int i = 0; i < task.num_members; i++) {
                const int member = call_.members[task.first_member + i];
                const int first = call_.query_start[member];
                to = load_tokens(first, call_.query_start[member + 1] - first, query_head, to);
            }
        }
    }

    E* load_tokens(int64_t first_row, int num_tokens, int64_t query_head, E* to) const {
        for (int64_t row = first_row; row < first_row + num_tokens; row++) {
            const T* from = call_.qkv + row * call_.qkv_stride + query_head * call_.head_dim;
            for (int i = 0; i < group_; i++, to += query_size_) load_query(from + i * call_.head_dim, to);
        }
        return to;
    }

    void load_query(const T* from, E* to) const {
        const int head_dim = call_.head_dim;
        if constexpr (IS_ROTATED) {
            rotate_from(from, head_dim, rotated_, rotated_ + rotated_size());
            pack_rotated_query(rotated_, head_dim, to);
        } else {
            pack_query(from, head_dim, to);
        }
    }

    // Floats of a rotated head, and of the memory that rotating it takes besides
    size_t rotated_size() const {
        return width_ + ROTATION_SLACK;
    }

    static KeyRange range_of(const Task& task, int split) {
        if (task.num_splits == 1) return {task.first_key, task.end_key};
        const int first = (task.first_key / SPLIT_KEYS + split) * SPLIT_KEYS;
        return {std::max(task.first_key, first), std::min(task.end_key, first + SPLIT_KEYS)};
    }

    // Prefetches the rows of a block's keys, then those of its values, spread over `num_heads` rounds of packing
    Prefetcher prefetcher_of(const Task& task, const KeyBlock& block, const char** rows, int num_heads) const {
        const size_t base = task.first_head * call_.cache.head_size();
        const int num_read = block.num_keys - block.num_unseen;
        for (int i = 0; i < num_read; i++) {
            const size_t offset = block.offsets[block.num_unseen + i] + base;
            rows[i] = reinterpret_cast<const char*>(call_.k_cache + offset);
            rows[num_read + i] = reinterpret_cast<const char*>(call_.v_cache + offset);
        }
        const int num_rows = 2 * num_read;
        const int packs = KEY_BLOCK / LANES * (width_ / WIDTH_GRANULE) * num_heads;
        const int row_bytes = int(task.num_heads * call_.cache.head_size() * sizeof(C));
        return {rows, num_rows, row_bytes, num_rows / 3 / packs + 1};
    }

    // Finds where the keys [key, key + KEY_BLOCK) before `end` lie
    void locate(const Task& task, int key, int end, KeyBlock& block) const {
        const int32_t* table = call_.block_tables + size_t(task.sequence) * call_.max_blocks;
        const CacheLayout<C>& cache = call_.cache;
        block.first = key;
        block.num_keys = std::max(0, std::min(KEY_BLOCK, end - key));
        block.num_unseen = std::max(0, std::min(task.first_seen - key, block.num_keys));
        for (int i = block.num_unseen; i < block.num_keys;) {
            const int offset = (key + i) % cache.block_size;
            const size_t token = cache.token(table[(key + i) / cache.block_size], offset);
            const int run = std::min(cache.block_size - offset, block.num_keys - i);
            for (int j = 0; j < run; j++) block.offsets[i + j] = token + j * cache.slot_size();
            if (CacheLayout<C>::HAS_SCALES) {
                for (int head = 0; head < task.num_heads; head++) {
                    const size_t scale = cache.scale(token, offset, task.first_head + head);
                    __builtin_prefetch(call_.k_cache + scale, 0, 2);
                    __builtin_prefetch(call_.v_cache + scale, 0, 2);
                }
            }
            i += run;
        }
    }

    // Copies the scales of a block's keys or values of one head; those of keys that are not read stay undefined
    void load_scales(const C* from, const KeyBlock& block, int head, float* to) const {
        const CacheLayout<C>& cache = call_.cache;
        for (int i = block.num_unseen; i < block.num_keys;) {
            const int offset = (block.first + i) % cache.block_size;
            const int run = std::min(cache.block_size - offset, block.num_keys - i);
            memcpy(to + i, from + cache.scale(block.offsets[i], offset, head), run * sizeof(float));
            i += run;
        }
    }

    // Pointers to the first `span` rows of a block; before its first seen key and after its last, to zeros
    void point(const C* cache, const KeyBlock& block, int span, const C** rows) const {
        for (int i = 0; i < block.num_unseen; i++) rows[i] = zeros_;
        for (int i = block.num_unseen; i < block.num_keys; i++) rows[i] = cache + block.offsets[i];
        for (int i = block.num_keys; i < span; i++) rows[i] = zeros_;
    }

    void attend(const Task& task, int key, const KeyBlock& block, Prefetcher& prefetcher) {
        const int span = round_up(block.num_keys, GRANULE);
        const C* rows[KEY_BLOCK];
        E* packed_values = rows_ > ROW_BLOCK ? packed_ + size_t(width_) * KEY_BLOCK : packed_;
        for (int head = 0; head < task.num_heads; head++) {
            const size_t base = (task.first_head + head) * call_.cache.head_size();
            if (CacheLayout<C>::HAS_SCALES) {
                load_scales(call_.k_cache, block, task.first_head + head, key_scales_);
                load_scales(call_.v_cache, block, task.first_head + head, value_scales_);
            }
            point(call_.k_cache + base, block, span, rows);
            for (int i = 0; i < span; i += LANES) pack_keys(rows + i, call_.head_dim, packed_ + i * width_, prefetcher);
            for (int row = 0; row < rows_; row += ROW_BLOCK) {
                const int num_rows = std::min(ROW_BLOCK, rows_ - row);
                const size_t first = size_t(head) * padded_rows_ + row;
                score(first, num_rows, span / LANES);
                softmax(task, head, row, num_rows, key, span, prefetcher);
                if (row == 0) {
                    point(call_.v_cache + base, block, span, rows);
                    pack_values(rows, span, call_.head_dim, packed_values, prefetcher);
                }
                gather(packed_values, span, gathered_ + first * width_, num_rows);
            }
        }
        is_fresh_ = false;
    }

    // Products of rows from `first` on, over all heads, with the packed keys
    void score(size_t first, int rows, int panels) {
        const E* const queries = queries_ + first * query_size_;
        if constexpr (SUMS_BYTES) {
            multiply_bytes<true>(queries, query_size_, packed_, width_, scores_, KEY_BLOCK, rows, panels, false);
        } else {
            product(queries, width_, packed_, width_, scores_, KEY_BLOCK, rows, panels, false);
        }
    }

    // Adds the products of rows' probabilities with the packed values of `span` keys to what the rows have gathered
    void gather(const E* values, int span, float* to, int rows) {
        const int panels = width_ / LANES;
        if constexpr (SUMS_BYTES) {
            multiply_bytes<false>(probabilities_, WEIGHTS, values, span, to, width_, rows, panels, !is_fresh_);
        } else {
            product(probabilities_, KEY_BLOCK, values, span, to, width_, rows, panels, !is_fresh_);
        }
    }

    // A score's scale that is its row's
    float query_scale(size_t state) const {
        return SUMS_BYTES ? RoundedQuery::of(queries_ + state * query_size_, width_).scale : 1.0f;
    }

    void product(const E* a, int lda, const E* b, int depth, float* c, int ldc, int rows, int panels, bool adds) {
#if MANTA_AMX
        if constexpr (PAIRS) {
            if (tiles_granted()) {
                const auto multiply_tiles = adds ? multiply_amx<true> : multiply_amx<false>;
                return multiply_tiles(a, lda, b, depth, c, ldc, round_up(rows, 16), panels);
            }
        }
#endif
        if constexpr (EMULATES_FUSED) {
            return multiply_exactly(a, lda, b, depth, c, ldc, rows, panels, adds);
        }
        const auto multiply_rows = adds ? multiply<true, E> : multiply<false, E>;
        multiply_rows(a, lda, b, depth, c, ldc, rows, panels);
    }

    // Rows [first_row, first_row + num_rows) of a head; `scores_` begins with the scores of `first_row`
    void softmax(
        const Task& task, int head, int first_row, int num_rows, int key, int span, Prefetcher& prefetcher
    ) {
        const int length = call_.query_start[task.sequence + 1] - call_.query_start[task.sequence];
        const int first_position = call_.context_lens[task.sequence] - length + task.first_token;
        const bool all_visible = task.num_members != 0;  // a shared prefix consists of whole key blocks
        const bool is_capped = call_.logit_cap > 0;
        const float cap_scale = is_capped ? call_.scale / call_.logit_cap : 0;
        const float factor = (is_capped ? call_.logit_cap : call_.scale) * LOG2_E;
        constexpr int full = KEY_BLOCK / LANES;
        for (int row = first_row; row < first_row + num_rows; row++) {
            prefetcher.ask(1);
            const int64_t position = first_position + row / group_;
            const int high = all_visible ? span : int(std::min<int64_t>(span, position + 1 - key));
            const int low = all_visible ? 0 : int(std::max<int64_t>(0, position + 1 - call_.window - key));
            const size_t state = size_t(head) * padded_rows_ + row;
            const float* scores = scores_ + (row - first_row) * KEY_BLOCK;
            E* probabilities = probabilities_ + (row - first_row) * WEIGHTS;
            float* sum = sums_ + state * SUM_LANES;
            float* gathered = gathered_ + state * width_;
            float& best = maxima_[state];
            const float row_scale = query_scale(state);
            constexpr bool scaled = CacheLayout<C>::HAS_SCALES;
            const auto run = [&](auto masked, int vectors) {
                constexpr bool is_masked = decltype(masked)::value;
                if (is_capped) {
                    capped_softmax_row<is_masked, scaled>(
                        scores, probabilities, vectors, low, high, cap_scale * row_scale, factor, best, sum, gathered,
                        width_, key_scales_, value_scales_
                    );
                } else {
                    softmax_row<is_masked, scaled, false>(
                        scores, probabilities, vectors, low, high, 0.0f, factor * row_scale, best, sum, gathered, width_,
                        key_scales_, value_scales_
                    );
                }
            };
            if (high <= low) {
                memset(static_cast<void*>(probabilities), 0, WEIGHTS * sizeof(E));
            } else if (low == 0 && high == KEY_BLOCK) {
                run(std::false_type{}, full);
            } else if (span == KEY_BLOCK) {
                run(std::true_type{}, full);
            } else {
                run(std::true_type{}, span / LANES);
            }
        }
    }

    int query_head(const Task& task, int head, int row) const {
        return (task.first_head + head) * group_ + row % group_;
    }

    T* output_row(const Task& task, int head, int row) const {
        const int64_t token = call_.query_start[task.sequence] + task.first_token + row / group_;
        return call_.output + (token * call_.num_heads + query_head(task, head, row)) * call_.head_dim;
    }

    void store_output(const Task& task) {
        for (int head = 0; head < task.num_heads; head++) {
            for (int row = 0; row < rows_; row++) {
                store_row(fold_row(size_t(head) * padded_rows_ + row), task, head, row);
            }
        }
    }

    void store_row(const RowState& row, const Task& task, int head, int index) const {
        T* const to = output_row(task, head, index);
        float sum = row.sum;
        if (call_.sinks) {
            const float logit = call_.sinks[query_head(task, head, index)] * LOG2_E - row.maximum;
            sum += exp2_of<false>(splat(std::min(logit, 126.0f)))[0];
        }
        const float inverse = 1.0f / sum;
        const int head_dim = call_.head_dim;
        if constexpr (IS_ROTATED) {
            for (int dim = 0; dim < head_dim; dim += LANES) {
                store(rotated_ + dim, rotated_columns(row.values, dim) * inverse);
            }
            rotate_back(rotated_, head_dim, rotated_ + rotated_size());
            for (int dim = 0; dim < head_dim; dim += LANES) store_rounded(to + dim, load(rotated_ + dim));
        } else {
            for (int dim = 0; dim < head_dim; dim += LANES) {
                store_rounded(to + dim, output_columns<E>(row.values, dim) * inverse);
            }
        }
    }

    void store_partial(size_t first_state, int rows, float* to) const {
        for (size_t state = first_state; state < first_state + rows; state++, to += width_ + 2) {
            const RowState row = row_state(state);
            memcpy(to, row.values, width_ * sizeof(float));
            to[width_] = row.maximum;
            to[width_ + 1] = row.sum;
        }
    }

    // Gives a whole split of shared keys to the members' own tasks
    void hand_over(const Task& task, int split) {
        size_t row = 0;
        for (int i = 0; i < task.num_members; i++) {
            Task& own = plan_.member_task(call_.members[task.first_member + i], task.first_head);
            const int rows = own.num_tokens * group_;
            const size_t place = task.first_key / SPLIT_KEYS + split;
            store_partial(row, rows, results_ + own.partial + place * partial_size(own));
            if (!task.goes_on && __atomic_sub_fetch(&own.remaining, 1, __ATOMIC_ACQ_REL) == 0) merge(own, -1);
            row += rows;
        }
    }

    // The thread that finishes the last split merges; its own results need not go through memory
    void finish_split(Task& task, int split) {
        if (task.num_splits == 1) return store_output(task);
        const int own = task.shared_splits + split;
        if (__atomic_load_n(&task.remaining, __ATOMIC_ACQUIRE) == 1) return merge(task, own);
        float* to = results_ + task.partial + own * partial_size(task);
        for (int head = 0; head < task.num_heads; head++) {
            store_partial(size_t(head) * padded_rows_, rows_, to + size_t(head) * rows_ * (width_ + 2));
        }
        if (__atomic_sub_fetch(&task.remaining, 1, __ATOMIC_ACQ_REL) == 0) merge(task, -1);
    }

    // Combines the splits of a task, in their order; split `own` is in this thread's rows, not in `results_`
    void merge(const Task& task, int own) {
        const int rows = task.num_tokens * group_;
        const size_t stride = partial_size(task);
        for (int row = 0; row < task.num_heads * rows; row++) {
            float* const first = results_ + task.partial + size_t(row) * (width_ + 2);
            RowState merged = {merged_, LOWEST, 0};
            for (int i = 0; i < task.num_splits; i++) {
                float* const part = first + i * stride;
                const bool is_own = i == own;
                fold(merged, is_own ? row_state(size_t(row / rows) * padded_rows_ + row % rows)
                                    : RowState{part, part[width_], part[width_ + 1]}, width_);
            }
            store_row(merged, task, row / rows, row % rows);
        }
    }

    // Floats of one split: each row's gathered values, maximum and sum
    size_t partial_size(const Task& task) const {
        return size_t(task.num_heads) * task.num_tokens * group_ * (width_ + 2);
    }

    const Attention<T, C>& call_;
    Plan& plan_;
    float* results_;  // of splits, at the offsets that the plan gives
    const int group_;  // query heads of a KV head
    const int width_;  // head_dim, padded
    const int query_size_;  // elements from a query's row to the next one
    int rows_ = 0;
    int padded_rows_ = 0;
    bool is_fresh_ = true;  // no key of the split was added to `gathered_` yet, whose content is undefined
    E* queries_ = nullptr;  // [heads][padded_rows][query_size_]
    float* scores_ = nullptr;  // [ROW_BLOCK][KEY_BLOCK]
    E* probabilities_ = nullptr;  // [ROW_BLOCK][WEIGHTS]
    E* packed_ = nullptr;  // keys, then values, of one block and head; in separate memory if later rows need both again
    float* gathered_ = nullptr;  // [heads][padded_rows][width]: probabilities times values, still to be divided
    float* sums_ = nullptr;  // [heads][padded_rows][SUM_LANES]
    float* maxima_ = nullptr;  // [heads][padded_rows]
    float* merged_ = nullptr;  // [width]: a row of merged splits
    float* folded_ = nullptr;  // [heads][padded_rows][width]: values of the unit's earlier splits
    float* folded_maxima_ = nullptr;  // [heads][padded_rows]
    float* folded_sums_ = nullptr;  // [heads][padded_rows]
    float key_scales_[KEY_BLOCK];  // of the block and head under way, if the cache has scales
    float value_scales_[KEY_BLOCK];
    C* zeros_ = nullptr;  // read instead of keys past the end of a context
    float* rotated_ = nullptr;  // [2][rotated_size()]: a rotated head, and memory for rotating it
};

template <class T, class C, class E, bool EMULATES_FUSED = false>
void attend_all(const Attention<T, C>& call) {
    static thread_local Plan plan_memory;
    static thread_local Scratch result_memory;
    Plan& plan = plan_memory;  // in the parallel region the thread-local name would mean each thread's own plan
    plan.make(call, AttentionWorker<T, C, E, EMULATES_FUSED>::width_of(call.head_dim), max_threads());
    float* results = reinterpret_cast<float*>(result_memory.reserve(plan.floats * sizeof(float)));
    const int num_units = int(plan.units.size());
    const int threads = plan.cost > PARALLEL_COST ? std::min(num_units, max_threads()) : 1;
    // Each thread's first unit is fixed. If it were taken like the rest, the first thread to run could take two.
    std::atomic<int> next{threads};
    parallel(threads, [&](int thread) {
        static thread_local Scratch scratch;
        static thread_local Scratch member_scratch;
        AttentionWorker<T, C, E, EMULATES_FUSED> worker(call, plan, results);
        worker.begin();
        int i = thread;
        while (i < num_units) {
            const int upcoming = next.fetch_add(1, std::memory_order_relaxed);
            worker.run(plan.units[i], upcoming < num_units ? &plan.units[upcoming] : nullptr, scratch, member_scratch);
            i = upcoming;
        }
        worker.end();
    });
}
