// Draws a token by Gumbel-max. Noise is the function of (seed, position, token id) that workers/sampling/noise.py
// documents.
#pragma once

#include "logarithms.h"
#include "row_tokens.h"

namespace {

constexpr float LN2 = 0.693147180559945309f;
constexpr float LARGEST_V = 0x1.fffffep-1f;  // 1 - 2^-24
constexpr float LARGEST_NOISE = 22.9f;       // -log(2^-33), rounded up

uint64_t mix64(uint64_t word) {
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9u;
    word = (word ^ word >> 27) * 0x94d049bb133111ebu;
    return word ^ word >> 31;
}

uint64_t noise_key(int64_t seed, int64_t position) {
    const uint64_t golden = 0x9e3779b97f4a7c15u;
    return mix64(mix64(uint64_t(seed) + golden) + (uint64_t(position) + 1) * golden);
}

MANTA_INLINE Words hash(Words token_ids, uint64_t key) {
    Words x = token_ids ^ uint32_t(key);
    x = (x ^ x >> 17) * 0xed5ad4bbu + uint32_t(key >> 32);
    x = (x ^ x >> 11) * 0xac4c1b51u;
    x = (x ^ x >> 15) * 0x31848babu;
    return x ^ x >> 14;
}

float gumbel(uint32_t word) {
    float v = std::min((float(word) + 0.5f) * 0x1p-32f, LARGEST_V);
    return float(-log_of(-log1p_of(-double(v))));
}

struct Drawn {
    float score;
    float logit;
    int32_t id;  // -1: no token can be drawn
    bool is_invalid;
};

// Not inlined: most vectors never come here, and if it were inlined each of them would store its locals
__attribute__((noinline)) void draw_exactly(uint32_t mask, Floats logits, Floats scaled, Ints ids, Words words,
                                              Drawn& best) {
    for (; mask; mask &= mask - 1) {
        int lane = __builtin_ctz(mask);
        float score = scaled[lane] + gumbel(words[lane]);
        if (score > best.score || (score == best.score && ids[lane] < best.id)) {
            best.score = score;
            best.logit = logits[lane];
            best.id = ids[lane];
        }
    }
}

// Gumbel-max over the tokens whose scaled logit is at least `floor`. For most tokens only a hash and an upper bound of
// the noise are computed: -log(-log1p(-v)) < -log(v), and the bits of a float, read as an integer, are a lower bound of
// its logarithm that is at most 0.06 off. Logarithms are computed only for the few tokens that could still win (about a
// dozen in a row).
template <class Tokens>
Drawn draw(const Tokens& tokens, float scale, float floor, uint64_t key) {
    Drawn best = {-INF, -INF, -1, false};
    Floats threshold = splat(-INF);  // a token whose bound is above it may win
    Floats hopeless = splat(-INF);   // a token whose scaled logit is not above it loses with any noise
    uint32_t bad = 0;
    const float slope = -LN2 * 0x1p-23f;
    const float offset = LN2 * (127 + 32);
    for_each_vector(tokens, [&](int i, Floats logits) __attribute__((always_inline)) {
        bad |= invalid(logits);
        Floats scaled = logits * scale;
        if (!greater(scaled, hopeless)) return;
        Ints ids = tokens.ids(i);
        Words words = hash((Words)ids, key);
        Floats v = __builtin_convertvector(words, Floats) + 0.5f;  // times 2^32
        Floats bound = scaled + (__builtin_convertvector((Ints)v, Floats) * slope + offset);
        uint32_t mask = greater(bound, threshold) & at_least(scaled, splat(floor));
        if (__builtin_expect(mask == 0, 1)) return;
        draw_exactly(mask, logits, scaled, ids, words, best);
        float reach = best.score - (1e-4f + 1e-6f * std::fabs(best.score));  // minus the bound's rounding error
        threshold = splat(reach);
        hopeless = splat(reach - LARGEST_NOISE);
    });
    best.is_invalid = bad != 0;
    return best;
}

}  // namespace
