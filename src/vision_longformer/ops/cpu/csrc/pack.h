// Copies of keys and values in the order the products want them, a vector of keys at a time: rows, or columns.
#pragma once

#include "microkernel.h"
#include "storage.h"

namespace vision_longformer {
namespace VL_LEVEL {

// target[column * LANES + row] = rows[row][column] for a square of LANES x LANES elements from `column` on.
#if defined(__AVX2__)
VL_INLINE void transpose_8x8(const float* const* rows, Index column, float* target) {
    target += column * LANES<float>;
#pragma GCC unroll 2
    for (int half = 0; half < 8; half += 4, column += 4, target += 4 * LANES<float>) {
        __m256 in[4], pairs[4];  // rows i and i + 4 side by side
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            in[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[i] + column)),
                                         _mm_loadu_ps(rows[i + 4] + column), 1);
        pairs[0] = _mm256_unpacklo_ps(in[0], in[1]);
        pairs[1] = _mm256_unpackhi_ps(in[0], in[1]);
        pairs[2] = _mm256_unpacklo_ps(in[2], in[3]);
        pairs[3] = _mm256_unpackhi_ps(in[2], in[3]);
        _mm256_storeu_ps(target, _mm256_shuffle_ps(pairs[0], pairs[2], 0x44));
        _mm256_storeu_ps(target + LANES<float>, _mm256_shuffle_ps(pairs[0], pairs[2], 0xee));
        _mm256_storeu_ps(target + 2 * LANES<float>, _mm256_shuffle_ps(pairs[1], pairs[3], 0x44));
        _mm256_storeu_ps(target + 3 * LANES<float>, _mm256_shuffle_ps(pairs[1], pairs[3], 0xee));
    }
}

VL_INLINE void transpose_square(const float* const* rows, Index column, float* target) {
    for (int down = 0; down < LANES<float>; down += 8)
        for (int across = 0; across < LANES<float>; across += 8)
            transpose_8x8(rows + down, column + across, target + down);
}

VL_INLINE void transpose_4x4(const double* const* rows, Index column, double* target) {
    __m256d in[4], pairs[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) in[i] = _mm256_loadu_pd(rows[i] + column);
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2) {
        pairs[i] = _mm256_unpacklo_pd(in[i], in[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_pd(in[i], in[i + 1]);
    }
    target += column * LANES<double>;
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        _mm256_storeu_pd(target + i * LANES<double>, _mm256_permute2f128_pd(pairs[i], pairs[i + 2], 0x20));
        _mm256_storeu_pd(target + (i + 2) * LANES<double>, _mm256_permute2f128_pd(pairs[i], pairs[i + 2], 0x31));
    }
}

VL_INLINE void transpose_square(const double* const* rows, Index column, double* target) {
    for (int down = 0; down < LANES<double>; down += 4)
        for (int across = 0; across < LANES<double>; across += 4)
            transpose_4x4(rows + down, column + across, target + down);
}
#else
template <class T>
VL_INLINE void transpose_square(const T* const* rows, Index column, T* target) {
    for (int row = 0; row < LANES<T>; row++)
        for (int i = 0; i < LANES<T>; i++) target[(column + i) * LANES<T> + row] = rows[row][column + i];
}
#endif

// Rows of keys or values: those of the tensor, or zeros for keys that are padding.
template <class S>
struct KeySource {
    const S* base;  // of a batch entry and head
    Index token_stride, head_stride;
    Index size, padded;  // head dimension, and the same in whole panels
    const S* zeros;      // `size` of them

    KeySource after(Index heads) const {
        KeySource other = *this;
        other.base += heads * head_stride;
        return other;
    }
    VL_INLINE const S* row(Index token) const { return token < 0 ? zeros : base + token * token_stride; }
};

// The keys `tokens[0 .. LANES)` as rows of `padded` elements.
template <class S>
VL_INLINE void pack_rows(const KeySource<S>& source, const Index* tokens, Arithmetic<S>* rows) {
    for (int key = 0; key < LANES<Arithmetic<S>>; key++)
        load_row<S>(source.row(tokens[key]), source.size, source.padded, rows + key * source.padded);
}

// columns[d * LANES + key] = rows[key][d], for `size` elements in whole vectors.
template <class T>
VL_INLINE void transpose_rows(const T* const* rows, Index size, T* columns) {
    for (Index column = 0; column < size; column += LANES<T>) transpose_square(rows, column, columns);
}

// The same of rows that were packed before.
template <class T>
VL_INLINE void transpose_packed_rows(const T* rows, Index padded, T* columns) {
    const T* pointers[LANES<T>];
    for (int key = 0; key < LANES<T>; key++) pointers[key] = rows + key * padded;
    transpose_rows<T>(pointers, padded, columns);
}

// The same straight from the tensor where its rows need neither conversion nor padding, else by way of `rows`.
template <class S>
VL_INLINE void pack_columns(const KeySource<S>& source, const Index* tokens, Arithmetic<S>* rows,
                            Arithmetic<S>* columns) {
    using T = Arithmetic<S>;
    if constexpr (sizeof(S) == sizeof(T)) {
        if (source.size == source.padded) {
            const T* pointers[LANES<T>];
            for (int key = 0; key < LANES<T>; key++) pointers[key] = source.row(tokens[key]);
            return transpose_rows<T>(pointers, source.size, columns);
        }
    }
    pack_rows<S>(source, tokens, rows);
    transpose_packed_rows<T>(rows, source.padded, columns);
}

}  // namespace VL_LEVEL
}  // namespace vision_longformer
