// The arithmetic of the forward pass: scores, running softmax, sums of values.
#pragma once

#include "block.h"
#include "prefetch.h"

namespace vision_longformer {
namespace VL_LEVEL {

template <class T>
struct ForwardCore {
    static constexpr Index BLOCK_PANELS = 896 / (2 * VECTOR_BYTES), ARRAYS = 2;  // arrays of packed keys
    // Weights are powers of two of scores relative to a reference per query. Most scores are small, so that 0 does: it
    // is raised for scores that exceed it by more than SLACK, and a sum of weights below TINY says it was too high.
    static constexpr T SLACK = 60, TINY = T(0x1p-60);

    Index dim, padded, heads, head;  // heads of a pass at most, and which of them is at work
    ChunkPlan<T> plan;
    Bias<T> bias;
    KeyRing<T> ring;
    T *query, *result;           // rows of `padded` elements per query
    T *reference, *total, *sum;  // per query: what weights are relative to; sum of weights, lane by lane, and in all
    T *key_panels, *value_rows;  // of the groups of the ring, for each head
    PanelMatrix<T> weights, block_bias;
    Prefetch prefetch;

    void allocate(const Problem& problem, Index pass_heads, Arena& arena) {
        dim = problem.dim;
        heads = pass_heads;
        padded = round_up(dim, PANEL<T>);
        plan.allocate(problem, arena);
        bias.allocate(problem, plan, heads, false, arena);
        ring.allocate(plan, padded, arena);
        const Index queries = plan.largest_queries(), block = BLOCK_PANELS * PANEL<T>;
        query = arena.take<T>(queries * padded);
        result = arena.take<T>(queries * padded);
        reference = arena.take<T>(queries);
        total = arena.take<T>(queries * LANES<T>);
        sum = arena.take<T>(queries);
        for (T** packed : {&key_panels, &value_rows}) *packed = arena.take<T>(heads * ring.size());
        weights = {arena.take<T>(GROUP_ROWS * block), GROUP_ROWS * PANEL<T>};
        block_bias = {arena.take<T>(bias.cached ? 0 : GROUP_ROWS * block), GROUP_ROWS * PANEL<T>};
    }

    // Before anything else: the zeros that stand for padding.
    void start() {
        for (T* packed : {key_panels, value_rows})
            for (Index i = 0; i < heads; i++)
                std::memset(packed + i * ring.size() + ring.zeros(), 0, sizeof(T) * LANES<T> * padded);
    }

    // All keys of a chunk, relative to the references; false if some query's was too high.
    bool attend() {
        std::memset(result, 0, sizeof(T) * plan.queries * padded);
        std::memset(total, 0, sizeof(T) * plan.queries * LANES<T>);
        each_block(plan, BLOCK_PANELS, [&](const Block& block) { attend(block); });
        bool fine = true;
        for (Index i = 0; i < plan.queries; i++) {
            sum[i] = sum_of_lanes<T>(load<T>(total + i * LANES<T>));
            if (sum[i] < TINY) fine = false;
        }
        return fine;
    }

    // Attends anew, one by one, for queries whose sums went wrong. A key that is not finite spoils, beside the queries
    // that see it, those it is hidden from by a score of -infinity; and a query whose own key has such a score may have
    // no reference that suits it.
    void attend_failed() {
        if (!failed(0, plan.queries)) return;
        for (Index i = 0; i < plan.queries; i++)
            if (failed(i, 1) && all_finite(query + i * padded, padded)) attend_alone(i);
    }

   private:
    bool failed(Index first, Index count) const {
        bool tiny = false;
        for (Index i = first; i < first + count; i++) tiny = tiny || sum[i] < TINY;
        return tiny || !all_finite(result + first * padded, count * padded);
    }

    // One query and, key by key, what it sees.
    VL_NOINLINE void attend_alone(Index index) {
        T *values = result + index * padded, highest = -T(INFINITY);
        const auto each_seen = [&](auto body) {
            for (Index key = 0; key < plan.panels * PANEL<T>; key++)
                if (plan.sees(index, key)) body(key, score_alone(index, key));
        };
        each_seen([&](Index, T score) { highest = score > highest ? score : highest; });
        reference[index] = highest;
        sum[index] = 0;
        std::memset(values, 0, sizeof(T) * padded);
        each_seen([&](Index key, T score) {
            const T weight = power_of_two<T>(broadcast<T>(score - highest))[0];
            sum[index] += weight;
            add_row<T>(value_rows + head * ring.size() + ring.row_of(key, padded), dim, weight, values);
        });
    }

    T score_alone(Index index, Index key) {
        const Index panel = key / PANEL<T>;
        T score = *(bias.of_block(plan, head, panel, panel + 1, index, index + 1, block_bias).data + key % PANEL<T>);
        const T* column = key_panels + head * ring.size() + ring.place[key / LANES<T>] + key % LANES<T>;
        for (Index i = 0; i < dim; i++) score += query[index * padded + i] * column[i * LANES<T>];
        return score;
    }

    VL_NOINLINE void attend(const Block& block) {
        score(block);
        const Index first = plan.tile_start[block.tile_begin];
        for (Index tile = block.tile_begin; tile < block.tile_end; tile++) {
            const Index begin = block.seen_begin(plan, tile), end = block.seen_end(plan, tile);
            if (begin >= end) continue;
            const Index start = plan.tile_start[tile];
            sum_over_keys<T>(weights.at(begin, start - first), weights.panel_stride, value_rows + head * ring.size(),
                             ring.place + 2 * (block.panel_begin + begin), end - begin,
                             plan.tile_start[tile + 1] - start, result + start * padded, padded);
        }
    }

    // Weights of the group's queries with the block's keys: powers of two of bias plus product.
    void score(const Block& block) {
        const Index first = plan.tile_start[block.tile_begin];
        const PanelMatrix<T> added = bias.of_block(plan, head, block.panel_begin, block.panel_end, first,
                                                   plan.tile_start[block.tile_end], block_bias);
        for (Index panel = block.panel_begin; panel < block.panel_end; panel++)
            for (Index tile = block.tile_begin; tile < block.tile_end; tile++) {
                if (!block.sees(plan, tile, panel)) continue;
                prefetch.step();
                const Index start = plan.tile_start[tile], place = panel - block.panel_begin;
                with_constant<MICRO_ROWS>(plan.tile_start[tile + 1] - start, [&](auto rows) VL_LAMBDA {
                    score_tile<rows.value>(start, ring.place + 2 * panel, place, start - first,
                                           added.at(place, start - first));
                });
            }
    }

    template <int ROWS>
    VL_INLINE void score_tile(Index start, const Index* keys, Index panel, Index row, const T* added) {
        T *weight = weights.at(panel, row), *row_reference = reference + start, *row_total = total + start * LANES<T>;
        Tile<T, ROWS> sums;
        sums.each([=](Vector<T>& score, int i, int j) VL_LAMBDA {
            score = load<T>(added + i * PANEL<T> + j * LANES<T>) - row_reference[i];
        });
        const T* panels = key_panels + head * ring.size();
        sums.multiply(query + start * padded, padded, 1, panels + keys[0], panels + keys[1], LANES<T>, dim);
        Vector<T> highest{};  // of all rows, passing over what is not a number: that hides no other row's score
        sums.each([&](Vector<T>& score, int, int) VL_LAMBDA { highest = maximum(score, highest); });
        if (__builtin_expect(any_above<T>(highest, SLACK), false)) {
            sums.write(weight, PANEL<T>);
            for (int i = 0; i < ROWS; i++) raise_reference(start + i, panel, row + i);
            sums.read(weight, PANEL<T>);
        }
        sums.each([=](Vector<T>& score, int i, int j) VL_LAMBDA {
            score = power_of_two<T>(score);
            store<T>(weight + i * PANEL<T> + j * LANES<T>, score);
        });
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            T* place = row_total + i * LANES<T>;
            store<T>(place, load<T>(place) + (sums.sum[i][0] + sums.sum[i][1]));
        }
    }

    // Makes the largest score of a query in a panel its reference, if it is much too large: scales what has been summed
    // up, and the weights of the block's earlier panels.
    VL_NOINLINE void raise_reference(Index index, Index panel, Index row) {
        T* scores = weights.at(panel, row);
        const Vector<T> highest = maximum(load<T>(scores), load<T>(scores + LANES<T>));
        if (!any_above<T>(highest, SLACK)) return;
        const T rise = largest_lane<T>(highest);
        const Vector<T> factor = power_of_two<T>(broadcast<T>(-rise));
        const auto scale = [&](T* values, Index count) {
            for (Index i = 0; i < count; i += LANES<T>) store<T>(values + i, load<T>(values + i) * factor);
        };
        reference[index] += rise;
        scale(total + index * LANES<T>, LANES<T>);
        scale(result + index * padded, padded);
        for (Index earlier = 0; earlier < panel; earlier++) scale(weights.at(earlier, row), PANEL<T>);
        for (int i = 0; i < PANEL<T>; i += LANES<T>) store<T>(scores + i, load<T>(scores + i) - rise);
    }
};

}  // namespace VL_LEVEL
}  // namespace vision_longformer
