// Weights in bfloat16 that take 12 bits each in memory, without loss. Trained weights of a neighbourhood have few
// different exponents, so a code of 4 bits stands for the exponent, and 8 bits for the sign and the mantissa (after
// Zhang et al., "70% Size, 100% Accuracy: Lossless LLM Compression", 2025, whose codes have variable lengths). What a
// code cannot express is an exception, which is kept apart as a whole. linear_vectors.h and linear_tiles.h decode a
// chunk into a near cache before they multiply it: the products are those of the weights as they were, bit for bit.
//
// Weights lie in strips as linear.h describes them. A chunk is STEP inputs of a strip; its base is an exponent. Code c
// below 15 stands for the exponent base - c, and 15 for the exponent 0, which zeros have.
#pragma once

#include <cstdint>

#include "simd.h"

constexpr int LOSSLESS_CHUNK = 1024;  // weights that have one base
constexpr int LOSSLESS_GROUP = 128;  // weights that are decoded at a time
constexpr int GROUP_BYTES = LOSSLESS_GROUP / 2 + LOSSLESS_GROUP;  // of codes, then of signs and mantissas
constexpr int LOSSLESS_BYTES = LOSSLESS_CHUNK / LOSSLESS_GROUP * GROUP_BYTES;  // of a chunk
constexpr int LOSSLESS_AHEAD = LOSSLESS_BYTES;  // from what is decoded to what is fetched: farther, it overtakes the use
constexpr int ZERO_CODE = 15;
constexpr int LEAST_BASE = 15, MOST_BASE = 254;             // infinities and NaN are exceptions

// The weights of a linear, [chunks of all strips].
struct Lossless {
    const uint8_t* codes = nullptr;        // [chunks][LOSSLESS_BYTES]
    const uint8_t* bases = nullptr;        // [chunks]
    const uint32_t* starts = nullptr;      // [chunks + 1]: the first exception of each
    const uint32_t* exceptions = nullptr;  // the place in the chunk, and in the lower half the weight

    explicit operator bool() const { return codes != nullptr; }

    static int64_t bytes(int64_t chunks) {
        return chunks * LOSSLESS_BYTES + padded(chunks) + (chunks + 1) * sizeof(uint32_t);
    }
    static int64_t padded(int64_t chunks) { return (chunks + 63) / 64 * 64; }

    Lossless() = default;
    Lossless(const void* packed, const void* exceptions, int64_t chunks)
        : codes((const uint8_t*)packed),
          bases(codes + chunks * LOSSLESS_BYTES),
          starts((const uint32_t*)(bases + padded(chunks))),
          exceptions((const uint32_t*)exceptions) {}

    bool has_exceptions(int64_t chunk) const { return starts[chunk] != starts[chunk + 1]; }

    // Fetches what is far behind a group
    static MANTA_INLINE void fetch(const uint8_t* group) {
        for (int line = 0; line < GROUP_BYTES; line += 64) __builtin_prefetch(group + LOSSLESS_AHEAD + line, 0, 3);
    }

    // Writes chunks [first, end) as they lie in a strip, and fetches those behind them.
    void decode(int64_t first, int64_t end, bf16* to) const;
};

// A group is 64 bytes of codes, then two halves of 64 bytes of signs and mantissas. The lower 4 bits of byte i are the
// code of byte i of the first half, the upper ones that of the second. In 16 bytes of a half, the first 8 are weights of
// its first 32, and the others of its second 32: so two interleavings give them in order.
#if defined(__AVX512BW__)
// Code by code, what stands in the upper and in the lower byte of a weight: the exponent's higher 7 bits and its last one
struct GroupDecoder {
    __m512i upper, lower;

    GroupDecoder() = default;
    explicit MANTA_INLINE GroupDecoder(int base) {
        const __m512i codes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
        const __mmask64 is_zero = _mm512_cmpeq_epi8_mask(codes, _mm512_set1_epi8(ZERO_CODE));
        const __m512i exponents = _mm512_mask_blend_epi8(
            is_zero, _mm512_sub_epi8(_mm512_set1_epi8((char)base), codes), _mm512_setzero_si512());
        upper = _mm512_and_si512(_mm512_srli_epi16(exponents, 1), _mm512_set1_epi8(0x7f));
        lower = _mm512_and_si512(_mm512_slli_epi16(exponents, 7), _mm512_set1_epi8((char)0x80));
    }

    // weights [2][32] of a half, given its codes and its bytes; what lies `ahead` of these, if not 0, is fetched
    MANTA_INLINE void half(__m512i codes, const uint8_t* from, Ints* weights, int64_t ahead) const {
        constexpr int OR_AND = 0xf8;  // a | (b & c)
        const __m512i bytes = _mm512_loadu_si512(from);
        if (ahead) __builtin_prefetch(from + ahead, 0, 3);
        const __m512i signs = _mm512_ternarylogic_epi64(_mm512_shuffle_epi8(upper, codes), bytes,
                                                        _mm512_set1_epi8((char)0x80), OR_AND);
        const __m512i mantissas = _mm512_ternarylogic_epi64(_mm512_shuffle_epi8(lower, codes), bytes,
                                                            _mm512_set1_epi8(0x7f), OR_AND);
        weights[0] = (Ints)_mm512_unpacklo_epi8(mantissas, signs);
        weights[1] = (Ints)_mm512_unpackhi_epi8(mantissas, signs);
    }

    // weights [4][32]. One fetch after each load, because several at once take the buffers that loads need.
    MANTA_INLINE void group(const uint8_t* from, Ints* weights, int64_t ahead = 0) const {
        const __m512i codes = _mm512_loadu_si512(from), mask = _mm512_set1_epi8(15);
        if (ahead) __builtin_prefetch(from + ahead, 0, 3);
        half(_mm512_and_si512(codes, mask), from + 64, weights, ahead);
        half(_mm512_and_si512(_mm512_srli_epi16(codes, 4), mask), from + 128, weights + 2, ahead);
    }

    MANTA_INLINE void write(const uint8_t* from, bf16* to) const {
        Ints weights[4];
        group(from, weights);
        for (int i = 0; i < 4; i++) memcpy(to + i * 32, &weights[i], 64);
    }
};
#elif defined(__AVX2__)
struct GroupDecoder {
    __m256i upper, lower;

    explicit MANTA_INLINE GroupDecoder(int base) {
        const __m256i codes =
            _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
        const __m256i is_zero = _mm256_cmpeq_epi8(codes, _mm256_set1_epi8(ZERO_CODE));
        const __m256i exponents = _mm256_andnot_si256(is_zero, _mm256_sub_epi8(_mm256_set1_epi8((char)base), codes));
        upper = _mm256_and_si256(_mm256_srli_epi16(exponents, 1), _mm256_set1_epi8(0x7f));
        lower = _mm256_and_si256(_mm256_slli_epi16(exponents, 7), _mm256_set1_epi8((char)0x80));
    }

    MANTA_INLINE void write(const uint8_t* from, bf16* to) const {
        const __m256i mask = _mm256_set1_epi8(15), sign = _mm256_set1_epi8((char)0x80);
        for (int part = 0; part < 2; part++) {
            const __m256i both = _mm256_loadu_si256((const __m256i*)(from + part * 32));
            for (int half = 0; half < 2; half++) {
                const __m256i codes = _mm256_and_si256(half ? _mm256_srli_epi16(both, 4) : both, mask);
                const __m256i bytes = _mm256_loadu_si256((const __m256i*)(from + 64 + half * 64 + part * 32));
                const __m256i signs =
                    _mm256_or_si256(_mm256_shuffle_epi8(upper, codes), _mm256_and_si256(bytes, sign));
                const __m256i mantissas =
                    _mm256_or_si256(_mm256_shuffle_epi8(lower, codes), _mm256_andnot_si256(sign, bytes));
                bf16* const at = to + half * 64 + part * 16;
                _mm256_storeu_si256((__m256i*)at, _mm256_unpacklo_epi8(mantissas, signs));
                _mm256_storeu_si256((__m256i*)(at + 32), _mm256_unpackhi_epi8(mantissas, signs));
            }
        }
    }
};
#elif defined(__aarch64__)
struct GroupDecoder {
    uint8x16_t upper, lower;

    explicit MANTA_INLINE GroupDecoder(int base) {
        const uint8x16_t codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const uint8x16_t is_zero = vceqq_u8(codes, vdupq_n_u8(ZERO_CODE));
        const uint8x16_t exponents = vbicq_u8(vsubq_u8(vdupq_n_u8(base), codes), is_zero);
        upper = vshrq_n_u8(exponents, 1), lower = vshlq_n_u8(exponents, 7);
    }

    MANTA_INLINE void write(const uint8_t* from, bf16* to) const {
        const uint8x16_t sign = vdupq_n_u8(0x80);
        for (int part = 0; part < 4; part++) {
            const uint8x16_t both = vld1q_u8(from + part * 16);
            for (int half = 0; half < 2; half++) {
                const uint8x16_t codes = half ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
                const uint8x16_t bytes = vld1q_u8(from + 64 + half * 64 + part * 16);
                const uint8x16_t signs = vorrq_u8(vqtbl1q_u8(upper, codes), vandq_u8(bytes, sign));
                const uint8x16_t mantissas = vorrq_u8(vqtbl1q_u8(lower, codes), vbicq_u8(bytes, sign));
                bf16* const at = to + half * 64 + part * 8;
                vst1q_u8((uint8_t*)at, vzip1q_u8(mantissas, signs));
                vst1q_u8((uint8_t*)(at + 32), vzip2q_u8(mantissas, signs));
            }
        }
    }
};
#else
struct GroupDecoder {
    int base;

    explicit GroupDecoder(int base) : base(base) {}

    void write(const uint8_t* from, bf16* to) const {
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < 64; i++) {
                const int code = half ? from[i] >> 4 : from[i] & 15, byte = from[64 + half * 64 + i];
                const int exponent = code == ZERO_CODE ? 0 : base - code;
                const int place = half * 64 + i % 16 / 8 * 32 + i / 16 * 8 + i % 8;
                to[place].bits = uint16_t((byte & 0x80) << 8 | exponent << 7 | (byte & 0x7f));
            }
    }
};
#endif

inline void Lossless::decode(int64_t first, int64_t end, bf16* to) const {
    for (int64_t chunk = first; chunk < end; chunk++, to += LOSSLESS_CHUNK) {
        const uint8_t* from = codes + chunk * LOSSLESS_BYTES;
        const GroupDecoder decoder(bases[chunk]);
        for (int i = 0; i < LOSSLESS_CHUNK; i += LOSSLESS_GROUP, from += GROUP_BYTES) {
            fetch(from);
            decoder.write(from, to + i);
        }
        for (uint32_t i = starts[chunk]; i < starts[chunk + 1]; i++)
            to[(exceptions[i] >> 16) % LOSSLESS_CHUNK].bits = uint16_t(exceptions[i]);
    }
}
