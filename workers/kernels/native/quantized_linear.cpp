// Entry points of quantised linears: packs weights, rounds activations, and shares the panels out among threads. Called
// by cpu_quantized_linear.py.
#include <atomic>

#include "native_linear.h"
#include "quantized_linear.h"
#include "quantized_tiles.h"

namespace {

constexpr int64_t SERIAL_PRODUCTS = 64 * 1024;  // below this, waking the other threads costs more than it saves
constexpr int LEAST_ROWS_OF_TILES = 8;          // from so many rows on, tiles beat dot products
constexpr int64_t SERIAL_INPUTS = 16 * 1024;    // the same for rounding activations

// A quantised linear, for decoder.cpp, which runs all layers in one call; mirrored in cpu_quantized_linear.py.
struct QuantizedLinear {
    const void *packed, *bias, *input_order, *codebook;
    int dtype, bits, in_features, out_features, group, half_scales, offsets, one_scale, one_input_scale, gated;

    WeightLayout layout() const {
        return {bits, out_features, Groups(in_features, group), half_scales != 0, offsets != 0, one_scale != 0,
                (const int8_t*)codebook};
    }
};

int64_t packed_row(const WeightLayout& layout, int place, bool gated) {
    if (place >= layout.out_features) return -1;
    return gated ? place / 32 * 16 + place % 16 + place / 16 % 2 * (layout.out_features / 2) : place;
}

// One group of a panel: rows[64] of int8 values, null where there is none.
void pack_values(const WeightLayout& layout, const int8_t* const* rows, int first, int count, uint8_t* to) {
    const int zero = layout.bits == 8 ? PACKED_BYTE_ZERO : NIBBLE_ZERO;
    uint8_t codes[256] = {};
    for (int code = 0; layout.codebook && code < 16; code++) codes[(uint8_t)layout.codebook[code]] = code;
    for (int k = 0; k < layout.groups.padded; k += 4)
        for (int n = 0; n < PANEL; n++)
            for (int i = 0; i < 4; i++) {
                const int8_t given = rows[n] && k + i < count ? rows[n][first + k + i] : 0;
                const int value = layout.codebook ? codes[(uint8_t)given] : given + zero;
                if (layout.bits == 8)
                    to[k * PANEL + n * 4 + i] = (uint8_t)value;
                else if (k % 8 == 0)
                    to[k / 8 * PANEL * 4 + n * 4 + i] = (uint8_t)value;
                else
                    to[k / 8 * PANEL * 4 + n * 4 + i] |= (uint8_t)(value << 4);
            }
}

// A float that is a number of float16, as its bits.
uint16_t half_bits(float value) {
    uint32_t word;
    const float scaled = value * 0x1p-112f;
    memcpy(&word, &scaled, sizeof(word));
    return (uint16_t)((word >> 13 & 0x7fff) | (word >> 16 & 0x8000));
}

void pack_scales(const WeightLayout& layout, const float* scales, const int64_t* rows, int stride, int group, char* to) {
    for (int n = 0; n < PANEL; n++) {
        const float value = rows[n] < 0 ? 0.0f : scales[rows[n] * stride + group];
        const uint16_t bits = half_bits(value);
        if (layout.has_half_scales)
            memcpy(to + n * 2, &bits, 2);
        else
            memcpy(to + n * 4, &value, 4);
    }
}

void pack_panel(const WeightLayout& layout, const int8_t* values, const float* scales, const float* offsets, int panel,
                bool gated, char* to) {
    int64_t numbers[PANEL];
    const int8_t* rows[PANEL];
    for (int n = 0; n < PANEL; n++) {
        numbers[n] = packed_row(layout, panel * PANEL + n, gated);
        rows[n] = numbers[n] < 0 ? nullptr : values + numbers[n] * layout.groups.in_features;
    }
    const int stride = layout.has_one_scale ? 1 : layout.groups.groups;
    for (int g = 0; g < layout.groups.groups; g++) {
        pack_values(layout, rows, g * layout.groups.group, layout.groups.size(g),
                    (uint8_t*)to + g * layout.group_bytes());
        if (layout.has_one_scale && g > 0) continue;
        char* const at = to + layout.scales_at(g);
        pack_scales(layout, scales, numbers, stride, g, at);
        if (offsets) pack_scales(layout, offsets, numbers, stride, g, at + layout.scale_bytes());
    }
}

// The room of rounded rows in one piece of memory
int64_t bytes_of_rows(const Groups& groups, int num_rows) {
    const int64_t count = (int64_t)num_rows * groups.groups;
    return ((count + SPARE_ROWS) * groups.padded + 3 * count * sizeof(float) + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
}

QuantizedRows rows_in(void* memory, const Groups& groups, int num_rows) {
    const int64_t count = (int64_t)num_rows * groups.groups;
    int8_t* const values = (int8_t*)memory;
    float* const floats = (float*)(values + (count + SPARE_ROWS) * groups.padded);
    return {num_rows, values, floats, (int32_t*)floats + count, floats + 2 * count};
}

// Row `row` of all, from x [in_features].
template <class T>
void quantize_row_of(const QuantizedLinear& linear, const T* x, const Groups& groups, const QuantizedRows& to, int row) {
    if (!linear.input_order) return quantize_row(x, groups, linear.one_input_scale, to, row);
    const int64_t* const order = (const int64_t*)linear.input_order;
    T* const ordered = of_thread<T, 2>(linear.in_features);
    for (int i = 0; i < linear.in_features; i++) ordered[i] = x[order[i]];
    quantize_row(ordered, groups, linear.one_input_scale, to, row);
}

#if MANTA_AMX
template <class T>
void multiply_by_tiles(const QuantizedProduct<T>& product, int threads, Shares& shares) {
    const int num_rows = product.rows.num_rows;
    const int64_t row_bytes = (int64_t)product.layout.groups.groups * product.layout.groups.padded;
    const int blocks = 1 + num_rows * row_bytes / (INPUT_BLOCK_BYTES + 1);
    parallel(threads, [&](int thread) {
        QuantizedTiles<T> tiles(product);
        Share share{shares, thread};
        if (blocks == 1) {
            while (share.take(1)) tiles.multiply_panel(share.first, 0, num_rows);
        } else if (share.take_own()) {
            for (int block = 0; block < blocks; block++)
                for (int panel = share.first; panel < share.last; panel++)
                    tiles.multiply_panel(panel, (int64_t)num_rows * block / blocks,
                                         (int64_t)num_rows * (block + 1) / blocks);
        }
    });
}
#endif

template <class T>
QuantizedProduct<T> product_of(const QuantizedLinear& linear, const WeightLayout& layout, T* y, const QuantizedRows& rows,
                               const float* const* addends = nullptr) {
    return {layout, (const char*)linear.packed, (const T*)linear.bias, y, rows, linear.gated != 0, addends};
}

template <class T>
void run(const QuantizedLinear& linear, const T* x, T* y, int num_rows, const float* const* addends = nullptr) {
    const WeightLayout layout = linear.layout();
    void* const memory = of_thread<char, 4>(bytes_of_rows(layout.groups, num_rows));
    const QuantizedRows rows = rows_in(memory, layout.groups, num_rows);
    parallel_for(num_rows, (int64_t)num_rows * linear.in_features < SERIAL_INPUTS, [&](int64_t row) {
        quantize_row_of(linear, x + row * linear.in_features, layout.groups, rows, int(row));
    });
    const auto product = product_of(linear, layout, y, rows, addends);
    const bool serial = (int64_t)num_rows * linear.in_features * linear.out_features < SERIAL_PRODUCTS;
    const int threads = serial ? 1 : max_threads();
    Shares shares(layout.panels(), threads);
#if MANTA_AMX
    if (num_rows >= LEAST_ROWS_OF_TILES && tiles_granted()) return multiply_by_tiles(product, threads, shares);
#endif
    parallel(threads, [&](int thread) {
        Share share{shares, thread};
        while (share.take(1))
            for (int panel = share.first; panel < share.last; panel++) product.multiply_panel(panel);
    });
}

// ---- the pieces of the work (native_linear.h)

int64_t prepared_bytes(const void* self, int num_rows) {
    return bytes_of_rows(((const QuantizedLinear*)self)->layout().groups, num_rows);
}

void prepare(const void* self, const void* x, void* prepared, int row, int num_rows) {
    const QuantizedLinear& l = *(const QuantizedLinear*)self;
    const Groups groups = l.layout().groups;
    const QuantizedRows rows = rows_in(prepared, groups, num_rows);
    if (l.dtype == 0)
        quantize_row_of(l, (const float*)x, groups, rows, row);
    else
        quantize_row_of(l, (const bf16*)x, groups, rows, row);
}

int num_panels(const void* self) {
    return ((const QuantizedLinear*)self)->layout().panels();
}

void multiply(const void* self, const void* prepared, void* products, int num_rows, int panel) {
    const QuantizedLinear& l = *(const QuantizedLinear*)self;
    const WeightLayout layout = l.layout();
    const QuantizedRows rows = rows_in((void*)prepared, layout.groups, num_rows);
    if (l.dtype == 0)
        product_of(l, layout, (float*)products, rows).multiply_panel(panel);
    else
        product_of(l, layout, (bf16*)products, rows).multiply_panel(panel);
}

void fetch(const void* self, int panel) {
    const QuantizedLinear& l = *(const QuantizedLinear*)self;
    const int64_t bytes = l.layout().panel_bytes();
    const char* const begin = (const char*)l.packed + panel * bytes;
    for (int64_t at = 0; at < std::min(bytes, AHEAD_BYTES); at += LINE_BYTES)
        __builtin_prefetch(begin + at, 0, INTO_SECOND);
}

int most_rows(const void*) {
#if MANTA_AMX
    if (tiles_granted()) return LEAST_ROWS_OF_TILES - 1;
#endif
    return BLOCK_ROWS;
}

}  // namespace

extern "C" const LinearParts manta_quantized_linear_parts = {
    prepared_bytes, prepare, num_panels, multiply, fetch, nullptr, most_rows};

// [0]: the size of a QuantizedLinear
extern "C" int manta_quantized_layout(int which) {
    return which == 0 ? (int)sizeof(QuantizedLinear) : 0;
}

// Bytes of a packed weight; `group` inputs have a scale of the activations, and of the weight unless `one_scale`.
extern "C" int64_t manta_quantized_bytes(int bits, int out_features, int in_features, int group, int half_scales,
                                         int offsets, int one_scale) {
    const WeightLayout layout = {bits, out_features, Groups(in_features, group), half_scales != 0, offsets != 0,
                                 one_scale != 0, nullptr};
    return layout.panels() * layout.panel_bytes();
}

// values int8 [out_features, in_features]; scales and offsets (or null) float [out_features, groups], or [out_features]
// if `one_scale`. If gated, half of out_features must be divisible by 16. Of 4 bits with a codebook int8 [16], each
// value is one of it.
extern "C" void manta_pack_quantized(const void* values, const void* scales, const void* offsets, const void* codebook,
                                     void* packed, int bits, int out_features, int in_features, int group,
                                     int half_scales, int one_scale, int gated) {
    const WeightLayout layout = {bits, out_features, Groups(in_features, group), half_scales != 0, offsets != nullptr,
                                 one_scale != 0, (const int8_t*)codebook};
    ask_for_huge_pages(packed, layout.panels() * layout.panel_bytes());
    parallel_for(layout.panels(), false, [&](int64_t panel) {
        pack_panel(layout, (const int8_t*)values, (const float*)scales, (const float*)offsets, panel, gated != 0,
                   (char*)packed + panel * layout.panel_bytes());
    });
}

// x [num_rows, in_features] -> y [num_rows, out_features], or half as wide if gated, both of dtype 0: float32 or 1:
// bfloat16. bias [out_features] is in the order of packing, or null; input_order int64 [in_features], or null; codebook
// is that of packing.
extern "C" void manta_quantized_linear(int dtype, const void* x, const void* packed, const void* bias,
                                       const void* input_order, const void* codebook, void* y, int num_rows,
                                       int bits, int in_features, int out_features, int group, int half_scales,
                                       int offsets, int one_scale, int one_input_scale, int gated) {
    const QuantizedLinear linear = {packed,       bias,  input_order, codebook, dtype,     bits,           in_features,
                                    out_features, group, half_scales, offsets,  one_scale, one_input_scale, gated};
    if (dtype == 0)
        run(linear, (const float*)x, (float*)y, num_rows);
    else
        run(linear, (const bf16*)x, (bf16*)y, num_rows);
}

// `manta_quantized_linear` with the signature by which decoder.cpp calls every linear; `linear` is a QuantizedLinear.
extern "C" void manta_run_quantized_linear(const void* linear, const void* x, void* y, int num_rows) {
    const QuantizedLinear& l = *(const QuantizedLinear*)linear;
    if (l.dtype == 0)
        run(l, (const float*)x, (float*)y, num_rows);
    else
        run(l, (const bf16*)x, (bf16*)y, num_rows);
}

// The same, with floats that are added to the sums of each row before the bias, or null for a row.
extern "C" void manta_run_quantized_linear_adding(const void* linear, const void* x, void* y, int num_rows,
                                                  const float* const* addends) {
    const QuantizedLinear& l = *(const QuantizedLinear*)linear;
    if (l.dtype == 0)
        run(l, (const float*)x, (float*)y, num_rows, addends);
    else
        run(l, (const bf16*)x, (bf16*)y, num_rows, addends);
}
