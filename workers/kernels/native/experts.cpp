// The experts of a layer in one call: for each expert, the rows that chose it, in the order of the experts. So a row's
// sum depends on no other row. Weights of experts that no row chose are not read. Called by cpu_experts.py, and by
// decoder.cpp for a whole mixture with its router.
#include <vector>

#include "head_products.h"
#include "linear.h"
#include "native_linear.h"
#include "parallel.h"
#include "phases.h"
#include "quantized_floats.h"
#include "routing.h"

namespace {

constexpr int64_t PARALLEL_ELEMENTS = 32768;
constexpr int64_t SERIAL_PRODUCTS = 32 * 1024;  // below this, waking the other threads costs more than it saves

// A linear with the pieces of its work. Mirrors _ExpertLinear of cpu_experts.py
struct ExpertLinear {
    Linear whole;
    const LinearParts* parts;

    bool has_separate_gate() const { return parts->finish != nullptr; }
    int64_t prepared_bytes(int num_rows) const { return parts->prepared_bytes(whole.self, num_rows); }
    void prepare(const void* x, void* prepared, int row, int num_rows) const {
        parts->prepare(whole.self, x, prepared, row, num_rows);
    }
    int num_panels() const { return parts->num_panels(whole.self); }
    void multiply(const void* prepared, void* products, int num_rows, int panel) const {
        parts->multiply(whole.self, prepared, products, num_rows, panel);
    }
    void fetch(int panel) const { parts->fetch(whole.self, panel); }
    void finish(const void* products, void* y) const { parts->finish(whole.self, products, y); }
    int most_rows() const { return parts->most_rows(whole.self); }
};

// Mirrors _Expert of cpu_experts.py
struct Expert {
    ExpertLinear gated, down;
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

// Experts of a layer and rows that chose them, at most MOST_PLACES. Experts with few rows are computed together, in phases;
// those with many one after the other.
template <class T>
class Batch {
  public:
    static constexpr int MOST_PLACES = 1024;

    // Begins with the place `first`; the next batch begins with `end`.
    Batch(const Expert* experts, const Sorted& sorted, int first, const T* x, const Choice& choice, int hidden, int inner)
        : x_(x), choice_(choice), places_(sorted.places.data() + first), hidden_(hidden), inner_(inner) {
        const int num_experts = (int)sorted.starts.size() - 1;
        for (int e = 0; e < num_experts; e++) {
            const int left = sorted.starts[e + 1] - std::max(sorted.starts[e], first);
            if (left <= 0) continue;
            if (num_places_ > 0 && num_places_ + left > MOST_PLACES) break;
            const int count = std::min(left, MOST_PLACES);
            const bool are_few = count <= std::min(experts[e].gated.most_rows(), experts[e].down.most_rows());
            (are_few ? few_ : many_).push_back({&experts[e], num_places_, count});
            num_places_ += count;
        }
        end = first + num_places_;
    }

    // y [num_rows][hidden] = or += the weighted results.
    void run(float* y, bool adds) {
        results_ = of_thread<T, 3>((int64_t)num_places_ * hidden_);
        for (const Hit& hit : many_) run_whole(hit);
        run_together();
        combine(y, adds);
    }

    int end;

  private:
    // An expert and the rows that chose it
    struct Hit {
        const Expert* expert;
        int first, count;  // among the batch's places
        int64_t prepared = 0, products = 0, inner_prepared = 0;  // of experts with few rows: where they lie in `memory_`
    };

    // Where a place's row stands among those of its expert
    struct Row {
        const Hit* hit;
        int row;
    };

    const T* input(int place) const { return x_ + (int64_t)(places_[place] / choice_.num_chosen) * hidden_; }

    // What an expert gets of a place, in memory [hidden] if it is not the input itself.
    const T* given(int place, T* memory) const {
        if (!choice_.scales_inputs) return input(place);
        const Floats share = splat(choice_.shares[places_[place]]);
        for (int at = 0; at < hidden_; at += LANES)
            store_rounded_upto(memory + at, product(load_upto(input(place) + at, hidden_ - at), share), hidden_ - at);
        return memory;
    }

    void run_whole(const Hit& hit) {
        T* const inputs = of_thread<T, 4>((int64_t)hit.count * (hidden_ + inner_));
        T* const gated = inputs + (int64_t)hit.count * hidden_;
        parallel_for(hit.count, (int64_t)hit.count * hidden_ < PARALLEL_ELEMENTS, [&](int64_t row) {
            T* const to = inputs + row * hidden_;
            const T* const from = given(hit.first + row, to);
            if (from != to) memcpy(to, from, hidden_ * sizeof(T));
        });
        hit.expert->gated.whole(inputs, gated, hit.count);
        hit.expert->down.whole(gated, results_ + (int64_t)hit.first * hidden_, hit.count);
    }

    // Of all experts with few rows: their inputs are prepared, then the first linears' panels multiplied, then gates
    // computed and prepared, then the second linears' panels multiplied.
    void run_together() {
        if (few_.empty()) return;
        const std::vector<Row> rows = make_room();
        const int num_gated = few_[0].expert->gated.num_panels(), num_down = few_[0].expert->down.num_panels();
        const int num_hits = (int)few_.size(), num_rows = (int)rows.size();
        const auto fetch_gated = [&](int unit) { few_[unit / num_gated].expert->gated.fetch(unit % num_gated); };
        const auto fetch_down = [&](int unit) { few_[unit / num_down].expert->down.fetch(unit % num_down); };
        const auto prepare = [&](int i) {
            const auto [hit, row] = rows[i];
            const T* const from = given(hit->first + row, of_thread<T, 8>(hidden_));
            hit->expert->gated.prepare(from, memory_ + hit->prepared, row, hit->count);
        };
        const auto multiply_gated = [&](int unit) {
            const Hit& hit = few_[unit / num_gated];
            const int panel = unit % num_gated, next = unit + 1;
            if (panel == num_gated - 1 && next < num_hits * num_gated) fetch_gated(next);
            hit.expert->gated.multiply(memory_ + hit.prepared, memory_ + hit.products, hit.count, panel);
        };
        const auto prepare_inner = [&](int i) {
            const auto [hit, row] = rows[i];
            const T* from = (const T*)(memory_ + hit->products) + (int64_t)row * products_width(*hit);
            if (hit->expert->gated.has_separate_gate()) {
                T* const gated = of_thread<T, 9>(inner_);
                hit->expert->gated.finish(from, gated);
                from = gated;
            }
            hit->expert->down.prepare(from, memory_ + hit->inner_prepared, row, hit->count);
        };
        const auto multiply_down = [&](int unit) {
            const Hit& hit = few_[unit / num_down];
            const int panel = unit % num_down, next = unit + 1;
            if (panel == num_down - 1 && next < num_hits * num_down) fetch_down(next);
            hit.expert->down.multiply(memory_ + hit.inner_prepared, results_ + (int64_t)hit.first * hidden_, hit.count, panel);
        };
        const bool serial = (int64_t)num_rows * hidden_ * inner_ < SERIAL_PRODUCTS;
        parallel_phases(serial ? 1 : max_threads(), {
            {num_rows, prepare, nullptr},
            {num_hits * num_gated, multiply_gated, fetch_gated},
            {num_rows, prepare_inner, nullptr},
            {num_hits * num_down, multiply_down, fetch_down},
        });
    }

    int products_width(const Hit& hit) const { return hit.expert->gated.has_separate_gate() ? 2 * inner_ : inner_; }

    // Gives each expert with few rows its part of `memory_`. Returns these rows.
    std::vector<Row> make_room() {
        std::vector<Row> rows;
        int64_t bytes = 0;
        const auto room = [&](int64_t wanted) {
            const int64_t at = bytes;
            bytes += (wanted + 63) / 64 * 64;
            return at;
        };
        for (Hit& hit : few_) {
            hit.prepared = room(hit.expert->gated.prepared_bytes(hit.count));
            hit.products = room((int64_t)hit.count * products_width(hit) * sizeof(T));
            hit.inner_prepared = room(hit.expert->down.prepared_bytes(hit.count));
            for (int row = 0; row < hit.count; row++) rows.push_back({&hit, row});
        }
        memory_ = of_thread<char, 7>(bytes);
        return rows;
    }

    // A row's results are added in the order of the experts.
    void combine(float* y, bool adds) const {
        constexpr int COLUMNS = 512;  // of a unit of work
        const int num_rows = choice_.num_rows, num_parts = (hidden_ + COLUMNS - 1) / COLUMNS;
        std::vector<int> counts(num_rows), of_rows(num_rows * choice_.num_chosen);
        for (int place = 0; place < num_places_; place++) {
            const int row = places_[place] / choice_.num_chosen;
            of_rows[row * choice_.num_chosen + counts[row]++] = place;
        }
        parallel_for(num_rows * num_parts, (int64_t)num_places_ * hidden_ < PARALLEL_ELEMENTS, [&](int64_t unit) {
            const int row = int(unit / num_parts), first = int(unit % num_parts) * COLUMNS;
            const int last = std::min(first + COLUMNS, hidden_);
            if (adds && counts[row] == 0) return;
            const int* const places = of_rows.data() + row * choice_.num_chosen;
            float* const sums = y + (int64_t)row * hidden_;
            for (int at = first; at < last; at += LANES) {
                Floats sum = adds ? load_upto(sums + at, last - at) : splat(0);
                for (int i = 0; i < counts[row]; i++) {
                    const Floats share = splat(choice_.scales_inputs ? 1.0f : choice_.shares[places_[places[i]]]);
                    const T* const result = results_ + (int64_t)places[i] * hidden_;
                    sum += product(load_upto(result + at, last - at), share);
                }
                store_upto(sums + at, sum, last - at);
            }
        });
    }

    const T* x_;
    const Choice& choice_;
    const int* places_;
    int hidden_, inner_;
    int num_places_ = 0;
    std::vector<Hit> few_, many_;
    T* results_ = nullptr;  // [num_places][hidden]
    char* memory_ = nullptr;
};

template <class T>
void run_experts(const Expert* experts, int num_experts, const T* x, const Choice& choice, int hidden, int inner, float* y) {
    const Sorted sorted(choice, num_experts);
    int first = 0;
    do {
        Batch<T> batch(experts, sorted, first, x, choice, hidden, inner);
        batch.run(y, first > 0);
        first = batch.end;
    } while (first < (int)sorted.places.size());
}

// Mirrors _Mixture of cpu_experts.py
struct Mixture {
    Linear shared_gated, shared_down;  // of the expert that computes every token; null for none
    const Expert* experts;
    const void* router;         // [hidden, num_scores]
    const float* router_bias;   // [num_scores], or null
    const void* shared_gate;    // [hidden], or null
    const float* share_scales;  // [num_scores], which multiply the shares of chosen experts, or null
    Routing routing;
    int router_dtype, shared_gate_dtype, dtype, num_experts, hidden, inner, shared_inner, scales_inputs;
};

// x [num_rows, hidden] times a weight [hidden, num_outputs] of the dtype `weight_dtype`
template <class T>
void multiply_exactly(const Mixture& m, const T* x, const void* weight, int weight_dtype, float* output, int num_rows,
                      int num_outputs) {
    const auto run = [&](auto element) {
        using W = decltype(element);
        HeadProducts<T, W, float>{x, (const W*)weight, output, num_rows, 1, m.hidden, num_outputs, m.hidden, m.hidden}
            .multiply_all();
    };
    weight_dtype == 1 ? run(bf16{}) : run(float{});
}

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
    T *gated = nullptr, *results = nullptr;
    float* const gates = of_thread<float, 6>(num_rows);
    if (m.shared_gated.run) {
        gated = of_thread<T, 5>(int64_t(num_rows) * (m.shared_inner + m.hidden));
        results = gated + int64_t(num_rows) * m.shared_inner;
        m.shared_gated(x, gated, num_rows);
        m.shared_down(gated, results, num_rows);
        if (m.shared_gate) multiply_exactly(m, x, m.shared_gate, m.shared_gate_dtype, gates, num_rows, 1);
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
    multiply_exactly(m, x, m.router, m.router_dtype, logits, num_rows, num_scores);
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
