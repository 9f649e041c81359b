// The layers of workers/decoders/decoder.py in one call: the same kernels in the same order. It spares a step what Python
// does between them, 8 calls a layer, and leaves the interpreter to others throughout. Called by cpu_decoder.py, whose
// structures mirror these.
#include <algorithm>
#include <cstdint>

#include "native_linear.h"

// Of cpu.cpp.
extern "C" {
void manta_rms_norm(int dtype, const void* x, void* residual, const void* weight, void* output, int rows, int hidden,
                    float eps);
void manta_rope_and_cache(int dtype, int cache_dtype, void* qkv, const float* cos_sin, const int64_t* positions,
                          const int64_t* slots, void* k_cache, void* v_cache, const void* q_weight,
                          const void* k_weight, int num_tokens, int block_size, int64_t block_stride, int num_heads,
                          int num_kv_heads, int head_dim, float eps);
void manta_paged_attention(int dtype, int cache_dtype, const void* qkv, int64_t qkv_stride, const void* k_cache,
                           const void* v_cache, void* output, const int32_t* query_start, const int32_t* context_lens,
                           const int32_t* block_tables, const int32_t* group_start, const int32_t* members,
                           const int32_t* prefix_lens, int num_sequences, int num_groups, int max_blocks,
                           int block_size, int64_t block_stride, int num_heads, int num_kv_heads, int head_dim,
                           int window, float scale, float logit_cap, const float* sinks, int exact);
}

namespace {

constexpr int BFLOAT16 = 1;

struct Layer {
    const void *input_norm, *q_norm, *k_norm, *mlp_norm;
    Linear qkv, attention_output, gated, down;
    Linear mixture;  // of experts, in the place of `gated` and `down`; null for none
    void *k_cache, *v_cache;
    const float *cos_sin, *sinks;
    int window;
    int group;  // whose slots and block tables it uses
};

struct Shape {
    int dtype, cache_dtype, hidden, num_heads, num_kv_heads, head_dim;
    int exact;  // attention gives the same bits in every form
    int block_stride;  // elements from a block of a cache to the next one
    float eps, scale, logit_cap;
};

// What `AttentionMetadata` says; no groups are null. `slots` and `block_tables` are those of the first group of layers,
// `other_slots` and `other_tables` those of the further ones, or null if all layers have the same blocks.
struct Step {
    const int64_t *positions, *slots;
    const int32_t *query_start, *context_lens, *block_tables;
    const int64_t* const* other_slots;
    const int32_t* const* other_tables;
    const int32_t *group_start, *members, *prefix_lens;
    int num_tokens, num_sequences, num_groups, max_blocks, block_size;
};

// [num_tokens] rows each but `gated`, which has `mlp_rows`.
struct Buffers {
    char *residual, *normed, *qkv, *attended, *gated, *update;
    int mlp_rows;
};

}  // namespace

extern "C" int manta_decoder_layout(int which) {
    return which == 0   ? sizeof(Linear)
           : which == 1 ? sizeof(Layer)
           : which == 2 ? sizeof(Shape)
           : which == 3 ? sizeof(Step)
                        : sizeof(Buffers);
}

// embedded tokens in `residual` -> output [num_tokens, hidden], after the last norm; all in the shape's dtype.
extern "C" void manta_decoder(const Shape* shape, const Layer* layers, int num_layers, const void* final_norm,
                              const Step* step, const Buffers* buffers, void* output) {
    const Shape& s = *shape;
    const Buffers& b = *buffers;
    const int rows = step->num_tokens;
    const auto norm = [&](const void* x, void* residual, const void* weight, void* to) {
        manta_rms_norm(s.dtype, x, residual, weight, to, rows, s.hidden, s.eps);
    };
    const int qkv_width = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim;
    for (int i = 0; i < num_layers; i++) {
        const Layer& layer = layers[i];
        if (i == 0)
            norm(b.residual, nullptr, layer.input_norm, b.normed);
        else
            norm(b.update, b.residual, layer.input_norm, b.normed);
        const bool is_first_group = layer.group == 0 || step->other_slots == nullptr;
        const int64_t* slots = is_first_group ? step->slots : step->other_slots[layer.group - 1];
        const int32_t* block_tables = is_first_group ? step->block_tables : step->other_tables[layer.group - 1];
        layer.qkv(b.normed, b.qkv, rows);
        manta_rope_and_cache(s.dtype, s.cache_dtype, b.qkv, layer.cos_sin, step->positions, slots, layer.k_cache,
                             layer.v_cache, layer.q_norm, layer.k_norm, rows, step->block_size, s.block_stride, s.num_heads,
                             s.num_kv_heads, s.head_dim, s.eps);
        // A window may end inside a prefix, and other groups share other blocks
        const int num_groups = layer.window == INT32_MAX && is_first_group ? step->num_groups : 0;
        manta_paged_attention(s.dtype, s.cache_dtype, b.qkv, qkv_width, layer.k_cache, layer.v_cache, b.attended,
                              step->query_start, step->context_lens, block_tables, step->group_start,
                              step->members, step->prefix_lens, step->num_sequences, num_groups, step->max_blocks,
                              step->block_size, s.block_stride, s.num_heads, s.num_kv_heads, s.head_dim, layer.window, s.scale,
                              s.logit_cap, layer.sinks, s.exact);
        layer.attention_output(b.attended, b.update, rows);
        norm(b.update, b.residual, layer.mlp_norm, b.normed);
        if (layer.mixture.run) {
            layer.mixture(b.normed, b.update, rows);
            continue;
        }
        const int64_t row_bytes = s.hidden * (s.dtype == BFLOAT16 ? 2 : 4);
        for (int first = 0; first < rows; first += b.mlp_rows) {
            const int count = std::min(b.mlp_rows, rows - first);
            layer.gated(b.normed + first * row_bytes, b.gated, count);
            layer.down(b.gated, b.update + first * row_bytes, count);
        }
    }
    norm(b.update, b.residual, final_norm, output);
}
