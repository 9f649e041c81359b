// Products of bfloat16 activations with weights packed once: y = x @ weight.T + bias, accumulated in float32.
// Panels of 64 outputs, inside which pairs of inputs lie together ([in / 2][64][2]), suit AVX-512's dot products and AMX's
// tiles alike: AMX takes over where there are rows enough to fill a tile. Called by cpu_linear.py.
#include <cstdint>

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#include <omp.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "simd.h"

constexpr int PANEL = 64;     // outputs of a panel: four vectors of float32
constexpr int STEP = 32;      // inputs that one tile or one cache line of a row holds
constexpr int MAX_ROWS = 6;   // rows of a block: 24 accumulators, 4 weights and a broadcast fill 32 registers
constexpr int TILE_ROWS = 32; // rows of two tiles
constexpr int64_t CACHE_BYTES = 640 * 1024;  // of panels that stay in the second-level cache while many rows pass
constexpr int STREAMED_ROWS = 512;  // up to here a call waits for memory, not for arithmetic
constexpr int64_t SERIAL_PRODUCTS = 32 * 1024;  // below, waking the other threads costs more than it saves
constexpr int64_t HUGE_PAGE = 2 << 20;

static int64_t panel_size(int in_features) {
    return (int64_t)in_features * PANEL;
}

// Adds the bias to 16 sums, rounds them, and writes the first `columns`.
static MANTA_INLINE void store(bf16* y, __m512 sum, const bf16* bias, int columns) {
    if (columns <= 0) return;
    const __mmask16 mask = columns >= 16 ? 0xffff : (1 << columns) - 1;
    if (bias) {
        const __m256i bits = _mm256_maskz_loadu_epi16(mask, bias);
        sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
    }
    _mm256_mask_storeu_epi16(y, mask, (__m256i)_mm512_cvtneps_pbh(sum));
}

// ---- packing: transposes 16 x 16 pairs ---------------------------------------------------------------------------

static void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// ---- few rows, or no tiles: AVX-512 dot products -----------------------------------------------------------------

// `ahead`, where given, is weights that are fetched while this panel is used, one cache line for each of its own.
template <int ROWS>
static void rows_times_panel(const bf16* x, const bf16* panel, const bf16* bias, bf16* y, int in_features,
                             int64_t y_stride, int columns, const bf16* ahead) {
    __m512 sum[ROWS][4];
    for (int row = 0; row < ROWS; row++)
        for (int c = 0; c < 4; c++) sum[row][c] = _mm512_setzero_ps();
    for (int k = 0; k < in_features; k += 2) {
        __m512bh weights[4];
        for (int c = 0; c < 4; c++) {
            const int64_t offset = (int64_t)k * PANEL + c * STEP;
            weights[c] = (__m512bh)_mm512_loadu_si512(panel + offset);
            if (ahead) _mm_prefetch((const char*)(ahead + offset), _MM_HINT_T0);
        }
        for (int row = 0; row < ROWS; row++) {
            int32_t pair;
            memcpy(&pair, x + (int64_t)row * in_features + k, sizeof(pair));
            const __m512bh inputs = (__m512bh)_mm512_set1_epi32(pair);
            for (int c = 0; c < 4; c++) sum[row][c] = _mm512_dpbf16_ps(sum[row][c], inputs, weights[c]);
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int c = 0; c < 4; c++)
            store(y + row * y_stride + c * 16, sum[row][c], bias ? bias + c * 16 : nullptr, columns - c * 16);
}

constexpr decltype(&rows_times_panel<1>) ROWS_TIMES_PANEL[] = {
    nullptr,
    rows_times_panel<1>,
    rows_times_panel<2>,
    rows_times_panel<3>,
    rows_times_panel<4>,
    rows_times_panel<5>,
    rows_times_panel<6>,
};

// ---- many rows: AMX tiles ----------------------------------------------------------------------------------------

#if defined(__AMX_BF16__)
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr int PANEL_STRIDE = PANEL * 4;  // bytes from one pair of inputs to the next, and from one row of sums

// sum [32][64] of 32 rows of x, as two blocks of 2 x 2 tiles.
static void tiles_times_panel(const bf16* x, const bf16* panel, int in_features, float* sum, const bf16* ahead) {
    const int64_t x_stride = (int64_t)in_features * 2;
    for (int half = 0; half < 2; half++) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int k = 0; k < in_features; k += STEP) {
            const bf16* weights = panel + (int64_t)k * PANEL + half * 2 * STEP;
            _tile_loadd(4, x + k, x_stride);
            _tile_loadd(6, weights, PANEL_STRIDE);
            _tile_loadd(7, weights + STEP, PANEL_STRIDE);
            _tile_dpbf16ps(0, 4, 6);
            if (ahead) {
                const bf16* from = ahead + (int64_t)k * PANEL + half * 32 * STEP;
                for (int line = 0; line < 32; line++) _mm_prefetch((const char*)(from + line * STEP), _MM_HINT_T1);
            }
            _tile_loadd(5, x + 16 * (int64_t)in_features + k, x_stride);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        float* to = sum + half * STEP;
        _tile_stored(0, to, PANEL_STRIDE);
        _tile_stored(1, to + 16, PANEL_STRIDE);
        _tile_stored(2, to + 16 * PANEL, PANEL_STRIDE);
        _tile_stored(3, to + 16 * PANEL + 16, PANEL_STRIDE);
    }
}

// sum [16][64] of 16 rows of x, as 1 x 4 tiles.
static void tile_times_panel(const bf16* x, const bf16* panel, int in_features, float* sum) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < in_features; k += STEP) {
        const bf16* weights = panel + (int64_t)k * PANEL;
        _tile_loadd(4, x + k, (int64_t)in_features * 2);
        _tile_loadd(6, weights, PANEL_STRIDE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + STEP, PANEL_STRIDE);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, weights + 2 * STEP, PANEL_STRIDE);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, weights + 3 * STEP, PANEL_STRIDE);
        _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, sum, PANEL_STRIDE);
    _tile_stored(1, sum + 16, PANEL_STRIDE);
    _tile_stored(2, sum + 32, PANEL_STRIDE);
    _tile_stored(3, sum + 48, PANEL_STRIDE);
}

// Linux hands out the tiles' register space on request only.
static bool request_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
static const bool has_tiles = request_tiles();
#endif

// ---- one call ----------------------------------------------------------------------------------------------------

struct Product {
    const bf16 *x, *packed, *bias;
    bf16* y;
    int num_rows, in_features, out_features;

    const bf16* panel(int p) const { return packed + p * panel_size(in_features); }
    const bf16* panel_bias(int p) const { return bias ? bias + p * PANEL : nullptr; }
    const bf16* input(int row) const { return x + (int64_t)row * in_features; }
    bf16* output(int row, int p) const { return y + (int64_t)row * out_features + p * PANEL; }
    int columns(int p) const { return out_features - p * PANEL; }

    // Panels used in turn by each block of rows: one while weights stream from memory, as many as stay cached after.
    int group() const {
        return num_rows <= STREAMED_ROWS ? 1 : std::max<int64_t>(1, CACHE_BYTES / (panel_size(in_features) * 2));
    }

    void by_rows(int first, int last) const {
        const int blocks = (num_rows + MAX_ROWS - 1) / MAX_ROWS, step = group();
        for (int start = first; start < last; start += step)
            for (int b = 0; b < blocks; b++) {
                const int row = (int64_t)num_rows * b / blocks, end = (int64_t)num_rows * (b + 1) / blocks;
                for (int p = start; p < std::min(start + step, last); p++) {
                    const bf16* ahead = nullptr;
                    if (b == 0)
                        ahead = panel(p) + 64 * STEP;
                    else if (b == blocks - 1 && p + 1 < last)
                        ahead = panel(p + 1);
                    ROWS_TIMES_PANEL[end - row](input(row), panel(p), panel_bias(p), output(row, p), in_features,
                                                out_features, columns(p), ahead);
                }
            }
    }

#if defined(__AMX_BF16__)
    void by_tiles(int first, int last) const {
        const TileConfig config;
        _tile_loadconfig(&config);
        alignas(64) float sum[TILE_ROWS * PANEL];
        const int rest = num_rows % TILE_ROWS, step = group();
        bf16* padded = nullptr;  // the last rows, filled up to whole tiles
        if (rest != 0 && rest != 16) {
            const int rows = rest > 16 ? TILE_ROWS : 16;
            padded = static_cast<bf16*>(calloc((int64_t)rows * in_features, sizeof(bf16)));
            memcpy(padded, input(num_rows - rest), (int64_t)rest * in_features * sizeof(bf16));
        }
        for (int start = first; start < last; start += step)
            for (int row = 0; row < num_rows; row += TILE_ROWS)
                for (int p = start; p < std::min(start + step, last); p++) {
                    const int rows = std::min(TILE_ROWS, num_rows - row);
                    const bf16* from = rows < TILE_ROWS && padded ? padded : input(row);
                    const bool fetch = step == 1 && row > 0 && row + TILE_ROWS >= num_rows && p + 1 < last;
                    if (rows > 16)
                        tiles_times_panel(from, panel(p), in_features, sum, fetch ? panel(p + 1) : nullptr);
                    else
                        tile_times_panel(from, panel(p), in_features, sum);
                    for (int r = 0; r < rows; r++)
                        for (int c = 0; c < PANEL; c += 16)
                            store(output(row + r, p) + c, _mm512_load_ps(sum + r * PANEL + c),
                                  bias ? panel_bias(p) + c : nullptr, columns(p) - c);
                }
        free(padded);
        _tile_release();
    }
#endif
};

extern "C" int manta_linear_supported() {
    return 1;
}

// weight [out_features, in_features] -> packed [out_features rounded up to 64, in_features], zero-filled.
extern "C" void manta_pack_linear(const bf16* weight, bf16* packed, int out_features, int in_features) {
    const int panels = (out_features + PANEL - 1) / PANEL;
    const uintptr_t begin = ((uintptr_t)packed + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    const uintptr_t end = (uintptr_t)(packed + panels * panel_size(in_features)) / HUGE_PAGE * HUGE_PAGE;
    if (begin < end) madvise((void*)begin, end - begin, MADV_HUGEPAGE);  // fewer page faults now, fewer TLB misses later
#pragma omp parallel for schedule(static)
    for (int p = 0; p < panels; p++)
        for (int k = 0; k < in_features; k += STEP)
            for (int n = 0; n < PANEL; n += 16) {
                __m512i pairs[16];
                for (int i = 0; i < 16; i++) {
                    const int row = p * PANEL + n + i;
                    pairs[i] = row < out_features ? _mm512_loadu_si512(weight + (int64_t)row * in_features + k)
                                                  : _mm512_setzero_si512();
                }
                transpose(pairs);
                bf16* to = packed + p * panel_size(in_features) + (int64_t)k * PANEL + n * 2;
                for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * PANEL * 2, pairs[i]);
            }
}

// x [num_rows, in_features], bias [out_features] or null -> y [num_rows, out_features]; in_features divisible by 32.
extern "C" void manta_linear(const bf16* x, const bf16* packed, const bf16* bias, bf16* y, int num_rows,
                             int in_features, int out_features) {
    const Product product{x, packed, bias, y, num_rows, in_features, out_features};
    const int64_t panels = (out_features + PANEL - 1) / PANEL;
    const bool serial = (int64_t)num_rows * in_features * out_features < SERIAL_PRODUCTS;
#pragma omp parallel if (!serial)
    {
        const int threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int first = panels * thread / threads, last = panels * (thread + 1) / threads;
#if defined(__AMX_BF16__)
        if (has_tiles && num_rows > MAX_ROWS)
            product.by_tiles(first, last);
        else
#endif
            product.by_rows(first, last);
    }
}

#else

extern "C" int manta_linear_supported() {
    return 0;
}

#endif
