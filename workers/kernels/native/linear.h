// A product of activations with weights that are packed once: y = x @ weight.T + bias, summed in float32. If gated, the
// weight's halves give `gate` and `up`, and y = silu(gate) * up, or another function of the gate (Shazeer, 2020). This
// file has what all forms share: how weights lie, and how finished sums are written. linear_vectors.h and linear_tiles.h
// multiply; linear.cpp packs and chooses.
//
// Weights lie in strips of 32 outputs. Of bfloat16 a strip is [in / 2][32][2], with pairs of inputs together: AVX-512's
// and NEON's dot products and AMX's tiles read that as it is, and other processors widen a vector of it by one
// instruction. Of float a strip is [in][32]. bfloat16 is not widened in memory, because with few rows the speed is that
// of reading it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "lossless.h"
#include "parallel.h"
#include "shares.h"
#include "simd.h"

constexpr int STRIP = 32;   // outputs that lie together
constexpr int PANEL = 64;   // outputs of two strips: the unit that is shared out among threads
constexpr int STEP = 32;    // in_features are padded to a multiple of it
constexpr int64_t HUGE_PAGE = 2 << 20;

static inline int64_t panel_size(int in_features) {
    return (int64_t)in_features * PANEL;
}

// The panels of a linear, its inputs with padding, and the chunks of lossless.h in all its strips
static inline int panels_of(int out_features) {
    return (out_features + PANEL - 1) / PANEL;
}

static inline int padded_inputs(int in_features) {
    return (in_features + STEP - 1) / STEP * STEP;
}

static inline int64_t chunks_of(int out_features, int in_features) {
    return int64_t(panels_of(out_features)) * 2 * (padded_inputs(in_features) / STEP);
}

static inline void ask_for_huge_pages(void* memory, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t begin = ((uintptr_t)memory + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    const uintptr_t end = ((uintptr_t)memory + bytes) / HUGE_PAGE * HUGE_PAGE;
    if (begin < end) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

// Memory [count] that a thread keeps for its next call, on huge pages if the system grants them; one for each USE. What a
// large call needed is given back once a call needs less than a sixteenth, so that no prefill's memory stays.
template <typename T, int USE = 0>
static inline T* of_thread(int64_t count) {
    static thread_local std::unique_ptr<void, decltype(&free)> memory(nullptr, free);
    static thread_local int64_t size = 0;
    const int64_t bytes = std::max<int64_t>(1, count * sizeof(T)), wanted = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    if (size < wanted || size > 16 * wanted) {
        memory.reset();
        memory.reset(aligned_alloc(HUGE_PAGE, wanted));
        ask_for_huge_pages(memory.get(), wanted);
        size = wanted;
    }
    return static_cast<T*>(memory.get());
}

template <class T>
struct Product {
    static constexpr int PAIR = sizeof(float) / sizeof(T);  // inputs that lie together
    static constexpr int VECTORS = STRIP / LANES;
    using Sums = Floats[VECTORS];  // of a row and a strip

    const T *x, *packed, *bias;
    T* y;
    int num_rows, in_features, out_features;
    int gate;  // of simd.h: a strip holds 16 outputs of `gate`, then the 16 of `up`; y is half as wide as the sums
    const float* const* addends = nullptr;  // of each row, in the order of packing, or null: added to the sums
    Lossless lossless = {};  // the weights, if they do not lie as themselves at `packed`

    const T* panel(int p) const { return packed + p * panel_size(in_features); }
    const T* strip(int s) const { return packed + (int64_t)s * in_features * STRIP; }
    const T* input(int row) const { return x + (int64_t)row * in_features; }

    // Weights of a strip, of inputs [k, k + count): where they lie, or decoded to `room`. `k` is a multiple of STEP.
    MANTA_INLINE const T* weights(int s, int k, int count, T* room) const {
        if constexpr (PAIR == 2)
            if (lossless) {
                const int64_t first = ((int64_t)s * in_features + k) / STEP;
                lossless.decode(first, first + count / STEP, room);
                return room;
            }
        return strip(s) + (int64_t)k * STRIP;
    }

    // Where the weights of a strip lie in memory from input k on, and the bytes of two of them.
    const char* stored(int s, int k) const {
        if (lossless) return (const char*)lossless.codes + ((int64_t)s * in_features + k) / STEP * LOSSLESS_BYTES;
        return (const char*)(strip(s) + (int64_t)k * STRIP);
    }
    int bytes_of_two() const { return lossless ? 3 : 2 * (int)sizeof(T); }

    // Writes the outputs of a row and a strip, given their sums.
    MANTA_INLINE void write(int row, int strip, Sums& sums) const {
        const int column = strip * STRIP, left = out_features - column;
        if (addends && addends[row])
            for (int v = 0; v < VECTORS; v++) sums[v] += load_upto(addends[row] + column + v * LANES, left - v * LANES);
        if (bias)
            for (int v = 0; v < VECTORS; v++) sums[v] += load_upto(bias + column + v * LANES, left - v * LANES);
        if (gate) {
            constexpr int GATES = VECTORS / 2;
            const int width = out_features / 2;
            T* const to = y + (int64_t)row * width + column / 2;
            for (int v = 0; v < GATES; v++) {
                const Floats value = gate_of<PAIR == 2>(gate, sums[v]) * sums[v + GATES];
                store_upto(to + v * LANES, value, width - column / 2 - v * LANES);
            }
            return;
        }
        T* const to = y + (int64_t)row * out_features + column;
        for (int v = 0; v < VECTORS; v += 2) {
            if (left - v * LANES >= 2 * LANES) {
                store_two(to + v * LANES, sums[v], sums[v + 1]);
            } else {
                store_upto(to + v * LANES, sums[v], left - v * LANES);
                store_upto(to + (v + 1) * LANES, sums[v + 1], left - (v + 1) * LANES);
            }
        }
    }

    MANTA_INLINE void write(int row, int strip, const float* from) const {
        Sums sums;
        for (int v = 0; v < VECTORS; v++) sums[v] = load(from + v * LANES);
        write(row, strip, sums);
    }

    // The same product, of rows [first, last) only.
    Product of_rows(int first, int last) const {
        Product part = *this;
        part.x = input(first);
        part.y += (int64_t)first * (gate ? out_features / 2 : out_features);
        part.num_rows = last - first;
        if (addends) part.addends = addends + first;
        return part;
    }
};
