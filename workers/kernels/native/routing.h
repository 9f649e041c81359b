// The choice of experts for each token from the scores of a router; expert_choice.py defines it. Used by experts.cpp.
#pragma once

#include <algorithm>
#include <cmath>

#include "activations.h"

enum Scores { SOFTMAX = 0, SIGMOID = 1, ROOT_OF_SOFTPLUS = 2 };

// Mirrors _Routing of cpu_experts.py
struct Routing {
    const float* choice_bias;  // [num_scores], added for the choice alone, or null
    int scores;                // of `Scores`
    int num_scores, num_chosen, num_groups, num_chosen_groups, ranks_groups_by, normalises;
    float scale, least_sum;
};

inline void softmax(const float* x, float* output, int width) {
    float most = x[0];
    for (int i = 1; i < width; i++) most = x[i] > most || x[i] != x[i] ? x[i] : most;
    for (int i = 0; i < width; i += LANES) {
        store_upto(output + i, exp2_of<false>((load_upto(x + i, width - i) - most) * LOG2_E), width - i);
    }
    LaneSums sums = {};
    for (int i = 0; i < width; i += SUM_LANES) {
        for (int v = 0; v < SUM_VECTORS; v++) sums[v] += load_upto(output + i + v * LANES, width - i - v * LANES);
    }
    const float total = total_of(sums);
    for (int i = 0; i < width; i += LANES) {
        store_upto(output + i, load_upto(output + i, width - i) / total, width - i);
    }
}

inline void score(int kind, const float* logits, float* scores, int count) {
    if (kind == SOFTMAX) return softmax(logits, scores, count);
    for (int i = 0; i < count; i += LANES) {
        Floats value = load_upto(logits + i, count - i);
        if (kind == SIGMOID) {
            value = sigmoid_of(value);
        } else {
            value = softplus_of(value);
            for (int lane = 0; lane < LANES; lane++) value[lane] = std::sqrt(value[lane]);
        }
        store_upto(scores + i, value, count - i);
    }
}

// The places of the `most` largest of `count` numbers, the largest first: of equal ones the first, and NaN before all.
inline void largest_of(const float* numbers, int count, int most, int* places) {
    const auto is_before = [&](int a, int b) {
        const float x = numbers[a], y = numbers[b];
        if (x != x || y != y) return x != x && (y == y || a < b);
        return x > y || (x == y && a < b);
    };
    int found = 0;
    for (int i = 0; i < count; i++) {
        if (found == most && !is_before(i, places[most - 1])) continue;
        int at = found < most ? found++ : most - 1;
        for (; at > 0 && is_before(i, places[at - 1]); at--) places[at] = places[at - 1];
        places[at] = i;
    }
}

// `ranked` without the experts of groups whose best scores are not among the largest
inline void leave_out_groups(const Routing& r, float* ranked, float* of_groups, int* places) {
    const int size = r.num_scores / r.num_groups;
    for (int group = 0; group < r.num_groups; group++) {
        largest_of(ranked + group * size, size, r.ranks_groups_by, places);
        of_groups[group] = 0;
        for (int i = 0; i < r.ranks_groups_by; i++) of_groups[group] += ranked[group * size + places[i]];
    }
    largest_of(of_groups, r.num_groups, r.num_chosen_groups, places);
    for (int group = 0; group < r.num_groups; group++) {
        if (std::find(places, places + r.num_chosen_groups, group) != places + r.num_chosen_groups) continue;
        std::fill_n(ranked + group * size, size, -INFINITY);
    }
}

// Memory for the choice of one row
struct RoutingRoom {
    float* numbers;  // [2 * num_scores + num_groups]
    int* places;     // [num_scores]
};

// One row: logits [num_scores] -> shares and experts [num_chosen]
inline void choose(const Routing& r, const float* logits, const RoutingRoom& room, float* shares, int64_t* chosen) {
    float *const scores = room.numbers, *const ranked = scores + r.num_scores;
    score(r.scores, logits, scores, r.num_scores);
    for (int i = 0; i < r.num_scores; i++) ranked[i] = scores[i] + (r.choice_bias ? r.choice_bias[i] : 0.0f);
    if (r.num_groups > 1) leave_out_groups(r, ranked, ranked + r.num_scores, room.places);
    largest_of(ranked, r.num_scores, r.num_chosen, room.places);
    double total = 0;
    for (int i = 0; i < r.num_chosen; i++) total += scores[room.places[i]];
    const float divisor = r.normalises ? float(total) + r.least_sum : 1.0f;
    for (int i = 0; i < r.num_chosen; i++) {
        chosen[i] = room.places[i];
        shares[i] = scores[room.places[i]] / divisor * r.scale;
    }
}
