// The tokens of a row of logits, or a list of some of them, in vectors: which lanes are valid, the largest, and what is
// wrong with a logit. Included by sampler.cpp alone, as are its other parts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "simd.h"

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
enum Status : uint8_t { OK, NOT_A_NUMBER, INFINITE, MASKED, LATE, OVERFLOWED };  // workers/kernels/protocol.py

// ---- Masks: bit i is lane i -----------------------------------------------------------------------------------------

MANTA_INLINE uint32_t bits_of(Ints lanes) {
#if MANTA_LANES == 16
    return _mm512_movepi32_mask((__m512i)lanes);
#elif MANTA_LANES == 8
    return _mm256_movemask_ps((__m256)lanes);
#else
    uint32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= uint32_t(lanes[i] & 1) << i;
    return bits;
#endif
}

MANTA_INLINE uint32_t greater(Floats a, Floats b) {
#if MANTA_LANES == 16
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#else
    return bits_of(a > b);
#endif
}

MANTA_INLINE uint32_t at_least(Floats a, Floats b) {
#if MANTA_LANES == 16
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#else
    return bits_of(a >= b);
#endif
}

// Lanes that are NaN or +inf
MANTA_INLINE uint32_t invalid(Floats a) {
#if MANTA_LANES == 16
    return _mm512_cmp_ps_mask((__m512)a, _mm512_set1_ps(INF), _CMP_NLT_UQ);
#else
    return bits_of(~(a < INF));
#endif
}

// Writes the lanes of `mask` one after another and returns their number; up to LANES elements may be overwritten
MANTA_INLINE int compress(uint32_t mask, Floats values, Ints ids, float* values_to, int32_t* ids_to) {
#if MANTA_LANES == 16
    // Into a register, then a plain store: compressing stores are microcoded on some processors
    _mm512_storeu_ps(values_to, _mm512_maskz_compress_ps(mask, (__m512)values));
    _mm512_storeu_si512(ids_to, _mm512_maskz_compress_epi32(mask, (__m512i)ids));
    return __builtin_popcount(mask);
#else
    int count = 0;
    for (; mask; mask &= mask - 1) {
        int lane = __builtin_ctz(mask);
        values_to[count] = values[lane];
        ids_to[count++] = ids[lane];
    }
    return count;
#endif
}

// ---- Tokens to draw from: a whole row of logits, or a list of (logit, id) -------------------------------------------

template <class T>
struct Dense {
    const T* logits;
    int size;
    MANTA_INLINE Ints ids(int i) const { return lane_index() + i; }
    MANTA_INLINE float logit(int i) const { return to_float(logits[i]); }
};

struct Listed {
    float* logits;
    int32_t* token_ids;
    int size;
    MANTA_INLINE Ints ids(int i) const {
        Ints result;
        memcpy(&result, token_ids + i, sizeof(result));
        return result;
    }
};

// Calls body(index, logits, valid lanes); lanes beyond the end are -inf
template <class Tokens, class Body>
MANTA_INLINE void for_each_vector(const Tokens& tokens, Body body) {
    int i = 0;
    for (; i + LANES <= tokens.size; i += LANES) body(i, load(tokens.logits + i));
    if (i < tokens.size) {
        Floats rest = load_part(tokens.logits + i, tokens.size - i);
        body(i, lane_index() < tokens.size - i ? rest : splat(-INF));
    }
}

struct Best {
    float value;
    int32_t id;  // -1: every logit is -inf
    bool is_invalid;
};

// The largest logit, the lowest id among equals, and whether any is NaN or +inf
template <class T>
Best largest(const Dense<T>& tokens) {
    Floats best = splat(-INF);
    Ints best_at = splat_int(0);
    uint32_t bad = 0;
    for_each_vector(tokens, [&](int i, Floats logits) __attribute__((always_inline)) {
        bad |= invalid(logits);
        best_at = logits > best ? splat_int(i) : best_at;
        best = maximum(logits, best);
    });
    float value = reduce_max(best);
    int32_t id = std::numeric_limits<int32_t>::max();
    Ints ids = best_at + lane_index();
    for (int lane = 0; lane < LANES; lane++) {
        if (best[lane] == value) id = std::min(id, ids[lane]);
    }
    return {value, value == -INF ? -1 : id, bad != 0};
}

template <class T>
Status why_invalid(const Dense<T>& tokens) {
    for (int i = 0; i < tokens.size; i++) {
        if (std::isnan(tokens.logit(i))) return NOT_A_NUMBER;
    }
    return INFINITE;
}

}  // namespace
