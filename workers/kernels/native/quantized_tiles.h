// Products of int8 by AMX's tiles, for calls with enough rows: the sums of QuantizedProduct, scaled in the same order.
// Used by quantized_linear.cpp.
//
// A tile of inputs is 16 rows of 64 inputs, or of fewer where groups are smaller. All 64 outputs of a panel are
// multiplied at once, in four tiles of sums. Beside each such unit of work the vector units scale the sums of an earlier
// one. With 512 rows and groups of 128, leaving out the scaling saved 12 to 23% of the time.
#pragma once

#include "quantized_linear.h"
#include "tiles.h"

#if MANTA_AMX
constexpr int INPUT_ROWS = 16;     // of a tile of inputs
constexpr int OUTPUTS = 16;        // of a tile of sums
constexpr int SUMS = INPUT_ROWS * OUTPUTS;
constexpr int UNIT_SUMS = INPUT_ROWS * PANEL;
constexpr int SCALED_AT_ONCE = 4;  // rows
constexpr int64_t INPUT_BLOCK_BYTES = 1 << 20;  // of inputs, which stay in the second-level cache while all panels pass

// Products of one thread, whose tiles are configured as long as this lives.
template <class T>
class QuantizedTiles {
  public:
    explicit QuantizedTiles(const QuantizedProduct<T>& product)
        : product_(product), layout_(product.layout), rows_(product.rows), memory_(of_thread<Memory, 5>(1)) {
        while (layout_.groups.padded % depth_) depth_ -= GROUP_STEP;
        TileConfig config;
        std::fill_n(config.rows, 5, std::min(rows_.num_rows, INPUT_ROWS));  // the sums' and the inputs'
        config.row_bytes[4] = depth_;
        std::fill_n(config.rows + 5, 3, depth_ / 4);  // the weights'
        _tile_loadconfig(&config);
    }
    ~QuantizedTiles() { _tile_release(); }
    QuantizedTiles(const QuantizedTiles&) = delete;
    QuantizedTiles& operator=(const QuantizedTiles&) = delete;

    // The outputs of rows [first, last) and of a panel.
    void multiply_panel(int panel, int first, int last) {
        const int tiles = (last - first + INPUT_ROWS - 1) / INPUT_ROWS;
        const int blocks = (last - first + BLOCK_ROWS - 1) / BLOCK_ROWS;
        for (int b = 0; b < blocks; b++) {
            const int begin = first + tiles * b / blocks * INPUT_ROWS;
            multiply_block(panel, begin, std::min(last, first + tiles * (b + 1) / blocks * INPUT_ROWS));
        }
    }

  private:
    // A part of a group's inputs, for all outputs of a panel.
    struct Chunk {
        int group, first, end;   // inputs of the group
        const uint8_t* weights;  // of 8 bits
        bool begins, ends;       // it is the first or the last of the group
    };

    // Sums of a group that are not scaled yet, of up to 16 rows and a panel.
    struct Unscaled {
        const int32_t* ints;
        float* floats;        // of the first row, to which the scaled sums are added
        const float* scales;  // [2][PANEL]: scales and offsets of the outputs
        int64_t at;           // the first row's place in `rows.scales`
        int rows = 0;
    };

    struct Memory {
        alignas(64) float floats[BLOCK_ROWS * PANEL];
        // [4][16][16] a unit. With one chunk a group two units take turns, else two groups.
        alignas(64) int32_t ints[2][BLOCK_ROWS * PANEL];
        alignas(64) float scales[3][2 * PANEL];  // of the groups that are multiplied and scaled
        alignas(64) uint8_t unpacked[CHUNK_INPUTS * PANEL];
    };

    void multiply_block(int panel, int first, int last) {
        float* const floats = memory_->floats;
        const char* const weights = product_.packed + panel * layout_.panel_bytes();
        const int num_groups = layout_.groups.groups, padded = layout_.groups.padded;
        std::fill_n(floats, (last - first) * PANEL, 0.0f);
        for (int g = 0; g < num_groups; g++) {
            float* const scales = memory_->scales[g % 3];
            load_scales(weights + layout_.scales_at(g), scales);
            for (int k = 0; k < padded; k += CHUNK_INPUTS) {
                const int end = std::min(k + CHUNK_INPUTS, padded);
                const char* const values = weights + g * layout_.group_bytes() + (int64_t)k * PANEL * layout_.bits / 8;
                const Chunk chunk{g, k, end, bytes(values, end - k), k == 0, end == padded};
                for (int row = first; row < last; row += INPUT_ROWS) {
                    const int place = row - first;
                    int32_t* const sums = padded <= CHUNK_INPUTS ? memory_->ints[0] + (unit_++ & 1) * UNIT_SUMS
                                                                 : memory_->ints[g & 1] + place * PANEL;
                    multiply(chunk, row, sums);
                    if (chunk.ends)
                        newer_ = {sums, floats + place * PANEL, scales, (int64_t)g * rows_.num_rows + row,
                                  std::min(INPUT_ROWS, last - row)};
                }
            }
        }
        scale(older_, 0, INPUT_ROWS);
        scale(newer_, 0, INPUT_ROWS);
        older_.rows = newer_.rows = 0;
        for (int row = first; row < last; row++) product_.write(row, panel, floats + (row - first) * PANEL);
    }

    const uint8_t* bytes(const char* values, int inputs) const {
        if (layout_.bits == 8) return (const uint8_t*)values;
        product_.unpack((const uint8_t*)values, inputs, memory_->unpacked);
        return memory_->unpacked;
    }

    void load_scales(const char* from, float* to) const {
        for (int c = 0; c < PANEL; c += LANES) {
            store(to + c, layout_.load_scales(from, c));
            if (layout_.has_offsets) store(to + PANEL + c, layout_.load_scales(from + layout_.scale_bytes(), c));
        }
    }

    // Multiplies a chunk and 16 rows; meanwhile scales the unit before the last one, whose sums have reached the cache.
    // Rows after the last one are multiplied too, whatever they are.
    void multiply(const Chunk& chunk, int row, int32_t* sums) {
        const int64_t stride = layout_.groups.padded;
        const int8_t* inputs = rows_.values + ((int64_t)chunk.group * rows_.num_rows + row) * stride + chunk.first;
        const uint8_t* weights = chunk.weights;
        int scaled = 0;
        asm volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory
        if (chunk.begins) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(0, sums, 64);
            _tile_loadd(1, sums + SUMS, 64);
            _tile_loadd(2, sums + 2 * SUMS, 64);
            _tile_loadd(3, sums + 3 * SUMS, 64);
        }
        for (int k = chunk.first; k < chunk.end; k += depth_, inputs += depth_, weights += depth_ * PANEL) {
            _tile_stream_loadd(4, inputs, stride);
            _tile_loadd(5, weights, PANEL * 4);
            _tile_dpbssd(0, 4, 5);
            _tile_loadd(6, weights + 64, PANEL * 4);
            _tile_dpbssd(1, 4, 6);
            scale(older_, scaled, scaled + SCALED_AT_ONCE);
            _tile_loadd(7, weights + 128, PANEL * 4);
            _tile_dpbssd(2, 4, 7);
            _tile_loadd(5, weights + 192, PANEL * 4);
            _tile_dpbssd(3, 4, 5);
            scale(older_, scaled + SCALED_AT_ONCE, scaled + 2 * SCALED_AT_ONCE);
            scaled += 2 * SCALED_AT_ONCE;
        }
        scale(older_, scaled, INPUT_ROWS);  // before its sums may be overwritten
        asm volatile("" ::: "memory");
        _tile_stored(0, sums, 64);
        _tile_stored(1, sums + SUMS, 64);
        _tile_stored(2, sums + 2 * SUMS, 64);
        _tile_stored(3, sums + 3 * SUMS, 64);
        asm volatile("" ::: "memory");
        older_ = newer_;
        newer_.rows = 0;
    }

    // Adds rows [first, end) of a unit's sums, scaled.
    MANTA_INLINE void scale(const Unscaled& unit, int first, int end) const {
        end = std::min(end, unit.rows);
        for (; first + SCALED_AT_ONCE <= end; first += SCALED_AT_ONCE) add_scaled<SCALED_AT_ONCE>(unit, first);
        for (; first < end; first++) add_scaled<1>(unit, first);
    }

    template <int ROWS>
    MANTA_INLINE void add_scaled(const Unscaled& unit, int first) const {
        constexpr int VECTORS = PANEL / LANES;
        const float* const input_scales = rows_.scales + unit.at + first;
        const int32_t* const ints = unit.ints + first * OUTPUTS;
        float* const floats = unit.floats + first * PANEL;
        Floats scales[VECTORS];
        MANTA_UNROLL for (int c = 0; c < VECTORS; c++) scales[c] = load(unit.scales + c * LANES);
        MANTA_UNROLL for (int i = 0; i < ROWS; i++) {
            const Floats input_scale = splat(input_scales[i]);
            MANTA_UNROLL for (int c = 0; c < VECTORS; c++) {
                float* const to = floats + i * PANEL + c * LANES;
                const Floats sums = to_floats(load_ints(ints + c * SUMS + i * OUTPUTS));
                store(to, load(to) + product(product(sums, scales[c]), input_scale));
            }
        }
        if (!layout_.has_offsets) return;
        const float* const input_sums = rows_.sums + unit.at + first;
        for (int i = 0; i < ROWS; i++)
            MANTA_UNROLL for (int c = 0; c < VECTORS; c++) {
                float* const to = floats + i * PANEL + c * LANES;
                store(to, load(to) + product(load(unit.scales + PANEL + c * LANES), splat(input_sums[i])));
            }
    }

    const QuantizedProduct<T>& product_;
    const WeightLayout& layout_;
    const QuantizedRows& rows_;
    Memory* const memory_;
    int depth_ = 64;  // inputs of a tile: the most that divide every group
    int unit_ = 0;
    Unscaled older_{}, newer_{};
};
#endif
