// Functions of single numbers, and gates (Shazeer, 2020): `function(gate) * up`. They have the same bits in every form.
#pragma once

#include "quantized_floats.h"

MANTA_INLINE Floats sigmoid_of(Floats x) {
    const Floats exponent = maximum(splat(-126.0f), x * LOG2_E);  // so that 2^-x stays finite; a NaN passes
    return 1.0f / (1.0f + exp2_of<false>(-exponent));
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

// The gates that no linear fuses, by the numbers of ALL_GATE_KINDS in cpu_linear.py, which come after those of simd.h
constexpr int GELU = 3, CLAMPED = 4;

MANTA_INLINE Floats at_most(Floats x, float limit) {
    return x > splat(limit) ? splat(limit) : x;  // NaN stays NaN
}

MANTA_INLINE Floats within(Floats x, float limit) {
    const Floats upper = at_most(x, limit);
    return upper < splat(-limit) ? splat(-limit) : upper;
}

// gpt-oss's gate: both sides are bounded, a sigmoid of 1.702 times the gate, and one added to what is let through
MANTA_INLINE Floats clamped_gate(Floats gate, Floats up) {
    constexpr float LIMIT = 7.0f, SLOPE = 1.702f;
    const Floats bounded = at_most(gate, LIMIT);
    return (within(up, LIMIT) + 1.0f) * (bounded * sigmoid_of(bounded * SLOPE));
}

// A gate of kind `kind`; `limit` bounds the gate from above and what it lets through from both sides, unless it is 0
MANTA_INLINE Floats let_through(int kind, float limit, Floats gate, Floats up) {
    if (limit != 0) gate = at_most(gate, limit), up = within(up, limit);
    if (kind == CLAMPED) return clamped_gate(gate, up);
    return (kind == GELU ? gelu_of(gate) : gate_of<false>(kind, gate)) * up;
}
