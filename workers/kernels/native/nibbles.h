// Codes of four bits in a KV cache: rounding, and packing them as whole numbers for the products of tiles.h. Used by
// attention.h and by what writes the cache; four_bit_heads.py defines the codes.
//
// A code is a sign in bit 3 and a magnitude in the bits below, so that a table of 8 numbers suffices where a vector has
// 8 lanes. Keys are transposed while packed, 8 codes a lane, which takes an eighth of the shuffles. Codes become
// numbers by a look-up in a register.
#pragma once

#include <algorithm>
#include <cmath>

#include "kv_cache.h"
#include "tiles.h"

constexpr int NIBBLE_GROUP = 32;  // dimensions that are packed together: 16 bytes; a last group may read beyond a head
constexpr int8_t LEVELS[16] = {6, 18, 31, 44, 58, 75, 96, 127, -6, -18, -31, -44, -58, -75, -96, -127};
constexpr float DEVIATIONS[] = {36, 42, 48, 54, 60, 66};  // of rotated numbers, in units of the levels: all are tried
constexpr float LEAST_SQUARES = 1e-36f;  // a head whose squares have no larger sum is zero

// The numbers of the codes in the lowest four bits of each lane
MANTA_INLINE Floats levels_of(Ints codes) {
#if defined(__AVX512F__)
    return (Floats)_mm512_permutexvar_ps((__m512i)codes, (__m512)load(LEVELS));
#elif defined(__AVX2__)
    const __m256 magnitudes = _mm256_permutevar8x32_ps((__m256)load(LEVELS), (__m256i)codes);
    return (Floats)((Ints)magnitudes ^ ((codes << 28) & splat_int(INT32_MIN)));
#else
    Floats levels;
    for (int lane = 0; lane < LANES; lane++) levels[lane] = LEVELS[codes[lane] & 15];
    return levels;
#endif
}

struct Coded {
    float products;  // sum of products of a head's numbers and their levels
    float squares;  // sum of squares of the levels
};

// Codes a rotated head, whose size is a multiple of 16, of which a number times `inverse` is in units of the levels
template <bool STORES>
MANTA_INLINE Coded code_head(const float* rotated, int head_dim, float inverse, nibbles* to) {
    LaneSums products = {}, squares = {};
    for (int i = 0; i < head_dim; i += SUM_LANES) {
        int32_t codes[SUM_LANES];
        for (int v = 0; v < SUM_VECTORS; v++) {
            const Floats x = load(rotated + i + v * LANES);
            const Floats magnitude = (Floats)((Ints)x & splat_int(INT32_MAX)) * inverse;
            Ints code = ((Ints)x >> 31) & 8;
            for (int level = 0; level < 7; level++) {
                code -= magnitude > splat((LEVELS[level] + LEVELS[level + 1]) / 2.0f);  // a comparison that holds is -1
            }
            const Floats levels = levels_of(code);
            products[v] += x * levels;
            squares[v] += levels * levels;
            memcpy(codes + v * LANES, &code, sizeof(code));
        }
        for (int pair = 0; STORES && pair < SUM_LANES / 2; pair++) {
            to[i / 2 + pair].bits = uint8_t(codes[2 * pair] | codes[2 * pair + 1] << 4);
        }
    }
    return {total_of(products), total_of(squares)};
}

// Rounds a rotated head, and returns its scale: NaN if a number is not finite
inline float round_to_nibbles(const float* rotated, int head_dim, nibbles* to) {
    LaneSums squares = {};
    for (int i = 0; i < head_dim; i += SUM_LANES) {
        for (int v = 0; v < SUM_VECTORS; v++) {
            const Floats x = load(rotated + i + v * LANES);
            squares[v] += x * x;
        }
    }
    const float total = total_of(squares);
    const bool is_finite = total < INFINITY;
    if (!is_finite || total < LEAST_SQUARES) {
        memset(static_cast<void*>(to), 0, head_dim / 2);
        return is_finite ? 0.0f : __builtin_nanf("");
    }
    const float deviation = std::sqrt(total / head_dim);
    float likeness = 0, inverse = 0;
    for (float tried : DEVIATIONS) {
        const Coded coded = code_head<false>(rotated, head_dim, tried / deviation, to);
        const float tried_likeness = coded.products * coded.products / coded.squares;
        if (tried_likeness > likeness) {
            likeness = tried_likeness;
            inverse = tried / deviation;
        }
    }
    return total / code_head<true>(rotated, head_dim, inverse, to).products;
}

#if defined(__AVX512F__)
// 16 bytes from dimension `dim` on of four keys, or values, one after the other
MANTA_INLINE Ints load_groups(const nibbles* a, const nibbles* b, const nibbles* c, const nibbles* d, int dim) {
    const auto group_of = [&](const nibbles* key) { return _mm_loadu_si128((const __m128i*)(key + dim / 2)); };
    __m512i four = _mm512_castsi128_si512(group_of(a));
    four = _mm512_inserti32x4(four, group_of(b), 1);
    four = _mm512_inserti32x4(four, group_of(c), 2);
    return (Ints)_mm512_inserti32x4(four, group_of(d), 3);
}
#endif

// A group of LANES keys' codes: lane k of words[w] gets the codes [8 * w, 8 * w + 8) of key k's group at `dim`
MANTA_INLINE void load_words(const nibbles* const* keys, int dim, Ints (&words)[4]) {
    // Each fourth key is in the same vector, so that a transpose within quarters of vectors brings them into order
#if defined(__AVX512F__)
    for (int i = 0; i < 4; i++) words[i] = load_groups(keys[i], keys[i + 4], keys[i + 8], keys[i + 12], dim);
    const auto zip_words = [](Ints a, Ints b, Ints& low, Ints& high) {
        low = (Ints)_mm512_unpacklo_epi32((__m512i)a, (__m512i)b);
        high = (Ints)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b);
    };
#elif defined(__AVX2__)
    const auto group_of = [&](int key) { return _mm_loadu_si128((const __m128i*)(keys[key] + dim / 2)); };
    for (int i = 0; i < 4; i++) {
        words[i] = (Ints)_mm256_inserti128_si256(_mm256_castsi128_si256(group_of(i)), group_of(i + 4), 1);
    }
    const auto zip_words = [](Ints a, Ints b, Ints& low, Ints& high) {
        low = (Ints)_mm256_unpacklo_epi32((__m256i)a, (__m256i)b);
        high = (Ints)_mm256_unpackhi_epi32((__m256i)a, (__m256i)b);
    };
#else
    for (int i = 0; i < 4; i++) words[i] = load_ints(keys[i] + dim / 2);
    const auto zip_words = [](Ints a, Ints b, Ints& low, Ints& high) {
        low = zip_low(a, b);
        high = zip_high(a, b);
    };
#endif
    Ints even[2], odd[2];
    zip_words(words[0], words[2], even[0], even[1]);
    zip_words(words[1], words[3], odd[0], odd[1]);
    zip_words(even[0], odd[0], words[0], words[1]);
    zip_words(even[1], odd[1], words[2], words[3]);
}

// LANES bytes, one in each lane
MANTA_INLINE Ints load_bytes(const nibbles* from) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    Ints bytes;
    for (int lane = 0; lane < LANES; lane++) bytes[lane] = from[lane].bits;
    return bytes;
#endif
}

// LANES columns from `dim` on, of a row of sums over values that `pack_values` packed: it leaves the even dimensions of
// each 2 * LANES before the odd ones
MANTA_INLINE Floats rotated_columns(const float* sums, int dim) {
    const float* const group = sums + (dim & -2 * LANES);
    const Ints even = (Ints)load(group), odd = (Ints)load(group + LANES);
    return (Floats)(dim & LANES ? zip_high(even, odd) : zip_low(even, odd));
}

// ---------------------------------------------------------------------------------------------------------- float form

// Transposes LANES keys into a panel [head_dim][LANES], of whole groups
MANTA_INLINE void pack_keys(const nibbles* const* keys, int head_dim, float* panel, Prefetcher& prefetcher) {
    for (int dim = 0; dim < head_dim; dim += NIBBLE_GROUP) {
        Ints words[4];
        load_words(keys, dim, words);
        for (int word = 0; word < 4; word++) {
            for (int i = 0; i < 8; i++) {
                store(panel + (dim + 8 * word + i) * LANES, levels_of(words[word] >> (4 * i)));
            }
        }
        prefetcher.ask(prefetcher.per_pack);
    }
}

// Widens `num_keys` rows of values into panels [head_dim / LANES][num_keys][LANES], of whole groups
MANTA_INLINE void pack_values(
    const nibbles* const* values, int num_keys, int head_dim, float* packed, Prefetcher& prefetcher
) {
    const int width = (head_dim + NIBBLE_GROUP - 1) / NIBBLE_GROUP * NIBBLE_GROUP;
    for (int key = 0; key < num_keys; key++) {
        for (int dim = 0; dim < width; dim += 2 * LANES) {
            const Ints codes = load_bytes(values[key] + dim / 2);
            store(packed + dim * num_keys + key * LANES, levels_of(codes));
            store(packed + (dim + LANES) * num_keys + key * LANES, levels_of(codes >> 4));
        }
        prefetcher.ask(1);
    }
}

// A query's row, padded with zeros to whole groups
MANTA_INLINE void pack_rotated_query(const float* rotated, int head_dim, float* row) {
    for (int dim = 0; dim < head_dim; dim += LANES) store(row + dim, load(rotated + dim));
    const int padding = -head_dim & (NIBBLE_GROUP - 1);
    memset(row + head_dim, 0, padding * sizeof(float));
}

// ------------------------------------------------------------------------------------------------------ bfloat16 forms

#if MANTA_DOT
// Stores pairs of bfloat16, the numbers of the codes in the lowest four bits of each half of a lane
MANTA_INLINE void store_levels(bf16* to, Ints codes) {
    const __m512 levels = (__m512)load(LEVELS);
    const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(levels, levels);  // twice, because five bits choose
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16((__m512i)codes, table));
}

// Transposes 16 keys, as pairs of dimensions i and i + 4 of each 8, into a panel [head_dim / 2][16][2] of whole groups
MANTA_INLINE void pack_keys(const nibbles* const* keys, int head_dim, bf16* panel, Prefetcher& prefetcher) {
    for (int dim = 0; dim < head_dim; dim += NIBBLE_GROUP) {
        Ints words[4];
        load_words(keys, dim, words);
        for (int word = 0; word < 4; word++) {
            for (int i = 0; i < 4; i++) store_levels(panel + (dim / 2 + 4 * word + i) * 32, words[word] >> (4 * i));
        }
        prefetcher.ask(prefetcher.per_pack);
    }
}

// Interleaves neighbouring keys' values into panels [head_dim / 16][num_keys / 2][16][2] of whole groups
MANTA_INLINE void pack_values(
    const nibbles* const* values, int num_keys, int head_dim, bf16* packed, Prefetcher& prefetcher
) {
    for (int key = 0; key < num_keys; key += 2) {
        for (int dim = 0; dim < head_dim; dim += NIBBLE_GROUP) {
            const Ints even = load_bytes(values[key] + dim / 2), odd = load_bytes(values[key + 1] + dim / 2);
            const Ints codes = even | odd << 16;
            bf16* to = packed + dim * num_keys + key * 16;
            store_levels(to, codes);
            store_levels(to + 16 * num_keys, codes >> 4);
        }
        prefetcher.ask(1);
    }
}

// A query's row in the pairs of `pack_keys`, padded with zeros to whole groups
MANTA_INLINE void pack_rotated_query(const float* rotated, int head_dim, bf16* row) {
    const __m512i pairs = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    for (int dim = 0; dim < head_dim; dim += NIBBLE_GROUP) {
        const Floats second = dim + 16 < head_dim ? load(rotated + dim + 16) : splat(0);
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)load(rotated + dim));
        _mm512_storeu_si512(row + dim, _mm512_shuffle_epi8(both, pairs));
    }
}
#endif
