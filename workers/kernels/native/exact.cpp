// Products of heads, of which routers are one, and logarithms. Their bits depend
// neither on the form nor on the other rows. Called by cpu_exact.py and cpu_products.py through ctypes.
#include "head_products.h"
#include "logarithms.h"

extern "C" {

// `HeadProducts` explains the arguments; `dtype`, of x and the output, and `weight_dtype` are 0 for float32 and 1 for
// bfloat16. A weight of float32 has no x of bfloat16
void manta_head_products(
    int dtype, int weight_dtype, const void* x, const void* weight, void* output, int rows, int heads, int inputs, int outputs,
    int row_stride, int head_stride
) {
    const auto run = [&](auto element, auto weight_element) {
        using T = decltype(element);
        using W = decltype(weight_element);
        const HeadProducts<T, W, T> products = {
            (const T*)x, (const W*)weight, (T*)output, rows, heads, inputs, outputs, row_stride, head_stride};
        products.multiply_all();
    };
    dtype == 1 ? run(bf16{}, bf16{}) : weight_dtype == 1 ? run(float{}, bf16{}) : run(float{}, float{});
}

// log(1 + x) for x >= 0
void manta_log1p(const float* x, float* output, int64_t count) {
    for (int64_t i = 0; i < count; i++) output[i] = float(log1p_of(double(x[i])));
}
}
