// Products of attention over keys and values of four bits as sums of integers, on processors whose product of bytes does
// at least twice the work of their product of bfloat16. Used by attention.h and softmax.h only.
//
// A rotated query is rounded to int8, whose error is a fifteenth of the keys' own. A row's weights, which are
// probabilities times the scales of values, are rounded to 255 steps of the largest one in a block of keys
// (SageAttention, Zhang et al., 2025). They are rounded up or down by an ordered dither, so that many small weights
// beside a large one keep their sum.
#pragma once

#include "nibbles.h"
#include "quantized_dot.h"
#include "quantized_rows.h"

#if defined(__AVX512VNNI__) && MANTA_LANES == 16 && !MANTA_AMX
constexpr bool HAS_BYTE_PRODUCTS = true;
#else
constexpr bool HAS_BYTE_PRODUCTS = false;  // AMX's tiles multiply bfloat16 as fast as packing allows
#endif

// Follows the bytes of a query's row, of which there are as many as packed dimensions
struct RoundedQuery {
    float scale;  // NaN if a number is not finite
    int32_t total;  // of the bytes

    static RoundedQuery of(const void* row, int width) {
        RoundedQuery query;
        memcpy(&query, (const char*)row + width, sizeof(query));
        return query;
    }
};

// A query's row: bytes in the order of `pack_keys`, those beyond head_dim zero, up to whole groups
inline void pack_rotated_query(const float* rotated, int head_dim, int8_t* row) {
    const int width = (head_dim + NIBBLE_GROUP - 1) / NIBBLE_GROUP * NIBBLE_GROUP;
    RoundedQuery query;
    query.scale = quantize(rotated, head_dim, largest_bits(rotated, head_dim), row, width, query.total);
    memcpy(row + width, &query, sizeof(query));
    for (int i = 0; i < width; i += 8) {
        int8_t* const eight = row + i;
        const int8_t ordered[8] = {eight[0], eight[2], eight[4], eight[6], eight[1], eight[3], eight[5], eight[7]};
        memcpy(eight, ordered, sizeof(ordered));
    }
}

// Transposes LANES keys into a panel [head_dim / 4][LANES][4] of whole groups: of each 8 dimensions the even ones, then
// the odd ones, as `add_dot` takes them
MANTA_INLINE void pack_keys(const nibbles* const* keys, int head_dim, int8_t* panel, Prefetcher& prefetcher) {
    const Ints table = table_of(LEVELS, BYTE_ZERO);
    for (int dim = 0; dim < head_dim; dim += NIBBLE_GROUP) {
        Ints words[4];
        load_words(keys, dim, words);
        int8_t* const to = panel + dim * LANES;
        for (int word = 0; word < 4; word++) {
            const Ints even = lookup(low_nibbles(words[word]), table), odd = lookup(high_nibbles(words[word]), table);
            memcpy(to + 2 * word * sizeof(Ints), &even, sizeof(even));
            memcpy(to + (2 * word + 1) * sizeof(Ints), &odd, sizeof(odd));
        }
        prefetcher.ask(prefetcher.per_pack);
    }
}

#if MANTA_LANES == 16 && defined(__AVX512BW__)
// Interleaves four neighbouring keys' values into panels [head_dim / LANES][num_keys / 4][LANES][4] of whole groups, of
// which each has a panel of its even dimensions and one of its odd ones
MANTA_INLINE void pack_values(
    const nibbles* const* values, int num_keys, int head_dim, int8_t* packed, Prefetcher& prefetcher
) {
    // A transpose of four rows of 16 bytes: first of words over the vector, then of bytes in each quarter of it
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i words_order = _mm512_cvtepi8_epi32(order), bytes_order = _mm512_broadcast_i32x4(order);
    const Ints table = table_of(LEVELS, 0);
    for (int key = 0; key < num_keys; key += 4) {
        const nibbles* const* const four = values + key;
        for (int dim = 0; dim < head_dim; dim += NIBBLE_GROUP) {
            const Ints rows = load_groups(four[0], four[1], four[2], four[3], dim);
            const __m512i words = _mm512_permutexvar_epi32(words_order, (__m512i)rows);
            const Ints codes = (Ints)_mm512_shuffle_epi8(words, bytes_order);
            const Ints even = lookup(low_nibbles(codes), table), odd = lookup(high_nibbles(codes), table);
            int8_t* const to = packed + dim * num_keys + key * LANES;
            memcpy(to, &even, sizeof(even));
            memcpy(to + LANES * num_keys, &odd, sizeof(odd));
        }
        prefetcher.ask(4);
    }
}

// The threshold of each key of a block, above -0.5 and below 0.5: neighbours are far apart, as those of any short run
struct Dither {
    alignas(64) float thresholds[KEY_BLOCK];

    constexpr Dither() : thresholds() {
        for (int key = 0; key < KEY_BLOCK; key++) {
            int reversed = 0;
            for (int bit = 1; bit < KEY_BLOCK; bit *= 2) reversed = 2 * reversed + ((key & bit) != 0);
            thresholds[key] = (reversed + 0.5f) / KEY_BLOCK - 0.5f;
        }
    }
};
constexpr Dither DITHER;

// Rounds a row's weights of `vectors` * LANES keys, none negative, to bytes. After room for those of a block follows
// their scale: NaN if a weight is not finite.
MANTA_INLINE void store_weights(int8_t* to, const Floats (&weights)[KEY_BLOCK / LANES], int vectors) {
    Ints most = Ints{};
    for (int i = 0; i < vectors; i++) {
        const Ints bits = (Ints)weights[i] & splat_int(INT32_MAX);  // their order is that of the numbers, NaN above all
        most = most > bits ? most : bits;
    }
    const int32_t largest = _mm512_reduce_max_epi32((__m512i)most);
    float magnitude;
    memcpy(&magnitude, &largest, sizeof(magnitude));
    const bool is_rounded = magnitude >= LEAST_LARGEST && magnitude < INFINITY;
    const Floats inverse = splat(is_rounded ? 255.0f / magnitude : 0.0f);
    const float scale = is_rounded ? magnitude / 255.0f : magnitude < INFINITY ? 0.0f : __builtin_nanf("");
    for (int i = 0; i < vectors; i++) {
        const Floats dithered = add_product(load(DITHER.thresholds + i * LANES), weights[i], inverse);
        const __m512i rounded = _mm512_cvtps_epi32((__m512)dithered);
        _mm_storeu_si128((__m128i*)(to + i * LANES), _mm512_cvtusepi32_epi8(rounded));
    }
    memcpy(to + KEY_BLOCK, &scale, sizeof(scale));
}
#endif

// C [ROWS][2 * LANES] = the sums of products of rows of bytes, `stride` apart, with two panels. Of keys: of queries' rows,
// without any scale. Of values: of rows of weights, times their scales, added to C if `adds`.
template <bool OF_KEYS, int ROWS>
MANTA_INLINE void multiply_bytes_tile(
    const int8_t* rows, int stride, const int8_t* panels, int depth, float* c, int ldc, bool adds
) {
    const int64_t panel_bytes = int64_t(depth) * LANES;
    Ints sums[ROWS][2];
    for (int i = 0; i < ROWS; i++) {
        const int32_t start = OF_KEYS ? -BYTE_ZERO * RoundedQuery::of(rows + int64_t(i) * stride, depth).total : 0;
        sums[i][0] = sums[i][1] = splat_int(start);
    }
    for (int at = 0; at < depth; at += 4) {
        const Ints columns[2] = {load_ints(panels + at * LANES), load_ints(panels + panel_bytes + at * LANES)};
        for (int i = 0; i < ROWS; i++) {
            int32_t four;
            memcpy(&four, rows + int64_t(i) * stride + at, sizeof(four));
            const Ints row = splat_int(four);
            for (int j = 0; j < 2; j++) {  // the unsigned factor first
                sums[i][j] = OF_KEYS ? add_dot<BYTES>(sums[i][j], columns[j], row)
                                     : add_dot<BYTES>(sums[i][j], row, columns[j]);
            }
        }
    }
    for (int i = 0; i < ROWS; i++) {
        float scale = 1;
        if (!OF_KEYS) memcpy(&scale, rows + int64_t(i) * stride + KEY_BLOCK, sizeof(scale));
        for (int j = 0; j < 2; j++) {
            float* const to = c + i * ldc + j * LANES;
            const Floats sum = to_floats(sums[i][j]);
            store(to, OF_KEYS ? sum : add_product(adds ? load(to) : splat(0), sum, splat(scale)));
        }
    }
}

// C [num_rows][num_panels * LANES] = rows of `pack_rotated_query` times panels of `pack_keys`, or = or += rows of
// `store_weights` times panels of `pack_values`. The number of panels is even.
template <bool OF_KEYS>
inline void multiply_bytes(
    const int8_t* rows, int stride, const int8_t* panels, int depth, float* c, int ldc, int num_rows, int num_panels,
    bool adds
) {
    const int tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int panel = 0; panel < num_panels; panel += 2) {
        const int8_t* const columns = panels + int64_t(panel) * depth * LANES;
        for (int tile = 0; tile < tiles; tile++) {
            const int row = num_rows * tile / tiles, end = num_rows * (tile + 1) / tiles;
            with_constant<TILE_ROWS>(end - row, [&](auto count) __attribute__((always_inline)) {
                const int8_t* const first = rows + int64_t(row) * stride;
                float* const to = c + row * ldc + panel * LANES;
                multiply_bytes_tile<OF_KEYS, count>(first, stride, columns, depth, to, ldc, adds);
            });
        }
    }
}
