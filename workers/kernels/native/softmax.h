// One row of the online softmax of attention, for a block of keys at a time, and over splits. Used by attention.h only.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "byte_products.h"
#include "quantized_floats.h"
#include "tiles.h"

constexpr float LOWEST = -1e30f;  // the maximum before any key: finite, so that differences are never NaN
constexpr float SLACK = 8.0f;  // a score may exceed the row's running maximum by this many powers of two

// One row's state after a split of its keys, or after several of them
struct RowState {
    float* values;  // [width]: probabilities times values, still to be divided by `sum`
    float maximum;  // probabilities are relative to it
    float sum;  // of probabilities; 0 if no key was visible yet
};

// Adds a later split to a row's state
inline void fold(RowState& to, const RowState& split, int width) {
    if (split.sum == 0) return;
    if (to.sum == 0) {
        memcpy(to.values, split.values, width * sizeof(float));
        to.maximum = split.maximum;
        to.sum = split.sum;
        return;
    }
    const float maximum_now = std::max(to.maximum, split.maximum);
    const Floats left = exp2_of<false>(splat(to.maximum - maximum_now));
    const Floats right = exp2_of<false>(splat(split.maximum - maximum_now));
    for (int i = 0; i < width; i += LANES) {
        store(to.values + i, load(to.values + i) * left + load(split.values + i) * right);
    }
    to.maximum = maximum_now;
    to.sum = to.sum * left[0] + split.sum * right[0];
}

// One row of softmax over `vectors` * LANES scores, of which [low, high) are visible. Turns scores into probabilities
// relative to the row's running maximum. If that maximum grows, rescales what the row has gathered. It need not be the
// exact maximum: a score that exceeds it by less than SLACK costs no precision, so most blocks need not change it.
//
// With SCALED a score is to be multiplied by its key's scale first, and a probability by its value's scale last. With
// CAPPED a score becomes tanh(score * cap_scale) then.
template <bool MASKED, bool SCALED, bool CAPPED, class E>
MANTA_INLINE void softmax_row(
    const float* scores, E* probabilities, int vectors, int low, int high, float cap_scale, float factor,
    float& running_max, float* running_sum, float* gathered, int width, const float* key_scales, const float* value_scales
) {
    constexpr bool coarse = !std::is_same<E, float>::value, IS_ROUNDED = std::is_same<E, int8_t>::value;
    Floats logits[KEY_BLOCK / LANES];
    Ints visible[KEY_BLOCK / LANES];
    Floats best = splat(LOWEST);
    for (int i = 0; i < vectors; i++) {
        logits[i] = load(scores + i * LANES);
        if (SCALED) logits[i] *= load(key_scales + i * LANES);
        if (CAPPED) logits[i] = tanh_of(logits[i] * cap_scale);
        if (MASKED) {
            const Ints key = lane_index() + i * LANES;
            visible[i] = (key >= low) & (key < high);
            logits[i] = visible[i] ? logits[i] : splat(LOWEST);
        }
        best = maximum(best, logits[i]);
    }
    LaneSums sums;
    memcpy(&sums, running_sum, sizeof(sums));
    if (any_greater(best * factor, splat(running_max + SLACK))) {
        const float maximum_now = reduce_max(best) * factor;
        if (running_max > LOWEST) {
            const Floats shrink = exp2_of<false>(splat(running_max - maximum_now));
            for (int i = 0; i < width; i += LANES) store(gathered + i, load(gathered + i) * shrink);
            for (Floats& sum : sums) sum *= shrink;
        }
        running_max = maximum_now;
    }
    for (int first = 0; first < vectors; first += SUM_VECTORS) {
        for (int v = 0; v < SUM_VECTORS; v++) {
            const int i = first + v;
            Floats probability = exp2_of<coarse>(logits[i] * factor - running_max);
            if (MASKED) probability = visible[i] ? probability : splat(0);
            sums[v] += probability;
            if (SCALED) {
                probability *= load(value_scales + i * LANES);
                if (MASKED) probability = visible[i] ? probability : splat(0);  // a scale may be NaN
            }
            if constexpr (IS_ROUNDED) {
                logits[i] = probability;
            } else {
                store(probabilities + i * LANES, probability);
            }
        }
    }
    if constexpr (IS_ROUNDED) store_weights(probabilities, logits, vectors);
    memcpy(running_sum, &sums, sizeof(sums));
}

// A call of its own, so that the usual rows stay short in the loop over rows
template <bool MASKED, bool SCALED, class E, class... Rest>
__attribute__((noinline)) void capped_softmax_row(const float* scores, E* probabilities, Rest&&... rest) {
    softmax_row<MASKED, SCALED, true>(scores, probabilities, std::forward<Rest>(rest)...);
}
