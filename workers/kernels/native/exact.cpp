// Parts of a model that torch computes without the option `exact`: products of floats, each of which is one sum in the
// order of the inputs, the softmax of routers, and logarithms. Their bits depend neither on the form nor on the other
// rows. Called by cpu_exact.py through ctypes.
#include <algorithm>
#include <cstdint>

#include "logarithms.h"
#include "parallel.h"
#include "quantized_floats.h"

namespace {

constexpr int ROWS = 4;     // rows that a unit of work multiplies by what it reads of a weight
constexpr int VECTORS = 4;  // vectors of outputs of a unit
constexpr int64_t SERIAL_PRODUCTS = 1 << 17;
constexpr int64_t SERIAL_NUMBERS = 4096;

template <class T>
struct HeadProducts {
    const T* x;       // [rows][heads][inputs], with these strides of rows and heads
    const T* weight;  // [heads][inputs][outputs]
    T* output;        // [rows][heads][outputs]
    int rows, heads, inputs, outputs, row_stride, head_stride;
};

// Some rows of a head, and the outputs from `first` on
template <class T>
void multiply(const HeadProducts<T>& all, int head, int first_row, int first) {
    const int count = std::min(ROWS, all.rows - first_row), left = all.outputs - first;
    const T* const x = all.x + int64_t(first_row) * all.row_stride + int64_t(head) * all.head_stride;
    const T* weight = all.weight + int64_t(head) * all.inputs * all.outputs + first;
    Floats sums[ROWS][VECTORS] = {};
    for (int i = 0; i < all.inputs; i++, weight += all.outputs) {
        Floats columns[VECTORS];
        for (int v = 0; v < VECTORS; v++) columns[v] = load_upto(weight + v * LANES, left - v * LANES);
        for (int row = 0; row < count; row++) {
            const Floats value = splat(to_float(x[int64_t(row) * all.row_stride + i]));
            for (int v = 0; v < VECTORS; v++) sums[row][v] = add_product_exactly(sums[row][v], value, columns[v]);
        }
    }
    for (int row = 0; row < count; row++) {
        T* const output = all.output + ((int64_t(first_row) + row) * all.heads + head) * all.outputs + first;
        for (int v = 0; v < VECTORS; v++) store_rounded_upto(output + v * LANES, sums[row][v], left - v * LANES);
    }
}

template <class T>
void multiply_all(const HeadProducts<T>& all) {
    const int blocks = (all.rows + ROWS - 1) / ROWS, width = VECTORS * LANES;
    const int parts = (all.outputs + width - 1) / width;
    const int64_t products = int64_t(all.rows) * all.heads * all.inputs * all.outputs;
    parallel_for(int64_t(all.heads) * blocks * parts, products <= SERIAL_PRODUCTS, [&](int64_t unit) {
        const int part = int(unit % parts), block = int(unit / parts % blocks), head = int(unit / parts / blocks);
        multiply(all, head, block * ROWS, part * width);
    });
}

void softmax(const float* x, float* output, int width) {
    float most = x[0];
    for (int i = 1; i < width; i++) most = x[i] > most || x[i] != x[i] ? x[i] : most;
    for (int i = 0; i < width; i += LANES) {
        store_upto(output + i, exp2_of<false>((load_upto(x + i, width - i) - most) * LOG2_E), width - i);
    }
    LaneSums sums = {};
    for (int i = 0; i < width; i += SUM_LANES) {
        for (int v = 0; v < SUM_VECTORS; v++) sums[v] += load_upto(output + i + v * LANES, width - i - v * LANES);
    }
    const float total = total_of(sums);
    for (int i = 0; i < width; i += LANES) {
        store_upto(output + i, load_upto(output + i, width - i) / total, width - i);
    }
}

}  // namespace

extern "C" {

// `HeadProducts` explains the arguments; `dtype` is 0 for float32 and 1 for bfloat16
void manta_head_products(
    int dtype, const void* x, const void* weight, void* output, int rows, int heads, int inputs, int outputs,
    int row_stride, int head_stride
) {
    const auto run = [&](auto element) {
        using T = decltype(element);
        multiply_all(HeadProducts<T>{
            (const T*)x, (const T*)weight, (T*)output, rows, heads, inputs, outputs, row_stride, head_stride});
    };
    dtype == 1 ? run(bf16{}) : run(float{});
}

// The softmax of each of `rows` rows of `width` numbers
void manta_softmax(const float* x, float* output, int64_t rows, int width) {
    parallel_for(rows, rows * width <= SERIAL_NUMBERS, [&](int64_t row) {
        softmax(x + row * width, output + row * width, width);
    });
}

// log(1 + x) for x >= 0
void manta_log1p(const float* x, float* output, int64_t count) {
    for (int64_t i = 0; i < count; i++) output[i] = float(log1p_of(double(x[i])));
}
}
