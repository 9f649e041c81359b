// The experts of a layer in one call: for each expert, the rows that chose it, in the order of the experts. So a row's
// sum depends on no other row. Weights of experts that no row chose are not read. Called by cpu_experts.py.
#include <vector>

#include "linear.h"
#include "native_linear.h"
#include "parallel.h"
#include "quantized_floats.h"

namespace {

constexpr int64_t PARALLEL_ELEMENTS = 32768;

struct Expert {
    Linear gated, down;
};

// Which experts the rows chose, and the weights of their results.
struct Choice {
    const int64_t* experts;  // [num_rows][num_chosen]
    const float* shares;     // the same
    int num_rows, num_chosen;
    bool scales_inputs;  // the shares multiply what the experts get, instead of their results
};

// The places in a `Choice`, sorted by expert: those of expert e are places[starts[e]..starts[e + 1]), in order. A number
// that is no expert's has no place.
struct Sorted {
    std::vector<int> starts, places;

    Sorted(const Choice& choice, int num_experts) : starts(num_experts + 1) {
        const int num_choices = choice.num_rows * choice.num_chosen;
        const auto is_expert = [&](int i) { return choice.experts[i] >= 0 && choice.experts[i] < num_experts; };
        for (int i = 0; i < num_choices; i++)
            if (is_expert(i)) starts[choice.experts[i] + 1]++;
        for (int e = 0; e < num_experts; e++) starts[e + 1] += starts[e];
        places.resize(starts[num_experts]);
        std::vector<int> next(starts.begin(), starts.end() - 1);
        for (int i = 0; i < num_choices; i++)
            if (is_expert(i)) places[next[choice.experts[i]]++] = i;
    }
};

template <class T>
void gather_row(const T* from, float share, bool scales, int hidden, T* to) {
    if (!scales) return (void)memcpy(to, from, hidden * sizeof(T));
    for (int at = 0; at < hidden; at += LANES)
        store_rounded_upto(to + at, product(load_upto(from + at, hidden - at), splat(share)), hidden - at);
}

template <class T>
void run_experts(const Expert* experts, int num_experts, const T* x, const Choice& choice, int hidden, int inner, float* y) {
    const Sorted sorted(choice, num_experts);
    int most = 0;
    for (int e = 0; e < num_experts; e++) most = std::max(most, sorted.starts[e + 1] - sorted.starts[e]);
    T* const given = of_thread<T, 3>((int64_t)most * (2 * hidden + inner));
    T* const gated = given + (int64_t)most * hidden;
    T* const results = gated + (int64_t)most * inner;
    std::fill_n(y, (int64_t)choice.num_rows * hidden, 0.0f);
    for (int e = 0; e < num_experts; e++) {
        const int* const places = sorted.places.data() + sorted.starts[e];
        const int count = sorted.starts[e + 1] - sorted.starts[e];
        if (count == 0) continue;
        const bool serial = (int64_t)count * hidden < PARALLEL_ELEMENTS;
        const auto input = [&](int i) { return x + (int64_t)(places[i] / choice.num_chosen) * hidden; };
        const bool gathers = count > 1 || choice.scales_inputs;
        parallel_for(gathers ? count : 0, serial, [&](int64_t i) {
            gather_row(input(i), choice.shares[places[i]], choice.scales_inputs, hidden, given + i * hidden);
        });
        experts[e].gated(gathers ? given : input(0), gated, count);
        experts[e].down(gated, results, count);
        parallel_for(count, serial, [&](int64_t i) {
            const Floats share = splat(choice.scales_inputs ? 1.0f : choice.shares[places[i]]);
            float* const sum = y + (int64_t)(places[i] / choice.num_chosen) * hidden;
            const T* const result = results + i * hidden;
            for (int at = 0; at < hidden; at += LANES) {
                const Floats weighted = product(load_upto(result + at, hidden - at), share);
                store_upto(sum + at, load_upto(sum + at, hidden - at) + weighted, hidden - at);
            }
        });
    }
}

}  // namespace

extern "C" int manta_experts_layout(int) {
    return sizeof(Expert);
}

// x [num_rows, hidden], of dtype 0: float32 or 1: bfloat16 -> y float [num_rows, hidden]. chosen int64 [num_rows,
// num_chosen]
// names different experts in a row, or numbers of none, and shares float [num_rows, num_chosen] weight their results. `inner` is the width
// of what an expert's gates let through.
extern "C" void manta_experts(int dtype, const void* experts, int num_experts, const void* x, const void* chosen,
                              const void* shares, void* y, int num_rows, int num_chosen, int hidden, int inner,
                              int scales_inputs) {
    const Choice choice{(const int64_t*)chosen, (const float*)shares, num_rows, num_chosen, scales_inputs != 0};
    if (dtype == 0)
        run_experts((const Expert*)experts, num_experts, (const float*)x, choice, hidden, inner, (float*)y);
    else
        run_experts((const Expert*)experts, num_experts, (const bf16*)x, choice, hidden, inner, (float*)y);
}
