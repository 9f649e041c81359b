// Products by vectors, of any width and on any processor: the same source for AVX-512, AVX2, SSE and NEON, in bfloat16
// and float32. If the processor can multiply pairs of bfloat16 (AVX-512 BF16, NEON's BF16), that is used. Else weights
// are widened to float: in registers if there are few rows, once for a block of rows if there are many. A row's sums
// run over its inputs in order, so its result does not depend on the other rows.
#pragma once

#include <algorithm>
#include <type_traits>

#include "linear.h"
#include "tiles.h"

#if MANTA_PAIRS
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;
#endif
#if MANTA_PAIRS && MANTA_LANES == 16
#define MANTA_DECODES_IN_REGISTERS 1  // weights of lossless.h
constexpr bool DECODES_IN_REGISTERS = true;
#else
constexpr bool DECODES_IN_REGISTERS = false;
#endif
constexpr int ACCUMULATORS = TILE_ROWS == 8 ? 24 : 12;  // vectors of sums: three quarters of the registers
constexpr int FEW_ROWS = 6;  // most rows of a block whose weights go from memory straight into registers
constexpr int FEW_CHUNK = 128;  // inputs; with twice as many, fetched weights evict those in use from the cache
constexpr int64_t AHEAD_OF_ROWS = 64 * STEP;  // elements of a strip from those in use to those that are fetched
constexpr int MAX_FEW_ROWS = 12;  // with more rows, weights are widened once for all of them
constexpr int64_t CHUNK_BYTES = 16 << 10;  // of widened weights, which stay in the first-level cache
constexpr int64_t BLOCK_BYTES_OF_ROWS = 512 << 10;  // of a block of rows, which stays in a near cache for all strips
constexpr int MIN_BLOCK_ROWS = 96;  // however long the rows are: widening then costs a fiftieth of multiplying
constexpr int SHARED_ROWS_OF_VECTORS = 192;  // from so many rows a thread on, threads split the rows, not the outputs
constexpr int64_t PADDING_BYTES = 64;  // between rows, so that they do not all fall into a few sets of the cache

// How many vectors of outputs are computed at a time: as many as there are registers for their sums.
template <int ROWS>
constexpr int vectors_of() {
    int vectors = PANEL / LANES;
    while (vectors > 2 && ROWS * vectors > ACCUMULATORS) vectors /= 2;
    return vectors;
}

// The form in which rows are multiplied: pairs of bfloat16 if the processor can, else float.
template <class T>
struct VectorProduct : Product<T> {
    using Base = Product<T>;
    using Base::PAIR, Base::VECTORS, Base::num_rows, Base::in_features;
    using typename Base::Sums;
    static constexpr bool PAIRS = HAS_PAIRS && PAIR == 2;
    using Input = std::conditional_t<PAIRS, bf16, float>;

    explicit VectorProduct(const Base& product) : Base(product) {}

    // Up to how many rows `by_rows` is the faster one
    int most_few_rows() const { return !this->lossless ? MAX_FEW_ROWS : DECODES_IN_REGISTERS ? FEW_ROWS : 0; }

    // ---- few rows: weights stream from memory

    // Adds the products over inputs [first, end) to the sums of ROWS rows and some vectors of a panel, from `vector`
    // on. Meanwhile the weights at `ahead` are fetched. They lie as those in use do; if these are less than a strip,
    // they lie one after another.
    template <int ROWS, bool ADDS>
    MANTA_INLINE void rows_times_vectors(const Input* rows, int64_t stride, int p, int vector, int first, int end,
                                         const T* ahead, float (*to)[PANEL]) const {
        constexpr int COUNT = vectors_of<ROWS>();
        constexpr int FETCHED = COUNT * LANES * 2;  // elements for two inputs
        const T* const weights = this->panel(p) + vector / VECTORS * (int64_t)in_features * STRIP;
        Floats sums[ROWS][COUNT];
        for (int row = 0; row < ROWS; row++)
            for (int c = 0; c < COUNT; c++) sums[row][c] = ADDS ? load(to[row] + (vector + c) * LANES) : splat(0);
        // One after each load, because all fetches at once take the buffers that loads need (1.07 x with one row).
        // Inline, because GCC drops a call that does nothing else.
        const auto fetch = [&](int c, int64_t k, const T* from) __attribute__((always_inline)) {
            if (!ahead) return;
            if constexpr (COUNT >= VECTORS) {
                if (c * LANES * PAIR * sizeof(T) % 64) return;
                __builtin_prefetch(ahead + (from - weights), 0, 3);
                if (PAIR == 1) __builtin_prefetch(ahead + (from - weights) + STRIP, 0, 3);
            } else if (c == 0) {
                for (int i = 0; i < FETCHED; i += 64 / (int)sizeof(T))
                    __builtin_prefetch(ahead + (k - first) / 2 * FETCHED + i, 0, 3);
            }
        };
        for (int64_t k = first; k < end; k += 2) {
            const T* at[COUNT];
            for (int c = 0; c < COUNT; c++) {
                const int v = vector % VECTORS + c;
                at[c] = weights + (v / VECTORS * (int64_t)in_features + k) * STRIP + v % VECTORS * LANES * PAIR;
            }
            if constexpr (PAIRS) {
                Ints columns[COUNT];
                for (int c = 0; c < COUNT; c++) {
                    columns[c] = load_ints(at[c]);
                    fetch(c, k, at[c]);
                }
                for (int row = 0; row < ROWS; row++) {
                    const Ints inputs = splat_input(rows + row * stride + k);
                    for (int c = 0; c < COUNT; c++) sums[row][c] = add_product(sums[row][c], inputs, columns[c]);
                }
            } else {
                for (int odd = 0; odd < 2; odd++) {
                    Floats columns[COUNT];
                    for (int c = 0; c < COUNT; c++) {
                        columns[c] = column(at[c], odd);
                        if (!odd) fetch(c, k, at[c]);
                    }
                    for (int row = 0; row < ROWS; row++) {
                        const Floats inputs = splat(rows[row * stride + k + odd]);
                        for (int c = 0; c < COUNT; c++) sums[row][c] = add_product(sums[row][c], inputs, columns[c]);
                    }
                }
            }
        }
        for (int row = 0; row < ROWS; row++)
            for (int c = 0; c < COUNT; c++) store(to[row] + (vector + c) * LANES, sums[row][c]);
    }

    // Of the weights at `from`, those of the even or of the odd input.
    static MANTA_INLINE Floats column(const T* from, int odd) {
        if constexpr (PAIR == 2)
            return odd ? odd_of(load_ints(from)) : even_of(load_ints(from));
        else
            return load(from + odd * STRIP);
    }

    // If the registers cannot hold the sums of a whole strip, its vectors pass one by one over a chunk that stays in
    // the first-level cache, and each of them fetches its share of the next chunk.
    template <int ROWS>
    void rows_times_panel(const Input* rows, int64_t stride, int first_row, int p, int64_t ahead) const {
        constexpr int COUNT = vectors_of<ROWS>();
        float sums[ROWS][PANEL];
        for (int vector = 0; vector < PANEL / LANES; vector += std::max(COUNT, VECTORS)) {
            const T* const strip = this->panel(p) + vector / VECTORS * (int64_t)in_features * STRIP;
            if constexpr (COUNT >= VECTORS) {
                const T* const from = ahead ? strip + ahead : nullptr;
                rows_times_vectors<ROWS, false>(rows, stride, p, vector, 0, in_features, from, sums);
            } else {
                for (int k = 0; k < in_features; k += FEW_CHUNK) {
                    const int end = std::min(k + FEW_CHUNK, in_features);
                    for (int v = 0; v < VECTORS; v += COUNT) {
                        const T* const next = strip + (int64_t)end * STRIP + v * (end - k) * LANES;
                        const auto add = k ? &VectorProduct::template rows_times_vectors<ROWS, true>
                                           : &VectorProduct::template rows_times_vectors<ROWS, false>;
                        (this->*add)(rows, stride, p, vector + v, k, end, ahead ? next : nullptr, sums);
                    }
                }
            }
        }
        for (int row = 0; row < ROWS; row++)
            for (int half = 0; half < 2; half++) this->write(first_row + row, 2 * p + half, sums[row] + half * STRIP);
    }

#if MANTA_DECODES_IN_REGISTERS
    // The same for lossless weights: they go from memory through registers straight into the products.
    template <int ROWS>
    void rows_times_lossless_panel(const Input* rows, int64_t stride, int first_row, int p) const {
        constexpr int STRIPS = ROWS <= 4 ? 2 : 1;  // at a time: as many as there are registers for their sums
        for (int strip = 2 * p; strip < 2 * p + 2; strip += STRIPS) {
            Floats sums[ROWS][STRIPS * 2] = {};
            for (int k = 0; k < in_features; k += STEP) {
                const Input* const inputs = rows + k;
                const auto add = [&](const auto& weights_of) __attribute__((always_inline)) {
                    for (int i = 0; i < LOSSLESS_CHUNK / LOSSLESS_GROUP; i++)
                        for (int s = 0; s < STRIPS; s++) {
                            Ints weights[4];
                            weights_of(s, i, weights);
                            for (int row = 0; row < ROWS; row++)
                                for (int pair = 0; pair < 2; pair++) {
                                    const Ints input = splat_input(inputs + row * stride + i * 4 + pair * 2);
                                    for (int c = 0; c < 2; c++) {
                                        Floats& sum = sums[row][s * 2 + c];
                                        sum = add_product(sum, input, weights[pair * 2 + c]);
                                    }
                                }
                        }
                };
                add_chunk<STRIPS>(strip, k, add);
            }
            for (int row = 0; row < ROWS; row++)
                for (int s = 0; s < STRIPS; s++) this->write(first_row + row, strip + s, *(Sums*)&sums[row][s * 2]);
        }
    }

    // add(weights_of), where weights_of(s, i, weights) gives group i of a chunk of each of STRIPS strips, from input k on.
    template <int STRIPS, class Add>
    MANTA_INLINE void add_chunk(int strip, int k, const Add& add) const {
        const Lossless& from = this->lossless;
        int64_t chunks[STRIPS];
        bool is_plain = true;
        for (int s = 0; s < STRIPS; s++) {
            chunks[s] = ((int64_t)(strip + s) * in_features + k) / STEP;
            is_plain &= !from.has_exceptions(chunks[s]);
        }
        if (is_plain) {
            // At the end of a strip, the next panel's; between them is the other strip of this panel
            const int64_t skipped = k + STEP < in_features ? 0 : (int64_t)in_features / STEP * LOSSLESS_BYTES;
            const int64_t ahead = LOSSLESS_AHEAD + skipped;
            GroupDecoder decoders[STRIPS];
            for (int s = 0; s < STRIPS; s++) decoders[s] = GroupDecoder(from.bases[chunks[s]]);
            add([&](int s, int i, Ints* weights) __attribute__((always_inline)) {
                const uint8_t* const group = from.codes + chunks[s] * LOSSLESS_BYTES + i * GROUP_BYTES;
                decoders[s].group(group, weights, ahead);
            });
            return;
        }
        alignas(64) T room[STRIPS * LOSSLESS_CHUNK];
        for (int s = 0; s < STRIPS; s++) from.decode(chunks[s], chunks[s] + 1, room + s * LOSSLESS_CHUNK);
        add([&](int s, int i, Ints* weights) __attribute__((always_inline)) {
            memcpy(weights, room + s * LOSSLESS_CHUNK + i * LOSSLESS_GROUP, 4 * sizeof(Ints));
        });
    }
#endif

    int first_row(int block, int blocks) const { return (int64_t)num_rows * block / blocks; }

    void by_rows(Share share) const {
        const Input* rows = nullptr;
        while (share.take(1)) {
            if (!rows) rows = inputs(0, num_rows);
            few_rows_times_panel(rows, share.first);
        }
    }

    // All rows, which are in the form in which they are multiplied, `few_rows_stride` apart.
    void few_rows_times_panel(const Input* rows, int panel) const {
        const int blocks = (num_rows + FEW_ROWS - 1) / FEW_ROWS;
        const int64_t stride = few_rows_stride();
        for (int b = 0; b < blocks; b++) {
            const int row = first_row(b, blocks), end = first_row(b + 1, blocks);
            // The first block fetches ahead in this panel, the last block the next panel. Fetches are hints, so one
            // after the last panel does no harm.
            const int64_t ahead = b == 0 ? AHEAD_OF_ROWS : b == blocks - 1 ? panel_size(in_features) : 0;
            with_constant<FEW_ROWS>(end - row, [&](auto count) {
#if MANTA_DECODES_IN_REGISTERS
                if constexpr (PAIRS)
                    if (this->lossless) return rows_times_lossless_panel<count>(rows + row * stride, stride, row, panel);
#endif
                rows_times_panel<count>(rows + row * stride, stride, row, panel, ahead);
            });
        }
    }

    int64_t few_rows_stride() const { return std::is_same_v<Input, T> ? in_features : padded_stride(); }

    // Writes x [count] to row `row` of `to`, in the form in which few rows are multiplied, padded with zeros.
    void prepare(const void* x, int count, void* to, int row) const {
        Input* const inputs = (Input*)to + row * few_rows_stride();
        if constexpr (std::is_same_v<Input, T>) {
            memcpy(inputs, x, count * sizeof(T));
            std::fill(inputs + count, inputs + in_features, T{});
        } else {
            for (int k = 0; k < in_features; k += LANES) store(inputs + k, load_upto((const T*)x + k, count - k));
        }
    }

    // Rows [first, last) in the form in which they are multiplied: in place if nothing must be widened.
    const Input* inputs(int first, int last) const {
        if constexpr (std::is_same_v<Input, T>) {
            return this->input(first);
        } else {
            const int64_t stride = padded_stride();
            Input* const to = of_thread<Input>((last - first) * stride);
            copy_rows(first, last, to, stride);
            return to;
        }
    }

    // ---- many rows: arithmetic is the limit

    int64_t padded_stride() const { return in_features + PADDING_BYTES / (int64_t)sizeof(Input); }

    // Each block of rows is multiplied by every strip; a strip is widened chunk by chunk, for all rows of the block.
    void by_blocks(Share share, bool owns_rows) const {
        const int64_t stride = padded_stride();
        const int64_t fitting = std::max<int64_t>(MIN_BLOCK_ROWS, BLOCK_BYTES_OF_ROWS / (stride * sizeof(Input)));
        const int blocks = (num_rows + fitting - 1) / fitting;
        const int most = (num_rows + blocks - 1) / blocks + 1;
        // If there is a single pass over the rows, a thread may take other threads' panels.
        const bool helps = blocks == 1 && !owns_rows;
        if (!(helps ? share.take(1) : share.take_own())) return;
        float* const chunk = of_thread<float>(CHUNK_BYTES / sizeof(float) + most * (STRIP + stride));
        float* const sums = chunk + CHUNK_BYTES / sizeof(float);
        Input* const rows = reinterpret_cast<Input*>(sums + most * STRIP);
        for (int b = 0; b < blocks; b++) {
            const int row = first_row(b, blocks), end = first_row(b + 1, blocks);
            copy_rows(row, end, rows, stride);
            do {
                for (int strip = 2 * share.first; strip < 2 * share.last; strip++) {
                    rows_times_strip(rows, stride, end - row, strip, chunk, sums);
                    for (int i = row; i < end; i++) this->write(i, strip, sums + (i - row) * STRIP);
                }
            } while (helps && share.take(1));
        }
    }

    void rows_times_strip(const Input* rows, int64_t stride, int count, int strip, float* chunk, float* sums) const {
        constexpr int WIDTH = 2 * LANES;  // outputs at a time
        constexpr int MOST = CHUNK_BYTES / (PAIRS ? STRIP * sizeof(T) : WIDTH * sizeof(float));  // inputs of a chunk
        const int tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
        alignas(64) T room[PAIR == 2 ? MOST * STRIP : 1];
        for (int k = 0; k < in_features; k += MOST) {
            const int steps = std::min(MOST, in_features - k);
            const T* const weights = this->weights(strip, k, steps, room);
            for (int column = 0; column < STRIP; column += WIDTH) {
                const T* const from = weights + column * PAIR;
                // The share of the next chunk that these outputs have in the strip
                const int64_t bytes_of_input = WIDTH * this->bytes_of_two() / 2;
                const char* const next = this->stored(strip, k + steps) + column / WIDTH * steps * bytes_of_input;
                const Fetch fetch = {next, bytes_of_input / tiles};
                const auto multiply = [&](int first, const Input* packed, Columns at, Fetch ahead) {
                    const auto rows_of = k == 0 ? multiply_panels<false, 2, Input, Fetch>
                                                : multiply_panels<true, 2, Input, Fetch>;
                    rows_of(rows + first * stride + k, stride, packed, at, steps, sums + first * STRIP + column, STRIP,
                            count - first, ahead);
                };
                if constexpr (PAIRS) {
                    multiply(0, from, {STRIP, LANES * PAIR}, fetch);
                } else {
                    const int first = count / tiles;
                    with_constant<TILE_ROWS>(first, [&](auto num_first) {
                        widen_beside<num_first>(rows + k, stride, from, steps, k > 0, chunk, sums + column, fetch);
                    });
                    multiply(first, chunk, {WIDTH, LANES}, fetch.after(steps));
                }
            }
        }
    }

    // Widens weights of two vectors of outputs to `to`, [steps][2][LANES], while it multiplies the first rows by them:
    // the stores then cost next to nothing.
    template <int ROWS>
    static void widen_beside(const Input* rows, int64_t stride, const T* from, int steps, bool adds, float* to,
                             float* sums, Fetch fetch) {
        Floats totals[ROWS][2];
        for (int row = 0; row < ROWS; row++)
            for (int v = 0; v < 2; v++) totals[row][v] = adds ? load(sums + row * STRIP + v * LANES) : splat(0);
        for (int k = 0; k < steps; k++, to += 2 * LANES) {
            const int odd = k % 2;
            fetch(k);
            Floats columns[2];
            for (int v = 0; v < 2; v++) {
                columns[v] = column(from + (k - odd) * STRIP + v * LANES * PAIR, odd);
                store(to + v * LANES, columns[v]);
            }
            for (int row = 0; row < ROWS; row++) {
                const Floats inputs = splat(rows[row * stride + k]);
                for (int v = 0; v < 2; v++) totals[row][v] = add_product(totals[row][v], inputs, columns[v]);
            }
        }
        for (int row = 0; row < ROWS; row++)
            for (int v = 0; v < 2; v++) store(sums + row * STRIP + v * LANES, totals[row][v]);
    }

    void copy_rows(int first, int last, Input* to, int64_t stride) const {
        for (int row = first; row < last; row++, to += stride) {
            const T* const from = this->input(row);
            if constexpr (std::is_same_v<Input, T>)
                memcpy(to, from, in_features * sizeof(T));
            else
                for (int k = 0; k < in_features; k += LANES) store(to + k, load(from + k));
        }
    }
};
