// The kernels of a decoder layer on the CPU, called by cpu.py through ctypes; reference.py defines what they compute.
// Normalisation, activation and rotary embedding are here, attention is in attention.h. Threads are used only if there
// is enough work to pay for waking them.

#include <cmath>

#include "attention.h"
#include "parallel.h"
#include "quantized_floats.h"
#include "quantized_rows.h"

namespace {

constexpr int64_t PARALLEL_ELEMENTS = 32768;
constexpr int HEAD_DIM_MULTIPLE = 16;  // head sizes that attention supports are multiples of it

enum DType { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3 };  // integers: of caches only

// Two sums in each lane, so that one addition need not wait for the last
template <class T>
MANTA_INLINE float sum_of_squares(const T* x, int count) {
    LaneSums even = {}, odd = {};
    for (int i = 0; i < count; i += 2 * SUM_LANES) {
        for (int v = 0; v < SUM_VECTORS; v++) {
            const int at = i + v * LANES;
            const Floats first = load_upto(x + at, count - at);
            const Floats second = load_upto(x + at + SUM_LANES, count - at - SUM_LANES);
            even[v] += first * first;
            odd[v] += second * second;
        }
    }
    for (int v = 0; v < SUM_VECTORS; v++) even[v] += odd[v];
    return total_of(even);
}

template <class T>
void normalise_row(const T* x, T* residual, const T* weight, T* output, int hidden, float eps) {
    for (int i = 0; residual && i < hidden; i += LANES) {
        const Floats sum = load_upto(x + i, hidden - i) + load_upto(residual + i, hidden - i);
        store_rounded_upto(residual + i, sum, hidden - i);
    }
    const T* source = residual ? residual : x;
    const float inverse = 1.0f / std::sqrt(sum_of_squares(source, hidden) / hidden + eps);
    for (int i = 0; i < hidden; i += LANES) {
        const Floats value = load_upto(source + i, hidden - i) * inverse * load_upto(weight + i, hidden - i);
        store_rounded_upto(output + i, value, hidden - i);
    }
}

template <class T>
void rms_norm_all(const T* x, T* residual, const T* weight, T* output, int rows, int hidden, float eps) {
    parallel_for(rows, int64_t(rows) * hidden <= PARALLEL_ELEMENTS, [&](int64_t row) {
        const int64_t at = row * hidden;
        normalise_row(x + at, residual ? residual + at : nullptr, weight, output + at, hidden, eps);
    });
}

struct RopeShape {
    int num_tokens;
    int num_heads;
    int num_kv_heads;
    int head_dim;
    float eps;
};

// One head: RMS norm if there is a weight, then the rotation of its two halves
template <class T>
MANTA_INLINE void rotate_head(const T* from, T* to, const float* cos, const T* weight, int head_dim, float eps) {
    const int half = head_dim / 2;
    const float* sin = cos + half;
    float inverse = 1.0f;
    if (weight) {
        inverse = 1.0f / std::sqrt(sum_of_squares(from, head_dim) / head_dim + eps);
    }
    for (int i = 0; i < half; i += LANES) {
        const int count = half - i;
        Floats low = load_upto(from + i, count);
        Floats high = load_upto(from + half + i, count);
        if (weight) {
            low = low * inverse * load_upto(weight + i, count);
            high = high * inverse * load_upto(weight + half + i, count);
        }
        const Floats c = load_upto(cos + i, count);
        const Floats s = load_upto(sin + i, count);
        store_rounded_upto(to + i, low * c - high * s, count);
        store_rounded_upto(to + half + i, high * c + low * s, count);
    }
}

// Rounds a token's rotated keys, or its values, to int8: a head at a time, by its largest magnitude
template <class T>
void cache_rounded(const T* heads, int8_t* cache, const CacheLayout<int8_t>& layout, size_t token, int offset) {
    const int head_dim = layout.head_dim;
    for (int head = 0; head < layout.num_kv_heads; head++) {
        const T* from = heads + head * head_dim;
        int32_t total;
        const float scale =
            quantize(from, head_dim, largest_bits(from, head_dim), cache + token + head * head_dim, head_dim, total);
        memcpy(cache + layout.scale(token, offset, head), &scale, sizeof(scale));
    }
}

// Rounds them to four bits, rotated
template <class T>
void cache_rounded(const T* heads, nibbles* cache, const CacheLayout<nibbles>& layout, size_t token, int offset) {
    static thread_local Scratch scratch;
    const int head_dim = layout.head_dim, size = head_dim + ROTATION_SLACK;
    float* const rotated = reinterpret_cast<float*>(scratch.reserve(2 * size * sizeof(float)));
    for (int head = 0; head < layout.num_kv_heads; head++) {
        rotate_from(heads + head * head_dim, head_dim, rotated, rotated + size);
        const float scale = round_to_nibbles(rotated, head_dim, cache + token + head * layout.head_size());
        memcpy(static_cast<void*>(cache + layout.scale(token, offset, head)), &scale, sizeof(scale));
    }
}

template <class T, class C>
void rope_and_cache_all(
    T* qkv, const float* cos_sin, const int64_t* positions, const int64_t* slots, C* k_cache, C* v_cache,
    const T* q_weight, const T* k_weight, const RopeShape& shape, const CacheLayout<C>& layout
) {
    const int head_dim = shape.head_dim;
    const int64_t width = int64_t(shape.num_heads + (v_cache ? 2 : 1) * shape.num_kv_heads) * head_dim;
    const int64_t kv_width = int64_t(shape.num_kv_heads) * head_dim;
    parallel_for(shape.num_tokens, shape.num_tokens * width <= PARALLEL_ELEMENTS, [&](int64_t token) {
        T* query = qkv + token * width;
        T* key = query + int64_t(shape.num_heads) * head_dim;
        const float* cos = cos_sin + positions[token] * head_dim;
        for (int i = 0; i < shape.num_heads * head_dim; i += head_dim) {
            rotate_head(query + i, query + i, cos, q_weight, head_dim, shape.eps);
        }
        const int offset = int(slots[token] % layout.block_size);
        const size_t at = layout.token(slots[token] / layout.block_size, offset);
        if constexpr (CacheLayout<C>::HAS_SCALES) {
            for (int i = 0; i < kv_width; i += head_dim) {
                rotate_head(key + i, key + i, cos, k_weight, head_dim, shape.eps);
            }
            cache_rounded(key, k_cache, layout, at, offset);
            if (v_cache) cache_rounded(key + kv_width, v_cache, layout, at, offset);
        } else {
            for (int i = 0; i < kv_width; i += head_dim) {
                rotate_head(key + i, k_cache + at + i, cos, k_weight, head_dim, shape.eps);
            }
            if (v_cache) memcpy(v_cache + at, key + kv_width, kv_width * sizeof(T));
        }
    });
}

// Calls `run` with an element of the dtype and one of the cache's, which is the same or rounded
template <class Run>
void in_dtypes(int dtype, int cache_dtype, const Run& run) {
    const auto with_cache = [&](auto element) {
        if (cache_dtype == INT8) {
            run(element, int8_t{});
        } else if (cache_dtype == INT4) {
            run(element, nibbles{});
        } else {
            run(element, element);
        }
    };
    dtype == BFLOAT16 ? with_cache(bf16{}) : with_cache(float{});
}

}  // namespace

extern "C" {

int manta_attention_layout(int which) {
    return which == 0 ? HEAD_DIM_MULTIPLE : which == 1 ? INT32_MAX : which == 2 ? KEY_BLOCK : SHORT_QUERY;
}

void manta_rms_norm(
    int dtype, const void* x, void* residual, const void* weight, void* output, int rows, int hidden,
    float eps
) {
    if (dtype == BFLOAT16) {
        rms_norm_all((const bf16*)x, (bf16*)residual, (const bf16*)weight, (bf16*)output, rows, hidden, eps);
    } else {
        rms_norm_all((const float*)x, (float*)residual, (const float*)weight, (float*)output, rows, hidden, eps);
    }
}

// `cache_dtype` is `dtype`, or INT8 or INT4 if head_dim is a multiple of HEAD_DIM_MULTIPLE. A `v_cache` of null: qkv has no
// values
void manta_rope_and_cache(
    int dtype, int cache_dtype, void* qkv, const float* cos_sin, const int64_t* positions, const int64_t* slots,
    void* k_cache, void* v_cache, const void* q_weight, const void* k_weight, int num_tokens, int block_size,
    int64_t block_stride, int num_heads, int num_kv_heads, int head_dim, float eps
) {
    const RopeShape shape = {num_tokens, num_heads, num_kv_heads, head_dim, eps};
    in_dtypes(dtype, cache_dtype, [&](auto element, auto cached) {
        using T = decltype(element);
        using C = decltype(cached);
        rope_and_cache_all(
            (T*)qkv, cos_sin, positions, slots, (C*)k_cache, (C*)v_cache, (const T*)q_weight, (const T*)k_weight, shape,
            CacheLayout<C>{block_size, num_kv_heads, head_dim, block_stride}
        );
    });
}

// head_dim must be a multiple of HEAD_DIM_MULTIPLE; a window of INT32_MAX means none. `Attention` explains the groups,
// caps and sinks.
// With `exact` every form gives the same bits, whatever its products of bfloat16 are
void manta_paged_attention(
    int dtype, int cache_dtype, const void* qkv, int64_t qkv_stride, const void* k_cache, const void* v_cache, void* output,
    const int32_t* query_start, const int32_t* context_lens, const int32_t* block_tables, const int32_t* group_start,
    const int32_t* members, const int32_t* prefix_lens, int num_sequences, int num_groups, int max_blocks,
    int block_size, int64_t block_stride, int num_heads, int num_kv_heads, int head_dim, int window, float scale,
    float logit_cap, const float* sinks, int exact
) {
#if MANTA_DOT
    using Packed = bf16;
#else
    using Packed = float;
#endif
    in_dtypes(dtype, cache_dtype, [&](auto element, auto cached) {
        using T = decltype(element);
        using C = decltype(cached);
        constexpr bool sums_bytes = std::is_same<C, nibbles>::value && HAS_BYTE_PRODUCTS;
        using Rounded = std::conditional_t<sums_bytes, int8_t, Packed>;
        using E = std::conditional_t<std::is_same<T, bf16>::value, Rounded, float>;
        const Attention<T, C> call = {
            (const T*)qkv, (const C*)k_cache, (const C*)v_cache, {block_size, num_kv_heads, head_dim, block_stride}, (T*)output,
            query_start, context_lens, block_tables, group_start, members, prefix_lens, qkv_stride, num_sequences,
            num_groups, max_blocks, num_heads, num_kv_heads, head_dim, window, scale,
            logit_cap, sinks
        };
        exact ? attend_all<T, C, float, !MANTA_FUSES>(call) : attend_all<T, C, E>(call);
    });
}
}
