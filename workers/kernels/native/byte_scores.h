// Products of queries with keys of four bits as sums of integers, on processors whose product of bytes does twice the
// work of their product of bfloat16. A rotated query is rounded to int8, whose error is a fifteenth of the keys' own.
// Used by attention.h only.
#pragma once

#include "nibbles.h"
#include "quantized_dot.h"
#include "quantized_rows.h"

#if MANTA_DOT && !MANTA_AMX
constexpr bool HAS_BYTE_SCORES = true;
#else
constexpr bool HAS_BYTE_SCORES = false;  // tiles multiply bfloat16 as fast as packing allows
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

// A query's row: `width` bytes in the order of `pack_key_bytes`, those beyond head_dim zero
inline void pack_query_bytes(const float* rotated, int head_dim, int width, void* row) {
    int8_t* const bytes = (int8_t*)row;
    RoundedQuery query;
    query.scale = quantize(rotated, head_dim, largest_bits(rotated, head_dim), bytes, width, query.total);
    memcpy(bytes + width, &query, sizeof(query));
    for (int i = 0; i < width; i += 8) {
        const int8_t* const from = bytes + i;
        const int8_t ordered[8] = {from[0], from[2], from[4], from[6], from[1], from[3], from[5], from[7]};
        memcpy(bytes + i, ordered, sizeof(ordered));
    }
}

// Transposes LANES keys into a panel [head_dim / 4][LANES][4] of whole groups: of each 8 dimensions the even ones, then
// the odd ones, as `add_dot` takes them
MANTA_INLINE void pack_key_bytes(const nibbles* const* keys, int head_dim, void* panel, Prefetcher& prefetcher) {
    const Ints table = table_of(LEVELS, BYTE_ZERO);
    for (int dim = 0; dim < head_dim; dim += NIBBLE_GROUP) {
        Ints words[4];
        load_words(keys, dim, words);
        char* const to = (char*)panel + dim * LANES;
        for (int word = 0; word < 4; word++) {
            const Ints even = lookup(low_nibbles(words[word]), table), odd = lookup(high_nibbles(words[word]), table);
            memcpy(to + 2 * word * sizeof(Ints), &even, sizeof(even));
            memcpy(to + (2 * word + 1) * sizeof(Ints), &odd, sizeof(odd));
        }
        prefetcher.ask(prefetcher.per_pack);
    }
}

// C [ROWS][2 * LANES] = the sums of products of rows of bytes, `stride` apart, with two panels of keys
template <int ROWS>
MANTA_INLINE void multiply_bytes_tile(const char* rows, int stride, const char* panels, int width, float* c, int ldc) {
    const int64_t panel_bytes = int64_t(width) * LANES;
    Ints sums[ROWS][2];
    for (int i = 0; i < ROWS; i++) {
        const int32_t start = -BYTE_ZERO * RoundedQuery::of(rows + int64_t(i) * stride, width).total;
        sums[i][0] = sums[i][1] = splat_int(start);
    }
    for (int at = 0; at < width; at += 4) {
        const Ints first = load_ints(panels + at * LANES), second = load_ints(panels + panel_bytes + at * LANES);
        for (int i = 0; i < ROWS; i++) {
            int32_t four;
            memcpy(&four, rows + int64_t(i) * stride + at, sizeof(four));
            sums[i][0] = add_dot<BYTES>(sums[i][0], first, splat_int(four));
            sums[i][1] = add_dot<BYTES>(sums[i][1], second, splat_int(four));
        }
    }
    for (int i = 0; i < ROWS; i++) {
        for (int j = 0; j < 2; j++) store(c + i * ldc + j * LANES, to_floats(sums[i][j]));
    }
}

// C [num_rows][num_panels * LANES] = rows of `pack_query_bytes` times panels of `pack_key_bytes`, without their scales.
// The number of panels is even.
inline void multiply_bytes(
    const void* rows, int stride, const void* panels, int width, float* c, int ldc, int num_rows, int num_panels
) {
    const int tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int panel = 0; panel < num_panels; panel += 2) {
        const char* const columns = (const char*)panels + int64_t(panel) * width * LANES;
        for (int tile = 0; tile < tiles; tile++) {
            const int row = num_rows * tile / tiles, end = num_rows * (tile + 1) / tiles;
            with_constant<TILE_ROWS>(end - row, [&](auto count) __attribute__((always_inline)) {
                const char* const first = (const char*)rows + int64_t(row) * stride;
                multiply_bytes_tile<count>(first, stride, columns, width, c + row * ldc + panel * LANES, ldc);
            });
        }
    }
}
