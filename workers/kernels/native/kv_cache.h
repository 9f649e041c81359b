// How the keys, or the values, of a layer lie in its KV cache. Used by attention and by what writes the cache.
//
// In the model's dtype a block is [block_size][num_kv_heads][head_dim]. With int8 a block is such an array of bytes,
// then [num_kv_heads][block_size] float scales: a number is its byte times the scale of its token and head. A head's
// scales of a block are neighbours, and a block of 16 tokens begins and ends at a cache line. With int4 two numbers
// share a byte, and all are rotated (`rotation.h`).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

// The codes of two neighbouring dimensions, the first one in the lower bits. `nibbles.h` has the numbers of codes.
struct nibbles {
    uint8_t bits;
};

template <class C>
struct CacheLayout {
    static constexpr bool IS_ROTATED = std::is_same<C, nibbles>::value;
    static constexpr bool HAS_SCALES = std::is_same<C, int8_t>::value || IS_ROTATED;

    int block_size, num_kv_heads, head_dim;
    int64_t block_stride;  // elements from a block to the next one, which may leave some of them unused

    // Elements from a head of a token to the next one
    size_t head_size() const {
        return IS_ROTATED ? head_dim / 2 : head_dim;
    }

    // Elements from a token to the next one of its block
    size_t slot_size() const {
        return num_kv_heads * head_size();
    }

    // The element at which a token begins
    size_t token(int64_t block, int offset) const {
        return size_t(block) * block_stride + offset * slot_size();
    }

    // The byte at which a token's scale of a head lies, given the element at which the token begins
    size_t scale(size_t token, int offset, int head) const {
        const size_t end_of_values = token + (block_size - offset) * slot_size();
        return end_of_values + (size_t(head) * block_size + offset) * sizeof(float);
    }
};
