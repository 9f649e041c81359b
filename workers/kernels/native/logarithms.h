// Natural logarithms of double, to about 2e-16: IEEE additions, products and divisions in a fixed order, so that every
// machine has the same bits. Those of the C libraries differ in the last one.
#pragma once

#include <cstdint>
#include <cstring>

// log((1 + f) / (1 - f)) for |f| <= 0.1716: twice the series of artanh, whose next term is below 1e-17 of the sum
inline double log_of_ratio(double f) {
    const double square = f * f;
    double sum = 1.0 / 23;
    for (int divisor = 21; divisor > 0; divisor -= 2) sum = sum * square + 1.0 / divisor;
    return 2 * f * sum;
}

// x is positive, finite and normal
inline double log_of(double x) {
    constexpr double LN2_HIGH = 0x1.62e42fee00000p-1, LN2_LOW = 0x1.a39ef35793c76p-33;  // the first has 32 bits: exact
    constexpr double ROOT_2 = 1.4142135623730951;
    int64_t bits;
    memcpy(&bits, &x, sizeof(bits));
    int64_t exponent = (bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffff) | 0x3ff0000000000000;
    double fraction;  // 1 to 2, then 0.7 to 1.4
    memcpy(&fraction, &bits, sizeof(fraction));
    if (fraction > ROOT_2) {
        fraction *= 0.5;
        exponent++;
    }
    const double of_fraction = log_of_ratio((fraction - 1) / (fraction + 1));
    return exponent * LN2_HIGH + (exponent * LN2_LOW + of_fraction);
}

// log(1 + x) for x > -1
inline double log1p_of(double x) {
    return x > -0.25 && x < 0.25 ? log_of_ratio(x / (2 + x)) : log_of(1 + x);
}
