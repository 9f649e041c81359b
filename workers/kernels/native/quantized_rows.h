// Rounds activations to int8: each group of inputs of a row by its largest value, or the whole row by its largest.
// Symmetric: value = scale * q, -127 <= q <= 127, scale = largest / 127. Used by quantized_linear.cpp.
#pragma once

#include "linear.h"
#include "quantized_floats.h"

constexpr int GROUP_STEP = 16;  // inputs of a group are padded to a multiple of it, with zeros
constexpr int SPARE_ROWS = 15;  // memory after the last row, which tiles may read
constexpr float LEAST_LARGEST = 1e-30f;  // a group whose values are all smaller is zero: 127 / largest stays finite

// Groups of inputs: `groups` of `group` inputs each, the last perhaps of fewer.
struct Groups {
    int in_features, group, groups, padded;

    Groups(int in_features, int group)
        : in_features(in_features), group(group), groups((in_features + group - 1) / group),
          padded((group + GROUP_STEP - 1) / GROUP_STEP * GROUP_STEP) {}

    int size(int g) const { return std::min(group, in_features - g * group); }
};

// A group of all rows lies together, so that products read one stretch of memory.
struct QuantizedRows {
    int num_rows;
    int8_t* values;   // [groups][num_rows][padded]
    float* scales;    // [groups][num_rows]
    int32_t* totals;  // [groups][num_rows], the sum of a group's values
    float* sums;      // [groups][num_rows], scale * total
};

typedef int8_t Bytes __attribute__((vector_size(MANTA_LANES)));

MANTA_INLINE int32_t largest_of(Ints value) {
#if MANTA_LANES == 16
    return _mm512_reduce_max_epi32((__m512i)value);
#else
    int32_t largest = value[0];
    for (int lane = 1; lane < LANES; lane++) largest = std::max(largest, (int32_t)value[lane]);
    return largest;
#endif
}

MANTA_INLINE int32_t total_of(Ints value) {
#if MANTA_LANES == 16
    return _mm512_reduce_add_epi32((__m512i)value);
#else
    int32_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += value[lane];
    return total;
#endif
}

// The bits of the largest magnitude: their order as integers is that of the magnitudes, with NaN above all.
template <class T>
MANTA_INLINE int32_t largest_bits(const T* x, int count) {
    Ints most = Ints{};
    for (int i = 0; i < count; i += LANES) {
        const Ints bits = (Ints)load_upto(x + i, count - i) & splat_int(0x7fffffff);
        most = most > bits ? most : bits;
    }
    return largest_of(most);
}

// Rounds `count` numbers whose largest magnitude has the bits `largest`, padded with zeros. Returns their scale: NaN if one
// of them is not finite. `total` gets the sum of the values.
template <class T>
MANTA_INLINE float quantize(const T* x, int count, int32_t largest, int8_t* values, int padded, int32_t& total) {
    float magnitude;
    memcpy(&magnitude, &largest, sizeof(magnitude));
    const bool is_finite = largest < 0x7f800000;
    if (!is_finite || magnitude < LEAST_LARGEST) {
        memset(values, 0, padded);
        total = 0;
        return is_finite ? 0.0f : __builtin_nanf("");
    }
    const Floats inverse = splat(127.0f / magnitude), shift = splat(12582912.0f);
    Ints totals = Ints{};
    for (int i = 0; i < padded; i += LANES) {
        const Floats shifted = product(load_upto(x + i, count - i), inverse) + shift;  // rounds to nearest even
        const Ints rounded = (Ints)shifted - splat_int(0x4b400000);
        totals += rounded;
        const Bytes bytes = __builtin_convertvector(rounded, Bytes);
        memcpy(values + i, &bytes, sizeof(bytes));
    }
    total = total_of(totals);
    return magnitude / 127.0f;
}

template <class T>
MANTA_INLINE void quantize_group(const T* x, int count, int32_t largest, QuantizedRows to, int64_t at, int padded) {
    const float scale = quantize(x, count, largest, to.values + at * padded, padded, to.totals[at]);
    to.scales[at] = scale;  // NaN fails the row
    to.sums[at] = scale * (float)to.totals[at];
}

// One row of x.
template <class T>
static void quantize_row(const T* x, const Groups& groups, bool one_scale, const QuantizedRows& to, int row) {
    int32_t largest = one_scale ? largest_bits(x, groups.in_features) : 0;
    for (int g = 0; g < groups.groups; g++) {
        const T* const from = x + (int64_t)g * groups.group;
        const int count = groups.size(g);
        if (!one_scale) largest = largest_bits(from, count);
        quantize_group(from, count, largest, to, (int64_t)g * to.num_rows + row, groups.padded);
    }
}
