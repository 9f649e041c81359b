// Products of bfloat16 activations with weights packed once: y = x @ weight.T + bias, accumulated in float32; or gated,
// where the weight's halves are those of a gate and of what it lets through: y = silu(gate) * up (SwiGLU, Shazeer, 2020).
// Strips of 32 outputs, inside which pairs of inputs lie together ([in / 2][32][2]), suit AVX-512's dot products and
// AMX's tiles alike: AMX takes over where there are rows enough to fill a tile. Called by cpu_linear.py.
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
#include <memory>

#include "shares.h"
#include "simd.h"

constexpr int STRIP = 32;     // outputs that lie together: two vectors of float32, or the columns of two tiles
constexpr int PANEL = 64;     // outputs of two strips: the unit that threads share out
constexpr int STEP = 32;      // inputs that one tile or one cache line of a row holds
constexpr int MAX_ROWS = 6;   // rows of a block: 24 accumulators, 4 weights and a broadcast fill 32 registers
constexpr int TILE_ROWS = 32; // rows of two tiles
constexpr int64_t CACHE_BYTES = 640 * 1024;  // of panels that stay in the second-level cache while many rows pass
constexpr int64_t BLOCK_BYTES = 1 << 20;  // of inputs that stay in the second-level cache while the weights pass
constexpr int CHUNK_STEPS = 8;  // of a strip that stay in the first-level cache, 16 KiB, while a block of rows passes
constexpr int PACKED_CHUNK_STEPS = 14;  // where the rows are packed, which then leave it more room
constexpr int FEW_TILES_CHUNK_STEPS = 28;  // of 2 or 3 TILE_ROWS: a longer chunk overtakes what is fetched ahead
constexpr int AHEAD_STEPS = 24;  // from the weights in use to those that are fetched
constexpr int FEW_AHEAD_STEPS = 12;  // the same where rows fill one tile at most
constexpr int FEW_ROWS = 3;  // from which a tile, however empty, beats dot products
constexpr int BLOCK_TILES = 8;  // TILE_ROWS that repay the loading of a chunk
constexpr int ROWS_BESIDE = 2;  // of finished sums that are written while a step of tiles multiplies
constexpr int PACKED_TILES = 4;  // TILE_ROWS from which packing them pays
constexpr int STREAMED_ROWS = 512;  // up to here a call waits for memory, not for arithmetic
constexpr int SHARED_ROWS = 256;  // of each thread, from which they share out the rows, and each reads its own only
constexpr int64_t SERIAL_PRODUCTS = 32 * 1024;  // below, waking the other threads costs more than it saves
constexpr int64_t HUGE_PAGE = 2 << 20;

static int64_t panel_size(int in_features) {
    return (int64_t)in_features * PANEL;
}

static MANTA_INLINE __mmask16 mask_of(int columns) {
    return columns >= 16 ? 0xffff : columns > 0 ? (1 << columns) - 1 : 0;
}

// Rounds 16 values and writes the first `columns`.
static MANTA_INLINE void store(bf16* y, __m512 value, int columns) {
    _mm256_mask_storeu_epi16(y, mask_of(columns), (__m256i)_mm512_cvtneps_pbh(value));
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

// ---- many rows: AMX tiles ----------------------------------------------------------------------------------------

#if defined(__AMX_BF16__)
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr int STRIP_STRIDE = STRIP * 4;  // bytes from one pair of inputs of a strip to the next
constexpr int TILE = 256;  // sums of a tile

// Where tiles of inputs lie: in rows of x, or packed, each tile's rows behind one another.
struct Inputs {
    const bf16* tile;  // of the first 16 rows and inputs
    int64_t stride;    // bytes from row to row
    int64_t second;    // elements to the tile of the next 16 rows
    int64_t step;      // elements to the tile of the next inputs
    bool passes;       // not wanted in the first-level cache, where a chunk of weights is to stay
};

// sums [ROW_TILES][2][16][16] of 16 * ROW_TILES rows of x and a part of a strip, added to what is there or not.
// `beside(step)` is work for the vector units while the tiles multiply; it may not touch `sums`. What limits it stands in
// benchmarks/results/2026-11-21.md, "Linears that pack their inputs".
template <int ROW_TILES, typename Beside>
static MANTA_INLINE void tiles_times_strip(Inputs x, const bf16* strip, int steps, float* sums, bool adds,
                                           Beside beside) {
    asm volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory
    if (adds) {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + TILE, 64);
        if (ROW_TILES == 2) {
            _tile_loadd(2, sums + 2 * TILE, 64);
            _tile_loadd(3, sums + 3 * TILE, 64);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int step = 0; step < steps; step++, x.tile += x.step, strip += STEP * STRIP) {
        _tile_loadd(6, strip, STRIP_STRIDE);
        if (x.passes)
            _tile_stream_loadd(4, x.tile, x.stride);
        else
            _tile_loadd(4, x.tile, x.stride);
        _tile_loadd(7, strip + 32, STRIP_STRIDE);
        _tile_dpbf16ps(0, 4, 6);
        beside(step);
        _tile_dpbf16ps(1, 4, 7);
        if (ROW_TILES == 2) {
            if (x.passes)
                _tile_stream_loadd(5, x.tile + x.second, x.stride);
            else
                _tile_loadd(5, x.tile + x.second, x.stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + TILE, 64);
    if (ROW_TILES == 2) {
        _tile_stored(2, sums + 2 * TILE, 64);
        _tile_stored(3, sums + 3 * TILE, 64);
    }
    asm volatile("" ::: "memory");
}

// sums [4][16][16] of up to 16 rows of x, as many as tiles have, and both strips of a panel. Weights are fetched ahead,
// behind the panel's end those of the next.
static void tile_times_panel(const bf16* x, int64_t in_features, const bf16* panel, float* sums) {
    const bf16* const second = panel + in_features * STRIP;
    asm volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < in_features; k += STEP) {
        const int64_t later = k + FEW_AHEAD_STEPS * STEP;
        const bf16* const ahead = panel + (later < in_features ? later : later + in_features) * STRIP;
        for (int line = 0; line < STEP; line++) {
            _mm_prefetch((const char*)(ahead + line * STRIP), _MM_HINT_T1);
            _mm_prefetch((const char*)(ahead + (in_features + line) * STRIP), _MM_HINT_T1);
        }
        _tile_loadd(4, x + k, in_features * 2);
        _tile_loadd(6, panel + k * STRIP, STRIP_STRIDE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + k * STRIP + 32, STRIP_STRIDE);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, second + k * STRIP, STRIP_STRIDE);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, second + k * STRIP + 32, STRIP_STRIDE);
        _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + TILE, 64);
    _tile_stored(2, sums + 2 * TILE, 64);
    _tile_stored(3, sums + 3 * TILE, 64);
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
    bool gated;  // a strip is 16 gates and then what these 16 let through; y is half as wide as the sums

    const bf16* panel(int p) const { return packed + p * panel_size(in_features); }
    const bf16* input(int row) const { return x + (int64_t)row * in_features; }

    // Writes what a row's 32 sums of a strip come to.
    MANTA_INLINE void write(int row, int strip, __m512 left, __m512 right) const {
        const int column = strip * STRIP;
        left = with_bias(left, column);
        right = with_bias(right, column + 16);
        if (gated) {
            const int width = out_features / 2;
            const __m512 value = (__m512)(silu_of<true>((Floats)left) * (Floats)right);
            store(y + (int64_t)row * width + column / 2, value, width - column / 2);
        } else {
            bf16* const to = y + (int64_t)row * out_features + column;
            if (out_features - column >= STRIP) {
                _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(right, left));  // a whole cache line
            } else {
                store(to, left, out_features - column);
                store(to + 16, right, out_features - column - 16);
            }
        }
    }

    MANTA_INLINE __m512 with_bias(__m512 sum, int column) const {
        if (!bias) return sum;
        const __m256i bits = _mm256_maskz_loadu_epi16(mask_of(out_features - column), bias + column);
        return _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
    }

    // ---- few rows, or no tiles: AVX-512 dot products

    // `ahead`, where given, is weights that are fetched while this panel is used, one cache line for each of its own.
    template <int ROWS>
    void rows_times_panel(int first_row, int p, const bf16* ahead) const {
        const bf16* const rows = input(first_row);
        const bf16* const weights_of_panel = panel(p);
        __m512 sum[ROWS][4];
        for (int row = 0; row < ROWS; row++)
            for (int c = 0; c < 4; c++) sum[row][c] = _mm512_setzero_ps();
        for (int k = 0; k < in_features; k += 2) {
            __m512bh weights[4];
            for (int c = 0; c < 4; c++) {
                const int64_t offset = ((int64_t)(c / 2) * in_features + k) * STRIP + c % 2 * STRIP;
                weights[c] = (__m512bh)_mm512_loadu_si512(weights_of_panel + offset);
                if (ahead) _mm_prefetch((const char*)(ahead + offset), _MM_HINT_T0);
            }
            for (int row = 0; row < ROWS; row++) {
                int32_t pair;
                memcpy(&pair, rows + (int64_t)row * in_features + k, sizeof(pair));
                const __m512bh inputs = (__m512bh)_mm512_set1_epi32(pair);
                for (int c = 0; c < 4; c++) sum[row][c] = _mm512_dpbf16_ps(sum[row][c], inputs, weights[c]);
            }
        }
        for (int row = 0; row < ROWS; row++)
            for (int c = 0; c < 4; c += 2) write(first_row + row, 2 * p + c / 2, sum[row][c], sum[row][c + 1]);
    }

    void rows_times_panel(int rows, int first_row, int p, const bf16* ahead) const {
        switch (rows) {
            case 1: return rows_times_panel<1>(first_row, p, ahead);
            case 2: return rows_times_panel<2>(first_row, p, ahead);
            case 3: return rows_times_panel<3>(first_row, p, ahead);
            case 4: return rows_times_panel<4>(first_row, p, ahead);
            case 5: return rows_times_panel<5>(first_row, p, ahead);
            case 6: return rows_times_panel<6>(first_row, p, ahead);
        }
    }

    // Panels used in turn by each block of rows: one while weights stream from memory, as many as stay cached after.
    int group() const {
        return num_rows <= STREAMED_ROWS ? 1 : std::max<int64_t>(1, CACHE_BYTES / (panel_size(in_features) * 2));
    }

    void by_rows(Share share) const {
        const int blocks = (num_rows + MAX_ROWS - 1) / MAX_ROWS, step = group();
        while (share.take(step))
            for (int b = 0; b < blocks; b++) {
                const int row = (int64_t)num_rows * b / blocks, end = (int64_t)num_rows * (b + 1) / blocks;
                for (int p = share.first; p < share.last; p++) {
                    const bf16* ahead = nullptr;
                    if (b == 0)
                        ahead = panel(p) + 64 * STEP;
                    else if (b == blocks - 1)
                        ahead = panel(p + 1);  // a hint, also behind the last
                    rows_times_panel(end - row, row, p, ahead);
                }
            }
    }

#if defined(__AMX_BF16__)
    // Sums of rows [row, end) and a strip, from those of a tile.
    struct Finished {
        const float* sums = nullptr;
        int row = 0, end = 0, strip = 0;
    };

    // Tiles of rows [first_tile, end_tile) and of inputs [first_step, end_step), which pass by every strip of weights.
    struct Pass {
        int first_tile, end_tile, first_step, end_step;
        int chunk_steps;
        bool packs;
        const bf16* inputs;  // packed, or the padded last rows
    };

    // Of 16 rows at most, which wait for memory only.
    void by_row_of_tiles(Share share) const {
        TileConfig config;
        std::fill_n(config.rows, 5, num_rows);  // the sums' and the inputs'
        _tile_loadconfig(&config);
        alignas(64) float sums[4 * TILE];
        while (share.take(1)) {
            tile_times_panel(x, in_features, panel(share.first), sums);
            for (int half = 0; half < 2; half++) {
                Finished strip{sums + half * 2 * TILE, 0, num_rows, 2 * share.first + half};
                write_rows(strip, num_rows);
            }
        }
        _tile_release();
    }

    // Inputs of a block of rows stay in the second-level cache while all strips pass, and of each strip a chunk stays in
    // the first-level cache while the block's rows pass; the weights that come next are fetched meanwhile. A step of
    // 2 x 2 tiles then takes 2 KiB from the second-level cache instead of 4. Where a row is so long that the block would
    // have few rows, its inputs pass in parts, and sums wait in memory from part to part.
    void by_tiles(Share share, bool owns_rows) const {
        const int steps = in_features / STEP, tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;  // of TILE_ROWS rows
        const int64_t step_bytes = TILE_ROWS * STEP * sizeof(bf16);
        const int parts = 1 + std::min(tiles, BLOCK_TILES) * steps * step_bytes / (BLOCK_BYTES + 1);
        const int part_steps = (steps + parts - 1) / parts;
        const int blocks = 1 + (tiles - 1) / std::max<int64_t>(1, BLOCK_BYTES / (part_steps * step_bytes));
        // Where rows pass once only, a thread's panels need not be the same ones throughout.
        const bool helps = parts == 1 && blocks == 1 && !owns_rows;
        if (!(helps ? share.take(1) : share.take_own())) return;
        const TileConfig config;
        _tile_loadconfig(&config);
        // Long rows that every thread packs for itself would take longer to pack than they save.
        const bool packs = tiles >= PACKED_TILES && (parts == 1 || owns_rows);
        const int chunk_steps = packs                  ? PACKED_CHUNK_STEPS
                                : tiles == 1           ? part_steps
                                : tiles < PACKED_TILES ? FEW_TILES_CHUNK_STEPS
                                                       : CHUNK_STEPS;
        const int64_t block_tiles = 1 + (tiles - 1) / blocks, strip_sums = block_tiles * 4 * TILE;
        float* const sums = of_thread<float>(strip_sums * (parts > 1 ? 2 * (share.last - share.first) : 1));
        bf16* const buffer = packs ? of_thread<bf16>(block_tiles * part_steps * TILE_ROWS * STEP) : padded_rows();
        Finished finished;
        for (int block = 0; block < blocks; block++)
            for (int part = 0; part < steps; part += part_steps) {
                const Pass pass{tiles * block / blocks, tiles * (block + 1) / blocks, part,
                                std::min(steps, part + part_steps), chunk_steps, packs, buffer};
                if (packs) pack_inputs(pass, buffer);
                do {
                    for (int strip = 2 * share.first; strip < 2 * share.last; strip++) {
                        float* const at = sums + (parts > 1 ? (strip - 2 * share.first) * strip_sums : 0);
                        pass_by_strip(pass, strip, at, finished);
                    }
                } while (helps && share.take(1));
            }
        write_rows(finished, TILE_ROWS);  // the last
        if (!packs) free(buffer);
        _tile_release();
    }

    // Adds to the sums of a strip, [tiles][2][2][16][16].
    MANTA_INLINE void pass_by_strip(const Pass& pass, int strip, float* sums, Finished& finished) const {
        const int steps = in_features / STEP, lines = 1 + (STEP - 1) / (pass.end_tile - pass.first_tile);
        for (int step = pass.first_step; step < pass.end_step; step += pass.chunk_steps) {
            const int end = std::min(pass.end_step, step + pass.chunk_steps), later = step + AHEAD_STEPS;
            const bf16* ahead = later < pass.end_step ? chunk(strip, later)
                                                      : chunk(strip + 1, pass.first_step + later - pass.end_step);
            float* tile_sums = sums;
            for (int tile = pass.first_tile; tile < pass.end_tile; tile++, tile_sums += 4 * TILE) {
                const Inputs x = pass.packs ? packed_tile(pass, tile, step) : tile_of_rows(tile, step, pass.inputs);
                ahead = rows_times_chunk(x, tile, strip, step, end, tile_sums, ahead, lines, finished);
                const int row = tile * TILE_ROWS;
                if (end == steps) finished = {tile_sums, row, std::min(num_rows, row + TILE_ROWS), strip};
            }
        }
    }

    void write_rows(Finished& from, int count) const {
        for (; count > 0 && from.row < from.end; count--, from.row++) {
            const int i = from.row % TILE_ROWS;
            const float* const left = from.sums + i / 16 * 2 * TILE + i % 16 * 16;
            write(from.row, from.strip, _mm512_load_ps(left), _mm512_load_ps(left + TILE));
        }
    }

    // Of steps [first_step, end_step) of a strip and a tile of rows. Meanwhile the weights at `ahead` are fetched, `lines`
    // cache lines a step, and the sums finished before are written. Returns what is to be fetched next.
    const bf16* rows_times_chunk(Inputs x, int tile, int strip, int first_step, int end_step, float* sums,
                                 const bf16* ahead, int lines, Finished& finished) const {
        const int steps = end_step - first_step;
        const auto beside = [&](int step) {
            const bf16* const from = ahead + (int64_t)step * lines * STRIP;
            for (int line = 0; line < lines; line++) _mm_prefetch((const char*)(from + line * STRIP), _MM_HINT_T1);
            write_rows(finished, step + 1 < steps ? ROWS_BESIDE : TILE_ROWS);
        };
        if (num_rows - tile * TILE_ROWS > 16)
            tiles_times_strip<2>(x, chunk(strip, first_step), steps, sums, first_step > 0, beside);
        else
            tiles_times_strip<1>(x, chunk(strip, first_step), steps, sums, first_step > 0, beside);
        return ahead + (int64_t)steps * lines * STRIP;
    }

    Inputs tile_of_rows(int tile, int step, const bf16* padded) const {
        const int row = tile * TILE_ROWS;
        const bf16* const rows = num_rows - row < TILE_ROWS && padded ? padded : input(row);
        const bool passes = num_rows > 2 * TILE_ROWS;
        return {rows + step * STEP, in_features * (int64_t)sizeof(bf16), (int64_t)16 * in_features, STEP, passes};
    }

    // The inputs of a pass, [tiles][steps][2][16][STEP]; rows that are not there are zero. A tile whose rows are apart
    // takes longer to load, for its cache lines lie in many pages and in few sets.
    void pack_inputs(const Pass& pass, bf16* to) const {
        const int64_t size = TILE_ROWS * STEP;
        for (int tile = pass.first_tile; tile < pass.end_tile; tile++, to += (pass.end_step - pass.first_step) * size)
            for (int i = 0; i < TILE_ROWS; i++) {
                const int row = tile * TILE_ROWS + i;
                bf16* line = to + i * STEP;
                for (int step = pass.first_step; step < pass.end_step; step++, line += size)
                    _mm512_store_si512(line, row < num_rows ? _mm512_loadu_si512(input(row) + step * STEP)
                                                            : _mm512_setzero_si512());
            }
    }

    static Inputs packed_tile(const Pass& pass, int tile, int step) {
        const int64_t size = TILE_ROWS * STEP, steps = pass.end_step - pass.first_step;
        const bf16* const at = pass.inputs + ((tile - pass.first_tile) * steps + step - pass.first_step) * size;
        return {at, STEP * sizeof(bf16), size / 2, size, true};
    }

    const bf16* chunk(int strip, int step) const {
        return packed + ((int64_t)strip * in_features + step * STEP) * STRIP;
    }

    // The last rows, filled up to whole tiles; null where they are whole.
    bf16* padded_rows() const {
        const int rest = num_rows % TILE_ROWS;
        if (rest == 0 || rest == 16) return nullptr;
        const int64_t row_bytes = in_features * sizeof(bf16);
        bf16* padded = static_cast<bf16*>(calloc(rest > 16 ? TILE_ROWS : 16, row_bytes));
        memcpy(padded, input(num_rows - rest), rest * row_bytes);
        return padded;
    }

    // A share of the rows, in whole tiles.
    Product of_rows(int64_t share, int64_t shares) const {
        const int64_t tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
        const int64_t first = tiles * share / shares * TILE_ROWS;
        Product part = *this;
        part.x = input(first);
        part.y += first * (gated ? out_features / 2 : out_features);
        part.num_rows = std::min<int64_t>(num_rows, tiles * (share + 1) / shares * TILE_ROWS) - first;
        return part;
    }

    // Memory that a thread keeps for its next call, [count], on its own huge pages where it is large.
    template <typename T>
    static T* of_thread(int64_t count) {
        static thread_local std::unique_ptr<void, decltype(&free)> memory(nullptr, free);
        static thread_local int64_t size = 0;
        const int64_t wanted = (count * sizeof(T) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        if (size < wanted) {
            memory.reset(aligned_alloc(HUGE_PAGE, wanted));
            madvise(memory.get(), wanted, MADV_HUGEPAGE);
            size = wanted;
        }
        return static_cast<T*>(memory.get());
    }
#endif
};

extern "C" int manta_linear_supported() {
    return 1;
}

// weight [out_features, in_features] -> packed [out_features rounded up to 64, in_features], zero-filled. Gated, 16 rows
// of its first half and 16 of its second take turns; half of out_features is then divisible by 16.
extern "C" void manta_pack_linear(const bf16* weight, bf16* packed, int out_features, int in_features, int gated) {
    const int panels = (out_features + PANEL - 1) / PANEL;
    const uintptr_t begin = ((uintptr_t)packed + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    const uintptr_t end = (uintptr_t)(packed + panels * panel_size(in_features)) / HUGE_PAGE * HUGE_PAGE;
    if (begin < end) madvise((void*)begin, end - begin, MADV_HUGEPAGE);  // fewer page faults now, fewer TLB misses later
#pragma omp parallel for schedule(static)
    for (int p = 0; p < panels; p++)
        for (int k = 0; k < in_features; k += STEP)
            for (int n = 0; n < PANEL; n += 16) {
                __m512i pairs[16];
                const int place = p * PANEL + n;
                const int half = n % STRIP ? out_features / 2 : 0;
                for (int i = 0; i < 16; i++) {
                    const int64_t row = i + (gated ? half + place / STRIP * 16 : place);
                    pairs[i] = place + i < out_features ? _mm512_loadu_si512(weight + row * in_features + k)
                                                        : _mm512_setzero_si512();
                }
                transpose(pairs);
                bf16* to = packed + p * panel_size(in_features) + ((int64_t)(n / STRIP) * in_features + k) * STRIP;
                to += n % STRIP * 2;
                for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * STRIP * 2, pairs[i]);
            }
}

// x [num_rows, in_features], bias [out_features], in the order of packing, or null -> y [num_rows, out_features], or half
// as wide where gated; in_features divisible by 32.
extern "C" void manta_linear(const bf16* x, const bf16* packed, const bf16* bias, bf16* y, int num_rows,
                             int in_features, int out_features, int gated) {
    const Product product{x, packed, bias, y, num_rows, in_features, out_features, gated != 0};
    const int64_t panels = (out_features + PANEL - 1) / PANEL;
    const bool serial = (int64_t)num_rows * in_features * out_features < SERIAL_PRODUCTS;
    Shares shares(panels, omp_get_max_threads());
#pragma omp parallel if (!serial)
    {
        const int threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const Share share{shares, thread};
#if defined(__AMX_BF16__)
        if (has_tiles && num_rows >= SHARED_ROWS * threads) {
            Shares all(panels, 1);
            product.of_rows(thread, threads).by_tiles({all, 0}, true);
        } else if (has_tiles && num_rows > 16)
            product.by_tiles(share, false);
        else if (has_tiles && num_rows >= FEW_ROWS)
            product.by_row_of_tiles(share);
        else
#endif
            product.by_rows(share);
    }
}

#else

extern "C" int manta_linear_supported() {
    return 0;
}

#endif
