// Linear recurrences and causal convolutions of recurrent layers, called by cpu_recurrence.py through ctypes;
// recurrence.py and convolution.py define what they compute. One token follows the other in every sequence, and each sum
// has one order, so a token's bits depend neither on where a step begins nor on the form.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "activations.h"
#include "parallel.h"

namespace {

constexpr int BLOCK_VECTORS = 4;  // columns of a state that stay in registers as sums, twice
constexpr int WIDE_VECTORS = LANES == 16 ? 8 : BLOCK_VECTORS;  // the same where a thread has all columns of a head
constexpr int BFLOAT16 = 1;
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

// The last inputs of `count` channels, oldest first: WIDTH - 1 numbers of each in a state, WIDTH in a window
template <int WIDTH>
MANTA_INLINE void read_windows(const float* state, int count, float* windows) {
    for (int c = 0; c < count; c++) {
        for (int i = 0; i < WIDTH - 1; i++) windows[c * WIDTH + i] = state[c * (WIDTH - 1) + i];
    }
}

template <int WIDTH>
MANTA_INLINE void write_windows(const float* windows, int count, float* state) {
    for (int c = 0; c < count; c++) {
        for (int i = 0; i < WIDTH - 1; i++) state[c * (WIDTH - 1) + i] = windows[c * WIDTH + i];
    }
}

// One token of some channels
template <int WIDTH>
MANTA_INLINE void convolve_token(
    const float* x, const float* kernel, const float* bias, float* windows, float* output, int count, bool activates
) {
    for (int c = 0; c < count; c++) {
        float* taps = windows + c * WIDTH;
        taps[WIDTH - 1] = x[c];
        float total = taps[0] * kernel[c * WIDTH];
        for (int i = 1; i < WIDTH; i++) total += taps[i] * kernel[c * WIDTH + i];
        output[c] = bias ? total + bias[c] : total;
        for (int i = 0; i < WIDTH - 1; i++) taps[i] = taps[i + 1];
    }
    if (!activates) return;
    for (int c = 0; c < count; c += LANES) {
        store_upto(output + c, silu_of<false>(load_upto(output + c, count - c)), count - c);
    }
}

template <int WIDTH>
void convolve_channels(const Convolution& all, int sequence, int first, int count) {
    const int64_t last_row = all.sequence_starts[sequence + 1], channels = all.channels;
    int64_t segment =
        std::lower_bound(all.starts, all.starts + all.num_segments, all.sequence_starts[sequence]) - all.starts;
    float windows[CHANNELS * WIDTH];
    bool is_read = false;
    for (; segment < all.num_segments && all.starts[segment] < last_row; segment++) {
        const auto state = [&](int64_t slot) { return all.states + (slot * channels + first) * (WIDTH - 1); };
        if (!is_read) read_windows<WIDTH>(state(all.reads[segment]), count, windows);
        is_read = true;
        for (int64_t row = all.starts[segment]; row < all.starts[segment + 1]; row++) {
            const int64_t at = row * channels + first;
            convolve_token<WIDTH>(
                all.x + at, all.kernel + first * int64_t(WIDTH), all.bias ? all.bias + first : nullptr, windows,
                all.output + at, count, all.activates
            );
        }
        write_windows<WIDTH>(windows, count, state(all.writes[segment]));
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

// The norm of one group, times its gate
MANTA_INLINE void norm_and_gate(
    const float* x, const float* gate, const float* weight, float* output, int size, bool gates_first, bool has_sigmoid,
    float eps
) {
    const auto gate_at = [&](int i) {
        const Floats value = load_upto(gate + i, size - i);
        return has_sigmoid ? sigmoid_of(value) : silu_of<false>(value);
    };
    if (gates_first) {
        for (int i = 0; i < size; i += LANES) {
            store_upto(output + i, load_upto(x + i, size - i) * gate_at(i), size - i);
        }
        x = output;
    }
    const float inverse = 1.0f / std::sqrt(sum_of_squares(x, size) / size + eps);
    for (int i = 0; i < size; i += LANES) {
        Floats value = load_upto(x + i, size - i) * inverse * load_upto(weight + i, size - i);
        if (!gates_first) value *= gate_at(i);
        store_upto(output + i, value, size - i);
    }
}

// A head of length 1, times `scale`
MANTA_INLINE void scale_to_unit(const float* x, float* output, int size, float scale, float eps) {
    const float factor = scale / std::sqrt(sum_of_squares(x, size) + eps);
    for (int i = 0; i < size; i += LANES) store_upto(output + i, load_upto(x + i, size - i) * factor, size - i);
}

// Mirrors _DeltaStep of cpu_recurrence.py: a gated delta net between its linears, for one token of each sequence
struct DeltaStep {
    // [rows][queries, keys and values of all heads, then their gates, then a beta and a time step of each head]
    const void* projected;
    const float *kernel, *rates, *time_bias, *norm;  // [channels, width], [heads] twice, [value_dim]
    float *windows, *states;                         // [slots, channels, width - 1], [slots, heads, key_dim, value_dim]
    void* output;                                    // [rows, heads * value_dim]
    const int64_t *reads, *writes;
    int dtype;  // of `projected` and `output`
    int num_rows, num_groups, num_heads, key_dim, value_dim, width;
    float beta_scale, query_scale, unit_eps, norm_eps;
};

// `count` columns of a head's state from `from` to `to`, and the outputs
template <int VECTORS>
MANTA_INLINE int advance_blocks(
    const Token& token, const DeltaStep& all, const float* from, float* to, const float* value, float* output, int first
) {
    const int stride = all.value_dim, key_dim = all.key_dim, width = VECTORS * LANES;
    for (; first < stride && (VECTORS == 1 || first + width <= stride); first += width) {
        const int count = std::min(LANES, stride - first);
        advance<VECTORS>(token, key_dim, from + first, stride, to + first, stride, value + first, output + first, count);
    }
    return first;
}

// A key head's part of a row: its query and key, and all value heads that share them
template <class T, int WIDTH>
void step_group(const DeltaStep& all, int64_t row, int group) {
    const int key_dim = all.key_dim, value_dim = all.value_dim, repeats = all.num_heads / all.num_groups;
    const int64_t keys = int64_t(all.num_groups) * key_dim, values = int64_t(all.num_heads) * value_dim;
    const int64_t channels = 2 * keys + values, width = channels + values + 2 * all.num_heads;
    const T* const projected = static_cast<const T*>(all.projected) + row * width;
    thread_local std::vector<float> memory;
    memory.resize(3 * key_dim + (repeats + 2) * value_dim);
    float *const query = memory.data(), *const key = query + key_dim, *const decays = key + key_dim;
    float *const value = decays + key_dim, *const gate = value + repeats * value_dim, *const output = gate + value_dim;
    const auto widen = [](const T* from, float* to, int count) {
        for (int i = 0; i < count; i += LANES) store_upto(to + i, load_upto(from + i, count - i), count - i);
    };
    const auto convolve = [&](int64_t first, float* to, int count) {
        float windows[CHANNELS * WIDTH], x[CHANNELS];
        for (int c = 0; c < count; c += CHANNELS) {
            const int64_t channel = first + c;
            const int part = std::min(CHANNELS, count - c);
            const auto state = [&](int64_t slot) { return all.windows + (slot * channels + channel) * (WIDTH - 1); };
            widen(projected + channel, x, part);
            read_windows<WIDTH>(state(all.reads[row]), part, windows);
            convolve_token<WIDTH>(x, all.kernel + channel * WIDTH, nullptr, windows, to + c, part, true);
            write_windows<WIDTH>(windows, part, state(all.writes[row]));
        }
    };
    convolve(int64_t(group) * key_dim, query, key_dim);
    convolve(keys + int64_t(group) * key_dim, key, key_dim);
    convolve(2 * keys + int64_t(group) * repeats * value_dim, value, repeats * value_dim);
    scale_to_unit(query, query, key_dim, all.query_scale, all.unit_eps);
    scale_to_unit(key, key, key_dim, 1, all.unit_eps);
    const T* const betas = projected + channels + values;
    for (int i = 0; i < repeats; i++) {
        const int64_t head = int64_t(group) * repeats + i, size = int64_t(key_dim) * value_dim;
        const float time = to_float(betas[all.num_heads + head]);
        const float log_decay = all.rates[head] * softplus_of(splat(time) + splat(all.time_bias[head]))[0];
        std::fill(decays, decays + key_dim, exp2_of<false>(splat(log_decay * LOG2_E))[0]);
        const float beta = sigmoid_of(splat(to_float(betas[head])))[0] * all.beta_scale;
        const Token token = {query, key, decays, beta, true};
        const float* const from = all.states + (all.reads[row] * all.num_heads + head) * size;
        float* const to = all.states + (all.writes[row] * all.num_heads + head) * size;
        const float* const own = value + i * value_dim;
        int first = advance_blocks<WIDE_VECTORS>(token, all, from, to, own, output, 0);
        first = advance_blocks<BLOCK_VECTORS>(token, all, from, to, own, output, first);
        advance_blocks<1>(token, all, from, to, own, output, first);
        widen(projected + channels + head * value_dim, gate, value_dim);
        norm_and_gate(output, gate, all.norm, output, value_dim, false, false, all.norm_eps);
        T* const result = static_cast<T*>(all.output) + row * values + head * value_dim;
        for (int d = 0; d < value_dim; d += LANES) {
            store_rounded_upto(result + d, load_upto(output + d, value_dim - d), value_dim - d);
        }
    }
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
        int(sizeof(Recurrence)), int(sizeof(Convolution)), int(sizeof(GatedNorm)), int(sizeof(RunningMax)),
        int(sizeof(DeltaStep))};
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

// `width` is 3 or 4. The bits are those of the separate functions. Heads need not wait for each other, so there is one
// parallel region
void manta_delta_step(const DeltaStep* all) {
    parallel_each(int64_t(all->num_rows) * all->num_groups, [&](int64_t unit) {
        const int64_t row = unit / all->num_groups;
        const int group = int(unit % all->num_groups);
        const auto run = [&](auto element) {
            using T = decltype(element);
            all->width == 4 ? step_group<T, 4>(*all, row, group) : step_group<T, 3>(*all, row, group);
        };
        all->dtype == BFLOAT16 ? run(bf16{}) : run(float{});
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
        const int64_t row = unit / all->groups, group = unit % all->groups;
        norm_and_gate(
            all->x + unit * all->size, all->gate + row * all->gate_stride + group * all->size,
            all->weight + (all->has_wide_weight ? group * all->size : 0), all->output + unit * all->size, all->size,
            all->gates_first, all->has_sigmoid, all->eps
        );
    });
}

// Heads of length 1, times `scale`
void manta_unit_heads(const float* x, float* output, int64_t heads, int size, float scale, float eps) {
    parallel_for(heads, heads * size <= SERIAL_NUMBERS, [&](int64_t head) {
        scale_to_unit(x + head * size, output + head * size, size, scale, eps);
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
