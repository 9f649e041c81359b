// Packs rows of weights into strips (linear.h). Called by linear.cpp and lossless.cpp.
#pragma once

#include <algorithm>

#include "linear.h"

// Transposes units of LANES rows, from byte `first` on: unit i of all rows goes to `to + i * STRIP`. Null rows, and
// units after the `bytes` of a row, are zero.
static inline void pack_square(const char* const* rows, int64_t first, int64_t bytes, int32_t* to) {
    Ints square[LANES];
    for (int i = 0; i < LANES; i++) {
        square[i] = Ints{};
        const int64_t left = rows[i] ? bytes - first : 0;
        if (left > 0) memcpy(&square[i], rows[i] + first, std::min<int64_t>(left, sizeof(Ints)));
    }
    transpose(square);
    for (int i = 0; i < LANES; i++) memcpy(to + i * STRIP, &square[i], sizeof(Ints));
}

// weight [out_features] rows of `bytes` -> a strip of [units][32], a unit being a float or a pair of bfloat16. If gated,
// 16 rows of the first half and 16 of the second alternate.
static inline void pack_strip(const char* weight, int32_t* to, int64_t strip, int out_features, int64_t bytes,
                              int64_t units, bool gated) {
    const char* rows[STRIP];
    for (int n = 0; n < STRIP; n++) {
        const int64_t place = strip * STRIP + n;
        const int64_t row = gated ? strip * 16 + n % 16 + n / 16 * (out_features / 2) : place;
        rows[n] = place < out_features ? weight + row * bytes : nullptr;
    }
    for (int64_t unit = 0; unit < units; unit += LANES)
        for (int n = 0; n < STRIP; n += LANES) pack_square(rows + n, unit * 4, bytes, to + unit * STRIP + n);
}
