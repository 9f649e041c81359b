// Products of floats, each of which is one sum in the order of the inputs, whose terms are fused. Their bits depend
// neither on the form nor on the other rows. Used by exact.cpp and experts.cpp.
#pragma once

#include <algorithm>
#include <cstdint>

#include "parallel.h"
#include "quantized_floats.h"

template <class X, class W, class Y>
struct HeadProducts {
    static constexpr int ROWS = 4;     // rows that a unit of work multiplies by what it reads of a weight
    static constexpr int VECTORS = 4;  // vectors of outputs of a unit
    static constexpr int AHEAD = 16;   // inputs from the weights in use to those that are fetched
    static constexpr int64_t SERIAL_PRODUCTS = 1 << 17;

    const X* x;       // [rows][heads][inputs], with these strides of rows and heads
    const W* weight;  // [heads][inputs][outputs]
    Y* output;        // [rows][heads][outputs]
    int rows, heads, inputs, outputs, row_stride, head_stride;

    void multiply_all() const {
        const int blocks = (rows + ROWS - 1) / ROWS, width = VECTORS * LANES;
        const int parts = (outputs + width - 1) / width;
        const int64_t products = int64_t(rows) * heads * inputs * outputs;
        parallel_for(int64_t(heads) * blocks * parts, products <= SERIAL_PRODUCTS, [&](int64_t unit) {
            const int part = int(unit % parts), block = int(unit / parts % blocks), head = int(unit / parts / blocks);
            const int count = std::min(ROWS, rows - block * ROWS), first = part * width;
            const int vectors = (std::min(width, outputs - first) + LANES - 1) / LANES;
            with_constant<ROWS>(count, [&](auto num_rows) {
                with_constant<VECTORS>(vectors, [&](auto num_vectors) {
                    multiply<num_rows, num_vectors>(head, block * ROWS, first);
                });
            });
        });
    }

  private:
    // Some rows of a head, and the outputs from `first` on
    template <int COUNT, int WIDTH>
    void multiply(int head, int first_row, int first) const {
        const int left = outputs - first;
        const X* const from = x + int64_t(first_row) * row_stride + int64_t(head) * head_stride;
        const W* columns_of = weight + int64_t(head) * inputs * outputs + first;
        Floats sums[COUNT][WIDTH] = {};
        for (int i = 0; i < inputs; i++, columns_of += outputs) {
            Floats columns[WIDTH];
            for (int v = 0; v < WIDTH; v++) {
                columns[v] = load_upto(columns_of + v * LANES, left - v * LANES);
                if (v * LANES * sizeof(W) % 64 == 0) __builtin_prefetch(columns_of + AHEAD * outputs + v * LANES, 0, 2);
            }
            for (int row = 0; row < COUNT; row++) {
                const Floats value = splat(to_float(from[int64_t(row) * row_stride + i]));
                for (int v = 0; v < WIDTH; v++) sums[row][v] = add_product_exactly(sums[row][v], value, columns[v]);
            }
        }
        for (int row = 0; row < COUNT; row++) {
            Y* const to = output + ((int64_t(first_row) + row) * heads + head) * outputs + first;
            for (int v = 0; v < WIDTH; v++) store_rounded_upto(to + v * LANES, sums[row][v], left - v * LANES);
        }
    }
};
