// Small matrix products held in registers: tiles of a few rows by two vectors.
//
// Operands are rows (a matrix with a row stride) or columns in groups of one or two vectors, each group stored row by
// row. `multiply` serves all of them through its strides.
#pragma once

#include "simd.h"

namespace vision_longformer {
namespace VL_LEVEL {

// Tiles are two vectors wide. Keys are handled in panels of that width, and rows are padded to whole ones.
template <class T>
constexpr int PANEL = 2 * LANES<T>;

template <int N>
struct Constant {
    static constexpr int value = N;
};

// Calls `body` with `count` (1 .. MAX) as a compile-time constant.
template <int MAX, class Body>
VL_INLINE void with_constant(Index count, Body body) {
    if constexpr (MAX > 1) {
        if (count < MAX) return with_constant<MAX - 1>(count, body);
    }
    body(Constant<MAX>{});
}

constexpr Index micro_tiles(Index rows) { return (rows + MICRO_ROWS - 1) / MICRO_ROWS; }

// First row of a micro tile: `rows` are spread evenly, because a tile of a single row would be as slow as a full one.
constexpr Index micro_tile_start(Index rows, Index tile) {
    const Index tiles = micro_tiles(rows);
    const Index size = rows / tiles, larger = rows % tiles;
    return tile * size + (tile < larger ? tile : larger);
}

template <class T, int ROWS>
struct Tile {
    Vector<T> sum[ROWS][2];

    // Calls `body(sum, row, vector)` for every vector of the tile, unrolled.
    template <class Body>
    VL_INLINE void each(Body body) {
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
            for (int vector = 0; vector < 2; vector++) body(sum[row][vector], row, vector);
    }

    VL_INLINE void clear() {
        each([](Vector<T>& value, int, int) VL_LAMBDA { value = Vector<T>{}; });
    }
    VL_INLINE void read(const T* source, Index stride) {
        each([=](Vector<T>& value, int row, int vector) VL_LAMBDA {
            value = load<T>(source + row * stride + vector * LANES<T>);
        });
    }
    VL_INLINE void write(T* target, Index stride) {
        each([=](Vector<T>& value, int row, int vector) VL_LAMBDA {
            store<T>(target + row * stride + vector * LANES<T>, value);
        });
    }

    // sum[row][:] += left[row * left_row + step * left_step] * right[step * right_step + :] for all steps, where
    // `right` is `first` for the first vector of a row and `second` for the second.
    VL_INLINE void multiply(const T* left, Index left_row, Index left_step, const T* first, const T* second,
                            Index right_step, Index steps) {
        for (Index step = 0; step < steps; step++) {
            Vector<T> right[2] = {load<T>(first + step * right_step), load<T>(second + step * right_step)};
            keep_in_register(right[0]);
            keep_in_register(right[1]);
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++) {
                const Vector<T> value = broadcast<T>(left[row * left_row + step * left_step]);
                sum[row][0] += value * right[0];
                sum[row][1] += value * right[1];
            }
        }
    }
};

}  // namespace VL_LEVEL
}  // namespace vision_longformer
