// What forward and backward share: a chunk's keys are taken block by block, its queries group by group.
#pragma once

#include "bias.h"
#include "pack.h"
#include "ring.h"

namespace vision_longformer {
namespace VL_LEVEL {

// Weights of a group of queries and a block of keys should stay in the caches of one core.
constexpr Index GROUP_TILES = 60 / MICRO_ROWS;
constexpr Index GROUP_ROWS = GROUP_TILES * MICRO_ROWS;

// The panels and the micro tiles of queries at work, and the panels of the block that a tile's queries see.
struct Block {
    Index panel_begin, panel_end, tile_begin, tile_end;

    template <class T>
    bool sees(const ChunkPlan<T>& plan, Index tile, Index panel) const {
        return panel >= plan.panel_begin[tile] && panel < plan.panel_end[tile];
    }
    // Relative to the first panel of the block.
    template <class T>
    Index seen_begin(const ChunkPlan<T>& plan, Index tile) const {
        return maximum(panel_begin, plan.panel_begin[tile]) - panel_begin;
    }
    template <class T>
    Index seen_end(const ChunkPlan<T>& plan, Index tile) const {
        return minimum(panel_end, plan.panel_end[tile]) - panel_begin;
    }
};

// Calls `body(block)` for all of a chunk, with blocks of at most `largest` panels. Blocks and groups of queries are of
// nearly equal size.
template <class T, class Body>
VL_INLINE void each_block(const ChunkPlan<T>& plan, Index largest, Body body) {
    const Index blocks = ceiling(plan.panels, largest), groups = ceiling(plan.tiles, GROUP_TILES);
    for (Index i = 0; i < blocks; i++)
        for (Index group = 0; group < groups; group++)
            body(Block{i * plan.panels / blocks, (i + 1) * plan.panels / blocks, group * plan.tiles / groups,
                       (group + 1) * plan.tiles / groups});
}

// At least so many passes, of as many heads as have their packed keys, in `arrays` copies, in a cache shared by few
// threads, and their expanded bias kept.
template <class T>
HeadPasses head_passes(const Problem& problem, Index arrays, Index least) {
    constexpr Index CACHE_BYTES = 2 << 20;
    ChunkPlan<T> plan;
    plan.problem = &problem;
    const Index keys = plan.largest_panels() * PANEL<T>;
    const Index bytes = arrays * keys * round_up(problem.dim, PANEL<T>) * Index(sizeof(T));
    const Index most_cached = minimum(CACHE_BYTES / bytes, Bias<T>::most_heads_cached(plan));
    const Index most_heads = minimum(most_cached, problem.heads / least);
    return {problem.heads, ceiling(problem.heads, maximum(1, most_heads))};
}

// The keys or values of one batch entry, from a head on.
template <class S>
KeySource<S> key_source(const Problem& problem, const void* tensor, const Strides& strides, Index batch, Index head,
                        const S* zeros) {
    const S* base = static_cast<const S*>(tensor) + batch * strides.batch + head * strides.head;
    return {base, strides.token, strides.head, problem.dim, round_up(problem.dim, PANEL<Arithmetic<S>>), zeros};
}

// target[query][:] += sum over keys of left[query][key] * right[key][:], for a micro tile of queries and the panels of
// `place`, which says where the rows of each vector of keys are. `left` is the tile's first row in the first panel.
template <class T>
VL_INLINE void sum_over_keys(const T* left, Index panel_stride, const T* right, const Index* place, Index panels,
                             Index count, T* target, Index padded) {
    for (Index column = 0; column < padded; column += PANEL<T>)
        with_constant<MICRO_ROWS>(count, [&](auto rows) VL_LAMBDA {
            Tile<T, rows.value> sums;
            sums.read(target + column, padded);
            for (Index vector = 0; vector < 2 * panels; vector++) {
                const T* first = right + place[vector] + column;
                sums.multiply(left + vector / 2 * panel_stride + vector % 2 * LANES<T>, PANEL<T>, 1, first,
                              first + LANES<T>, padded, LANES<T>);
            }
            sums.write(target + column, padded);
        });
}

}  // namespace VL_LEVEL
}  // namespace vision_longformer
