// What one call of the paged attention computes, cut into units of work for the threads. Used by attention.h only.
//
// Sequences whose block tables begin alike may form a group (Hydragen, Juravsky et al., 2024): one unit then packs the
// keys of the shared prefix once for the queries of many members, and continues each member's softmax with the member's
// own keys. The arithmetic and its order are the same as without a group, so the bits are the same. One thread does all
// of it, so no state moves between cores.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <vector>

#include "kv_cache.h"
#include "tiles.h"

// T is the dtype of queries and results, C that of the cache
template <class T, class C>
struct Attention {
    const T* qkv;  // [num_tokens, qkv_stride], of which the first num_heads * head_dim are the queries
    const C* k_cache;
    const C* v_cache;
    CacheLayout<C> cache;
    T* output;  // [num_tokens, num_heads * head_dim]
    const int32_t* query_start;
    const int32_t* context_lens;
    const int32_t* block_tables;
    const int32_t* group_start;  // [num_groups + 1] into `members`
    const int32_t* members;  // sequences; each is in at most one group and has a short query
    const int32_t* prefix_lens;  // [num_groups]: shared keys, a multiple of KEY_BLOCK, before all members' queries
    int64_t qkv_stride;
    int num_sequences;
    int num_groups;
    int max_blocks;
    int num_heads;
    int num_kv_heads;
    int head_dim;
    int window;  // visible positions; INT32_MAX without a sliding window
    float scale;
    float logit_cap;  // c: scaled products become c * tanh(product / c); 0 for none
    const float* sinks;  // [num_heads]: a further logit of each head, without a value; null for none
};

constexpr int SPLIT_KEYS = 512;  // keys of one unit of work if the query is short
constexpr int SHORT_QUERY = 8;  // tokens; longer queries have enough tiles to keep all threads busy
constexpr int TILE_QUERY_ROWS = 96;  // rows of a prefill tile, which share the packing of a key block
constexpr int LONG_CONTEXT = 4096;  // keys from which a prefill tile may have more rows: no cache near a core holds them
constexpr int LONG_TILE_ROWS = 384;  // the most; what they gather stays in the second-level cache
constexpr int TILES_PER_THREAD = 16;  // with fewer tiles than this, larger ones would leave threads waiting in the end
constexpr int FEW_TILES_PER_THREAD = 4;  // with fewer tiles than this over a long context, the context is split too
constexpr int64_t SPLIT_FLOATS_PER_THREAD = 1 << 22;  // of a call: the most partial results with those of its tiles
constexpr int SHARED_ROWS = 256;  // rows of a unit over a shared prefix
constexpr int FEW_SHARED_ROWS = 64;  // with fewer rows, packing a shared prefix hardly pays
constexpr int KV_RUN_BYTES = 512;  // of one token's heads that are read together, so that the prefetcher sees runs
constexpr int PACKING_ROWS = 32;  // packing a key costs about as much as this many rows' products with it

// Query tokens [first_token, first_token + num_tokens) of a sequence's step, for KV heads [first_head, first_head +
// num_heads) and keys [first_key, end_key); or all query tokens of some members of a group over their shared prefix
struct Task {
    int sequence;  // whose block table is read
    int first_token = 0;
    int num_tokens = 0;
    int first_head = 0;
    int num_heads = 1;
    int first_key = 0;
    int first_seen = 0;  // of a window: no query token sees a key before it, and its block may be another sequence's
    int end_key = 0;
    int num_splits = 1;  // including those of a shared prefix, which come first
    int shared_splits = 0;  // whole splits of a shared prefix
    int remaining = 0;  // own splits not yet done: the thread that finishes the last one merges
    size_t partial = 0;  // offset of the first split's results, in floats
    int first_member = 0;  // of a group's task: index in the call's `members`
    int num_members = 0;  // 0: a sequence's own task
    bool goes_on = false;  // one unit computes the shared keys, then each member's first own split
};

struct Unit {
    int task;
    int split;  // counted from the split of the task's first key
    int64_t cost;
};

inline int round_up(int value, int multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

inline int splits_of(int first_key, int end_key) {
    return (end_key - 1) / SPLIT_KEYS - first_key / SPLIT_KEYS + 1;
}

// Tasks and units of one call; the memory is reused from call to call
class Plan {
  public:
    std::vector<Task> tasks;
    std::vector<Unit> units;
    size_t floats;  // of all partial results
    int64_t cost;  // in products of a row, a key and a dimension

    // A group member's own task for a KV head
    Task& member_task(int sequence, int head) {
        return tasks[first_tasks_[sequence] + head];
    }

    template <class Call>
    void make(const Call& call, int width, int threads) {
        group_ = call.num_heads / call.num_kv_heads;
        width_ = width;
        tasks.clear();
        units.clear();
        floats = 0;
        cost = 0;
        prefixes_.assign(call.num_sequences, 0);
        apart_.assign(call.num_sequences, 0);
        first_tasks_.resize(call.num_sequences);
        shapes_.clear();
        for (int i = 0; i < call.num_groups; i++) {
            shapes_.push_back(shape_of(call, i, threads));
            for (int j = call.group_start[i]; j < call.group_start[i + 1]; j++) {
                prefixes_[call.members[j]] = call.prefix_lens[i];
                apart_[call.members[j]] = shapes_[i].apart;
            }
        }
        // A token's heads lie together and are best read together, unless that leaves threads without work
        int64_t num_splits = 0;
        for (int i = 0; i < call.num_sequences; i++) num_splits += splits_of(prefixes_[i], call.context_lens[i]);
        const int run_heads = std::max(1, KV_RUN_BYTES / int(call.cache.head_size() * sizeof(*call.k_cache)));
        heads_together_ = num_splits >= 2 * threads ? std::min(run_heads, call.num_kv_heads) : 1;
        bool uneven = call.num_groups > 0;
        for (int sequence = 0; sequence < call.num_sequences; sequence++) {
            const int length = tokens_of(call, sequence);
            uneven |= length > SHORT_QUERY;
            add_sequence(call, sequence, length, threads);
        }
        for (int i = 0; i < call.num_groups; i++) add_group(call, i);
        if (uneven) {  // the most expensive first, so that the threads end together
            std::stable_sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) { return a.cost > b.cost; });
        }
    }

  private:
    // How a sequence's query is cut into units
    struct QueryCut {
        int tile;  // tokens
        bool splits;  // whether splits of the context are units of their own
    };

    // Each tile reads and packs all its keys, so a long context has larger ones. A chunk of few tokens has too few tiles
    // to keep the threads busy, so its context is split as well.
    template <class Call>
    QueryCut cut_of(const Call& call, int sequence, int length, int threads) const {
        if (length <= SHORT_QUERY) return {length, true};
        const int64_t context = call.context_lens[sequence], rows = int64_t(length) * group_;
        if (context < LONG_CONTEXT || call.window < LONG_CONTEXT) return {tokens_of_rows(TILE_QUERY_ROWS), false};
        const int64_t all_rows = rows * call.num_kv_heads;
        const int64_t all_floats = splits_of(0, int(context)) * all_rows * (width_ + 2);
        const int64_t num_tiles = ((rows - 1) / TILE_QUERY_ROWS + 1) * call.num_kv_heads;
        const bool has_few_tiles = num_tiles < FEW_TILES_PER_THREAD * threads;
        const bool has_room = int64_t(floats) + all_floats <= SPLIT_FLOATS_PER_THREAD * threads;
        const bool splits = threads > 1 && has_few_tiles && has_room;
        if (threads == 1 || splits) return {even_tile(length, tokens_of_rows(LONG_TILE_ROWS)), splits};
        int tile_rows = TILE_QUERY_ROWS;
        while (tile_rows < LONG_TILE_ROWS && all_rows / (2 * tile_rows) >= TILES_PER_THREAD * threads) tile_rows *= 2;
        return {even_tile(length, tokens_of_rows(tile_rows)), false};
    }

    int tokens_of_rows(int rows) const {
        return std::max(1, rows / group_);
    }

    // Tokens of tiles that are about equally large, and have at most so many
    static int even_tile(int length, int most) {
        const int count = (length - 1) / most + 1;
        return (length - 1) / count + 1;
    }

    template <class Call>
    void add_sequence(const Call& call, int sequence, int length, int threads) {
        const int start = call.context_lens[sequence] - length;
        const bool is_short = length <= SHORT_QUERY;
        const auto [tile, splits] = cut_of(call, sequence, length, threads);
        const int prefix = prefixes_[sequence];
        const int heads = is_short && !prefix ? heads_together_ : 1;
        Task task;
        task.sequence = sequence;
        first_tasks_[sequence] = int(tasks.size());
        for (int token = 0; token < length; token += tile) {
            task.first_token = token;
            task.num_tokens = std::min(tile, length - token);
            task.end_key = start + token + task.num_tokens;
            const int64_t first_visible = std::max<int64_t>(0, int64_t(start) + token + 1 - call.window);
            task.first_key = std::max(prefix, int(first_visible) / KEY_BLOCK * KEY_BLOCK);
            task.first_seen = int(first_visible);
            task.shared_splits = prefix / SPLIT_KEYS;
            const int own_splits = splits ? splits_of(task.first_key, task.end_key) : 1;
            task.num_splits = task.shared_splits + own_splits;
            for (int head = 0; head < call.num_kv_heads; head += heads) {
                task.first_head = head;
                task.num_heads = std::min(heads, call.num_kv_heads - head);
                task.remaining = own_splits + apart_[sequence];
                task.partial = floats;
                const int64_t rows = int64_t(task.num_tokens) * group_;
                if (task.num_splits > 1) floats += task.num_splits * task.num_heads * rows * (width_ + 2);
                const int64_t product = (rows + PACKING_ROWS) * task.num_heads * width_;
                const int64_t total = product * (task.end_key - task.first_key);
                cost += total;
                for (int split = prefix ? 1 : 0; split < own_splits; split++) {
                    units.push_back({int(tasks.size()), split, total / own_splits});
                }
                tasks.push_back(task);
            }
        }
    }

    // How a group is cut
    struct GroupShape {
        int rows;
        int wide_tiles;
        int tiles;  // of the units that continue with the members' own keys
        int apart;  // whole splits of the prefix that are units of their own, for wide tiles
    };

    // If the rows suffice to keep all threads busy with many rows each, a unit computes the whole prefix and continues
    // with the members' own keys, so that its sums stay in one core. If they do not, the prefix is split over threads.
    template <class Call>
    GroupShape shape_of(const Call& call, int index, int threads) const {
        GroupShape shape = {0, 0, 0, 0};
        for (int i = call.group_start[index]; i < call.group_start[index + 1]; i++) {
            shape.rows += tokens_of(call, call.members[i]) * group_;
        }
        shape.wide_tiles = shape.tiles = (shape.rows - 1) / SHARED_ROWS + 1;
        int num_units = shape.tiles * call.num_kv_heads;
        for (; num_units % threads && num_units < 4 * threads; num_units += call.num_kv_heads) shape.tiles++;
        const bool few_rows = shape.tiles > shape.wide_tiles && shape.rows < shape.tiles * FEW_SHARED_ROWS;
        if (few_rows) shape.apart = call.prefix_lens[index] / SPLIT_KEYS;
        return shape;
    }

    template <class Call>
    void add_group(const Call& call, int index) {
        const GroupShape& shape = shapes_[index];
        const int apart_keys = shape.apart * SPLIT_KEYS;
        if (shape.apart) add_tiles(call, index, shape.wide_tiles, 0, apart_keys, false);
        add_tiles(call, index, shape.tiles, apart_keys, call.prefix_lens[index], true);
    }

    // Tiles of a group's members, one KV head each, for the shared keys [first_key, end_key)
    template <class Call>
    void add_tiles(const Call& call, int index, int num_tiles, int first_key, int end_key, bool goes_on) {
        const int end = call.group_start[index + 1];
        const int tile_rows = (shapes_[index].rows - 1) / num_tiles + 1;
        for (int member = call.group_start[index]; member < end;) {
            Task task;
            task.sequence = call.members[member];
            task.first_member = member;
            task.first_key = first_key;
            task.end_key = end_key;
            task.num_splits = first_key < end_key ? splits_of(first_key, end_key) : 0;
            task.goes_on = goes_on;
            int64_t own_cost = 0;
            for (; member < end && task.num_tokens * group_ < tile_rows; member++) {
                const Task& own = member_task(call.members[member], 0);
                const int own_end = std::min(own.end_key, (own.first_key / SPLIT_KEYS + 1) * SPLIT_KEYS);
                own_cost += int64_t(own.num_tokens * group_ + PACKING_ROWS) * (own_end - own.first_key) * width_;
                task.num_tokens += own.num_tokens;
            }
            task.num_members = member - task.first_member;
            const int64_t product = (int64_t(task.num_tokens) * group_ + PACKING_ROWS) * width_;
            const int64_t shared = product * (end_key - first_key);
            cost += shared * call.num_kv_heads;
            for (task.first_head = 0; task.first_head < call.num_kv_heads; task.first_head++) {
                const int num_units = goes_on ? 1 : task.num_splits;
                for (int split = 0; split < num_units; split++) {
                    units.push_back({int(tasks.size()), split, shared / num_units + (goes_on ? own_cost : 0)});
                }
                tasks.push_back(task);
            }
        }
    }

    template <class Call>
    static int tokens_of(const Call& call, int sequence) {
        return call.query_start[sequence + 1] - call.query_start[sequence];
    }

    int group_ = 1;  // query heads of a KV head
    int width_ = 0;
    int heads_together_ = 1;
    std::vector<GroupShape> shapes_;  // of each group
    std::vector<int> prefixes_;  // of each sequence: keys that it shares
    std::vector<int> apart_;  // of each sequence: its group's `apart`
    std::vector<int> first_tasks_;  // of each sequence
};
