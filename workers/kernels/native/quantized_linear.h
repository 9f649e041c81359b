// A product of activations in int8 with weights of 8 or 4 bits in groups: y = x @ weight.T + bias. Integer sums inside a
// group are exact. A group's sum becomes float, times the weight's scale, times the activation's; groups are added in
// order. Each of these operations is rounded by itself (quantized_floats.h), so y depends neither on the other rows nor
// on threads nor on the processor.
//
// Weights lie in panels of 64 outputs, a panel's groups one after another. A group is its values, then its 64 scales and
// offsets, so a thread reads one stretch of memory from begin to end. Values of 8 bits are [inputs / 4][64][4]. Of 4
// bits they are [inputs / 8][64][4 bytes]: low nibbles are the first four inputs, high nibbles the next four. If all
// groups have one scale, it stands at the end of the panel. With a codebook, the 4 bits are codes: each stands for one
// of 16 values of 8 bits (MXFP4 and its like).
#pragma once

#include "quantized_dot.h"
#include "quantized_rows.h"
#include "tiles.h"

constexpr int CHUNK_INPUTS = 256;  // weights of a panel that stay in the first-level cache while a block of rows passes
constexpr int BLOCK_ROWS = 96;     // rows whose sums stay in the first-level cache
constexpr int UNPACKED_ROWS = 8;   // with more rows, 4 bits become 8 once for all of them
constexpr int SMALL_GROUP = 32;    // inputs of a group of the usual formats of 4 bits
constexpr int LINE_BYTES = 64;     // of the caches
constexpr int64_t AHEAD_BYTES = 6 << 10;  // from the weights in use to those that are fetched
#if MANTA_LANES == 16
constexpr int MOST_ROWS = 6, LEAST_VECTORS = 4, MOST_SUMS = 8;  // 24 sums in 32 registers
#elif MANTA_LANES == 4 && defined(__aarch64__)
constexpr int MOST_ROWS = 4, LEAST_VECTORS = 4, MOST_SUMS = 16;
#else
constexpr int MOST_ROWS = 4, LEAST_VECTORS = 2, MOST_SUMS = 8;  // 8 sums in 16 registers
#endif

// Lines of weights that are fetched for later with each step of 4 or 8 inputs, if a step has four: a QUARTER of them or
// HALF. ALL are as many as a step has.
enum Fetches { NONE = 0, QUARTER = 1, HALF = 2, ALL = 4 };

// Levels of caches into which lines are fetched. Fetches into the first level wait for one of its few miss buffers: on
// Zen 4 they read 15 GB/s a core where those into the second level read 30. But they are what helps if a tile
// multiplies long enough.
constexpr int INTO_FIRST = 3, INTO_SECOND = MANTA_LANES == 16 ? 2 : INTO_FIRST;

// Vectors of outputs that a pass over the weights sums: with few rows more of them, up to a panel's, so that memory is
// read in order. On an AMD processor with AVX2, one row of 8 bits from memory ran at 9 GB/s a core with two vectors a
// pass, whatever it computed, and runs at 14.
constexpr int vectors_of(int num_rows) {
    int vectors = LEAST_VECTORS;
    while (2 * vectors * LANES <= PANEL && 2 * vectors * num_rows <= MOST_SUMS) vectors *= 2;
    return vectors;
}

#if defined(__clang__)
#define MANTA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MANTA_UNROLL _Pragma("GCC unroll 8")
#endif

MANTA_INLINE Floats load_scales(bool are_half, const char* scales, int first) {
    return are_half ? load_half((const uint16_t*)scales + first) : load((const float*)scales + first);
}

struct WeightLayout {
    int bits, out_features;
    Groups groups;
    bool has_half_scales, has_offsets;
    bool has_one_scale;  // of an output for all of its groups
    const int8_t* codebook;  // [16], or null

    int panels() const { return (out_features + PANEL - 1) / PANEL; }
    int64_t value_bytes() const { return (int64_t)groups.padded * PANEL * bits / 8; }
    int64_t scale_bytes() const { return PANEL * (has_half_scales ? 2 : 4); }
    int64_t scales_bytes() const { return scale_bytes() * (1 + has_offsets); }
    int64_t group_bytes() const { return value_bytes() + (has_one_scale ? 0 : scales_bytes()); }
    int64_t panel_bytes() const { return groups.groups * group_bytes() + (has_one_scale ? scales_bytes() : 0); }

    int64_t scales_at(int group) const {
        return has_one_scale ? groups.groups * group_bytes() : group * group_bytes() + value_bytes();
    }
    MANTA_INLINE Floats load_scales(const char* scales, int first) const {
        return ::load_scales(has_half_scales, scales, first);
    }
};

template <class T>
struct QuantizedProduct {
    WeightLayout layout;
    const char* packed;
    const T* bias;  // in the order of packing, or null
    T* y;
    QuantizedRows rows;
    bool gated;  // 16 outputs of `gate` and 16 of `up` alternate; y is half as wide as the sums
    const float* const* addends = nullptr;  // of each row, in the order of packing, or null: added to the sums

    // What is done in one pass over a chunk of a group.
    struct Chunk {
        int panel, group, first, end;  // inputs of the group
        const uint8_t* weights;        // of the chunk
        const char* scales;            // of the group
        bool begins, ends;             // it is the first or the last of the group
        const uint8_t* fetched = nullptr;  // where a QUARTER or HALF begins
    };

    struct Sums {
        float* floats;  // [BLOCK_ROWS][PANEL], over groups
        int32_t* ints;  // [BLOCK_ROWS][PANEL], over chunks of a group
    };

    // Adds a chunk's products to the sums of ROWS rows and of V vectors of outputs, from output `column` on. Weights of
    // these outputs are fetched for later.
    template <Kind KIND, int ROWS, int V, Fetches FETCHED>
    MANTA_INLINE void add_products(const Chunk& chunk, int row, int column, Ints table, Ints (&sums)[ROWS][V]) const {
        const int64_t stride = layout.groups.padded;
        const int8_t* inputs = rows.values + ((int64_t)chunk.group * rows.num_rows + row) * stride + chunk.first;
        const uint8_t* weights = chunk.weights + column * 4;
        const int num_inputs = chunk.end - chunk.first;
#if MANTA_BYTE_PAIRS
        if constexpr (KIND == NIBBLES || KIND == SINGLE_NIBBLES) {
            for (int first = 0; first < num_inputs; first += PAIRED_INPUTS) {
                const int last = std::min(first + PAIRED_INPUTS, num_inputs);
                Ints pairs[ROWS][V] = {};
                add_each<KIND, ROWS, V, FETCHED>(inputs, stride, first, last, weights, nullptr, table, pairs, add_paired);
                MANTA_UNROLL for (int i = 0; i < ROWS; i++)
                    MANTA_UNROLL for (int c = 0; c < V; c++) sums[i][c] = add_pairs_to(sums[i][c], pairs[i][c]);
            }
            return;
        }
#endif
        constexpr Kind DOT = KIND == CODES ? BYTES : KIND;
        add_each<KIND, ROWS, V, FETCHED>(inputs, stride, 0, num_inputs, weights, chunk.fetched, table, sums,
                                         add_dot<DOT>);
    }

    // What codes stand for as `add_dot` takes it; nothing for other kinds.
    template <Kind KIND>
    MANTA_INLINE Ints dot_table() const {
        return KIND == CODES ? table_of(layout.codebook, BYTE_ZERO) : Ints{};
    }

    // The same for inputs [first, last) of the chunk, by a function that adds four inputs' products.
    template <Kind KIND, int ROWS, int V, Fetches FETCHED, class Add>
    static MANTA_INLINE void add_each(const int8_t* inputs, int64_t stride, int first, int last, const uint8_t*& weights,
                                      const uint8_t* fetched, Ints table, Ints (&sums)[ROWS][V], const Add& add) {
        constexpr bool HAS_TWO = KIND == NIBBLES || KIND == CODES;  // in a byte
        constexpr int INPUTS = HAS_TWO ? 8 : 4;                     // in a unit of 4 bytes
        const auto value = [&](Ints nibbles) { return KIND == CODES ? lookup(nibbles, table) : nibbles; };
        for (int k = first; k < last; k += INPUTS, weights += PANEL * 4) {
            Ints columns[V];
            MANTA_UNROLL for (int c = 0; c < V; c++) {
                columns[c] = load_ints(weights + c * LANES * 4);
                if (KIND == BYTES) columns[c] = as_dot_bytes(columns[c]);
            }
            if (FETCHED == ALL)
                MANTA_UNROLL for (int line = 0; line < V * LANES * 4; line += LINE_BYTES)
                    __builtin_prefetch(weights + line + AHEAD_BYTES, 0,
                                       KIND == BYTES && ROWS == 1 ? INTO_SECOND : INTO_FIRST);
            if (FETCHED == QUARTER || FETCHED == HALF)
                MANTA_UNROLL for (int line = 0; line < FETCHED; line++, fetched += LINE_BYTES)
                    __builtin_prefetch(fetched, 0, FETCHED == HALF ? INTO_SECOND : INTO_FIRST);
            MANTA_UNROLL for (int i = 0; i < ROWS; i++) {
                int32_t four;
                memcpy(&four, inputs + i * stride + k, 4);
                const Ints given = splat_int(four);
                MANTA_UNROLL for (int c = 0; c < V; c++)
                    sums[i][c] = add(sums[i][c], HAS_TWO ? value(low_nibbles(columns[c])) : columns[c], given);
            }
            if constexpr (HAS_TWO)
                MANTA_UNROLL for (int i = 0; i < ROWS; i++) {
                    int32_t four;
                    memcpy(&four, inputs + i * stride + k + 4, 4);
                    const Ints given = splat_int(four);
                    MANTA_UNROLL for (int c = 0; c < V; c++)
                        sums[i][c] = add(sums[i][c], value(high_nibbles(columns[c])), given);
                }
        }
    }

    // `row` counts from the first of all rows, `place` from that of the block. Loops are unrolled so that sums stay in
    // registers.
    template <Kind KIND, int ROWS, int V, Fetches FETCHED>
    __attribute__((noinline)) void pass(const Chunk& chunk, int row, int place, int column, const Sums& to) const {
        const int64_t at = (int64_t)chunk.group * rows.num_rows + row;
        int32_t* const ints = to.ints + place * PANEL + column;
        float* const floats = to.floats + place * PANEL + column;
        Ints sums[ROWS][V];
        if (chunk.begins) {
            MANTA_UNROLL for (int i = 0; i < ROWS; i++) {
                const Ints start = splat_int(-zero_of(KIND) * rows.totals[at + i]);
                MANTA_UNROLL for (int c = 0; c < V; c++) sums[i][c] = start;
            }
        } else {
            MANTA_UNROLL for (int i = 0; i < ROWS; i++)
                MANTA_UNROLL for (int c = 0; c < V; c++) sums[i][c] = load_ints(ints + i * PANEL + c * LANES);
        }
        add_products<KIND, ROWS, V, FETCHED>(chunk, row, column, dot_table<KIND>(), sums);
        if (!chunk.ends) {
            MANTA_UNROLL for (int i = 0; i < ROWS; i++)
                MANTA_UNROLL for (int c = 0; c < V; c++)
                    memcpy(ints + i * PANEL + c * LANES, &sums[i][c], sizeof(Ints));
            return;
        }
        Floats scales[V];
        MANTA_UNROLL for (int c = 0; c < V; c++) scales[c] = layout.load_scales(chunk.scales, column + c * LANES);
        const float* const input_scales = rows.scales + at;
        MANTA_UNROLL for (int i = 0; i < ROWS; i++) {
            const Floats input_scale = splat(input_scales[i]);
            MANTA_UNROLL for (int c = 0; c < V; c++) {
                const Floats scaled = product(product(to_floats(sums[i][c]), scales[c]), input_scale);
                float* const sum = floats + i * PANEL + c * LANES;
                store(sum, load(sum) + scaled);
            }
        }
        if (layout.has_offsets) add_offsets<ROWS, V>(chunk, rows.sums + at, column, floats);
    }

    template <int ROWS, int V>
    MANTA_INLINE void add_offsets(const Chunk& chunk, const float* input_sums, int column, float* floats) const {
        for (int c = 0; c < V; c++) {
            const Floats offsets = layout.load_scales(chunk.scales + layout.scale_bytes(), column + c * LANES);
            for (int i = 0; i < ROWS; i++) {
                float* const sum = floats + i * PANEL + c * LANES;
                store(sum, load(sum) + product(offsets, splat(input_sums[i])));
            }
        }
    }

    // `pass` for a whole SMALL_GROUP of unpacked weights. Between so few products, what `pass` looks up and decides took a
    // tenth of the time. A row's `start` is what its sums begin with.
    template <Kind KIND, int ROWS>
    static __attribute__((noinline)) void pass_small(const int8_t* inputs, const uint8_t* weights, const float* scales,
                                                     const int32_t* starts, const float* input_scales, float* floats) {
        constexpr int V = LEAST_VECTORS;
        Ints sums[ROWS][V];
        MANTA_UNROLL for (int i = 0; i < ROWS; i++) {
            const Ints start = splat_int(starts[i]);
            MANTA_UNROLL for (int c = 0; c < V; c++) sums[i][c] = start;
        }
        MANTA_UNROLL for (int k = 0; k < SMALL_GROUP; k += 4) {
            Ints columns[V];
            MANTA_UNROLL for (int c = 0; c < V; c++) columns[c] = load_ints(weights + k * PANEL + c * LANES * 4);
            MANTA_UNROLL for (int i = 0; i < ROWS; i++) {
                int32_t four;
                memcpy(&four, inputs + i * SMALL_GROUP + k, 4);
                const Ints given = splat_int(four);
                MANTA_UNROLL for (int c = 0; c < V; c++) sums[i][c] = add_dot<KIND>(sums[i][c], columns[c], given);
            }
        }
        MANTA_UNROLL for (int c = 0; c < V; c++) {
            const Floats scale = load(scales + c * LANES);
            MANTA_UNROLL for (int i = 0; i < ROWS; i++) {
                const Floats scaled = product(product(to_floats(sums[i][c]), scale), splat(input_scales[i]));
                float* const sum = floats + i * PANEL + c * LANES;
                store(sum, load(sum) + scaled);
            }
        }
    }

    // Whether `pass_small_by_rows` takes unpacked weights. AVX2 sums pairs of products in `add_products`.
    bool has_small_groups() const {
        return MANTA_LANES == 16 && PACKED_BYTE_ZERO == BYTE_ZERO && layout.groups.padded == SMALL_GROUP;
    }

    template <Kind KIND>
    void pass_small_by_rows(const Chunk& chunk, int first, int last, float* floats) const {
        const int count = last - first, tiles = (count + MOST_ROWS - 1) / MOST_ROWS;
        const int64_t at = (int64_t)chunk.group * rows.num_rows + first;
        const int8_t* const inputs = rows.values + at * SMALL_GROUP;
        alignas(64) float scales[PANEL];
        for (int c = 0; c < PANEL; c += LANES) store(scales + c, layout.load_scales(chunk.scales, c));
        int32_t starts[BLOCK_ROWS];
        for (int i = 0; i < count; i++) starts[i] = -zero_of(KIND) * rows.totals[at + i];
        for (int column = 0; column < PANEL; column += LEAST_VECTORS * LANES)
            for (int tile = 0; tile < tiles; tile++) {
                const int place = count * tile / tiles;
                with_constant<MOST_ROWS>(count * (tile + 1) / tiles - place, [&](auto num_rows) {
                    float* const sums = floats + place * PANEL + column;
                    pass_small<KIND, num_rows>(inputs + place * SMALL_GROUP, chunk.weights + column * 4, scales + column,
                                               starts + place, rows.scales + at + place, sums);
                    if (layout.has_offsets)
                        add_offsets<num_rows, LEAST_VECTORS>(chunk, rows.sums + at + place, column, sums);
                });
            }
    }

    // All groups of a few rows: 1.5 times as fast as `pass` with one row and 4 bits in groups of 32, and 1.1 times with 8
    // bits in groups of 128, on one thread in the cache. Of one or two rows the float sums stay in registers between
    // groups, of more rows in `to`.
    template <Kind KIND, int ROWS>
    __attribute__((noinline)) void pass_all_groups(int panel, const char* weights, float* to) const {
        constexpr int V = PANEL / LANES;
        constexpr bool IN_REGISTERS = ROWS <= MOST_ROWS_IN_REGISTERS;
        Floats totals[ROWS][V] = {};
        if (!IN_REGISTERS) std::fill_n(to, ROWS * PANEL, 0.0f);
        const auto add = [&](int i, int c, Floats value) __attribute__((always_inline)) {
            float* const at = to + i * PANEL + c * LANES;
            if (IN_REGISTERS)
                totals[i][c] += value;
            else
                store(at, load(at) + value);
        };
        const int num_groups = layout.groups.groups;
        const bool has_half_scales = layout.has_half_scales, has_offsets = layout.has_offsets;
        const Ints table = dot_table<KIND>();
        for (int g = 0; g < num_groups; g++) {
            const char* const values = weights + g * layout.group_bytes();
            const char* const of_group = weights + layout.scales_at(g);
            const Chunk chunk{panel, g, 0, layout.groups.padded, (const uint8_t*)values, of_group, true, true};
            const int64_t at = (int64_t)g * rows.num_rows;
            Ints sums[ROWS][V];
            MANTA_UNROLL for (int i = 0; i < ROWS; i++) {
                const Ints start = splat_int(-zero_of(KIND) * rows.totals[at + i]);
                MANTA_UNROLL for (int c = 0; c < V; c++) sums[i][c] = start;
            }
            add_products<KIND, ROWS, V, ALL>(chunk, 0, 0, table, sums);
            MANTA_UNROLL for (int c = 0; c < V; c++) {
                const Floats scales = load_scales(has_half_scales, of_group, c * LANES);
                MANTA_UNROLL for (int i = 0; i < ROWS; i++)
                    add(i, c, product(product(to_floats(sums[i][c]), scales), splat(rows.scales[at + i])));
            }
            if (!has_offsets) continue;
            MANTA_UNROLL for (int c = 0; c < V; c++) {
                const Floats offsets = load_scales(has_half_scales, of_group + layout.scale_bytes(), c * LANES);
                MANTA_UNROLL for (int i = 0; i < ROWS; i++) add(i, c, product(offsets, splat(rows.sums[at + i])));
            }
        }
        if (!IN_REGISTERS) return;
        MANTA_UNROLL for (int i = 0; i < ROWS; i++)
            MANTA_UNROLL for (int c = 0; c < V; c++) store(to + i * PANEL + c * LANES, totals[i][c]);
    }

    static constexpr int MOST_ROWS_IN_REGISTERS = vectors_of(2) * LANES == PANEL ? 2 : 1;
    // Of 8 bits, more rows share out what they fetch.
    static constexpr int MOST_FEW_ROWS = MOST_ROWS_IN_REGISTERS;
    static constexpr int MOST_FEW_NIBBLE_ROWS = LEAST_VECTORS * LANES == PANEL ? MOST_ROWS : MOST_ROWS_IN_REGISTERS;

    // Whether `pass_all_groups` takes these rows.
    bool are_few() const {
        constexpr bool IS_ONE_PASS = vectors_of(1) * LANES == PANEL;
        const int most = layout.bits == 8 ? MOST_FEW_ROWS : MOST_FEW_NIBBLE_ROWS;
        return IS_ONE_PASS && rows.num_rows <= most && layout.groups.padded <= CHUNK_INPUTS;
    }

    template <Kind KIND, int MOST>
    void pass_few_rows(int panel, const char* weights, float* sums) const {
        with_constant<MOST>(rows.num_rows, [&](auto count) { pass_all_groups<KIND, count>(panel, weights, sums); });
    }

    void multiply_few_rows(int panel, const char* weights) const {
        alignas(64) float sums[MOST_FEW_NIBBLE_ROWS * PANEL];
        layout.bits == 8 ? pass_few_rows<BYTES, MOST_FEW_ROWS>(panel, weights, sums)
        : layout.codebook ? pass_few_rows<CODES, MOST_FEW_NIBBLE_ROWS>(panel, weights, sums)
                          : pass_few_rows<NIBBLES, MOST_FEW_NIBBLE_ROWS>(panel, weights, sums);
        for (int row = 0; row < rows.num_rows; row++) write(row, panel, sums + row * PANEL);
    }

    template <Kind KIND, Fetches FETCHED>
    void pass(int count, const Chunk& chunk, int row, int place, int column, const Sums& to) const {
        switch (count) {
            case 1: return pass<KIND, 1, LEAST_VECTORS, FETCHED>(chunk, row, place, column, to);
            case 2: return pass<KIND, 2, LEAST_VECTORS, FETCHED>(chunk, row, place, column, to);
            case 3: return pass<KIND, 3, LEAST_VECTORS, FETCHED>(chunk, row, place, column, to);
            case 4: return pass<KIND, 4, LEAST_VECTORS, FETCHED>(chunk, row, place, column, to);
#if MANTA_LANES == 16
            case 5: return pass<KIND, 5, LEAST_VECTORS, FETCHED>(chunk, row, place, column, to);
            case 6: return pass<KIND, 6, LEAST_VECTORS, FETCHED>(chunk, row, place, column, to);
#endif
        }
    }

    // All rows of a block: in tiles of about equal size. The first tile fetches weights for later. Of 8 bits, the first
    // tiles share out the next chunk, so that memory is read while they multiply: 16 rows then take 0.75 of the time, and
    // 32 rows 0.83.
    template <Kind KIND>
    void pass_by_rows(const Chunk& chunk, int first, int last, const Sums& to) const {
        constexpr bool MAY_FETCH = KIND != UNPACKED || UNPACKED == BYTES;  // unpacking fetches too
        constexpr bool MAY_SHARE = KIND == BYTES && LEAST_VECTORS * LANES * 4 == ALL * LINE_BYTES;
        const int count = last - first, tiles = (count + MOST_ROWS - 1) / MOST_ROWS;
        if (count <= 2) return pass_few<KIND>(count, chunk, first, to);
        for (int column = 0; column < PANEL; column += LEAST_VECTORS * LANES)
            for (int tile = 0; tile < tiles; tile++) {
                const int place = count * tile / tiles, rows = count * (tile + 1) / tiles - place;
                if (MAY_SHARE && tiles > 1 && tile < ALL)
                    pass_fetching<KIND>(rows, chunk, first + place, place, tile, tiles < ALL ? HALF : QUARTER, to);
                else if (MAY_FETCH && tile == 0)
                    pass<KIND, ALL>(rows, chunk, first + place, place, column, to);
                else
                    pass<KIND, NONE>(rows, chunk, first + place, place, column, to);
            }
    }

    // A tile that fetches its share of the next chunk; the third of three halves is of the chunk after that.
    template <Kind KIND>
    void pass_fetching(int count, Chunk chunk, int row, int place, int tile, Fetches share, const Sums& to) const {
        const int64_t bytes = int64_t(chunk.end - chunk.first) * PANEL;
        const int64_t scales = chunk.ends && !layout.has_one_scale ? layout.scales_bytes() : 0;
        chunk.fetched = chunk.weights + bytes + scales + bytes * tile * share / ALL;
        share == HALF ? pass<KIND, HALF>(count, chunk, row, place, 0, to)
                      : pass<KIND, QUARTER>(count, chunk, row, place, 0, to);
    }

    template <Kind KIND>
    void pass_few(int count, const Chunk& chunk, int row, const Sums& to) const {
        constexpr int V1 = vectors_of(1), V2 = vectors_of(2);
        const int width = (count == 1 ? V1 : V2) * LANES;
        for (int column = 0; column < PANEL; column += width)
            count == 1 ? pass<KIND, 1, V1, ALL>(chunk, row, 0, column, to)
                       : pass<KIND, 2, V2, ALL>(chunk, row, 0, column, to);
    }

    // Weights of 4 bits [inputs / 8][PANEL][4] as UNPACKED ones [inputs / 4][PANEL][4], or codes as packed BYTES.
    void unpack(const uint8_t* from, int inputs, uint8_t* to) const {
        if (layout.codebook == nullptr) return unpack_by(from, inputs, to, as_unpacked);
        const Ints table = table_of(layout.codebook, PACKED_BYTE_ZERO);
        unpack_by(from, inputs, to, [&](Ints codes) { return lookup(codes, table); });
    }

    template <class Unpacked>
    static MANTA_INLINE void unpack_by(const uint8_t* from, int inputs, uint8_t* to, const Unpacked& unpacked) {
        for (int k = 0; k < inputs; k += 8, from += PANEL * 4, to += 2 * PANEL * 4)
            for (int i = 0; i < PANEL * 4; i += (int)sizeof(Ints)) {
                const Ints packed = load_ints(from + i);
                const Ints low = unpacked(low_nibbles(packed)), high = unpacked(high_nibbles(packed));
                memcpy(to + i, &low, sizeof(low));
                memcpy(to + PANEL * 4 + i, &high, sizeof(high));
                __builtin_prefetch(from + i + AHEAD_BYTES, 0, 3);
            }
    }

    void multiply_panel(int panel) const {
        alignas(64) float floats[BLOCK_ROWS * PANEL];
        alignas(64) int32_t ints[BLOCK_ROWS * PANEL];
        alignas(64) uint8_t unpacked[CHUNK_INPUTS * PANEL];
        const char* const weights = packed + panel * layout.panel_bytes();
        if (are_few()) return multiply_few_rows(panel, weights);
        const int blocks = (rows.num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        for (int b = 0; b < blocks; b++) {
            const int first = (int64_t)rows.num_rows * b / blocks, last = (int64_t)rows.num_rows * (b + 1) / blocks;
            std::fill_n(floats, (last - first) * PANEL, 0.0f);
            for (int g = 0; g < layout.groups.groups; g++)
                for (int k = 0; k < layout.groups.padded; k += CHUNK_INPUTS) {
                    const int end = std::min(k + CHUNK_INPUTS, layout.groups.padded);
                    const char* const values = weights + g * layout.group_bytes() + (int64_t)k * PANEL * layout.bits / 8;
                    Chunk chunk{panel, g, k, end, (const uint8_t*)values, weights + layout.scales_at(g), k == 0,
                                end == layout.groups.padded};
                    if (layout.bits == 8) {
                        pass_by_rows<BYTES>(chunk, first, last, {floats, ints});
                    } else if (last - first <= UNPACKED_ROWS) {
                        layout.codebook ? pass_by_rows<CODES>(chunk, first, last, {floats, ints})
                                        : pass_by_rows<NIBBLES>(chunk, first, last, {floats, ints});
                    } else {
                        unpack(chunk.weights, end - k, unpacked);
                        chunk.weights = unpacked;
                        if (has_small_groups())
                            layout.codebook ? pass_small_by_rows<BYTES>(chunk, first, last, floats)
                                            : pass_small_by_rows<UNPACKED>(chunk, first, last, floats);
                        else
                            layout.codebook ? pass_by_rows<BYTES>(chunk, first, last, {floats, ints})
                                            : pass_by_rows<UNPACKED>(chunk, first, last, {floats, ints});
                    }
                }
            for (int row = first; row < last; row++) write(row, panel, floats + (row - first) * PANEL);
        }
    }

    // Writes the outputs of a row and a panel, given their sums.
    void write(int row, int panel, float* sums) const {
        const int column = panel * PANEL, left = layout.out_features - column;
        if (addends && addends[row])
            for (int i = 0; i < PANEL; i += LANES)
                store(sums + i, load(sums + i) + load_upto(addends[row] + column + i, left - i));
        if (bias)
            for (int i = 0; i < PANEL; i += LANES) store(sums + i, load(sums + i) + load_upto(bias + column + i, left - i));
        if (!gated) {
            T* const to = y + (int64_t)row * layout.out_features + column;
            for (int i = 0; i < PANEL; i += LANES) store_rounded_upto(to + i, load(sums + i), left - i);
            return;
        }
        const int width = layout.out_features / 2;
        T* const to = y + (int64_t)row * width + column / 2;
        for (int i = 0; i < PANEL / 2; i += LANES) {
            const float* const gate = sums + i / 16 * 32 + i % 16;
            const Floats value = product(separate_silu(load(gate)), load(gate + 16));
            store_rounded_upto(to + i, value, left / 2 - i);
        }
    }
};
