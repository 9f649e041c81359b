// The rotation of heads before they are rounded to four bits; four_bit_heads.py explains it. Used by attention and by
// what writes the cache. Every form gives the same bits: sums and differences in one order, then one product.
#pragma once

#include <cmath>
#include <utility>

#include "simd.h"

constexpr int ROTATION_SLACK = 16;  // floats after a head, and after its spare memory, that may be read or written

// The largest power of two that is at most head_dim
inline int transform_width(int head_dim) {
    int width = 1;
    while (2 * width <= head_dim) width *= 2;
    return width;
}

// Flips the signs of numbers by the Rudin-Shapiro sequence: that of number i is negative if i has an odd number of
// neighbouring pairs of set bits. `width` is at most 2^16.
inline void flip_signs(float* x, int width) {
    for (int i = 0; i < width; i += LANES) {
        Ints pairs = lane_index() + i;
        pairs &= pairs >> 1;
        for (int shift = 8; shift > 0; shift /= 2) pairs ^= pairs >> shift;  // the lowest bit becomes their parity
        store(x + i, (Floats)((Ints)load(x + i) ^ (pairs << 31)));
    }
}

// The Walsh-Hadamard transform of `width` numbers, a power of two of at least 16, times width^-0.5. Its steps are all
// alike (Pease, 1968): halves are added and subtracted, and the results interleaved.
inline void transform(float* x, int width, float* spare) {
    const int half = width / 2;
    float *from = x, *to = spare;
    for (int step = 1; step < width; step *= 2) {
        for (int i = 0; i < half; i += LANES) {
            const Floats a = load(from + i), b = load(from + half + i);
            const Ints sum = (Ints)(a + b), difference = (Ints)(a - b);
            store(to + 2 * i, (Floats)zip_low(sum, difference));
            store(to + 2 * i + LANES, (Floats)zip_high(sum, difference));
        }
        std::swap(from, to);
    }
    const float factor = 1.0f / std::sqrt(float(width));
    for (int i = 0; i < width; i += LANES) store(x + i, load(from + i) * factor);
}

// Rotates a head of T into `rotated`. There and in `spare` is memory for head_dim + ROTATION_SLACK floats.
template <class T>
inline void rotate_from(const T* head, int head_dim, float* rotated, float* spare) {
    for (int i = 0; i < head_dim; i += LANES) store(rotated + i, load(head + i));
    const int width = transform_width(head_dim), others = head_dim - width;
    flip_signs(rotated, width);
    transform(rotated, width, spare);
    if (others) {
        flip_signs(rotated + others, width);
        transform(rotated + others, width, spare);
    }
}

// Undoes `rotate_from`, in place
inline void rotate_back(float* rotated, int head_dim, float* spare) {
    const int width = transform_width(head_dim), others = head_dim - width;
    if (others) {
        transform(rotated + others, width, spare);
        flip_signs(rotated + others, width);
    }
    transform(rotated, width, spare);
    flip_signs(rotated, width);
}
