// What Python hands to the kernel. The structure is mirrored field by field in library.py.
#pragma once

#include <cstdint>

namespace vision_longformer {

using Index = int64_t;

enum Rule : Index { RULE_CHUNK = 0, RULE_EXACT = 1, RULE_CYCLIC = 2, RULE_CYCLIC_RELEASE = 3 };
enum Neighbours : Index { NEIGHBOURS_ALL = 0, NEIGHBOURS_SELF = 1, NEIGHBOURS_ONE = 2 };
enum DataType : Index { TYPE_FLOAT32 = 0, TYPE_FLOAT64 = 1, TYPE_BFLOAT16 = 2, TYPE_FLOAT16 = 3 };
enum Level : Index { LEVEL_PORTABLE = 0, LEVEL_AVX2 = 1, LEVEL_AVX512 = 2 };

// Steps in elements from one batch entry, token and head to the next; the head dimension is contiguous.
struct Strides {
    Index batch, token, head;
};

// A whole map of height x width tokens, or a band of chunk rows of a map: then `banded` is 1, rows do not wrap, and the
// keys have `above` rows before those of the queries, the first ones of the chunk row above, and `below` rows after
// them, the first ones of the chunk row below.
//
// Tensors: q, out, grad_out, grad_q (B, N, heads, dim) and k, v (B, G + K, heads, dim), global tokens first, in the
// data type; grad_k, grad_v (B, G + K, heads, dim), lse (B, heads, N), bias, grad_bias (heads, 4w-1, 4w-1),
// global_bias, grad_global_bias (heads, G) in the type of the arithmetic, which is float64 for float64 and float32 for
// all others. All but q, k, v and grad_out are contiguous. The biases and their gradients may be null.
struct Problem {
    Index batch, heads, dim, height, width, window, global_tokens, banded, above, below;
    Index rule, neighbours, neighbour_row, neighbour_column, data_type, threads;
    double scale;
    Strides q_strides, k_strides, v_strides, grad_out_strides;
    const void *q, *k, *v, *bias, *global_bias;
    void *out, *lse;
    const void* grad_out;
    void *grad_q, *grad_k, *grad_v, *grad_bias, *grad_global_bias;

    Index tokens() const { return height * width; }
    Index key_rows() const { return above + height + below; }
    Index key_tokens() const { return global_tokens + key_rows() * width; }  // G + K
    bool cyclic() const { return rule == RULE_CYCLIC || rule == RULE_CYCLIC_RELEASE; }
    Index bias_side() const { return 4 * window - 1; }
};

}  // namespace vision_longformer
