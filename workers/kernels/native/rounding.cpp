// Rounds weights to integers in groups: the numbers of workers/kernels/rounding.py, which says how, bit for bit. Sums are
// of double, so that their order does not show in a scale of float16. Called by cpu_quantized_linear.py.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace {

constexpr int SUMS = 8;                       // partial sums of a group, which the compiler adds side by side
constexpr float SHIFT = 12582912.0f;          // 1.5 * 2^23: adding and subtracting it rounds to nearest even
constexpr float STARTS[] = {1.0f, 0.9f};      // where the search of a scale of 4 bits begins
constexpr float LEAST_NORMAL_HALF = 0x1p-14f;

// To the nearest number of float16, as a float.
__attribute__((noinline)) float to_half(float value) {  // so that no product is fused with its sum
    if (std::fabs(value) < LEAST_NORMAL_HALF) return (value + 0.75f) - 0.75f;  // whole multiples of 2^-24
    if (!(std::fabs(value) < 65520.0f)) return std::isnan(value) ? value : std::copysign(INFINITY, value);
    uint32_t word;
    memcpy(&word, &value, sizeof(word));
    word = (word + 0xfff + (word >> 13 & 1)) & ~0x1fffu;
    memcpy(&value, &word, sizeof(value));
    return value;
}

// Whole numbers in `to`; zeros if the scale is zero or not finite.
void round_group(const float* x, int count, float scale, float least, float most, float* to) {
    if (!(std::fabs(scale) > 0 && std::fabs(scale) < INFINITY)) return std::fill_n(to, count, 0.0f), void();
    for (int i = 0; i < count; i++) {
        const float ratio = x[i] / scale;
        to[i] = (std::min(std::max(ratio, least), most) + SHIFT) - SHIFT;
    }
}

template <class Term>
double sum(int count, const Term& term) {
    double sums[SUMS] = {};
    int i = 0;
    for (; i + SUMS <= count; i += SUMS)
        for (int j = 0; j < SUMS; j++) sums[j] += term(i + j);
    for (; i < count; i++) sums[0] += term(i);
    double total = 0;
    for (const double each : sums) total += each;
    return total;
}

float round_to_8(const float* x, int count, float* to) {
    float largest = 0;
    bool is_number = true;
    for (int i = 0; i < count; i++) {
        largest = std::max(largest, std::fabs(x[i]));
        is_number &= x[i] == x[i];
    }
    const float scale = is_number ? to_half(largest / 127.0f) : NAN;
    round_group(x, count, scale, -127, 127, to);
    return scale;
}

// `other` [count] is room for the numbers of another start.
float round_to_4(const float* x, int count, float* to, float* other) {
    float most = x[0], least = x[0];
    bool is_number = true;
    for (int i = 0; i < count; i++) {
        most = std::max(most, x[i]), least = std::min(least, x[i]);
        is_number &= x[i] == x[i];
    }
    const float first = is_number ? (most >= -least ? most : least) / -8.0f : NAN;
    float best_scale = first;
    double best_error = 0;
    for (const float start : STARTS) {
        float* const rounded = start == STARTS[0] ? to : other;
        round_group(x, count, to_half(first * start), -8, 7, rounded);
        const double product = sum(count, [&](int i) { return (double)x[i] * rounded[i]; });
        const double squares = sum(count, [&](int i) { return (double)rounded[i] * rounded[i]; });
        const float scale = to_half(squares > 0 ? (float)(product / squares) : first);
        round_group(x, count, scale, -8, 7, rounded);
        const double error = sum(count, [&](int i) {
            const double difference = (double)rounded[i] * scale - x[i];
            return difference * difference;
        });
        if (start != STARTS[0] && !(error < best_error)) continue;
        if (rounded != to) std::copy_n(rounded, count, to);
        best_scale = scale, best_error = error;
    }
    return best_scale;
}

template <class T>
void round_rows(const T* weight, int bits, int rows, int inputs, int group, int8_t* values, float* scales) {
    const int groups = inputs / group;
    parallel_for(rows, false, [&](int64_t row) {
        static thread_local std::vector<float> memory;
        memory.resize(3 * (size_t)group);
        float *const x = memory.data(), *const to = x + group, *const other = to + group;
        for (int g = 0; g < groups; g++) {
            const int64_t at = row * inputs + (int64_t)g * group;
            for (int i = 0; i < group; i++) x[i] = to_float(weight[at + i]);
            scales[row * groups + g] = bits == 8 ? round_to_8(x, group, to) : round_to_4(x, group, to, other);
            for (int i = 0; i < group; i++) values[at + i] = (int8_t)to[i];
        }
    });
}

}  // namespace

// weight [rows, inputs] of dtype 0: float32 or 1: bfloat16 -> values int8 [rows, inputs] and scales float
// [rows, inputs / group] that are numbers of float16. `bits` is 8 or 4; `group` divides `inputs`.
extern "C" void manta_round_weight(int dtype, const void* weight, int bits, int rows, int inputs, int group, void* values,
                                   void* scales) {
    if (dtype == 0)
        round_rows((const float*)weight, bits, rows, inputs, group, (int8_t*)values, (float*)scales);
    else
        round_rows((const bf16*)weight, bits, rows, inputs, group, (int8_t*)values, (float*)scales);
}
