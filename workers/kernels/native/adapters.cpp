// Low-rank adapters (LoRA; Hu et al., 2021) beside a linear of any kind: y = linear(x) + scale * (x @ a.T) @ b, where
// each row of a step has an adapter of its own, or none. Rows of one adapter go together. Products are summed in
// float32 and added to the linear's own sums before its bias is, its gate runs and it is rounded, so a row without an
// adapter has the same bits as without this file. A row's sums run over its inputs in order, so its result does not
// depend on the other rows. EXACT sums have one order in every form, each term fused: those over inputs have SUM_LANES
// lanes, and those over ranks run in the order of the ranks. Called by cpu_adapters.py.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "linear.h"
#include "linear_vectors.h"
#include "native_linear.h"

namespace {

constexpr int64_t SERIAL_PRODUCTS = 64 * 1024;  // below this, waking the other threads costs more than it saves
constexpr int64_t MOST_ADDEND_BYTES = 8 << 20;  // more rows than fit run in several parts
constexpr int LEAST_PART_ROWS = 64;
constexpr int TASK_ROWS = 16, TASK_RANKS = 16, TASK_OUTPUTS = 256;
constexpr int TILE = 4;  // rows at a time, and ranks or vectors of outputs: their sums fit into the registers

// The outputs of one part of a linear, such as the queries of a linear for queries, keys and values.
struct Part {
    const void* b;  // [rank][num_outputs]
    int first_rank, rank, first_output, num_outputs;
    int is_interleaved;  // its outputs lie in sixteens, with those of another part between them
    float scale;
};

// What an adapter adds to one linear; `rank` 0 for nothing.
struct LowRank {
    const void* a;  // [rank][in_features]
    const Part* parts;
    int rank, num_parts;
};

// rows[first, first + count) have this adapter, in ascending order, times `scale`.
struct Segment {
    int32_t adapter, first, count;
    float scale;
};

// The rows of the step under way that have adapters.
struct StepRows {
    const Segment* segments;
    const int32_t* rows;
    int num_segments;
};

struct AdaptedLinear {
    void (*run)(const void* self, const void* x, void* y, int num_rows);
    void (*run_adding)(const void* self, const void* x, void* y, int num_rows, const float* const* addends);
    const void* self;
    const LowRank* adapters;  // by number
    const StepRows* step;
    int dtype, in_features, out_features, width;  // `width` is that of y, half of `out_features` with a gate
    int exact;
};

// Rows of one adapter that are computed together.
struct Group {
    const LowRank* adapter;
    const int32_t* rows;
    int count;
    float* products;   // [count][rank]: x @ a.T
    int first_addend;  // of the rows' addends
    float scale;
};

struct Task {
    int group, row, at;  // the first row, and the first rank or the number of a part
    int output;
};

template <class T>
struct Inputs {
    static constexpr bool PAIRS = HAS_PAIRS && sizeof(T) == 2;
    static constexpr int COUNT = PAIRS ? 2 * LANES : LANES;  // inputs at a time
    using Vector = std::conditional_t<PAIRS, Ints, Floats>;

    static MANTA_INLINE Vector take(const T* from, int left) {
        if constexpr (PAIRS) {
            if (left >= COUNT) return load_ints(from);
            T padded[COUNT] = {};
            memcpy(padded, from, left * sizeof(T));
            return load_ints(padded);
        } else {
            return load_upto(from, left);
        }
    }
};

MANTA_INLINE float sum_of(Floats value) {
    float lanes[LANES];
    store(lanes, value);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

// The products of ROWS rows and RANKS rows of a.
template <class T, int ROWS, int RANKS>
void multiply_a(const T* const* x, const T* a, int in_features, float* to, int stride) {
    Floats sums[ROWS][RANKS] = {};
    for (int k = 0; k < in_features; k += Inputs<T>::COUNT) {
        typename Inputs<T>::Vector columns[RANKS];
        for (int rank = 0; rank < RANKS; rank++)
            columns[rank] = Inputs<T>::take(a + (int64_t)rank * in_features + k, in_features - k);
        for (int row = 0; row < ROWS; row++) {
            const auto inputs = Inputs<T>::take(x[row] + k, in_features - k);
            for (int rank = 0; rank < RANKS; rank++)
                sums[row][rank] = add_product(sums[row][rank], inputs, columns[rank]);
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int rank = 0; rank < RANKS; rank++) to[row * stride + rank] = sum_of(sums[row][rank]);
}

// The same with sums of one order.
template <class T, int ROWS, int RANKS>
void multiply_a_exactly(const T* const* x, const T* a, int in_features, float* to, int stride) {
    float lanes[ROWS][RANKS][SUM_LANES];
    for (int first = 0; first < SUM_LANES; first += LANES) {
        Floats sums[ROWS][RANKS] = {};
        for (int k = first; k < in_features; k += SUM_LANES) {
            Floats columns[RANKS];
            for (int rank = 0; rank < RANKS; rank++)
                columns[rank] = load_upto(a + (int64_t)rank * in_features + k, in_features - k);
            for (int row = 0; row < ROWS; row++) {
                const Floats inputs = load_upto(x[row] + k, in_features - k);
                for (int rank = 0; rank < RANKS; rank++)
                    sums[row][rank] = add_product_exactly(sums[row][rank], inputs, columns[rank]);
            }
        }
        for (int row = 0; row < ROWS; row++)
            for (int rank = 0; rank < RANKS; rank++) store(lanes[row][rank] + first, sums[row][rank]);
    }
    for (int row = 0; row < ROWS; row++)
        for (int rank = 0; rank < RANKS; rank++) to[row * stride + rank] = total_of(lanes[row][rank]);
}

// scale * products @ b of ROWS rows and TILE vectors of outputs, `left` of which exist.
template <class T, bool EXACT, int ROWS>
void multiply_b(const float* products, int stride, const Part& part, float scale, int output, float* const* to) {
    const int left = part.num_outputs - output;
    const T* b = (const T*)part.b + output;
    Floats sums[ROWS][TILE] = {};
    for (int rank = 0; rank < part.rank; rank++, b += part.num_outputs) {
        Floats columns[TILE];
        for (int v = 0; v < TILE; v++) columns[v] = load_upto(b + v * LANES, left - v * LANES);
        for (int row = 0; row < ROWS; row++) {
            const Floats product = splat(products[row * stride + part.first_rank + rank]);
            for (int v = 0; v < TILE; v++)
                sums[row][v] = EXACT ? add_product_exactly(sums[row][v], product, columns[v])
                                     : add_product(sums[row][v], product, columns[v]);
        }
    }
    for (int v = 0; v < TILE; v++) {
        const int at = output + v * LANES;
        const int place = part.first_output + (part.is_interleaved ? at / 16 * 32 + at % 16 : at);
        for (int row = 0; row < ROWS; row++)
            store_upto(to[row] + place, sums[row][v] * scale, left - v * LANES);
    }
}

template <class T, bool EXACT>
class AddedRows {
  public:
    // The rows [first, last) of the step.
    AddedRows(const AdaptedLinear& linear, const T* x, int first, int last)
        : linear_(linear), x_(x), addends_(last - first, nullptr) {
        int64_t num_products = 0;
        for (int s = 0; s < linear.step->num_segments; s++) {
            const Segment& segment = linear.step->segments[s];
            const LowRank& adapter = linear.adapters[segment.adapter];
            if (adapter.rank == 0) continue;
            const int32_t* const all = linear.step->rows + segment.first;
            const int32_t* const begin = std::lower_bound(all, all + segment.count, first);
            const int32_t* const end = std::lower_bound(begin, all + segment.count, last);
            if (begin == end) continue;
            groups_.push_back({&adapter, begin, (int)(end - begin), nullptr, num_rows_, segment.scale});
            num_rows_ += (int)(end - begin);
            num_products += (end - begin) * (int64_t)adapter.rank;
        }
        if (groups_.empty()) return;
        float* products = of_thread<float, 5>(num_products);
        float* const sums = of_thread<float, 6>((int64_t)num_rows_ * linear.out_features);
        for (Group& group : groups_) {
            group.products = products;
            products += (int64_t)group.count * group.adapter->rank;
            for (int i = 0; i < group.count; i++) {
                sums_.push_back(sums + (int64_t)sums_.size() * linear.out_features);
                addends_[group.rows[i] - first] = sums_.back();
            }
        }
    }

    bool are_none() const { return groups_.empty(); }

    const float* const* compute() {
        std::vector<Task> of_a, of_b;
        int64_t num_products = 0;
        for (int g = 0; g < (int)groups_.size(); g++) {
            const LowRank& adapter = *groups_[g].adapter;
            num_products += (int64_t)groups_[g].count * adapter.rank * linear_.in_features;
            for (int row = 0; row < groups_[g].count; row += TASK_ROWS) {
                for (int rank = 0; rank < adapter.rank; rank += TASK_RANKS) of_a.push_back({g, row, rank, 0});
                for (int part = 0; part < adapter.num_parts; part++)
                    for (int output = 0; output < adapter.parts[part].num_outputs; output += TASK_OUTPUTS)
                        of_b.push_back({g, row, part, output});
            }
        }
        const bool serial = num_products < SERIAL_PRODUCTS;
        each(of_a, serial, [&](const Task& task) { run_a(task); });
        each(of_b, serial, [&](const Task& task) { run_b(task); });
        return addends_.data();
    }

  private:
    template <class Run>
    static void each(const std::vector<Task>& tasks, bool serial, const Run& run) {
        if (serial)
            for (const Task& task : tasks) run(task);
        else
            parallel_each(tasks.size(), [&](int64_t i) { run(tasks[i]); });
    }

    void run_a(const Task& task) const {
        const Group& group = groups_[task.group];
        const int rank = group.adapter->rank, in = linear_.in_features;
        const int end = std::min(task.row + TASK_ROWS, group.count), last = std::min(task.at + TASK_RANKS, rank);
        for (int row = task.row; row < end; row += TILE) {
            const T* x[TILE];
            const int rows = std::min(TILE, end - row);
            for (int i = 0; i < rows; i++) {
                x[i] = x_ + (int64_t)group.rows[row + i] * in;
                if (task.at == 0 && !covers(*group.adapter))
                    std::fill_n(sums_[group.first_addend + row + i], linear_.out_features, 0.0f);
            }
            for (int j = task.at; j < last; j += TILE) {
                const T* const a = (const T*)group.adapter->a + (int64_t)j * in;
                float* const to = group.products + row * rank + j;
                with_constant<TILE>(rows, [&](auto num_rows) {
                    with_constant<TILE>(std::min(TILE, last - j), [&](auto num_ranks) {
                        if constexpr (EXACT)
                            multiply_a_exactly<T, num_rows, num_ranks>(x, a, in, to, rank);
                        else
                            multiply_a<T, num_rows, num_ranks>(x, a, in, to, rank);
                    });
                });
            }
        }
    }

    void run_b(const Task& task) const {
        const Group& group = groups_[task.group];
        const int rank = group.adapter->rank, end = std::min(task.row + TASK_ROWS, group.count);
        const Part& part = group.adapter->parts[task.at];
        const int last = std::min(task.output + TASK_OUTPUTS, part.num_outputs);
        for (int output = task.output; output < last; output += TILE * LANES)
            for (int row = task.row; row < end; row += TILE)
                with_constant<TILE>(std::min(TILE, end - row), [&](auto num_rows) {
                    multiply_b<T, EXACT, num_rows>(group.products + row * rank, rank, part, part.scale * group.scale,
                                                   output, sums_.data() + group.first_addend + row);
                });
    }

    // Whether every output of the linear has a part.
    bool covers(const LowRank& adapter) const {
        int covered = 0;
        for (int part = 0; part < adapter.num_parts; part++) covered += adapter.parts[part].num_outputs;
        return covered == linear_.out_features;
    }

    const AdaptedLinear& linear_;
    const T* const x_;
    std::vector<Group> groups_;
    std::vector<float*> sums_;           // of each row with an adapter, group by group
    std::vector<const float*> addends_;  // of each row, or null
    int num_rows_ = 0;
};

template <class T, bool EXACT>
void run_adapted(const AdaptedLinear& linear, const T* x, T* y, int num_rows) {
    const int64_t fitting = MOST_ADDEND_BYTES / ((int64_t)linear.out_features * sizeof(float));
    const int blocks = 1 + (num_rows - 1) / std::max<int64_t>(LEAST_PART_ROWS, fitting);
    for (int b = 0; b < blocks; b++) {
        const int first = (int64_t)num_rows * b / blocks, last = (int64_t)num_rows * (b + 1) / blocks;
        const T* const from = x + (int64_t)first * linear.in_features;
        T* const to = y + (int64_t)first * linear.width;
        AddedRows<T, EXACT> added(linear, x, first, last);
        if (added.are_none())
            linear.run(linear.self, from, to, last - first);
        else
            linear.run_adding(linear.self, from, to, last - first, added.compute());
    }
}

}  // namespace

extern "C" int manta_adapters_layout(int which) {
    return which == 0   ? (int)sizeof(AdaptedLinear)
           : which == 1 ? (int)sizeof(LowRank)
           : which == 2 ? (int)sizeof(Part)
           : which == 3 ? (int)sizeof(Segment)
                        : (int)sizeof(StepRows);
}

// `linear` is an AdaptedLinear; x [num_rows, in_features] has all rows of the step if any has an adapter.
extern "C" void manta_run_adapted_linear(const void* linear, const void* x, void* y, int num_rows) {
    const AdaptedLinear& l = *(const AdaptedLinear*)linear;
    if (l.step->num_segments == 0 || num_rows == 0) return l.run(l.self, x, y, num_rows);
    const auto run = [&](auto element, auto is_exact) {
        using T = decltype(element);
        run_adapted<T, is_exact>(l, (const T*)x, (T*)y, num_rows);
    };
    const auto run_in = [&](auto element) {
        l.exact ? run(element, std::true_type()) : run(element, std::false_type());
    };
    l.dtype == 0 ? run_in(float()) : run_in(bf16());
}
