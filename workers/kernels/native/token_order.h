// Prefixes of the order of tokens by (logit descending, id ascending): what comes before a token, and the first k. The
// vocabulary is never sorted.
#pragma once

#include <functional>
#include <vector>

#include "row_tokens.h"

namespace {

constexpr float LOG2E = 1.44269504088896341f;
constexpr int SUMMED_TOKENS = 4096;  // whose weights are summed in float: rounding errors stay near 1e-7

struct TokenScratch {
    std::vector<float> edited;
    std::vector<float> values;
    std::vector<int32_t> ids;
    std::vector<int32_t> seen;
    std::vector<float> group_maxima;
    std::vector<uint64_t> keys;

    void reserve(int vocab_size) {
        if (int(seen.size()) >= vocab_size) return;
        edited.resize(vocab_size);
        values.resize(vocab_size + LANES);
        ids.resize(vocab_size + LANES);
        seen.assign(vocab_size, 0);
    }
    Listed listed(int size) { return {values.data(), ids.data(), size}; }
};

struct Before {
    int count;     // tokens ordered before the given one; with KEEP they are in the scratch
    double mass;   // sum of exp((logit - shift) * scale) over them
    double total;  // the same sum over all tokens
};

// What is ordered before the token (logit, id). `tokens` may lie in the scratch: writing never overtakes reading.
template <bool KEEP, class Tokens>
Before before(const Tokens& tokens, float logit, int32_t id, float scale, float shift, TokenScratch& scratch) {
    Before result = {0, 0, 0};
    LaneSums mass = {}, total = {};
    const float scale2 = scale * LOG2E;
    const auto add_up = [&] {
        result.mass += total_of(mass);
        result.total += total_of(total);
        for (int v = 0; v < SUM_VECTORS; v++) mass[v] = total[v] = Floats{};
    };
    for_each_vector(tokens, [&](int i, Floats logits) __attribute__((always_inline)) {
        if (i > 0 && i % SUMMED_TOKENS == 0) add_up();
        Ints ids = tokens.ids(i);
        Floats weight = exp2_of<false>((logits - shift) * scale2);
        Ints is_before = (logits > logit) | ((logits == logit) & (ids < id));
        const int v = i / LANES % SUM_VECTORS;
        total[v] += weight;
        mass[v] += (Floats)((Ints)weight & is_before);
        uint32_t mask = bits_of(is_before);
        if (mask) {
            float* values_to = scratch.values.data() + result.count;
            int32_t* ids_to = scratch.ids.data() + result.count;
            if (KEEP) compress(mask, logits, ids, values_to, ids_to);
            result.count += __builtin_popcount(mask);
        }
    });
    add_up();
    return result;
}

uint64_t sort_key(float logit, int32_t id) {
    logit += 0.0f;  // -0 equals 0
    uint32_t word;
    memcpy(&word, &logit, sizeof(word));
    word = word >> 31 ? ~word : word | 0x80000000u;
    return uint64_t(word) << 32 | uint32_t(~id);
}

// A value that at least k logits reach, and not many more do: the k-th largest of the maxima of disjoint groups
template <class T>
float reached_by(const Dense<T>& tokens, int k, TokenScratch& scratch) {
    int num_vectors = tokens.size / LANES;
    int num_chunks = std::max(4 * k, 512) / LANES;
    int chunk = num_vectors / std::max(num_chunks, 1);
    if (chunk < 4) return -INF;
    scratch.group_maxima.resize(num_chunks * LANES);
    float* maxima = scratch.group_maxima.data();
    for (int first = 0, group = 0; group < num_chunks; first += chunk, group++) {
        Floats best = splat(-INF);
        for (int i = first; i < first + chunk; i++) best = maximum(load(tokens.logits + i * LANES), best);
        store(maxima + group * LANES, best);
    }
    std::nth_element(maxima, maxima + k - 1, maxima + num_chunks * LANES, std::greater<float>());
    return maxima[k - 1];
}

// The k tokens that come first in the order; in the scratch, by ascending id
template <class T>
Listed first_tokens(const Dense<T>& tokens, int k, TokenScratch& scratch) {
    float enough = reached_by(tokens, k, scratch);
    int count = 0;
    for_each_vector(tokens, [&](int i, Floats logits) __attribute__((always_inline)) {
        uint32_t mask = at_least(logits, splat(enough));
        if (i + LANES > tokens.size) mask &= (1u << (tokens.size - i)) - 1;
        if (!mask) return;
        count += compress(mask, logits, tokens.ids(i), scratch.values.data() + count, scratch.ids.data() + count);
    });
    Listed result = scratch.listed(count);
    if (count <= k) return result;
    std::vector<uint64_t>& keys = scratch.keys;
    keys.resize(count);
    for (int i = 0; i < count; i++) keys[i] = sort_key(result.logits[i], result.token_ids[i]);
    std::nth_element(keys.begin(), keys.begin() + k - 1, keys.end(), std::greater<uint64_t>());
    const uint64_t least = keys[k - 1];
    result.size = 0;
    for (int i = 0; i < count; i++) {
        if (sort_key(result.logits[i], result.token_ids[i]) < least) continue;
        result.logits[result.size] = result.logits[i];
        result.token_ids[result.size++] = result.token_ids[i];
    }
    return result;
}

}  // namespace
