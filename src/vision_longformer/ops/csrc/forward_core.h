// The arithmetic of the forward pass: scores, running softmax, sums of values.
#pragma once

#include "block.h"

namespace vision_longformer {
namespace VL_LEVEL {

template <class T>
struct ForwardCore {
    static constexpr Index BLOCK_PANELS = 384 / (2 * VECTOR_BYTES);
    static constexpr T LOWEST = T(-1e30);  // below any score, yet finite: differences to -infinity stay defined
    static constexpr T SLACK = 8;          // weights may reach 2**8 before the running maximum is raised

    Index dim, padded;
    ChunkPlan<T> plan;
    Bias<T> bias;
    T *query, *result;           // rows of `padded` elements per query
    T *peak, *total;             // running maximum per query; sum of its weights, lane by lane
    T *key_panels, *value_rows;  // of the block
    PanelMatrix<T> scores, block_bias;

    void allocate(const Problem& problem, Arena& arena) {
        dim = problem.dim;
        padded = round_up(dim, LANES<T>);
        plan.allocate(problem, arena);
        bias.allocate(problem, plan, false, arena);
        const Index queries = plan.largest_queries(), block = BLOCK_PANELS * PANEL<T>;
        query = arena.take<T>(queries * padded);
        result = arena.take<T>(queries * padded);
        peak = arena.take<T>(queries);
        total = arena.take<T>(queries * LANES<T>);
        key_panels = arena.take<T>(block * padded);
        value_rows = arena.take<T>(block * padded);
        scores = {arena.take<T>(GROUP_ROWS * block), GROUP_ROWS * PANEL<T>};
        block_bias = {arena.take<T>(bias.cached ? 0 : GROUP_ROWS * block), GROUP_ROWS * PANEL<T>};
    }

    // Before the first block of a chunk.
    void clear() {
        for (Index i = 0; i < plan.queries; i++) peak[i] = LOWEST;
        std::memset(result, 0, sizeof(T) * plan.queries * padded);
        std::memset(total, 0, sizeof(T) * plan.queries * LANES<T>);
    }

    void attend(const Block& block) {
        score(block);
        const Index first = plan.tile_start[block.tile_begin];
        for (Index tile = block.tile_begin; tile < block.tile_end; tile++) {
            const Index begin = block.seen_begin(plan, tile), end = block.seen_end(plan, tile);
            if (begin >= end) continue;
            const Index start = plan.tile_start[tile], count = plan.tile_start[tile + 1] - start;
            T* weights = scores.at(begin, start - first);
            for (Index row = 0; row < count; row++) weigh(start + row, weights + row * PANEL<T>, end - begin);
            sum_over_keys<T>(weights, scores.panel_stride, value_rows, begin, end, count, result + start * padded,
                             padded);
        }
    }

   private:
    // Scores of the group's queries with the block's keys: bias plus product.
    void score(const Block& block) {
        const Index first = plan.tile_start[block.tile_begin];
        const PanelMatrix<T> added = bias.of_block(plan, block.panel_begin, block.panel_end, first,
                                                   plan.tile_start[block.tile_end], block_bias);
        for (Index panel = block.panel_begin; panel < block.panel_end; panel++)
            for (Index tile = block.tile_begin; tile < block.tile_end; tile++) {
                if (!block.sees(plan, tile, panel)) continue;
                const Index start = plan.tile_start[tile], place = panel - block.panel_begin;
                const T* keys = key_panels + place * PANEL<T> * padded;
                with_constant<MICRO_ROWS>(plan.tile_start[tile + 1] - start, [&](auto rows) VL_LAMBDA {
                    Tile<T, rows.value, 2> sums;
                    sums.read(added.at(place, start - first), PANEL<T>);
                    sums.multiply(query + start * padded, padded, 1, keys, PANEL<T>, dim);
                    sums.write(scores.at(place, start - first), PANEL<T>);
                });
            }
    }

    // One query: scores to powers of two relative to a running maximum.
    VL_INLINE void weigh(Index index, T* row, Index panels) {
        Vector<T> highest = load<T>(row);
        for (Index panel = 0; panel < panels; panel++) {
            const T* part = row + panel * scores.panel_stride;
            highest = maximum(highest, maximum(load<T>(part), load<T>(part + LANES<T>)));
        }
        if (any_above<T>(highest, peak[index] + SLACK)) raise_peak(index, largest_lane<T>(highest));
        const Vector<T> reference = broadcast<T>(peak[index]);
        Vector<T> sum = load<T>(total + index * LANES<T>);
        for (Index panel = 0; panel < panels; panel++) {
            T* part = row + panel * scores.panel_stride;
            const Vector<T> left = power_of_two<T>(load<T>(part) - reference);
            const Vector<T> right = power_of_two<T>(load<T>(part + LANES<T>) - reference);
            store<T>(part, left);
            store<T>(part + LANES<T>, right);
            sum += left + right;
        }
        store<T>(total + index * LANES<T>, sum);
    }

    void raise_peak(Index index, T higher) {
        const Vector<T> factor = power_of_two<T>(broadcast<T>(peak[index] - higher));
        peak[index] = higher;
        T *sum = total + index * LANES<T>, *row = result + index * padded;
        store<T>(sum, load<T>(sum) * factor);
        for (Index i = 0; i < padded; i += LANES<T>) store<T>(row + i, load<T>(row + i) * factor);
    }
};

}  // namespace VL_LEVEL
}  // namespace vision_longformer
