// Linear recurrences and causal convolutions of recurrent layers, called by cpu_recurrence.py through ctypes;
// recurrence.py and convolution.py define what they compute. One token follows the other in every sequence, and each sum
// has one order, so a token's bits depend neither on where a step begins nor on the form.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace {

constexpr int BLOCK_VECTORS = 4;  // columns of a state that stay in registers as sums, twice
constexpr int CHANNELS = 256;     // channels of a convolution that a thread takes together
constexpr int HEADS = 64;         // heads with values of one number that a thread takes together
constexpr int64_t SERIAL_NUMBERS = 16384;

// Mirrors _Recurrence of cpu_recurrence.py. Rows of inputs and outputs are contiguous
struct Recurrence {
    const float *query, *key, *value, *log_decay, *beta, *rates;  // beta and rates may be null
    float *states, *output;
    const int64_t *starts, *reads, *writes, *sequence_starts;
    int num_segments, num_sequences, num_groups, num_heads, key_dim, value_dim;
    int has_fine_decays;  // log_decay has key_dim numbers for each head
};

// A head's inputs of one token
struct Token {
    const float *query, *key, *decays;  // key_dim each
    float beta;
    bool corrects;
};

// Advances `VECTORS` vectors of a state's columns by one token: from rows `from` to rows `to`. A last vector of fewer
// than LANES columns has `count` of them
template <int VECTORS>
MANTA_INLINE void advance(
    const Token& token, int key_dim, const float* from, int from_stride, float* to, int to_stride, const float* value,
    float* output, int count
) {
    Floats values[VECTORS], sums[VECTORS] = {};
    const auto column = [&](int v) { return VECTORS == 1 ? count : LANES; };
    for (int v = 0; v < VECTORS; v++) values[v] = load_upto(value + v * LANES, column(v));
    if (token.corrects) {
        for (int k = 0; k < key_dim; k++) {
            const Floats key = splat(token.key[k] * token.decays[k]);
            for (int v = 0; v < VECTORS; v++) {
                const Floats state = load_upto(from + int64_t(k) * from_stride + v * LANES, column(v));
                sums[v] = add_product_exactly(sums[v], key, state);
            }
        }
        for (int v = 0; v < VECTORS; v++) {
            values[v] = (values[v] - sums[v]) * token.beta;
            sums[v] = splat(0);
        }
    }
    for (int k = 0; k < key_dim; k++) {
        const Floats key = splat(token.key[k]), query = splat(token.query[k]), decay = splat(token.decays[k]);
        for (int v = 0; v < VECTORS; v++) {
            const Floats state = load_upto(from + int64_t(k) * from_stride + v * LANES, column(v));
            const Floats next = add_product_exactly(key * values[v], state, decay);
            store_upto(to + int64_t(k) * to_stride + v * LANES, next, column(v));
            sums[v] = add_product_exactly(sums[v], query, next);
        }
    }
    for (int v = 0; v < VECTORS; v++) store_upto(output + v * LANES, sums[v], column(v));
}

// The same for a head whose values are single numbers. Its state is one column, so vectors lie along the key, and sums
// run in SUM_LANES lanes
MANTA_INLINE void advance_column(
    const Token& token, int key_dim, const float* from, float* to, float value, float* output
) {
    LaneSums sums = {};
    if (token.corrects) {
        for (int k = 0; k < key_dim; k += SUM_LANES) {
            for (int v = 0; v < SUM_VECTORS; v++) {
                const int at = k + v * LANES, left = key_dim - at;
                const Floats key = load_upto(token.key + at, left) * load_upto(token.decays + at, left);
                sums[v] = add_product_exactly(sums[v], key, load_upto(from + at, left));
            }
        }
        value = (value - total_of(sums)) * token.beta;
        for (int v = 0; v < SUM_VECTORS; v++) sums[v] = splat(0);
    }
    for (int k = 0; k < key_dim; k += SUM_LANES) {
        for (int v = 0; v < SUM_VECTORS; v++) {
            const int at = k + v * LANES, left = key_dim - at;
            const Floats added = load_upto(token.key + at, left) * value, decay = load_upto(token.decays + at, left);
            const Floats next = add_product_exactly(added, load_upto(from + at, left), decay);
            store_upto(to + at, next, left);
            sums[v] = add_product_exactly(sums[v], load_upto(token.query + at, left), next);
        }
    }
    *output = total_of(sums);
}

// exp(log_decay), or exp(log_decay * rate), of each row of a head's state
void find_decays(const Recurrence& all, int64_t token, int head, float* decays) {
    const int key_dim = all.key_dim;
    const float* rates = all.rates ? all.rates + int64_t(head) * key_dim : nullptr;
    const float* fine = all.log_decay + (token * all.num_heads + head) * (all.has_fine_decays ? key_dim : 1);
    if (!all.has_fine_decays && !rates) {
        const float decay = exp2_of<false>(splat(*fine * LOG2_E))[0];
        std::fill(decays, decays + key_dim, decay);
        return;
    }
    for (int k = 0; k < key_dim; k += LANES) {
        const int count = key_dim - k;
        Floats logarithm = all.has_fine_decays ? load_upto(fine + k, count) : splat(*fine);
        if (rates) logarithm *= load_upto(rates + k, count);
        store_upto(decays + k, exp2_of<false>(logarithm * LOG2_E), count);
    }
}

// The tokens of one sequence for some columns of one head's state; with no VECTORS it has one column
template <int VECTORS>
void run_columns(const Recurrence& all, int sequence, int head, int first, int count) {
    const int key_dim = all.key_dim, value_dim = all.value_dim, group = head / (all.num_heads / all.num_groups);
    const int width = VECTORS ? VECTORS * LANES : 1;
    thread_local std::vector<float> decays, kept;
    decays.resize(key_dim);
    const int64_t last_row = all.sequence_starts[sequence + 1];
    int64_t segment =
        std::lower_bound(all.starts, all.starts + all.num_segments, all.sequence_starts[sequence]) - all.starts;
    for (; segment < all.num_segments && all.starts[segment] < last_row; segment++) {
        const int64_t start = all.starts[segment], end = all.starts[segment + 1];
        const auto slot = [&](int64_t number) {
            return all.states + ((number * all.num_heads + head) * key_dim) * value_dim + first;
        };
        if (end - start > 1) kept.resize(int64_t(key_dim) * width);
        for (int64_t row = start; row < end; row++) {
            find_decays(all, row, head, decays.data());
            const int64_t of_key = (row * all.num_groups + group) * key_dim;
            const int64_t of_value = (row * all.num_heads + head) * value_dim + first;
            const Token token = {all.query + of_key, all.key + of_key, decays.data(),
                                 all.beta ? all.beta[row * all.num_heads + head] : 0, all.beta != nullptr};
            const bool is_first = row == start, is_last = row == end - 1;
            const float* const from = is_first ? slot(all.reads[segment]) : kept.data();
            float* const to = is_last ? slot(all.writes[segment]) : kept.data();
            if constexpr (VECTORS == 0) {
                advance_column(token, key_dim, from, to, all.value[of_value], all.output + of_value);
            } else {
                advance<VECTORS>(
                    token, key_dim, from, is_first ? value_dim : width, to, is_last ? value_dim : width,
                    all.value + of_value, all.output + of_value, count
                );
            }
        }
    }
}

// Mirrors _Convolution of cpu_recurrence.py
struct Convolution {
    const float *x, *kernel, *bias;  // [tokens, channels], [channels, width], [channels] or null
    float *states, *output;          // [slots, channels, width - 1], [tokens, channels]
    const int64_t *starts, *reads, *writes, *sequence_starts;
    int num_segments, num_sequences, channels, width;
    int activates;
};

template <int WIDTH>
void convolve_channels(const Convolution& all, int sequence, int first, int count) {
    const int64_t last_row = all.sequence_starts[sequence + 1], channels = all.channels;
    int64_t segment =
        std::lower_bound(all.starts, all.starts + all.num_segments, all.sequence_starts[sequence]) - all.starts;
    float window[CHANNELS * WIDTH];  // the last inputs of each channel, oldest first
    bool is_read = false;
    for (; segment < all.num_segments && all.starts[segment] < last_row; segment++) {
        if (!is_read) {
            const float* kept = all.states + (all.reads[segment] * channels + first) * (WIDTH - 1);
            for (int c = 0; c < count; c++) {
                for (int i = 0; i < WIDTH - 1; i++) window[c * WIDTH + i] = kept[c * (WIDTH - 1) + i];
            }
            is_read = true;
        }
        for (int64_t row = all.starts[segment]; row < all.starts[segment + 1]; row++) {
            const float* x = all.x + row * channels + first;
            float* output = all.output + row * channels + first;
            for (int c = 0; c < count; c++) {
                float* taps = window + c * WIDTH;
                const float* kernel = all.kernel + (first + c) * int64_t(WIDTH);
                taps[WIDTH - 1] = x[c];
                float total = taps[0] * kernel[0];
                for (int i = 1; i < WIDTH; i++) total += taps[i] * kernel[i];
                output[c] = all.bias ? total + all.bias[first + c] : total;
                for (int i = 0; i < WIDTH - 1; i++) taps[i] = taps[i + 1];
            }
            if (all.activates) {
                for (int c = 0; c < count; c += LANES) {
                    store_upto(output + c, silu_of<false>(load_upto(output + c, count - c)), count - c);
                }
            }
        }
        float* kept = all.states + (all.writes[segment] * channels + first) * (WIDTH - 1);
        for (int c = 0; c < count; c++) {
            for (int i = 0; i < WIDTH - 1; i++) kept[c * (WIDTH - 1) + i] = window[c * WIDTH + i];
        }
    }
}

// Mirrors _RunningMax of cpu_recurrence.py
struct RunningMax {
    const float *numbers, *log_decay;  // [tokens, heads]
    float *states, *output;            // [slots, heads], [tokens, heads]
    const int64_t *starts, *reads, *writes, *sequence_starts;
    int num_segments, num_sequences, heads;
};

void find_largest(const RunningMax& all, int sequence) {
    const int64_t last_row = all.sequence_starts[sequence + 1], heads = all.heads;
    int64_t segment =
        std::lower_bound(all.starts, all.starts + all.num_segments, all.sequence_starts[sequence]) - all.starts;
    for (; segment < all.num_segments && all.starts[segment] < last_row; segment++) {
        const float* before = all.states + all.reads[segment] * heads;
        for (int64_t row = all.starts[segment]; row < all.starts[segment + 1]; row++) {
            float* const largest = all.output + row * heads;
            for (int head = 0; head < heads; head++) {
                const float decayed = before[head] + all.log_decay[row * heads + head];
                const float number = all.numbers[row * heads + head];
                largest[head] = decayed > number || decayed != decayed ? decayed : number;
            }
            before = largest;
        }
        std::copy(before, before + heads, all.states + all.writes[segment] * heads);
    }
}

MANTA_INLINE Floats sigmoid_of(Floats x) {
    const Floats exponent = maximum(splat(-126.0f), x * LOG2_E);  // so that 2^-x stays finite; a NaN passes
    return 1.0f / (1.0f + exp2_of<false>(-exponent));
}

// The sum of function(x[i])
template <class Function>
MANTA_INLINE float sum_each(const float* x, int count, const Function& function) {
    LaneSums sums = {};
    for (int i = 0; i < count; i += SUM_LANES) {
        for (int v = 0; v < SUM_VECTORS; v++) {
            const int at = i + v * LANES;
            sums[v] += function(load_upto(x + at, count - at));
        }
    }
    return total_of(sums);
}

MANTA_INLINE float sum_of_squares(const float* x, int count) {
    return sum_each(x, count, [](Floats value) { return value * value; });
}

// Mirrors _GatedNorm of cpu_recurrence.py
struct GatedNorm {
    const float *x, *gate, *weight;  // [rows, groups * size] twice; [size], or [groups * size] if `has_wide_weight`
    float* output;
    int rows, groups, size, gate_stride;
    int gates_first, has_sigmoid, has_wide_weight;
    float eps;
};

void norm_and_gate(const GatedNorm& all, int64_t row, int group) {
    const int size = all.size;
    const float* x = all.x + (row * all.groups + group) * size;
    const float* gate = all.gate + row * all.gate_stride + int64_t(group) * size;
    const float* weight = all.weight + (all.has_wide_weight ? int64_t(group) * size : 0);
    float* output = all.output + (row * all.groups + group) * size;
    const auto gate_at = [&](int i) {
        const Floats value = load_upto(gate + i, size - i);
        return all.has_sigmoid ? sigmoid_of(value) : silu_of<false>(value);
    };
    if (all.gates_first) {
        for (int i = 0; i < size; i += LANES) {
            store_upto(output + i, load_upto(x + i, size - i) * gate_at(i), size - i);
        }
        x = output;
    }
    const float inverse = 1.0f / std::sqrt(sum_of_squares(x, size) / size + all.eps);
    for (int i = 0; i < size; i += LANES) {
        Floats value = load_upto(x + i, size - i) * inverse * load_upto(weight + i, size - i);
        if (!all.gates_first) value *= gate_at(i);
        store_upto(output + i, value, size - i);
    }
}

// log(1 + e^x) = max(x, 0) + log(1 + e^-|x|), whose second part is twice the series of the inverse hyperbolic tangent: it
// loses no small numbers. NaN stays NaN
MANTA_INLINE Floats softplus_of(Floats x) {
    const Floats small = exp2_of<false>(maximum(x, -x) * -LOG2_E);
    const Floats ratio = small / (2.0f + small), square = ratio * ratio;
    Floats series = splat(1.0f / 15);
    for (int odd = 13; odd > 0; odd -= 2) series = series * square + 1.0f / odd;
    return maximum(splat(0), x) + 2.0f * ratio * series;
}

// GELU: x times the normal distribution's integral, whose tail is Abramowitz and Stegun's 7.1.26, to 1e-7 of x
MANTA_INLINE Floats gelu_of(Floats x) {
    const Floats root = maximum(x, -x) * 0.70710678118654752f, t = 1.0f / (1.0f + 0.3275911f * root);
    constexpr float coefficients[] = {1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f, 0.0f};
    const Floats tail = 0.5f * polynomial<false>(coefficients, t) * exp2_of<false>(root * root * -LOG2_E);
    return x < 0.0f ? x * tail : x - x * tail;
}

// output[i] = function(x[i])
template <class Function>
void compute_each(const float* x, float* output, int64_t count, const Function& function) {
    constexpr int64_t CHUNK = 4096;
    parallel_for((count + CHUNK - 1) / CHUNK, count <= SERIAL_NUMBERS, [&](int64_t chunk) {
        const int64_t last = std::min(count, (chunk + 1) * CHUNK);
        for (int64_t i = chunk * CHUNK; i < last; i += LANES) {
            const int left = int(std::min<int64_t>(last - i, LANES));
            store_upto(output + i, function(load_upto(x + i, left)), left);
        }
    });
}

}  // namespace

extern "C" {

int manta_recurrence_layout(int which) {
    const int sizes[] = {
        int(sizeof(Recurrence)), int(sizeof(Convolution)), int(sizeof(GatedNorm)), int(sizeof(RunningMax))};
    return sizes[which];
}

void manta_recur(const Recurrence* all) {
    if (all->value_dim == 1) {
        const int parts = (all->num_heads + HEADS - 1) / HEADS;
        parallel_each(int64_t(all->num_sequences) * parts, [&](int64_t unit) {
            const int first = int(unit % parts) * HEADS, last = std::min(first + HEADS, all->num_heads);
            for (int head = first; head < last; head++) run_columns<0>(*all, int(unit / parts), head, 0, 1);
        });
        return;
    }
    constexpr int block = BLOCK_VECTORS * LANES;
    const int whole = all->value_dim / block, rest = all->value_dim % block;
    const int parts = whole + (rest + LANES - 1) / LANES;
    parallel_each(int64_t(all->num_sequences) * all->num_heads * parts, [&](int64_t unit) {
        const int part = unit % parts, head = unit / parts % all->num_heads, sequence = unit / parts / all->num_heads;
        if (part < whole) return run_columns<BLOCK_VECTORS>(*all, sequence, head, part * block, LANES);
        const int first = whole * block + (part - whole) * LANES;
        run_columns<1>(*all, sequence, head, first, std::min(LANES, all->value_dim - first));
    });
}

// `width` is 3 or 4
void manta_convolve(const Convolution* all) {
    const int parts = (all->channels + CHANNELS - 1) / CHANNELS;
    const int64_t count = int64_t(all->num_sequences) * parts;
    const auto run = [&](int64_t unit) {
        const int sequence = unit / parts, first = unit % parts * CHANNELS;
        const int channels = std::min(CHANNELS, all->channels - first);
        all->width == 4 ? convolve_channels<4>(*all, sequence, first, channels)
                        : convolve_channels<3>(*all, sequence, first, channels);
    };
    const bool is_serial = all->starts[all->num_segments] * all->channels <= SERIAL_NUMBERS;
    parallel_for(count, is_serial, run);
}

void manta_running_max(const RunningMax* all) {
    for (int sequence = 0; sequence < all->num_sequences; sequence++) find_largest(*all, sequence);
}

void manta_gated_norm(const GatedNorm* all) {
    const int64_t count = int64_t(all->rows) * all->groups;
    parallel_for(count, count * all->size <= SERIAL_NUMBERS, [&](int64_t unit) {
        norm_and_gate(*all, unit / all->groups, int(unit % all->groups));
    });
}

// Heads of length 1, times `scale`
void manta_unit_heads(const float* x, float* output, int64_t heads, int size, float scale, float eps) {
    parallel_for(heads, heads * size <= SERIAL_NUMBERS, [&](int64_t head) {
        const float* from = x + head * size;
        const float factor = scale / std::sqrt(sum_of_squares(from, size) + eps);
        for (int i = 0; i < size; i += LANES) {
            store_upto(output + head * size + i, load_upto(from + i, size - i) * factor, size - i);
        }
    });
}

// The RMS norm of rows x [rows][width], which are parts of rows of `size` numbers with these sums of squares, times a
// weight [width], which may be null
void manta_row_norm(
    const float* x, const float* squares, const float* weight, float* output, int64_t rows, int width, int size, float eps
) {
    parallel_for(rows, rows * width <= SERIAL_NUMBERS, [&](int64_t row) {
        const float inverse = 1.0f / std::sqrt(squares[row] / size + eps);
        for (int i = 0; i < width; i += LANES) {
            Floats value = load_upto(x + row * width + i, width - i) * inverse;
            if (weight) value *= load_upto(weight + i, width - i);
            store_upto(output + row * width + i, value, width - i);
        }
    });
}

// Heads less their mean, divided by their deviation
void manta_centred_heads(const float* x, float* output, int64_t heads, int size, float eps) {
    parallel_for(heads, heads * size <= SERIAL_NUMBERS, [&](int64_t head) {
        const float* from = x + head * size;
        float* const to = output + head * size;
        const float mean = sum_each(from, size, [](Floats value) { return value; }) / size;
        for (int i = 0; i < size; i += LANES) store_upto(to + i, load_upto(from + i, size - i) - mean, size - i);
        const float inverse = 1.0f / std::sqrt(sum_of_squares(to, size) / size + eps);
        for (int i = 0; i < size; i += LANES) store_upto(to + i, load_upto(to + i, size - i) * inverse, size - i);
    });
}

// log(1 + exp(x + bias)) of rows of `width` numbers
void manta_softplus(const float* x, const float* bias, float* output, int64_t rows, int width) {
    parallel_for(rows, rows * width <= SERIAL_NUMBERS, [&](int64_t row) {
        const int64_t at = row * width;
        for (int i = 0; i < width; i += LANES) {
            const Floats sum = load_upto(x + at + i, width - i) + load_upto(bias + i, width - i);
            store_upto(output + at + i, softplus_of(sum), width - i);
        }
    });
}

void manta_sigmoid(const float* x, float* output, int64_t count) {
    compute_each(x, output, count, [](Floats value) { return sigmoid_of(value); });
}

void manta_silu(const float* x, float* output, int64_t count) {
    compute_each(x, output, count, [](Floats value) { return silu_of<false>(value); });
}

void manta_gelu(const float* x, float* output, int64_t count) {
    compute_each(x, output, count, [](Floats value) { return gelu_of(value); });
}

// e^x, for x <= 88
void manta_exp(const float* x, float* output, int64_t count) {
    compute_each(x, output, count, [](Floats value) { return exp2_of<false>(value * LOG2_E); });
}

// The nearest number to the root of each, as IEEE 754 defines it
void manta_sqrt(const float* x, float* output, int64_t count) {
    compute_each(x, output, count, [](Floats value) {
        for (int lane = 0; lane < LANES; lane++) value[lane] = std::sqrt(value[lane]);
        return value;
    });
}

// limit * tanh(x / limit)
void manta_cap(const float* x, float* output, int64_t count, float limit) {
    compute_each(x, output, count, [limit](Floats value) { return tanh_of(value / limit) * limit; });
}

// One sum of each of `rows` rows of `width` numbers
void manta_sums_of_squares(const float* x, float* output, int64_t rows, int width) {
    parallel_for(rows, rows * width <= SERIAL_NUMBERS, [&](int64_t row) {
        output[row] = sum_of_squares(x + row * width, width);
    });
}
}
