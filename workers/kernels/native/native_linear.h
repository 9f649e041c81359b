// A linear of any kind, as one kernel calls another: x [num_rows, in_features] -> y [num_rows, out_features], in the
// dtype of the model. What its weights are, and in which precision, is between `run` and `self`. Used by decoder.cpp,
// experts.cpp and gates.cpp; mirrored by `LinearCall` of cpu_linear.py.
#pragma once

struct Linear {
    void (*run)(const void* self, const void* x, void* y, int num_rows);
    const void* self;

    void operator()(const void* x, void* y, int num_rows) const { run(self, x, y, num_rows); }
};
