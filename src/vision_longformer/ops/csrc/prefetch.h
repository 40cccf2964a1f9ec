// Rows of tensors that will be needed soon, fetched a few at a time between products, which leave the memory idle.
#pragma once

#include "geometry.h"
#include "simd.h"

namespace vision_longformer {
namespace VL_LEVEL {

class Prefetch {
   public:
    // The rows of `tokens` in a pair of tensors, spread over so many calls of `step`.
    template <class S>
    void start(const Index* tokens, Index count, const S* first, Index first_stride, const S* second,
               Index second_stride, Index size, Index steps) {
        next_ = tokens;
        end_ = tokens + count;
        first_ = {reinterpret_cast<const char*>(first), first_stride * Index(sizeof(S))};
        second_ = {reinterpret_cast<const char*>(second), second_stride * Index(sizeof(S))};
        bytes_ = size * sizeof(S);
        per_step_ = ceiling(count, maximum(1, steps));
    }

    VL_INLINE void step() {
        for (Index i = 0; i < per_step_ && next_ != end_; i++) {
            const Index token = *next_++;
            if (token < 0) continue;
            for (Index byte = 0; byte < bytes_; byte += LINE) {
                __builtin_prefetch(first_.data + token * first_.stride + byte, 0, SECOND_LEVEL);
                __builtin_prefetch(second_.data + token * second_.stride + byte, 0, SECOND_LEVEL);
            }
        }
    }

   private:
    static constexpr Index LINE = 64;
    static constexpr int SECOND_LEVEL = 2;
    struct Tensor {
        const char* data;
        Index stride;
    };
    const Index *next_ = nullptr, *end_ = nullptr;
    Tensor first_, second_;
    Index bytes_, per_step_ = 0;
};

}  // namespace VL_LEVEL
}  // namespace vision_longformer
