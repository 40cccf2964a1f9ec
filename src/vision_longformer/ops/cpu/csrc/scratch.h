// Working memory of a thread, kept from call to call: fresh pages cost as much as arithmetic.
#pragma once

#include <cstdlib>
#include <initializer_list>

#include "problem.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace vision_longformer {
namespace VL_LEVEL {

// Hands out pieces of one allocation. Used twice: without memory, to count bytes, and then with it.
class Arena {
   public:
    Arena() = default;
    Arena(const Arena&) = delete;
    ~Arena() { std::free(memory_); }

    // Runs `take_all(arena)` so that its pieces are valid until the next call; false if there is no memory.
    template <class TakeAll>
    bool fill(TakeAll take_all) {
        counting_ = true;
        used_ = 0;
        take_all(*this);
        if (used_ > capacity_ && !grow()) return false;
        counting_ = false;
        used_ = 0;
#if defined(__SANITIZE_ADDRESS__)
        ASAN_POISON_MEMORY_REGION(memory_, capacity_);
#endif
        take_all(*this);
        return true;
    }

    template <class T>
    T* take(Index count) {
        const size_t bytes = size_t(count) * sizeof(T);
        char* piece = counting_ ? nullptr : static_cast<char*>(memory_) + used_;
        used_ += (bytes + 2 * ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;  // at least one byte unused between pieces
#if defined(__SANITIZE_ADDRESS__)
        if (!counting_) ASAN_UNPOISON_MEMORY_REGION(piece, bytes);
#endif
        return reinterpret_cast<T*>(piece);
    }

   private:
    static constexpr size_t ALIGNMENT = 64;
    void* memory_ = nullptr;
    size_t capacity_ = 0, used_ = 0;
    bool counting_ = true;

    bool grow() {
#if defined(__SANITIZE_ADDRESS__)
        ASAN_UNPOISON_MEMORY_REGION(memory_, capacity_);
#endif
        std::free(memory_);
        capacity_ = 0;
        if (posix_memalign(&memory_, ALIGNMENT, used_) != 0) memory_ = nullptr;
        if (memory_) capacity_ = used_;
        return memory_ != nullptr;
    }
};

}  // namespace VL_LEVEL
}  // namespace vision_longformer
