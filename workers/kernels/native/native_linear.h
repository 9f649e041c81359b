// A linear of any kind, as one kernel calls another: x [num_rows, in_features] -> y [num_rows, out_features], in the
// dtype of the model. What its weights are, and in which precision, is between `run` and `self`. Used by decoder.cpp,
// experts.cpp and gates.cpp; mirrored by `LinearCall` of cpu_linear.py.
#pragma once

#include <cstdint>

struct Linear {
    void (*run)(const void* self, const void* x, void* y, int num_rows);
    const void* self;

    void operator()(const void* x, void* y, int num_rows) const { run(self, x, y, num_rows); }
};

// The pieces of a linear's work, for callers that share out the work of many linears together. Each row is prepared, then
// each panel of outputs is multiplied for all prepared rows, then each row is finished. Pieces of the same stage may run
// on any threads. A piece gets the linear as `self`.
struct LinearParts {
    int64_t (*prepared_bytes)(const void* self, int num_rows);  // a multiple of 64
    // x [in_features] is row `row` of `num_rows`.
    void (*prepare)(const void* self, const void* x, void* prepared, int row, int num_rows);
    int (*num_panels)(const void* self);
    void (*multiply)(const void* self, const void* prepared, void* products, int num_rows, int panel);
    // Fetches the first weights of a panel into a cache.
    void (*fetch)(const void* self, int panel);
    // Makes a row of the linear's results from one of products, which is twice as wide. Null if products are the results.
    void (*finish)(const void* self, const void* products, void* y);
    // With more rows `run` is faster.
    int (*most_rows)(const void* self);
};
