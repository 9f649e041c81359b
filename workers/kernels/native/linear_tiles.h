// Products of bfloat16 by AMX's tiles, for calls with enough rows to fill one. Used by linear.cpp.
#pragma once

#include <algorithm>

#include "linear.h"
#include "tiles.h"

#if MANTA_AMX
constexpr int TILES_ROWS = 32;  // rows of two tiles
constexpr int64_t BLOCK_BYTES = 1 << 20;  // of inputs, which stay in the second-level cache while the weights pass
constexpr int CHUNK_STEPS = 8;  // of a strip: 16 KiB, which stay in the first-level cache while a block of rows passes
constexpr int PACKED_CHUNK_STEPS = 14;  // the same if the rows are packed, which leaves more room in that cache
constexpr int FEW_TILES_CHUNK_STEPS = 28;  // the same for 2 or 3 TILES_ROWS: a longer chunk overtakes the fetches
constexpr int AHEAD_STEPS = 24;  // from the weights in use to those that are fetched
constexpr int FEW_AHEAD_STEPS = 12;  // the same if the rows fill at most one tile
constexpr int BLOCK_TILES = 8;  // from so many TILES_ROWS on, loading a chunk pays
constexpr int ROWS_BESIDE = 2;  // rows of finished sums that are written while a step of tiles multiplies
constexpr int PACKED_TILES = 4;  // from so many TILES_ROWS on, packing them pays
constexpr int STRIP_STRIDE = STRIP * 4;  // bytes from one pair of inputs of a strip to the next
constexpr int TILE = 256;  // sums of a tile

// Where tiles of inputs lie: in rows of x; or packed, a tile's rows one after another.
struct Inputs {
    const bf16* tile;  // of the first 16 rows and inputs
    int64_t stride;    // bytes from row to row
    int64_t second;    // elements to the tile of the next 16 rows
    int64_t step;      // elements to the tile of the next inputs
    bool passes;       // keep out of the first-level cache, where a chunk of weights must stay
};

// sums [ROW_TILES][2][16][16] of 16 * ROW_TILES rows of x and a part of a strip; `adds`: added to the sums that are
// there. `beside(step)` is work for the vector units while the tiles multiply; it may not touch `sums`. What limits the
// speed is told in benchmarks/results/2026-11-21.md, "Linears that pack their inputs".
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

// sums [4][16][16] of up to 16 rows of x (as many as the tiles are configured for) and both strips of a panel. Weights
// are fetched ahead; near the panel's end, those of the next panel.
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

// Several inputs of a strip, or a panel, if they have to be decoded before they are multiplied.
static inline bf16* decoded_room(int64_t inputs, int strips) {
    return of_thread<bf16, 8>(inputs * strips * STRIP);
}

struct TileProduct : Product<bf16> {
    explicit TileProduct(const Product<bf16>& product) : Product<bf16>(product) {}

    // Finished sums that are not written yet: of rows [row, end) of a tile, and of a strip.
    struct Finished {
        const float* sums = nullptr;
        int row = 0, end = 0, strip = 0;
    };

    // One pass over every strip of weights, with tiles of rows [first_tile, end_tile) and inputs [first_step,
    // end_step).
    struct Pass {
        int first_tile, end_tile, first_step, end_step;
        int chunk_steps;
        bool packs;
        const bf16* inputs;  // packed, or the padded last rows
    };

    // For at most 16 rows, whose speed is limited by memory alone.
    void by_row_of_tiles(Share share) const {
        TileConfig config;
        std::fill_n(config.rows, 5, num_rows);  // the sums' and the inputs'
        _tile_loadconfig(&config);
        alignas(64) float sums[4 * TILE];
        while (share.take(1)) {
            tile_times_panel(x, in_features, whole_panel(share.first), sums);
            for (int half = 0; half < 2; half++) {
                Finished strip{sums + half * 2 * TILE, 0, num_rows, 2 * share.first + half};
                write_rows(strip, num_rows);
            }
        }
        _tile_release();
    }

    const bf16* whole_panel(int p) const {
        if (!lossless) return panel(p);
        bf16* const room = decoded_room(in_features, 2);
        for (int half = 0; half < 2; half++)
            weights(2 * p + half, 0, in_features, room + (int64_t)half * in_features * STRIP);
        return room;
    }

    // The inputs of a block of rows stay in the second-level cache while all strips pass. A chunk of each strip stays
    // in the first-level cache while the block's rows pass; the next weights are fetched meanwhile. A step of 2 x 2
    // tiles then takes 2 KiB from the second-level cache instead of 4. If rows are so long that a block would have few
    // of them, their inputs pass in parts, and the sums stay in memory between the parts.
    void by_tiles(Share share, bool owns_rows) const {
        const int steps = in_features / STEP, tiles = (num_rows + TILES_ROWS - 1) / TILES_ROWS;  // of TILES_ROWS rows
        const int64_t step_bytes = TILES_ROWS * STEP * sizeof(bf16);
        const int parts = 1 + std::min(tiles, BLOCK_TILES) * steps * step_bytes / (BLOCK_BYTES + 1);
        const int part_steps = (steps + parts - 1) / parts;
        const int blocks = 1 + (tiles - 1) / std::max<int64_t>(1, BLOCK_BYTES / (part_steps * step_bytes));
        // If there is a single pass over the rows, a thread may take other threads' panels.
        const bool helps = parts == 1 && blocks == 1 && !owns_rows;
        if (!(helps ? share.take(1) : share.take_own())) return;
        const TileConfig config;
        _tile_loadconfig(&config);
        // If every thread had to pack long rows for itself, that would take longer than it saves.
        const bool packs = tiles >= PACKED_TILES && (parts == 1 || owns_rows);
        const int chunk_steps = packs                  ? PACKED_CHUNK_STEPS
                                : tiles == 1           ? part_steps
                                : tiles < PACKED_TILES ? FEW_TILES_CHUNK_STEPS
                                                       : CHUNK_STEPS;
        const int64_t block_tiles = 1 + (tiles - 1) / blocks, strip_sums = block_tiles * 4 * TILE;
        float* const sums = of_thread<float>(strip_sums * (parts > 1 ? 2 * (share.last - share.first) : 1));
        bf16* const buffer = packs ? of_thread<bf16>(block_tiles * part_steps * TILES_ROWS * STEP) : padded_rows();
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
        write_rows(finished, TILES_ROWS);  // the last ones
        if (!packs) free(buffer);
        _tile_release();
    }

    // Adds to the sums of a strip, [tiles][2][2][16][16].
    MANTA_INLINE void pass_by_strip(const Pass& pass, int strip, float* sums, Finished& finished) const {
        const int steps = in_features / STEP, lines = 1 + (STEP - 1) / (pass.end_tile - pass.first_tile);
        for (int step = pass.first_step; step < pass.end_step; step += pass.chunk_steps) {
            const int end = std::min(pass.end_step, step + pass.chunk_steps), later = step + AHEAD_STEPS;
            bf16* const room = lossless ? decoded_room(pass.chunk_steps * STEP, 1) : nullptr;
            const bf16* const from = weights(strip, step * STEP, (end - step) * STEP, room);
            const bf16* ahead = lossless               ? room
                                : later < pass.end_step ? chunk(strip, later)
                                                        : chunk(strip + 1, pass.first_step + later - pass.end_step);
            float* tile_sums = sums;
            for (int tile = pass.first_tile; tile < pass.end_tile; tile++, tile_sums += 4 * TILE) {
                const Inputs x = pass.packs ? packed_tile(pass, tile, step) : tile_of_rows(tile, step, pass.inputs);
                ahead = rows_times_chunk(x, tile, from, step, end, tile_sums, ahead, lines, finished);
                const int row = tile * TILES_ROWS;
                if (end == steps) finished = {tile_sums, row, std::min(num_rows, row + TILES_ROWS), strip};
            }
        }
    }

    void write_rows(Finished& from, int count) const {
        for (; count > 0 && from.row < from.end; count--, from.row++) {
            const int i = from.row % TILES_ROWS;
            const float* const left = from.sums + i / 16 * 2 * TILE + i % 16 * 16;
            Sums sums = {load(left), load(left + TILE)};
            write(from.row, from.strip, sums);
        }
    }

    // Multiplies steps [first_step, end_step) of a strip, which lie at `from`, and a tile of rows. Meanwhile fetches the
    // weights at `ahead`,
    // `lines` cache lines in each step, and writes the sums that were finished before. Returns what to fetch next.
    const bf16* rows_times_chunk(Inputs x, int tile, const bf16* from, int first_step, int end_step, float* sums,
                                 const bf16* ahead, int lines, Finished& finished) const {
        const int steps = end_step - first_step;
        const auto beside = [&](int step) {
            const bf16* const next = ahead + (int64_t)step * lines * STRIP;
            for (int line = 0; line < lines; line++) _mm_prefetch((const char*)(next + line * STRIP), _MM_HINT_T1);
            write_rows(finished, step + 1 < steps ? ROWS_BESIDE : TILES_ROWS);
        };
        if (num_rows - tile * TILES_ROWS > 16)
            tiles_times_strip<2>(x, from, steps, sums, first_step > 0, beside);
        else
            tiles_times_strip<1>(x, from, steps, sums, first_step > 0, beside);
        return ahead + (int64_t)steps * lines * STRIP;
    }

    Inputs tile_of_rows(int tile, int step, const bf16* padded) const {
        const int row = tile * TILES_ROWS;
        const bf16* const rows = num_rows - row < TILES_ROWS && padded ? padded : input(row);
        const bool passes = num_rows > 2 * TILES_ROWS;
        return {rows + step * STEP, in_features * (int64_t)sizeof(bf16), (int64_t)16 * in_features, STEP, passes};
    }

    // Packs the inputs of a pass, [tiles][steps][2][16][STEP]; missing rows are zero. Without packing a tile takes
    // longer to load, because its cache lines lie in many pages and in few sets.
    void pack_inputs(const Pass& pass, bf16* to) const {
        const int64_t size = TILES_ROWS * STEP;
        for (int tile = pass.first_tile; tile < pass.end_tile; tile++, to += (pass.end_step - pass.first_step) * size)
            for (int i = 0; i < TILES_ROWS; i++) {
                const int row = tile * TILES_ROWS + i;
                bf16* line = to + i * STEP;
                for (int step = pass.first_step; step < pass.end_step; step++, line += size)
                    _mm512_store_si512(line, row < num_rows ? _mm512_loadu_si512(input(row) + step * STEP)
                                                            : _mm512_setzero_si512());
            }
    }

    static Inputs packed_tile(const Pass& pass, int tile, int step) {
        const int64_t size = TILES_ROWS * STEP, steps = pass.end_step - pass.first_step;
        const bf16* const at = pass.inputs + ((tile - pass.first_tile) * steps + step - pass.first_step) * size;
        return {at, STEP * sizeof(bf16), size / 2, size, true};
    }

    const bf16* chunk(int strip, int step) const {
        return packed + ((int64_t)strip * in_features + step * STEP) * STRIP;
    }

    // The last rows, padded to whole tiles; null if they fill whole tiles.
    bf16* padded_rows() const {
        const int rest = num_rows % TILES_ROWS;
        if (rest == 0 || rest == 16) return nullptr;
        const int64_t row_bytes = in_features * sizeof(bf16);
        bf16* padded = static_cast<bf16*>(calloc(rest > 16 ? TILES_ROWS : 16, row_bytes));
        memcpy(padded, input(num_rows - rest), rest * row_bytes);
        return padded;
    }
};
#endif
