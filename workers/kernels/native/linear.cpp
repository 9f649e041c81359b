// Entry points of the linears: packs weights and chooses the form that multiplies. Called by cpu_linear.py.
#include "linear.h"
#include "linear_tiles.h"
#include "linear_vectors.h"
#include "native_linear.h"
#include "strip_packing.h"

constexpr int FEW_ROWS_OF_TILES = 3;  // from so many rows on, a tile, however empty, beats dot products
constexpr int SHARED_ROWS_OF_TILES = 256;  // from so many rows a thread on, threads split the rows, not the outputs
constexpr int64_t SERIAL_PRODUCTS = 32 * 1024;  // below this, waking the other threads costs more than it saves

// weight [out_features] rows of `bytes` -> strips of [units][32]
static void pack(const char* weight, int32_t* packed, int out_features, int64_t bytes, int64_t units, bool gated) {
    const int panels = panels_of(out_features);
    ask_for_huge_pages(packed, panels * PANEL * units * 4);  // fewer page faults now, fewer TLB misses later
    parallel_for(2 * panels, false, [&](int64_t strip) {
        pack_strip(weight, packed + strip * units * STRIP, strip, out_features, bytes, units, gated);
    });
}

template <class T>
static void multiply_by_vectors(const Product<T>& product, int threads, Shares& shares) {
    if (threads > 1 && product.num_rows >= SHARED_ROWS_OF_VECTORS * threads)
        return parallel(threads, [&](int thread) {
            const int64_t rows = product.num_rows;
            const VectorProduct<T> part(product.of_rows(rows * thread / threads, rows * (thread + 1) / threads));
            Shares all(panels_of(product.out_features), 1);
            part.by_blocks({all, 0}, true);
        });
    const VectorProduct<T> whole(product);
    parallel(threads, [&](int thread) {
        if (product.num_rows <= whole.most_few_rows())
            whole.by_rows({shares, thread});
        else
            whole.by_blocks({shares, thread}, false);
    });
}

#if MANTA_AMX
static void multiply_by_tiles(const Product<bf16>& product, int threads, Shares& shares) {
    const TileProduct whole(product);
    const bool shares_rows = product.num_rows >= SHARED_ROWS_OF_TILES * threads;
    parallel(threads, [&](int thread) {
        if (shares_rows) {
            const int64_t tiles = (product.num_rows + TILES_ROWS - 1) / TILES_ROWS;
            const int first = tiles * thread / threads * TILES_ROWS, end = tiles * (thread + 1) / threads * TILES_ROWS;
            const TileProduct part(product.of_rows(first, std::min(end, product.num_rows)));
            Shares all(panels_of(product.out_features), 1);
            part.by_tiles({all, 0}, true);
        } else if (product.num_rows > 16) {
            whole.by_tiles({shares, thread}, false);
        } else {
            whole.by_row_of_tiles({shares, thread});
        }
    });
}
#endif

template <class T>
static void multiply(const Product<T>& product) {
    const int panels = panels_of(product.out_features);
    const bool serial = (int64_t)product.num_rows * product.in_features * product.out_features < SERIAL_PRODUCTS;
    const int threads = serial ? 1 : max_threads();
    Shares shares(panels, threads);
#if MANTA_AMX
    if constexpr (Product<T>::PAIR == 2)
        if (tiles_granted() && product.num_rows >= FEW_ROWS_OF_TILES) return multiply_by_tiles(product, threads, shares);
#endif
    multiply_by_vectors(product, threads, shares);
}

// The rows, padded with zeros to a multiple of STEP, in memory of the caller's thread.
template <class T>
static const T* padded_rows(const T* x, int num_rows, int in_features, int padded) {
    T* const rows = of_thread<T, 1>((int64_t)num_rows * padded);
    for (int64_t row = 0; row < num_rows; row++) {
        memcpy(rows + row * padded, x + row * in_features, in_features * sizeof(T));
        std::fill_n(rows + row * padded + in_features, padded - in_features, T{});
    }
    return rows;
}

// A packed linear, for decoder.cpp, which runs all layers in one call; mirrored in cpu_linear.py.
struct PackedLinear {
    const void *packed, *bias;
    const void* exceptions;  // of weights that lie as lossless.h says; null for others
    int dtype, in_features, out_features, gate;
};

template <class T>
static VectorProduct<T> product_of(const PackedLinear& l, void* y, int num_rows) {
    const int padded = padded_inputs(l.in_features);
    Product<T> product{nullptr, (const T*)l.packed, (const T*)l.bias, (T*)y, num_rows, padded, l.out_features, l.gate};
    if (l.exceptions) product.lossless = Lossless(l.packed, l.exceptions, chunks_of(l.out_features, l.in_features));
    return VectorProduct<T>(product);
}

template <class T>
static void linear(const PackedLinear& l, const void* from, void* y, int num_rows, const float* const* addends) {
    Product<T> product = product_of<T>(l, y, num_rows);
    product.x = (const T*)from, product.addends = addends;
    if (product.in_features != l.in_features)
        product.x = padded_rows(product.x, num_rows, l.in_features, product.in_features);
    multiply(product);
}

// Calls body(product) with a product of the linear's dtype.
template <class Body>
static auto with_product(const void* self, void* y, int num_rows, const Body& body) {
    const PackedLinear& l = *(const PackedLinear*)self;
    return l.dtype == 0 ? body(product_of<float>(l, y, num_rows)) : body(product_of<bf16>(l, y, num_rows));
}

// ---- the pieces of the work (native_linear.h)

static int64_t prepared_bytes(const void* self, int num_rows) {
    return with_product(self, nullptr, num_rows, [&](const auto& product) {
        using Input = typename std::decay_t<decltype(product)>::Input;
        return (int64_t)((num_rows * product.few_rows_stride() * sizeof(Input) + 63) / 64 * 64);
    });
}

static void prepare(const void* self, const void* x, void* prepared, int row, int num_rows) {
    const int in_features = ((const PackedLinear*)self)->in_features;
    with_product(self, nullptr, num_rows, [&](const auto& product) { product.prepare(x, in_features, prepared, row); });
}

static int num_panels(const void* self) {
    return panels_of(((const PackedLinear*)self)->out_features);
}

static void multiply(const void* self, const void* prepared, void* products, int num_rows, int panel) {
    with_product(self, products, num_rows, [&](const auto& product) {
        using Input = typename std::decay_t<decltype(product)>::Input;
        product.few_rows_times_panel((const Input*)prepared, panel);
    });
}

static void fetch(const void* self, int panel) {
    with_product(self, nullptr, 0, [&](const auto& product) {
        const int64_t bytes = AHEAD_OF_ROWS * product.bytes_of_two() / 2;
        for (int strip = 2 * panel; strip < 2 * panel + 2; strip++)
            for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(product.stored(strip, 0) + at, 0, 2);
    });
}

static int most_rows(const void* self) {
#if MANTA_AMX
    if (((const PackedLinear*)self)->dtype == 1 && tiles_granted()) return FEW_ROWS_OF_TILES - 1;
#endif
    return with_product(self, nullptr, 0, [](const auto& product) { return product.most_few_rows(); });
}

extern "C" const LinearParts manta_packed_linear_parts = {
    prepared_bytes, prepare, num_panels, multiply, fetch, nullptr, most_rows};

extern "C" int manta_linear_layout(int which) {
    return which == 0 ? (int)sizeof(PackedLinear) : which == 1 ? PANEL : which == 2 ? STEP : STRIP / 2;
}

// dtype 0: float32, 1: bfloat16. packed [out_features rounded up to PANEL][in_features rounded up to STEP]. If gated,
// half of out_features must be divisible by 16.
extern "C" void manta_pack_linear(int dtype, const void* weight, void* packed, int out_features, int in_features,
                                  int gated) {
    const int64_t padded = padded_inputs(in_features), size = dtype == 0 ? 4 : 2;
    pack((const char*)weight, (int32_t*)packed, out_features, in_features * size, padded * size / 4, gated != 0);
}

// x [num_rows, in_features] -> y [num_rows, out_features], or half as wide with a gate (simd.h), if it is not 0. The bias
// [out_features] is in the order of packing, or null. `addends` are floats that are added to the sums of each row before
// the bias, or null for a row. `linear` is a PackedLinear.
extern "C" void manta_run_packed_linear_adding(const void* self, const void* x, void* y, int num_rows,
                                               const float* const* addends) {
    const PackedLinear& l = *(const PackedLinear*)self;
    if (l.dtype == 0)
        linear<float>(l, x, y, num_rows, addends);
    else
        linear<bf16>(l, x, y, num_rows, addends);
}

// The same without addends.
extern "C" void manta_linear(int dtype, const void* x, const void* packed, const void* bias, const void* exceptions,
                             void* y, int num_rows, int in_features, int out_features, int gate) {
    const PackedLinear linear{packed, bias, exceptions, dtype, in_features, out_features, gate};
    manta_run_packed_linear_adding(&linear, x, y, num_rows, nullptr);
}

// The same, with the signature by which decoder.cpp calls every linear.
extern "C" void manta_run_packed_linear(const void* linear, const void* x, void* y, int num_rows) {
    manta_run_packed_linear_adding(linear, x, y, num_rows, nullptr);
}

extern "C" void manta_set_num_threads(int threads) {
    configured_threads = threads;
}
