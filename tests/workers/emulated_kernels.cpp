// The CPU kernels of another processor behind a pipe: reads calls from standard input, writes results to standard output.
// Built for it and run under user-mode emulation by tests/workers/emulated.py, which says what a frame holds.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

extern "C" {
void manta_rms_norm(int, const void*, void*, const void*, void*, int, int, float);
int manta_gates_layout(int);
void manta_gate(int, int, float, const void*, void*, int, int);
void manta_rope_and_cache(int, int, void*, const float*, const int64_t*, const int64_t*, void*, void*, const void*,
                          const void*, int, int, int64_t, int, int, int, float);
void manta_paged_attention(int, int, const void*, int64_t, const void*, const void*, void*, const int32_t*, const int32_t*,
                           const int32_t*, const int32_t*, const int32_t*, const int32_t*, int, int, int, int, int64_t,
                           int, int, int, int, float, float, const float*, int);
int manta_attention_layout(int);
int manta_linear_layout(int);
void manta_pack_linear(int, const void*, void*, int, int, int);
void manta_linear(int, const void*, const void*, const void*, const void*, void*, int, int, int, int);
int64_t manta_lossless_bytes(int, int);
void manta_pack_lossless(const void*, void*, int, int, int);
int64_t manta_count_exceptions(const void*, int, int);
void manta_pack_exceptions(const void*, const void*, void*, int, int, int);
void manta_set_num_threads(int);
int manta_quantized_layout(int);
int64_t manta_quantized_bytes(int, int, int, int, int, int, int);
void manta_round_weight(int, const void*, int, int, int, int, void*, void*);
void manta_pack_quantized(const void*, const void*, const void*, const void*, void*, int, int, int, int, int, int, int);
void manta_quantized_linear(int, const void*, const void*, const void*, const void*, const void*, void*, int, int, int,
                            int, int, int, int, int, int, int);
void manta_head_products(int, int, const void*, const void*, void*, int, int, int, int, int, int);
void manta_log1p(const float*, float*, int64_t);
}

namespace {

void read_all(void* to, size_t count) {
    for (char* at = (char*)to; count;) {
        const ssize_t got = read(0, at, count);
        if (got <= 0) exit(got == 0 && at == to ? 0 : 1);
        at += got, count -= got;
    }
}

void write_all(const void* from, size_t count) {
    for (const char* at = (const char*)from; count;) {
        const ssize_t put = write(1, at, count);
        if (put <= 0) exit(1);
        at += put, count -= put;
    }
}

template <class T>
T read_one() {
    T value;
    read_all(&value, sizeof(value));
    return value;
}

enum Kind : uint64_t { INTEGER, FLOAT, POINTER, NOTHING };

struct Argument {
    Kind kind;
    union {
        int64_t integer;
        double real;
        char* pointer;
    };

    template <class T>
    operator T*() const { return kind == NOTHING ? nullptr : (T*)pointer; }
    operator int() const { return (int)integer; }
    operator int64_t() const { return integer; }
    operator float() const { return (float)real; }
};

template <class Result, class... Types, size_t... I>
int64_t call(Result (*function)(Types...), const std::vector<Argument>& a, std::index_sequence<I...>) {
    if (a.size() != sizeof...(Types)) exit(2);
    if constexpr (std::is_void_v<Result>)
        return function((Types)a[I]...), 0;
    else
        return function((Types)a[I]...);
}

template <class Result, class... Types>
int64_t call(Result (*function)(Types...), const std::vector<Argument>& arguments) {
    return call(function, arguments, std::index_sequence_for<Types...>{});
}

int64_t call(const std::string& name, const std::vector<Argument>& arguments) {
#define KERNEL(function) if (name == #function) return call(function, arguments)
    KERNEL(manta_rms_norm);
    KERNEL(manta_gates_layout);
    KERNEL(manta_gate);
    KERNEL(manta_rope_and_cache);
    KERNEL(manta_paged_attention);
    KERNEL(manta_attention_layout);
    KERNEL(manta_linear_layout);
    KERNEL(manta_pack_linear);
    KERNEL(manta_linear);
    KERNEL(manta_lossless_bytes);
    KERNEL(manta_pack_lossless);
    KERNEL(manta_count_exceptions);
    KERNEL(manta_pack_exceptions);
    KERNEL(manta_set_num_threads);
    KERNEL(manta_quantized_layout);
    KERNEL(manta_quantized_bytes);
    KERNEL(manta_pack_quantized);
    KERNEL(manta_round_weight);
    KERNEL(manta_quantized_linear);
    KERNEL(manta_head_products);
    KERNEL(manta_log1p);
    exit(3);
}

}  // namespace

int main() {
    for (;;) {
        std::string name(read_one<uint64_t>(), 0);
        read_all(name.data(), name.size());
        std::vector<std::vector<char>> blobs(read_one<uint64_t>());
        for (auto& blob : blobs) {
            blob.resize(read_one<uint64_t>() + 64);
            read_all(blob.data(), blob.size() - 64);
        }
        std::vector<Argument> arguments(read_one<uint64_t>());
        for (auto& argument : arguments) {
            argument.kind = (Kind)read_one<uint64_t>();
            const uint64_t index = read_one<uint64_t>(), value = read_one<uint64_t>();
            if (argument.kind == POINTER)
                argument.pointer = blobs[index].data() + value;
            else
                memcpy(&argument.integer, &value, sizeof(value));
        }
        const int64_t result = call(name, arguments);
        write_all(&result, sizeof(result));
        for (const auto& blob : blobs) write_all(blob.data(), blob.size() - 64);
    }
}
