#pragma once

#include <cstdlib>

// Memory that one thread reuses from call to call
class Scratch {
  public:
    ~Scratch() {
        free(memory_);
    }
    char* reserve(size_t bytes) {
        if (bytes > capacity_) {
            free(memory_);
            capacity_ = (bytes * 3 / 2 + 4095) / 4096 * 4096;
            memory_ = static_cast<char*>(aligned_alloc(4096, capacity_));
        }
        return memory_;
    }

  private:
    char* memory_ = nullptr;
    size_t capacity_ = 0;
};
