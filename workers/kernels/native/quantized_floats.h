// The float operations of quantised linears, each rounded by itself: no form fuses a product with a sum, and all have
// one exponential. So every form gives the same bits, as does the torch fallback of quantized_reference.py.
#pragma once

#include "simd.h"

// a * b, rounded: the compiler cannot fuse it with what follows.
MANTA_INLINE Floats product(Floats a, Floats b) {
    Floats value = a * b;
#if defined(__x86_64__)
#if defined(__AVX512F__)
    asm("" : "+v"(value));
#else
    asm("" : "+x"(value));
#endif
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#else
    asm("" : "+m"(value));
#endif
    return value;
}

MANTA_INLINE Floats to_floats(Ints value) {
    return __builtin_convertvector(value, Floats);
}

// 2^x for -126 <= x <= 126, to a relative error of 2e-7.
MANTA_INLINE Floats separate_exp2(Floats x) {
    const Floats shift = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
    const Floats shifted = x + shift;
    const Floats fraction = x - (shifted - shift);
    Floats result = splat(0.0013276471518576605f);
    result = product(result, fraction) + 0.00967554133065924f;
    result = product(result, fraction) + 0.055507132749638484f;
    result = product(result, fraction) + 0.24022119723934343f;
    result = product(result, fraction) + 0.6931469670638635f;
    result = product(result, fraction) + 1.0000000716546553f;
    return product(result, (Floats)(((Ints)shifted + 127) << 23));
}

// x * sigmoid(x). NaN stays NaN.
MANTA_INLINE Floats separate_silu(Floats x) {
    Floats exponent = product(x, splat(LOG2_E));
    exponent = maximum(splat(-126.0f), exponent);
    exponent = -maximum(splat(-126.0f), -exponent);
    return x / (1.0f + separate_exp2(-exponent));
}

MANTA_INLINE void store_rounded(float* to, Floats value) {
    store(to, value);
}

// To nearest even, subnormal numbers too, which AVX-512's own instruction takes for zero.
MANTA_INLINE void store_rounded(bf16* to, Floats value) {
#if defined(__AVX512BF16__)
    if (!_mm512_fpclass_ps_mask((__m512)value, 0x20)) {  // none is subnormal
        const __m256bh nearest = _mm512_cvtneps_pbh((__m512)value);
        memcpy(to, &nearest, sizeof(nearest));
        return;
    }
#endif
    const Words word = (Words)value;
    const Words rounded = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    const Halves bits = __builtin_convertvector(value == value ? rounded : (word >> 16) | 0x40, Halves);
    memcpy(to, &bits, sizeof(bits));
}

template <class T>
MANTA_INLINE void store_rounded_upto(T* to, Floats value, int count) {
    if (count >= LANES) return store_rounded(to, value);
    if (count <= 0) return;
    T padded[LANES];
    store_rounded(padded, value);
    memcpy(to, padded, count * sizeof(T));
}
