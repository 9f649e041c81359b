// Sums of products of int8, four inputs of an output at a time: what each processor has for them. All forms give the
// same integers, because no sum is rounded or cut off. Knows nothing of linears; included by quantized_linear.h.
//
// A vector of weights holds LANES outputs of four inputs each. Weights of 4 bits are unsigned in every form. Weights of
// 8 bits are unsigned where one instruction sums four products of unsigned and signed bytes (VNNI), or where bytes are
// widened first, and signed elsewhere. In memory they are signed too where AMX's tiles multiply signed bytes.
#pragma once

#include "simd.h"

#if defined(__AVX2__) && MANTA_LANES == 8 && !defined(__AVXVNNI__)
#define MANTA_BYTE_PAIRS 1  // bytes are multiplied in pairs, whose sums are int16
#else
#define MANTA_BYTE_PAIRS 0
#endif

#if defined(__SSE2__) && !MANTA_BYTE_PAIRS
constexpr int BYTE_ZERO = 128;  // `add_dot` takes bytes this much larger than the values of 8 bits
#else
constexpr int BYTE_ZERO = 0;
#endif
#if MANTA_AMX
constexpr int PACKED_BYTE_ZERO = 0;  // bytes in memory are this much larger than the values of 8 bits
#else
constexpr int PACKED_BYTE_ZERO = BYTE_ZERO;
#endif
constexpr int NIBBLE_ZERO = 8;  // both for values of 4 bits

// How the weights of a product lie: values of 8 bits, two of 4 bits in a byte, one of 4 bits in a byte, or two codes of 4
// bits in a byte, each of which stands for a value of 8 bits.
enum Kind { BYTES, NIBBLES, SINGLE_NIBBLES, CODES };

#if MANTA_AMX
constexpr Kind UNPACKED = BYTES;  // the tiles multiply signed bytes
#else
constexpr Kind UNPACKED = SINGLE_NIBBLES;
#endif

constexpr int zero_of(Kind kind) {
    return kind == BYTES || kind == CODES ? BYTE_ZERO : NIBBLE_ZERO;
}

typedef int8_t FourBytes __attribute__((vector_size(MANTA_LANES * 4)));

// Packed values of 8 bits as `add_dot` takes them.
MANTA_INLINE Ints as_dot_bytes(Ints packed) {
    return PACKED_BYTE_ZERO == BYTE_ZERO ? packed : packed ^ splat_int(int32_t(0x80808080));
}

// Values of 4 bits, one in a byte, as UNPACKED ones.
MANTA_INLINE Ints as_unpacked(Ints nibbles) {
    return UNPACKED == BYTES ? (Ints)((FourBytes)nibbles + (int8_t)(PACKED_BYTE_ZERO - NIBBLE_ZERO)) : nibbles;
}

// The 16 bytes that codes stand for, `zero` larger than the values, as `lookup` takes them.
MANTA_INLINE Ints table_of(const int8_t* codebook, int zero) {
    Ints table;
    for (int i = 0; i < LANES / 4; i++) memcpy((char*)&table + 16 * i, codebook, 16);
    return (Ints)((FourBytes)table + (int8_t)zero);
}

// The byte of a table for each code, one in a byte.
MANTA_INLINE Ints lookup(Ints codes, Ints table) {
#if MANTA_LANES == 16 && defined(__AVX512BW__)
    return (Ints)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif MANTA_LANES == 8 && defined(__AVX2__)
    return (Ints)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
#elif MANTA_LANES == 4 && defined(__SSSE3__)
    return (Ints)_mm_shuffle_epi8((__m128i)table, (__m128i)codes);
#elif MANTA_LANES == 4 && defined(__aarch64__)
    return (Ints)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)codes);
#else
    uint8_t from[LANES * 4], to[LANES * 4];
    memcpy(from, &codes, sizeof(from));
    for (int i = 0; i < LANES * 4; i++) to[i] = ((const uint8_t*)&table)[from[i]];
    memcpy(&codes, to, sizeof(to));
    return codes;
#endif
}

MANTA_INLINE Ints low_nibbles(Ints packed) {
    return packed & splat_int(0x0f0f0f0f);
}

MANTA_INLINE Ints high_nibbles(Ints packed) {
    return (Ints)((Words)packed >> 4) & splat_int(0x0f0f0f0f);
}

#if defined(__SSE2__)
MANTA_INLINE Ints add_pairs(Ints a, Ints b) {  // int16 pairs: a0 * b0 + a1 * b1
#if MANTA_LANES == 16
    return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}

// The bytes at even or odd places of each int16, with the sign or without.
typedef int16_t Shorts __attribute__((vector_size(MANTA_LANES * 4)));
typedef uint16_t UnsignedShorts __attribute__((vector_size(MANTA_LANES * 4)));
MANTA_INLINE Ints signed_even(Ints bytes) {
    return (Ints)((Shorts)((UnsignedShorts)bytes << 8) >> 8);
}
MANTA_INLINE Ints signed_odd(Ints bytes) {
    return (Ints)((Shorts)bytes >> 8);
}
MANTA_INLINE Ints unsigned_even(Ints bytes) {
    return bytes & splat_int(0x00ff00ff);
}
MANTA_INLINE Ints unsigned_odd(Ints bytes) {
    return (Ints)((UnsignedShorts)bytes >> 8);
}
#endif

#if MANTA_BYTE_PAIRS
// Products of weights of 4 bits, added in int16: of up to PAIRED_INPUTS inputs none exceeds 8 * 2 * 15 * 127.
constexpr int PAIRED_INPUTS = 32;
MANTA_INLINE Ints add_paired(Ints pairs, Ints nibbles, Ints inputs) {
    return (Ints)_mm256_add_epi16((__m256i)pairs, _mm256_maddubs_epi16((__m256i)nibbles, (__m256i)inputs));
}
MANTA_INLINE Ints add_pairs_to(Ints sums, Ints pairs) {
    return sums + (Ints)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
}
#endif

// sums + the products of each output's four weights with four inputs; of NIBBLES one in a byte.
template <Kind KIND>
MANTA_INLINE Ints add_dot(Ints sums, Ints weights, Ints inputs) {
#if defined(__AVX512VNNI__) && MANTA_LANES == 16
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)inputs);
#elif defined(__AVXVNNI__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)inputs);
#elif defined(__SSE2__)
    // Pairs of products of an unsigned byte may exceed int16, where the instruction for bytes would cut them off: so
    // bytes are widened first. Pairs of 15 * 127 do not, nor those of 128 * 127: a weight gives its sign to the input.
#if MANTA_LANES == 16
    if (KIND != BYTES) {
        const __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, (__m512i)inputs);
        return sums + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
    }
#elif MANTA_BYTE_PAIRS
    if (KIND != BYTES) return add_pairs_to(sums, add_paired(Ints{}, weights, inputs));
    const __m256i signed_inputs = _mm256_sign_epi8((__m256i)inputs, (__m256i)weights);
    return add_pairs_to(sums, (Ints)_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)weights), signed_inputs));
#endif
    sums += add_pairs(unsigned_even(weights), signed_even(inputs));
    return sums + add_pairs(unsigned_odd(weights), signed_odd(inputs));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (Ints)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, (int8x16_t)inputs);
#elif defined(__aarch64__)
    const int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)weights), vget_low_s8((int8x16_t)inputs));
    const int16x8_t high = vmull_high_s8((int8x16_t)weights, (int8x16_t)inputs);
    return sums + (Ints)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#else
    int8_t a[LANES * 4], b[LANES * 4];
    memcpy(a, &weights, sizeof(a));
    memcpy(b, &inputs, sizeof(b));
    for (int i = 0; i < LANES * 4; i++) sums[i / 4] += a[i] * b[i];
    return sums;
#endif
}

// LANES numbers of float16, exactly. Neither infinite nor NaN.
MANTA_INLINE Floats load_half(const uint16_t* from) {
#if MANTA_LANES == 16
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    Halves bits;
    memcpy(&bits, from, sizeof(bits));
    const Words words = __builtin_convertvector(bits, Words);
    const Floats magnitude = (Floats)((words & 0x7fff) << 13) * 0x1p112f;  // moves the exponent to float's bias
    return (Floats)((Words)magnitude | (words & 0x8000) << 16);
#endif
}
