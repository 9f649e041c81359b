// All that changes logits before the temperature, on a float copy of the row: a grammar's mask, allowed ids, bad words,
// biases, penalties and adjustments. One pass copies the row, writes -inf for tokens that the mask forbids, and finds
// every NaN.
#pragma once

#include <algorithm>

#include "row_tokens.h"
#include "token_order.h"

namespace {

// One sequence's parameters: workers/sampling/sampling_state.py, ROW
struct Row {
    int64_t seed;
    const int32_t* tokens;
    const int32_t* stop_ids;
    const int32_t* allowed_ids;
    const int32_t* bad_words;  // each word as its length and its ids
    const int32_t* bias_ids;
    const float* bias_values;
    int32_t num_stop_ids;
    int32_t num_allowed_ids;
    int32_t num_bad_words;
    int32_t num_biases;
    int32_t num_prompt_tokens;
    int32_t min_tokens;
    int32_t top_k;
    float inverse_temperature;  // 0: greedy
    float top_p;
    float log_min_p;
    float repetition_penalty;
    float presence_penalty;
    float frequency_penalty;
};

// Mask and adjustments of one row: workers/kernels/cpu_sampler.py, CONSTRAINT
struct Constraint {
    const uint32_t* mask;  // bit t % 32 of word t / 32 allows token t; null: no mask
    const int32_t* adjusted_ids;
    const float* adjusted_by;
    int32_t num_adjusted;
    int32_t late;  // the row is not drawn
};


bool has_penalties(const Row& row) {
    return row.repetition_penalty != 1 || row.presence_penalty != 0 || row.frequency_penalty != 0;
}

bool is_edited(const Row& row, int64_t position, const Constraint* constraint) {
    return (constraint && (constraint->mask || constraint->num_adjusted)) || row.num_allowed_ids || row.num_bad_words ||
           row.num_biases || has_penalties(row) ||
           (row.num_stop_ids && position - row.num_prompt_tokens < row.min_tokens);
}

void mask_bad_words(const Row& row, int64_t position, float* logits) {
    int64_t num_output = position - row.num_prompt_tokens;
    const int32_t* word = row.bad_words;
    for (int i = 0; i < row.num_bad_words; i++) {
        int length = *word++;
        int head = length - 1;
        bool ends_output = head <= num_output && std::equal(word, word + head, row.tokens + position - head);
        if (ends_output) logits[word[head]] = -INF;
        word += length;
    }
}

// Counts the tokens in `seen` (1 + occurrences in the output), then visits each once and clears its count. That takes
// about a nanosecond a token: less than keeping counts from step to step, and it is right for any position.
void apply_penalties(const Row& row, int64_t position, int vocab_size, float* logits, int32_t* seen) {
    const int64_t first = row.repetition_penalty == 1 ? row.num_prompt_tokens : 0;
    for (int64_t i = first; i < position; i++) {
        uint32_t id = row.tokens[i];
        if (id >= uint32_t(vocab_size)) continue;
        seen[id] = std::max(seen[id], 1) + (i >= row.num_prompt_tokens);
    }
    for (int64_t i = first; i < position; i++) {
        uint32_t id = row.tokens[i];
        if (id >= uint32_t(vocab_size) || seen[id] == 0) continue;
        int count = seen[id] - 1;
        seen[id] = 0;
        float logit = logits[id];
        logit = logit > 0 ? logit / row.repetition_penalty : logit * row.repetition_penalty;
        if (count > 0) logit -= count * row.frequency_penalty + row.presence_penalty;
        logits[id] = logit;
    }
}

// Writes a float copy of the logits that the mask allows, and -inf for the others. Returns whether any logit, allowed
// or not, is NaN or +inf.
template <class T>
bool copy_allowed(const Dense<T>& raw, const uint32_t* mask, float* logits) {
    uint32_t bad = 0;
    for_each_vector(raw, [&](int i, Floats values) __attribute__((always_inline)) {
        bad |= invalid(values);
        uint32_t allowed = mask[i / 32] >> i % 32;
        Ints bits = (Ints)((splat_int(int32_t(allowed)) >> lane_index()) & 1);
        Floats kept = bits != 0 ? values : splat(-INF);
        if (i + LANES <= raw.size) {
            store(logits + i, kept);
        } else {
            for (int lane = 0; lane < raw.size - i; lane++) logits[i + lane] = kept[lane];
        }
    });
    return bad != 0;
}

// Applies all that comes before the temperature, on a float copy
template <class T>
Dense<float> edit(const Dense<T>& raw, const Row& row, int64_t position, const Constraint* constraint,
                  TokenScratch& scratch) {
    float* logits = scratch.edited.data();
    const uint32_t* mask = constraint ? constraint->mask : nullptr;  // with a mask the copy has been made
    if (row.num_allowed_ids) {
        std::fill_n(logits, raw.size, -INF);
        for (int i = 0; i < row.num_allowed_ids; i++) {
            int32_t id = row.allowed_ids[i];
            if (!mask || (mask[id / 32] >> id % 32 & 1)) logits[id] = raw.logit(id);
        }
    } else if (!mask) {
        for (int i = 0; i < raw.size; i++) logits[i] = raw.logit(i);
    }
    mask_bad_words(row, position, logits);
    if (position - row.num_prompt_tokens < row.min_tokens) {
        for (int i = 0; i < row.num_stop_ids; i++) logits[row.stop_ids[i]] = -INF;
    }
    for (int i = 0; i < row.num_biases; i++) logits[row.bias_ids[i]] += row.bias_values[i];
    if (has_penalties(row)) apply_penalties(row, position, raw.size, logits, scratch.seen.data());
    for (int i = 0; constraint && i < constraint->num_adjusted; i++) {
        logits[constraint->adjusted_ids[i]] += constraint->adjusted_by[i];
    }
    return {logits, raw.size};
}

// Whether any logit is NaN or +inf. With a mask this also makes the copy that `edit` works on.
template <class T>
bool is_any_invalid(const Dense<T>& raw, const Constraint* constraint, TokenScratch& scratch) {
    if (constraint && constraint->mask) return copy_allowed(raw, constraint->mask, scratch.edited.data());
    return largest(raw).is_invalid;
}

}  // namespace
