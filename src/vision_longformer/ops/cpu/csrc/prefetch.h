// Rows of tensors that will be needed soon, fetched a few at a time between products, which leave the memory idle.
#pragma once

#include "geometry.h"
#include "simd.h"

namespace vision_longformer {
namespace VL_LEVEL {

class Prefetch {
   public:
    void clear() { lists_ = list_ = row_ = rows_ = 0; }

    // The rows of `tokens`, of the first head only where heads do not follow each other in memory.
    template <class S>
    void add(const Index* tokens, Index count, const S* base, Index token_stride, Index head_stride, Index dim,
             Index heads) {
        if (count == 0) return;
        const Index size = head_stride == dim ? heads * dim : dim;
        list_of_[lists_++] = {tokens, count, reinterpret_cast<const char*>(base), token_stride * Index(sizeof(S)),
                              size * Index(sizeof(S))};
        rows_ += count;
    }

    // All that was added is to be spread over so many calls of `step`.
    void spread(Index steps) { per_step_ = ceiling(rows_, maximum(1, steps)); }

    VL_INLINE void step() {
        for (Index i = 0; i < per_step_ && list_ < lists_; i++) {
            const List& list = list_of_[list_];
            const Index token = list.tokens[row_];
            for (Index byte = 0; token >= 0 && byte < list.bytes; byte += LINE)
                __builtin_prefetch(list.base + token * list.stride + byte, 0, SECOND_LEVEL);
            if (++row_ == list.count) row_ = 0, list_++;
        }
    }

   private:
    static constexpr Index LINE = 64, MOST_LISTS = 8;
    static constexpr int SECOND_LEVEL = 2;
    struct List {
        const Index* tokens;
        Index count;
        const char* base;
        Index stride, bytes;
    };
    List list_of_[MOST_LISTS];
    Index lists_ = 0, list_ = 0, row_ = 0, rows_ = 0, per_step_ = 0;
};

}  // namespace VL_LEVEL
}  // namespace vision_longformer
