// Gates behind a linear that computes gates and what they let through, one after the other. Called by cpu_gates.py, and by
// decoder.cpp and experts.cpp as a linear.
#include <algorithm>

#include "activations.h"
#include "linear.h"
#include "native_linear.h"
#include "parallel.h"

namespace {

constexpr int64_t PARALLEL_ELEMENTS = 32768;
constexpr int64_t BLOCK_ELEMENTS = 1 << 20;  // of gates and what they let through, which a linear computes at a time

struct Gate {
    int kind;
    float limit;
};

// Numbers [first, last) of one row.
template <class T>
void gate_part(const Gate& gate, const T* gate_up, T* output, int first, int last, int intermediate) {
    for (int i = first; i < last; i += LANES) {
        const Floats value = load_upto(gate_up + i, last - i), up = load_upto(gate_up + intermediate + i, last - i);
        store_rounded_upto(output + i, let_through(gate.kind, gate.limit, value, up), last - i);
    }
}

template <class T>
void gate_all(const Gate& gate, const T* gate_up, T* output, int rows, int intermediate) {
    constexpr int CHUNK = 1024;
    const int chunks = (intermediate + CHUNK - 1) / CHUNK;
    parallel_for(int64_t(rows) * chunks, int64_t(rows) * intermediate <= PARALLEL_ELEMENTS, [&](int64_t piece) {
        const int64_t row = piece / chunks;
        const int first = int(piece % chunks) * CHUNK;
        const int last = std::min(first + CHUNK, intermediate);
        gate_part(gate, gate_up + row * 2 * intermediate, output + row * intermediate, first, last, intermediate);
    });
}

// Mirrors _GatedLinear of cpu_gates.py
struct GatedLinear {
    const Linear* linear;  // to twice the width
    const LinearParts* parts;  // of the linear, or null
    int dtype, width, in_features, kind;
    int is_whole;  // the linear needs all rows of a call together, because they differ by sequence
    float limit;
};

template <class T>
void run(const GatedLinear& gated, const T* x, T* y, int num_rows) {
    const int most = gated.is_whole ? std::max(1, num_rows) : std::max(1, int(BLOCK_ELEMENTS / (2 * gated.width)));
    T* const gate_up = of_thread<T>(int64_t(std::min(most, num_rows)) * 2 * gated.width);
    for (int first = 0; first < num_rows; first += most) {
        const int count = std::min(most, num_rows - first);
        (*gated.linear)(x + int64_t(first) * gated.in_features, gate_up, count);
        gate_all({gated.kind, gated.limit}, gate_up, y + int64_t(first) * gated.width, count, gated.width);
    }
}

// ---- the pieces of the work (native_linear.h)

const GatedLinear& of(const void* self) {
    return *(const GatedLinear*)self;
}

int64_t prepared_bytes(const void* self, int num_rows) {
    return of(self).parts->prepared_bytes(of(self).linear->self, num_rows);
}

void prepare(const void* self, const void* x, void* prepared, int row, int num_rows) {
    of(self).parts->prepare(of(self).linear->self, x, prepared, row, num_rows);
}

int num_panels(const void* self) {
    return of(self).parts->num_panels(of(self).linear->self);
}

void multiply(const void* self, const void* prepared, void* products, int num_rows, int panel) {
    of(self).parts->multiply(of(self).linear->self, prepared, products, num_rows, panel);
}

void fetch(const void* self, int panel) {
    of(self).parts->fetch(of(self).linear->self, panel);
}

void finish(const void* self, const void* products, void* y) {
    const GatedLinear& gated = of(self);
    if (gated.dtype == 1)
        gate_part({gated.kind, gated.limit}, (const bf16*)products, (bf16*)y, 0, gated.width, gated.width);
    else
        gate_part({gated.kind, gated.limit}, (const float*)products, (float*)y, 0, gated.width, gated.width);
}

int most_rows(const void* self) {
    return of(self).parts->most_rows(of(self).linear->self);
}

}  // namespace

extern "C" const LinearParts manta_gated_linear_parts = {
    prepared_bytes, prepare, num_panels, multiply, fetch, finish, most_rows};

extern "C" {

int manta_gates_layout(int) {
    return sizeof(GatedLinear);
}

// gate_up [rows, 2 * intermediate] -> output [rows, intermediate], of dtype 0: float32 or 1: bfloat16. `let_through`
// explains `kind` and `limit`.
void manta_gate(int dtype, int kind, float limit, const void* gate_up, void* output, int rows, int intermediate) {
    const Gate gate = {kind, limit};
    if (dtype == 1) {
        gate_all(gate, (const bf16*)gate_up, (bf16*)output, rows, intermediate);
    } else {
        gate_all(gate, (const float*)gate_up, (float*)output, rows, intermediate);
    }
}

// x [num_rows, in_features] -> y [num_rows, width], of a GatedLinear
void manta_run_gated_linear(const void* self, const void* x, void* y, int num_rows) {
    const GatedLinear& gated = *(const GatedLinear*)self;
    if (gated.dtype == 1) {
        run(gated, (const bf16*)x, (bf16*)y, num_rows);
    } else {
        run(gated, (const float*)x, (float*)y, num_rows);
    }
}
}
