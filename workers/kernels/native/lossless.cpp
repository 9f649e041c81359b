// Packs bfloat16 weights without loss in 12 bits each, as lossless.h describes them. Called by cpu_linear.py.
#include "lossless.h"

#include "strip_packing.h"

static_assert(LOSSLESS_CHUNK == STEP * STRIP, "a chunk is STEP inputs of a strip");

namespace {

struct Chunk {
    uint8_t codes[LOSSLESS_CHUNK], bytes[LOSSLESS_CHUNK];
    int base = LEAST_BASE, num_exceptions = 0;
};

bool is_exception(uint16_t weight, int base) {
    const int exponent = weight >> 7 & 0xff;
    return exponent != 0 && (exponent > base || exponent <= base - ZERO_CODE);
}

int exceptions_of(const uint16_t* weights, int base) {
    int count = 0;
    for (int i = 0; i < LOSSLESS_CHUNK; i++) count += is_exception(weights[i], base);
    return count;
}

// The base with the fewest exceptions: mostly the largest exponent
int base_of(const uint16_t* weights) {
    int largest = 0;
    for (int i = 0; i < LOSSLESS_CHUNK; i++) largest = std::max(largest, weights[i] >> 7 & 0xff);
    int best = std::min(std::max(largest, LEAST_BASE), MOST_BASE);
    if (exceptions_of(weights, best) == 0) return best;
    int counts[256] = {}, within = 0, most = 0;
    for (int i = 0; i < LOSSLESS_CHUNK; i++) counts[weights[i] >> 7 & 0xff]++;
    counts[0] = 0;  // zeros have a code of their own
    for (int exponent = 1; exponent <= MOST_BASE; exponent++) {
        within += counts[exponent] - (exponent > ZERO_CODE ? counts[exponent - ZERO_CODE] : 0);
        if (exponent >= LEAST_BASE && within > most) most = within, best = exponent;
    }
    return best;
}

void encode(const uint16_t* weights, Chunk& chunk) {
    const int base = chunk.base = base_of(weights);
    int count = 0;
    for (int i = 0; i < LOSSLESS_CHUNK; i++) {
        const int weight = weights[i], exponent = weight >> 7 & 0xff;
        const bool excepted = is_exception(weight, base);
        chunk.codes[i] = uint8_t(exponent == 0 || excepted ? ZERO_CODE : base - exponent);
        chunk.bytes[i] = uint8_t(excepted ? 0 : (weight >> 8 & 0x80) | (weight & 0x7f));
        count += excepted;
    }
    chunk.num_exceptions = count;
}

// The order of the bytes of a half: see GroupDecoder
void write_codes(const Chunk& chunk, uint8_t* to) {
    for (int group = 0; group < LOSSLESS_CHUNK; group += LOSSLESS_GROUP, to += GROUP_BYTES)
        for (int i = 0; i < 64; i++) {
            const int first = group + i % 16 / 8 * 32 + i / 16 * 8 + i % 8, second = first + 64;
            to[i] = uint8_t(chunk.codes[first] | chunk.codes[second] << 4);
            to[64 + i] = chunk.bytes[first], to[128 + i] = chunk.bytes[second];
        }
}

// The strips of a weight, one after another, each in memory of the thread that looks at it
struct Strips {
    const char* weight;
    int out_features, in_features;
    bool gated;

    // body(chunk, its weights)
    template <class Body>
    void for_each_chunk(const Body& body) const {
        const int64_t padded = padded_inputs(in_features), chunks = padded / STEP;
        parallel_for(2 * panels_of(out_features), false, [&](int64_t strip) {
            uint16_t* const weights = of_thread<uint16_t, 9>(padded * STRIP);
            pack_strip(weight, (int32_t*)weights, strip, out_features, in_features * 2, padded / 2, gated);
            for (int64_t i = 0; i < chunks; i++) body(strip * chunks + i, weights + i * LOSSLESS_CHUNK);
        });
    }
};

}  // namespace

extern "C" int64_t manta_lossless_bytes(int out_features, int in_features) {
    return Lossless::bytes(chunks_of(out_features, in_features));
}

// The number of exceptions of a packed weight.
extern "C" int64_t manta_count_exceptions(const void* packed, int out_features, int in_features) {
    const int64_t chunks = chunks_of(out_features, in_features);
    return Lossless(packed, nullptr, chunks).starts[chunks];
}

// weight bfloat16 [out_features, in_features] -> packed [manta_lossless_bytes]: all but the exceptions. If gated, half of
// out_features must be divisible by 16.
extern "C" void manta_pack_lossless(const void* weight, void* packed, int out_features, int in_features, int gated) {
    const Strips strips{(const char*)weight, out_features, in_features, gated != 0};
    const int64_t chunks = chunks_of(out_features, in_features);
    const Lossless to(packed, nullptr, chunks);
    ask_for_huge_pages(packed, Lossless::bytes(chunks));
    auto* const starts = (uint32_t*)to.starts;
    strips.for_each_chunk([&](int64_t i, const uint16_t* weights) {
        Chunk chunk;
        encode(weights, chunk);
        write_codes(chunk, (uint8_t*)to.codes + i * LOSSLESS_BYTES);
        ((uint8_t*)to.bases)[i] = uint8_t(chunk.base);
        starts[i + 1] = chunk.num_exceptions;
    });
    starts[0] = 0;
    for (int64_t i = 0; i < chunks; i++) starts[i + 1] += starts[i];
}

// The exceptions of a weight whose other parts are packed -> exceptions [manta_count_exceptions].
extern "C" void manta_pack_exceptions(const void* weight, const void* packed, void* exceptions, int out_features,
                                      int in_features, int gated) {
    const Strips strips{(const char*)weight, out_features, in_features, gated != 0};
    const Lossless from(packed, exceptions, chunks_of(out_features, in_features));
    strips.for_each_chunk([&](int64_t chunk, const uint16_t* weights) {
        auto* to = (uint32_t*)exceptions + from.starts[chunk];
        if (from.starts[chunk] == from.starts[chunk + 1]) return;
        for (uint32_t i = 0; i < LOSSLESS_CHUNK; i++)
            if (is_exception(weights[i], from.bases[chunk])) *to++ = i << 16 | weights[i];
    });
}
