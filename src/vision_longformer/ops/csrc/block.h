// What forward and backward share: a chunk's keys are taken block by block, its queries group by group.
#pragma once

#include "bias.h"
#include "pack.h"

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

// Calls `body(block, first group of this block)` for all of a chunk, and `pack(block)` before and `finish(block)` after
// the groups of each block of at most `largest` panels. Blocks and groups are of nearly equal size.
template <class T, class Pack, class Body, class Finish>
VL_INLINE void each_block(const ChunkPlan<T>& plan, Index largest, Pack pack, Body body, Finish finish) {
    const Index blocks = ceiling(plan.panels, largest), groups = ceiling(plan.tiles, GROUP_TILES);
    for (Index i = 0; i < blocks; i++) {
        Block block{i * plan.panels / blocks, (i + 1) * plan.panels / blocks, 0, 0};
        pack(block);
        for (Index group = 0; group < groups; group++) {
            block.tile_begin = group * plan.tiles / groups;
            block.tile_end = (group + 1) * plan.tiles / groups;
            body(block, group == 0);
        }
        finish(block);
    }
}

// The keys or values of one batch entry and head.
template <class S>
PanelSource<S> panel_source(const Problem& problem, const void* tensor, const Strides& strides, Index batch, Index head,
                            const S* zeros) {
    const S* base = static_cast<const S*>(tensor) + batch * strides.batch + head * strides.head;
    return {base, strides.token, problem.dim, round_up(problem.dim, PANEL<Arithmetic<S>>), zeros};
}

// target[query][:] += sum over the panels begin .. end of left[query][key] * right[key][:], for a micro tile of
// queries. `left` is the tile's first row in the first of those panels, `right` the rows of the block's keys.
template <class T>
VL_INLINE void sum_over_keys(const T* left, Index panel_stride, const T* right, Index begin, Index end, Index count,
                             T* target, Index padded) {
    for (Index column = 0; column < padded; column += PANEL<T>)
        with_constant<MICRO_ROWS>(count, [&](auto rows) VL_LAMBDA {
            Tile<T, rows.value> sums;
            sums.read(target + column, padded);
            for (Index panel = begin; panel < end; panel++)
                sums.multiply(left + (panel - begin) * panel_stride, PANEL<T>, 1,
                              right + panel * PANEL<T> * padded + column, padded, PANEL<T>);
            sums.write(target + column, padded);
        });
}

}  // namespace VL_LEVEL
}  // namespace vision_longformer
