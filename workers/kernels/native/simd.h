// Vectors of the processor's natural width, conversions between bfloat16 and float, sums, and exp2.
// Written in the vector extensions of GCC and Clang, so that the same source serves AVX-512, AVX2 and NEON; intrinsics
// are used only if the extensions do badly. Knows nothing of models; included by every CPU kernel.
//
// The compiler fuses no product with a sum (-ffp-contract=off), so an expression means the same in every form. Where
// fusing pays, the source says so: `add_product`, `add_product_exactly`.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define MANTA_LANES 16
#elif defined(__AVX__)
#define MANTA_LANES 8
#else
#define MANTA_LANES 4
#endif
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AMX_TILE__) && defined(__linux__)
#define MANTA_AMX 1
#endif
#define MANTA_INLINE inline __attribute__((always_inline))

constexpr int LANES = MANTA_LANES;
constexpr float LOG2_E = 1.44269504088896340736f;
typedef float Floats __attribute__((vector_size(MANTA_LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(MANTA_LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(MANTA_LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(MANTA_LANES * 2)));

struct bf16 {
    uint16_t bits;
};

MANTA_INLINE Floats splat(float value) {
    return value - Floats{};
}

MANTA_INLINE Ints splat_int(int32_t value) {
    return value - Ints{};
}

MANTA_INLINE Ints lane_index() {
#if MANTA_LANES == 16
    return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif MANTA_LANES == 8
    return Ints{0, 1, 2, 3, 4, 5, 6, 7};
#else
    return Ints{0, 1, 2, 3};
#endif
}

MANTA_INLINE Floats load(const float* from) {
    Floats value;
    memcpy(&value, from, sizeof(value));
    return value;
}

MANTA_INLINE Floats load(const bf16* from) {
#if defined(__AVX512F__)
    // GCC 12 makes four instructions of the form below; with two, argmax of bfloat16 logits took 25 to 40% less time
    __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
    return (Floats)_mm512_slli_epi32(words, 16);
#else
    Halves bits;
    memcpy(&bits, from, sizeof(bits));
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
#endif
}

MANTA_INLINE Floats load(const int8_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    typedef int8_t Bytes __attribute__((vector_size(MANTA_LANES)));
    Bytes bytes;
    memcpy(&bytes, from, sizeof(bytes));
    return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
#endif
}

MANTA_INLINE void store(float* to, Floats value) {
    memcpy(to, &value, sizeof(value));
}

// Rounds to nearest even; NaN stays NaN
MANTA_INLINE void store(bf16* to, Floats value) {
#if defined(__AVX512BF16__)
    __m256bh bits = _mm512_cvtneps_pbh((__m512)value);
#else
    Words word = (Words)value;
    Words rounded = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    Halves bits = __builtin_convertvector(value == value ? rounded : (word >> 16) | 0x40, Halves);
#endif
    memcpy(to, &bits, sizeof(bits));
}

// 2 * LANES elements in a row
MANTA_INLINE void store_two(float* to, Floats first, Floats second) {
    store(to, first);
    store(to + LANES, second);
}

MANTA_INLINE void store_two(bf16* to, Floats first, Floats second) {
#if defined(__AVX512BF16__)
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));  // a whole cache line
#else
    store(to, first);
    store(to + LANES, second);
#endif
}

// Lanes hold pairs of neighbouring bfloat16: the even elements, or the odd ones, widened to float
MANTA_INLINE Floats even_of(Ints pairs) {
    return (Floats)(pairs << 16);
}

MANTA_INLINE Floats odd_of(Ints pairs) {
    return (Floats)(pairs & splat_int(int32_t(0xffff0000)));
}

MANTA_INLINE Ints load_ints(const void* from) {
    Ints value;
    memcpy(&value, from, sizeof(value));
    return value;
}

#if defined(__FMA__) || defined(__aarch64__)
#define MANTA_FUSES 1  // the processor rounds sum + a * b once
#else
#define MANTA_FUSES 0
#endif

// sum + a * b, rounded once if the processor can; for pairs, sum + even * even + odd * odd in one instruction
MANTA_INLINE Floats add_product(Floats sum, Floats a, Floats b) {
#if MANTA_LANES == 16
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
    return sum + a * b;
#endif
}

// sum + a * b, rounded once by every processor. One without the instruction takes some twenty times as long: the product
// is exact in double, and the sum is rounded to odd, so that rounding it again to float is right (Boldo and Melquiond,
// 2008).
MANTA_INLINE Floats add_product_exactly(Floats sum, Floats a, Floats b) {
#if MANTA_FUSES
    return add_product(sum, a, b);
#else
    typedef double Doubles __attribute__((vector_size(MANTA_LANES * 8)));
    typedef int64_t Longs __attribute__((vector_size(MANTA_LANES * 8)));
    const Doubles product = __builtin_convertvector(a, Doubles) * __builtin_convertvector(b, Doubles);
    const Doubles addend = __builtin_convertvector(sum, Doubles);
    const Doubles total = product + addend;
    const Doubles part = total - product;
    const Doubles error = (product - (total - part)) + (addend - part);  // TwoSum: exact, NaN if the total is not finite
    const Longs is_inexact = (error > 0.0) | (error < 0.0), is_even = ((Longs)total & 1) == 0;
    const Longs is_short = (error > 0.0) == (total > 0.0);  // the exact sum is farther from zero: the next odd one is too
    const Longs step = is_short ? Longs{} + 1 : Longs{} - 1;
    return __builtin_convertvector((Doubles)((Longs)total + (is_inexact & is_even & step)), Floats);
#endif
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define MANTA_PAIRS 1
MANTA_INLINE Floats add_product(Floats sum, Ints a, Ints b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define MANTA_PAIRS 1
MANTA_INLINE Floats add_product(Floats sum, Ints a, Ints b) {
    return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
#endif

// The first `count` < LANES elements. On loading the others are zero; on storing they are not written.
template <class T>
MANTA_INLINE Floats load_part(const T* from, int count) {
    T padded[LANES] = {};
    memcpy(padded, from, count * sizeof(T));
    return load(padded);
}

template <class T>
MANTA_INLINE void store_part(T* to, Floats value, int count) {
    T padded[LANES];
    store(padded, value);
    memcpy(to, padded, count * sizeof(T));
}

template <class T>
MANTA_INLINE Floats load_upto(const T* from, int count) {
    return count >= LANES ? load(from) : load_part(from, count < 0 ? 0 : count);
}

template <class T>
MANTA_INLINE void store_upto(T* to, Floats value, int count) {
    if (count >= LANES) {
        store(to, value);
    } else if (count > 0) {
        store_part(to, value, count);
    }
}

MANTA_INLINE float to_float(float value) {
    return value;
}

MANTA_INLINE float to_float(bf16 value) {
    uint32_t word = uint32_t(value.bits) << 16;
    float result;
    memcpy(&result, &word, sizeof(result));
    return result;
}

// In each lane the larger of a and b; b if either is NaN
MANTA_INLINE Floats maximum(Floats a, Floats b) {
#if MANTA_LANES == 16
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// Long sums run in SUM_LANES lanes in every form: element i of a row is added to lane i % SUM_LANES.
constexpr int SUM_LANES = 16;
constexpr int SUM_VECTORS = SUM_LANES / LANES;
typedef Floats LaneSums[SUM_VECTORS];

// Adds the upper half of the lanes to the lower, then a quarter to a quarter, and so on
MANTA_INLINE float total_of(const float* lanes) {
    float sums[SUM_LANES];
    memcpy(sums, lanes, sizeof(sums));
    for (int half = SUM_LANES / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    }
    return sums[0];
}

MANTA_INLINE float total_of(const LaneSums& lanes) {
    return total_of((const float*)lanes);
}

MANTA_INLINE float reduce_max(Floats value) {
#if MANTA_LANES == 16
    return _mm512_reduce_max_ps((__m512)value);
#else
    float best = value[0];
    for (int i = 1; i < LANES; i++) best = value[i] > best ? value[i] : best;
    return best;
#endif
}

// Whether a > b in any lane; a NaN is never greater, nor is anything greater than a NaN
MANTA_INLINE bool any_greater(Floats a, Floats b) {
#if MANTA_LANES == 16
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
#else
    return reduce_max(a - b) > 0;
#endif
}

// A polynomial of x, from the leading coefficient down. COARSE fuses products with sums where the processor can
template <bool COARSE, int COUNT>
MANTA_INLINE Floats polynomial(const float (&coefficients)[COUNT], Floats x) {
    Floats result = splat(coefficients[0]);
    for (int i = 1; i < COUNT; i++) {
        const Floats next = splat(coefficients[i]);
        result = COARSE ? add_product(next, result, x) : result * x + next;
    }
    return result;
}

// 2^x for x <= 127, to a relative error of 8e-5 (COARSE: below bfloat16's 4e-3) or 2e-7, then with the same bits in
// every form. For x below -126 the result may be 2^-126 although it should be smaller; NaN stays NaN. A minimax
// polynomial of the fraction, times the power of two.
template <bool COARSE>
MANTA_INLINE Floats exp2_of(Floats x) {
#if defined(__AVX512DQ__)
    if (COARSE) {  // the processor splits x into floor and fraction, and scales: two instructions instead of six
        const Floats fraction = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        constexpr float coefficients[] = {0.078024520038022f, 0.22606715913192713f, 0.6958335392225105f,
                                          0.9999252186225541f};
        return (Floats)_mm512_scalef_ps((__m512)polynomial<true>(coefficients, fraction), (__m512)x);
    }
#endif
    constexpr float coarse[] = {0.05517166492415716f, 0.2426111218766865f, 0.6932609862236714f, 0.9999280735783665f};
    constexpr float fine[] = {0.0013276471518576605f, 0.00967554133065924f, 0.055507132749638484f,
                              0.24022119723934343f, 0.6931469670638635f, 1.0000000716546553f};
    x = maximum(splat(-126.0f), x);
    const Floats shift = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
    const Floats shifted = x + shift;
    const Floats fraction = x - (shifted - shift);
    const Floats result = COARSE ? polynomial<true>(coarse, fraction) : polynomial<false>(fine, fraction);
    return result * (Floats)(((Ints)shifted + 127) << 23);
}

// x * sigmoid(x); COARSE as in `exp2_of`
template <bool COARSE>
MANTA_INLINE Floats silu_of(Floats x) {
    const Floats exponent = maximum(splat(-126.0f), x * LOG2_E);  // so that 2^-x stays finite; a NaN passes
    return x / (1.0f + exp2_of<COARSE>(-exponent));
}

// GELU with tanh: x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3)); COARSE as in `exp2_of`
template <bool COARSE>
MANTA_INLINE Floats gelu_tanh_of(Floats x) {
    const Floats twice = x * (1.5957691216057308f + 0.07135481282989504f * (x * x));
    return x / (1.0f + exp2_of<COARSE>(-maximum(splat(-126.0f), twice * LOG2_E)));
}

// The gates that are compiled, by the numbers of GATE_KINDS in cpu_linear.py, where 0 is none
constexpr int SILU = 1, GELU_TANH = 2;

template <bool COARSE>
MANTA_INLINE Floats gate_of(int gate, Floats x) {
    return gate == GELU_TANH ? gelu_tanh_of<COARSE>(x) : silu_of<COARSE>(x);
}

// To about 1e-7, absolutely
MANTA_INLINE Floats tanh_of(Floats x) {
    const Floats shrunk = exp2_of<false>(maximum(x, -x) * (-2.0f * LOG2_E));
    const Floats result = (1.0f - shrunk) / (1.0f + shrunk);
    return x < 0.0f ? -result : result;
}

// body(std::integral_constant<int, count>) for a count in [1, MOST], so that loops over it are unrolled
template <int MOST, class Body>
MANTA_INLINE void with_constant(int count, const Body& body) {
    if constexpr (MOST > 0) {
        if (count == MOST) return body(std::integral_constant<int, MOST>());
        with_constant<MOST - 1>(count, body);
    }
}

// Interleaves the lower and the upper halves of a and b: (a0, b0, a1, b1, ...)
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define MANTA_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef MANTA_SHUFFLE  // GCC before 12
#define MANTA_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif

MANTA_INLINE Ints zip_low(Ints a, Ints b) {
#if MANTA_LANES == 16
    return MANTA_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif MANTA_LANES == 8
    return MANTA_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    return MANTA_SHUFFLE(a, b, 0, 4, 1, 5);
#endif
}

MANTA_INLINE Ints zip_high(Ints a, Ints b) {
#if MANTA_LANES == 16
    return MANTA_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif MANTA_LANES == 8
    return MANTA_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return MANTA_SHUFFLE(a, b, 2, 6, 3, 7);
#endif
}

// Transposes LANES rows of COUNT 32-bit elements, which lie one after the other, by log2(LANES) perfect shuffles: lane i
// of vector j becomes element j of row i
template <int COUNT>
MANTA_INLINE void transpose(Ints (&rows)[COUNT]) {
    for (int round = 1; round < LANES; round *= 2) {
        Ints next[COUNT];
        for (int i = 0; i < COUNT / 2; i++) {
            next[2 * i] = zip_low(rows[i], rows[i + COUNT / 2]);
            next[2 * i + 1] = zip_high(rows[i], rows[i + COUNT / 2]);
        }
        for (int i = 0; i < COUNT; i++) rows[i] = next[i];
    }
}
