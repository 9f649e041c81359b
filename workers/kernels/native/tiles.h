// Small matrix products over packed operands: the two products of attention, for a few rows and a block of keys.
// One interface in three forms: float (any processor), bfloat16 pairs (AVX-512 BF16), bfloat16 tiles (AMX). Called by
// attention.h; the linears use its tiles of registers too.
//
// A packed operand is a row of panels. In the float form a panel is [depth][LANES]; in the bfloat16 forms it is
// [depth / 2][16][2], where the two elements of a pair are neighbours in depth (the layout that AMX calls VNNI).
#pragma once

#include <type_traits>

#include "simd.h"

#if MANTA_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if MANTA_PAIRS && MANTA_LANES == 16
#define MANTA_DOT 1  // attention packs pairs
#endif

// Rows to prefetch while others are computed. KV blocks are scattered, so the processor's own prefetchers stop at the
// end of each. A burst of prefetches would stall the loads that are due now, so packing asks for a few rows at a time
// (with both, decode attention of 32 x 1024 reads 8 GB/s a thread instead of 6; `manta bench kernel-times`).
struct Prefetcher {
    const char* const* rows;
    int remaining;
    int row_bytes;
    int per_pack;  // rows to ask for at each step of `pack_keys`

    MANTA_INLINE void ask(int count) {
        for (; count > 0 && remaining > 0; count--, remaining--, rows++) {
            for (int byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(*rows + byte, 0, 2);
        }
    }
};

constexpr int KEY_BLOCK = 64;  // keys packed and multiplied at a time
#if MANTA_LANES == 8 || (MANTA_LANES == 4 && !defined(__aarch64__))
constexpr int TILE_ROWS = 6;  // 16 vector registers: 6 rows x 2 panels of sums, 2 of B, 1 of A
#else
constexpr int TILE_ROWS = 8;  // 32 vector registers
#endif

// ------------------------------------------------------------------------------------------------- tiles of registers

// How packed columns lie: the number of elements from one input (of all outputs) to the next, and from panel to panel.
struct Columns {
    int64_t input;
    int64_t panel;
};

MANTA_INLINE Floats load_column(const float* from) {
    return load(from);
}
MANTA_INLINE Ints load_column(const bf16* from) {
    return load_ints(from);
}
MANTA_INLINE Floats splat_input(const float* from) {
    return splat(*from);
}
MANTA_INLINE Ints splat_input(const bf16* from) {
    int32_t pair;
    memcpy(&pair, from, sizeof(pair));
    return splat_int(pair);
}

// What is done in each step over depth besides multiplying: nothing, or fetching data for later.
struct Nothing {
    MANTA_INLINE void operator()(int) const {}
    MANTA_INLINE Nothing after(int) const { return {}; }
};
struct Fetch {
    const char* from;
    int64_t advance;  // bytes a unit of depth

    MANTA_INLINE void operator()(int k) const { __builtin_prefetch(from + k * advance, 0, 2); }
    MANTA_INLINE Fetch after(int depth) const { return {from + depth * advance, advance}; }
};

// C [ROWS][PANELS * LANES] = or += A [ROWS][depth] times packed B; bfloat16 in pairs, if the processor multiplies those
template <int ROWS, int PANELS, bool ACCUMULATE, class E, class Beside>
MANTA_INLINE void multiply_tile(
    const E* a, int lda, const E* b, Columns at, int depth, float* c, int ldc, Beside beside
) {
    constexpr int STEP = sizeof(float) / sizeof(E);
    using Operand = decltype(load_column(b));
    Floats sums[ROWS][PANELS];
    for (int i = 0; i < ROWS; i++) {
        for (int j = 0; j < PANELS; j++) sums[i][j] = ACCUMULATE ? load(c + i * ldc + j * LANES) : splat(0);
    }
    for (int k = 0; k < depth; k += STEP) {
        beside(k);
        Operand columns[PANELS];
        for (int j = 0; j < PANELS; j++) columns[j] = load_column(b + j * at.panel + k * at.input);
        for (int i = 0; i < ROWS; i++) {
            const Operand row = splat_input(a + int64_t(i) * lda + k);
            for (int j = 0; j < PANELS; j++) sums[i][j] = add_product(sums[i][j], row, columns[j]);
        }
    }
    for (int i = 0; i < ROWS; i++) {
        for (int j = 0; j < PANELS; j++) store(c + i * ldc + j * LANES, sums[i][j]);
    }
}

// ---------------------------------------------------------------------------------------------------------- float form

// Transposes up to LANES rows of keys into a panel [head_dim][LANES]
template <class T>
MANTA_INLINE void pack_keys(const T* const* keys, int head_dim, float* panel, Prefetcher& prefetcher) {
    for (int dim = 0; dim < head_dim; dim += LANES) {
        Ints rows[LANES];
        for (int i = 0; i < LANES; i++) rows[i] = (Ints)load(keys[i] + dim);
        transpose(rows);
        for (int i = 0; i < LANES; i++) store(panel + (dim + i) * LANES, (Floats)rows[i]);
        prefetcher.ask(prefetcher.per_pack);
    }
}

// Copies `num_keys` rows of values into panels [head_dim / LANES][num_keys][LANES]
template <class T>
MANTA_INLINE void pack_values(
    const T* const* values, int num_keys, int head_dim, float* packed, Prefetcher& prefetcher
) {
    for (int key = 0; key < num_keys; key++) {
        for (int dim = 0; dim < head_dim; dim += LANES) {
            store(packed + dim * num_keys + key * LANES, load(values[key] + dim));
        }
        prefetcher.ask(1);
    }
}

template <class T>
MANTA_INLINE void pack_query(const T* query, int head_dim, float* row) {
    for (int dim = 0; dim < head_dim; dim += LANES) store(row + dim, load(query + dim));
}

// LANES output columns from `dim` on, of a row of sums over values that `pack_values` packed as elements E
template <class E>
MANTA_INLINE Floats output_columns(const float* sums, int dim) {
    return load(sums + dim);
}

// ------------------------------------------------------------------------------------------------------ bfloat16 forms

#if MANTA_DOT
// 32 elements of a head; if its size is no multiple of 32, the last group is padded with zeros
MANTA_INLINE __m512i load_group(const bf16* from, int dim, int head_dim) {
    if (dim + 32 <= head_dim) return _mm512_loadu_si512(from + dim);
    return _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)(from + dim)));
}

// The same of int8, widened: bfloat16 holds them exactly
MANTA_INLINE __m512i load_group(const int8_t* from, int dim, int head_dim) {
    const Floats first = load(from + dim);
    const Floats second = dim + 32 <= head_dim ? load(from + dim + 16) : splat(0);
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

// Transposes 16 rows of keys, as pairs, into a panel [head_dim / 2][16][2]
template <class C>
MANTA_INLINE void pack_keys(const C* const* keys, int head_dim, bf16* panel, Prefetcher& prefetcher) {
    for (int dim = 0; dim < head_dim; dim += 32) {
        Ints rows[16];
        for (int i = 0; i < 16; i++) rows[i] = (Ints)load_group(keys[i], dim, head_dim);
        transpose(rows);
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(panel + (dim / 2 + i) * 32, (__m512i)rows[i]);
        prefetcher.ask(prefetcher.per_pack);
    }
}

// Interleaves neighbouring keys' values into panels [head_dim / 16][num_keys / 2][16][2]. One unpack for each vector
// leaves each 32 columns in another order, which `output_columns` undoes once for each row: cheaper than a full
// permute.
template <class C>
MANTA_INLINE void pack_values(
    const C* const* values, int num_keys, int head_dim, bf16* packed, Prefetcher& prefetcher
) {
    for (int key = 0; key < num_keys; key += 2) {
        for (int dim = 0; dim < head_dim; dim += 32) {
            __m512i even = load_group(values[key], dim, head_dim);
            __m512i odd = load_group(values[key + 1], dim, head_dim);
            bf16* to = packed + dim * num_keys + key * 16;
            _mm512_storeu_si512(to, _mm512_unpacklo_epi16(even, odd));
            _mm512_storeu_si512(to + 16 * num_keys, _mm512_unpackhi_epi16(even, odd));
        }
        prefetcher.ask(1);
    }
}

MANTA_INLINE void pack_query(const bf16* query, int head_dim, bf16* row) {
    for (int dim = 0; dim < head_dim; dim += 32) _mm512_storeu_si512(row + dim, load_group(query, dim, head_dim));
}

template <>
MANTA_INLINE Floats output_columns<bf16>(const float* sums, int dim) {
    const int group = dim & ~31;
    __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    if (dim & 16) order = _mm512_add_epi32(order, _mm512_set1_epi32(8));
    return (Floats)_mm512_permutex2var_ps(_mm512_loadu_ps(sums + group), order, _mm512_loadu_ps(sums + group + 16));
}
#endif

// C [rows][panels * LANES] = or += A [rows][depth] times packed B. Each row's sum runs over depth in the same order,
// whatever the other rows are. Tiles have about equal numbers of rows: one of two rows takes as long as one of four,
// because each sum waits for its last product.
template <bool ACCUMULATE, int PANELS, class E, class Beside = Nothing>
MANTA_INLINE void multiply_panels(
    const E* a, int lda, const E* b, Columns at, int depth, float* c, int ldc, int rows, Beside beside = {}
) {
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int tile = 0; tile < tiles; tile++) {
        const int row = rows * tile / tiles, end = rows * (tile + 1) / tiles;
        with_constant<TILE_ROWS>(end - row, [&](auto count) __attribute__((always_inline)) {
            multiply_tile<count, PANELS, ACCUMULATE>(
                a + int64_t(row) * lda, lda, b, at, depth, c + row * ldc, ldc, beside
            );
        });
        beside = beside.after(depth);
    }
}

template <bool ACCUMULATE, class E>
inline void multiply(const E* a, int lda, const E* b, int depth, float* c, int ldc, int rows, int panels) {
    const Columns at = {LANES, int64_t(depth) * LANES};
    int panel = 0;
    for (; panel + 2 <= panels; panel += 2) {
        multiply_panels<ACCUMULATE, 2>(a, lda, b + panel * at.panel, at, depth, c + panel * LANES, ldc, rows);
    }
    if (panel < panels) {
        multiply_panels<ACCUMULATE, 1>(a, lda, b + panel * at.panel, at, depth, c + panel * LANES, ldc, rows);
    }
}

// Like `multiply` in the float form, with the bits of a processor that fuses products with sums
inline void multiply_exactly(
    const float* a, int lda, const float* b, int depth, float* c, int ldc, int rows, int panels, bool adds
) {
    for (int panel = 0; panel < panels; panel++) {
        const float* columns = b + int64_t(panel) * depth * LANES;
        for (int row = 0; row < rows; row++) {
            float* to = c + row * ldc + panel * LANES;
            Floats sum = adds ? load(to) : splat(0);
            for (int k = 0; k < depth; k++) {
                sum = add_product_exactly(sum, splat(a[int64_t(row) * lda + k]), load(columns + k * LANES));
            }
            store(to, sum);
        }
    }
}

// ------------------------------------------------------------------------------------------------------------ AMX form

#if MANTA_AMX
// Linux grants the tile registers to a process on request; if it does not, the form with pairs is used
inline bool tiles_granted() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023;
    constexpr int XFEATURE_XTILEDATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return granted;
}

struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

inline void configure_tiles() {
    static const TileConfig config;
    _tile_loadconfig(&config);
}

// Like `multiply`; rows is a multiple of 16, depth of 32, panels of 2
template <bool ACCUMULATE>
inline void multiply_amx(const bf16* a, int lda, const bf16* b, int depth, float* c, int ldc, int rows, int panels) {
    asm volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory
    for (int panel = 0; panel < panels; panel += 2) {
        const bf16* left = b + size_t(panel) * depth * 16;
        const bf16* right = left + size_t(depth) * 16;
        int row = 0;
        for (; row + 32 <= rows; row += 32) {
            float* upper = c + row * ldc + panel * 16;
            float* lower = upper + 16 * ldc;
            if (ACCUMULATE) {
                _tile_loadd(0, upper, ldc * 4);
                _tile_loadd(1, upper + 16, ldc * 4);
                _tile_loadd(2, lower, ldc * 4);
                _tile_loadd(3, lower + 16, ldc * 4);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int k = 0; k < depth; k += 32) {
                _tile_loadd(4, a + row * lda + k, lda * 2);
                _tile_loadd(5, a + (row + 16) * lda + k, lda * 2);
                _tile_loadd(6, left + k * 16, 64);
                _tile_loadd(7, right + k * 16, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, upper, ldc * 4);
            _tile_stored(1, upper + 16, ldc * 4);
            _tile_stored(2, lower, ldc * 4);
            _tile_stored(3, lower + 16, ldc * 4);
        }
        if (row < rows) {  // 16 left
            float* upper = c + row * ldc + panel * 16;
            if (ACCUMULATE) {
                _tile_loadd(0, upper, ldc * 4);
                _tile_loadd(1, upper + 16, ldc * 4);
            } else {
                _tile_zero(0);
                _tile_zero(1);
            }
            for (int k = 0; k < depth; k += 32) {
                _tile_loadd(4, a + row * lda + k, lda * 2);
                _tile_loadd(6, left + k * 16, 64);
                _tile_loadd(7, right + k * 16, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
            }
            _tile_stored(0, upper, ldc * 4);
            _tile_stored(1, upper + 16, ldc * 4);
        }
    }
}
#endif
