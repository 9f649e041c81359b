// The experts of a layer in one call: for each expert, the rows that chose it, in the order of the experts. So a row's
// sum depends on no other row. Weights of experts that no row chose are not read. Called by cpu_experts.py, and by
// decoder.cpp for a whole mixture with its router.
#include <vector>

#include "head_products.h"
#include "linear.h"
#include "native_linear.h"
#include "parallel.h"
#include "quantized_floats.h"
#include "routing.h"

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

// Mirrors _Mixture of cpu_experts.py
struct Mixture {
    Linear shared_gated, shared_down;  // of the expert that computes every token; null for none
    const Expert* experts;
    const float *router, *router_bias;  // [hidden, num_scores], [num_scores] or null
    const float *shared_gate;           // [hidden], or null
    const float *share_scales;          // [num_scores], which multiply the shares of chosen experts, or null
    Routing routing;
    int dtype, num_experts, hidden, inner, shared_inner, scales_inputs;
};

// `bias` is added to the logits, and `scales` multiply the shares of chosen experts; null for none
void route(const Routing& routing, float* logits, const float* bias, const float* scales, float* shares, int64_t* chosen,
           int num_rows) {
    constexpr int64_t SERIAL_SCORES = 4096;
    const int num_numbers = 2 * routing.num_scores + routing.num_groups;
    parallel_for(num_rows, int64_t(num_rows) * routing.num_scores <= SERIAL_SCORES, [&](int64_t row) {
        const RoutingRoom room = {of_thread<float, 4>(num_numbers), of_thread<int, 4>(routing.num_scores)};
        float *const of_row = logits + row * routing.num_scores, *const given = shares + row * routing.num_chosen;
        int64_t* const experts = chosen + row * routing.num_chosen;
        for (int i = 0; bias && i < routing.num_scores; i++) of_row[i] += bias[i];
        choose(routing, of_row, room, given, experts);
        for (int i = 0; scales && i < routing.num_chosen; i++) given[i] *= scales[experts[i]];
    });
}

// y = the sums, and what the shared expert adds to them
template <class T>
void add_shared(const Mixture& m, const T* x, const float* sums, T* y, int num_rows) {
    T* const gated = of_thread<T, 5>(int64_t(num_rows) * (m.shared_inner + m.hidden));
    T* const results = gated + int64_t(num_rows) * m.shared_inner;
    float* const gates = of_thread<float, 6>(num_rows);
    if (m.shared_gated.run) {
        m.shared_gated(x, gated, num_rows);
        m.shared_down(gated, results, num_rows);
        if (m.shared_gate)
            HeadProducts<T, float, float>{x, m.shared_gate, gates, num_rows, 1, m.hidden, 1, m.hidden, m.hidden}
                .multiply_all();
    }
    parallel_for(num_rows, int64_t(num_rows) * m.hidden < PARALLEL_ELEMENTS, [&](int64_t row) {
        const Floats gate = m.shared_gate ? sigmoid_of(splat(gates[row])) : splat(1.0f);
        for (int at = 0; at < m.hidden; at += LANES) {
            const int64_t place = row * m.hidden + at;
            Floats sum = load_upto(sums + place, m.hidden - at);
            if (m.shared_gated.run) sum += product(load_upto(results + place, m.hidden - at), gate);
            store_rounded_upto(y + place, sum, m.hidden - at);
        }
    });
}

template <class T>
void run_mixture(const Mixture& m, const T* x, T* y, int num_rows) {
    const int num_scores = m.routing.num_scores, num_chosen = m.routing.num_chosen;
    const int64_t num_sums = int64_t(num_rows) * m.hidden, num_logits = int64_t(num_rows) * num_scores;
    float* const sums = of_thread<float, 7>(num_sums + num_logits + int64_t(num_rows) * num_chosen);
    float *const logits = sums + num_sums, *const shares = logits + num_logits;
    int64_t* const chosen = of_thread<int64_t, 7>(int64_t(num_rows) * num_chosen);
    HeadProducts<T, float, float>{x, m.router, logits, num_rows, 1, m.hidden, num_scores, m.hidden, m.hidden}
        .multiply_all();
    route(m.routing, logits, m.router_bias, m.share_scales, shares, chosen, num_rows);
    const Choice choice{chosen, shares, num_rows, num_chosen, m.scales_inputs != 0};
    run_experts(m.experts, m.num_experts, x, choice, m.hidden, m.inner, sums);
    add_shared(m, x, sums, y, num_rows);
}

}  // namespace

extern "C" int manta_experts_layout(int which) {
    return which == 0 ? sizeof(Expert) : which == 1 ? sizeof(Routing) : sizeof(Mixture);
}

// logits float [num_rows, num_scores] -> shares float and experts int64 [num_rows, num_chosen]
extern "C" void manta_route(const void* routing, float* logits, float* shares, int64_t* chosen, int num_rows) {
    route(*(const Routing*)routing, logits, nullptr, nullptr, shares, chosen, num_rows);
}

// x [num_rows, hidden], of dtype 0: float32 or 1: bfloat16 -> y float [num_rows, hidden]. chosen int64 [num_rows,
// num_chosen] names different experts in a row, or numbers of none, and shares float [num_rows, num_chosen] weight their
// results. `inner` is the width of what an expert's gates let through.
extern "C" void manta_experts(int dtype, const void* experts, int num_experts, const void* x, const void* chosen,
                              const void* shares, void* y, int num_rows, int num_chosen, int hidden, int inner,
                              int scales_inputs) {
    const Choice choice{(const int64_t*)chosen, (const float*)shares, num_rows, num_chosen, scales_inputs != 0};
    if (dtype == 0)
        run_experts((const Expert*)experts, num_experts, (const float*)x, choice, hidden, inner, (float*)y);
    else
        run_experts((const Expert*)experts, num_experts, (const bf16*)x, choice, hidden, inner, (float*)y);
}

// x [num_rows, hidden] -> y [num_rows, hidden], with the signature by which decoder.cpp calls every linear; `mixture` is a
// Mixture
extern "C" void manta_run_mixture(const void* mixture, const void* x, void* y, int num_rows) {
    const Mixture& m = *(const Mixture*)mixture;
    if (m.dtype == 0)
        run_mixture(m, (const float*)x, (float*)y, num_rows);
    else
        run_mixture(m, (const bf16*)x, (bf16*)y, num_rows);
}
