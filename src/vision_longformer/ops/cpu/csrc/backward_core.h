// The arithmetic of the backward pass: weights recomputed from the kept log-sum-exp, and products with them.
#pragma once

#include "block.h"
#include "prefetch.h"

namespace vision_longformer {
namespace VL_LEVEL {

template <class T>
struct BackwardCore {
    static constexpr Index BLOCK_PANELS = 448 / (2 * VECTOR_BYTES), ARRAYS = 5;  // arrays of packed keys

    Index dim, padded, heads, head;  // heads of a pass at most, and which of them is at work
    bool wants_bias;
    ChunkPlan<T> plan;
    Bias<T> bias;
    KeyRing<T> ring;
    T *query, *grad_out, *grad_query;         // rows of `padded` elements per query
    T *lse, *delta;                           // per query: log-sum-exp in base 2; result times its gradient
    T *key_rows, *key_panels, *value_panels;  // of the groups of the ring, for each head
    T *grad_keys, *grad_values;               // of the same keys, as rows
    PanelMatrix<T> weights, grad_scores, block_bias;
    Prefetch prefetch;

    void allocate(const Problem& problem, Index pass_heads, Arena& arena) {
        dim = problem.dim;
        heads = pass_heads;
        padded = round_up(dim, PANEL<T>);
        wants_bias = problem.grad_bias || problem.grad_global_bias;
        plan.allocate(problem, arena);
        bias.allocate(problem, plan, heads, wants_bias, arena);
        ring.allocate(plan, padded, arena);
        const Index queries = plan.largest_queries(), block = BLOCK_PANELS * PANEL<T>;
        for (T** rows : {&query, &grad_out, &grad_query}) *rows = arena.take<T>(queries * padded);
        for (T** per_query : {&lse, &delta}) *per_query = arena.take<T>(queries);
        for (T** keys : {&key_rows, &key_panels, &value_panels, &grad_keys, &grad_values})
            *keys = arena.take<T>(heads * ring.size());
        for (PanelMatrix<T>* matrix : {&weights, &grad_scores})
            *matrix = {arena.take<T>(GROUP_ROWS * block), GROUP_ROWS * PANEL<T>};
        block_bias = {arena.take<T>(bias.cached ? 0 : GROUP_ROWS * block), GROUP_ROWS * PANEL<T>};
    }

    // Before anything else: the zeros that stand for padding.
    void start() {
        for (T* packed : {key_rows, key_panels, value_panels, grad_keys, grad_values})
            for (Index i = 0; i < heads; i++)
                std::memset(packed + i * ring.size() + ring.zeros(), 0, sizeof(T) * LANES<T> * padded);
    }

    // Before the first block of a chunk.
    void clear() { std::memset(grad_query, 0, sizeof(T) * plan.queries * padded); }

    // Whether all that the plan's chunk reads is finite.
    bool finite() const {
        const Index vectors = 2 * plan.panels, size = LANES<T> * padded, head_start = head * ring.size();
        bool fine = true;
        for (const T* keys : {key_rows, value_panels})
            for (Index i = 0; i < vectors; i++) fine = fine && all_finite(keys + head_start + ring.place[i], size);
        for (const T* rows : {query, grad_out}) fine = fine && all_finite(rows, plan.queries * padded);
        for (Index i = 0; i < plan.queries; i++) fine = fine && (lse[i] + delta[i]) * 0 == 0;
        return fine;
    }

    VL_NOINLINE void differentiate(const Block& block) {
        recompute(block);
        const Index first = plan.tile_start[block.tile_begin];
        for (Index tile = block.tile_begin; tile < block.tile_end; tile++) {
            const Index begin = block.seen_begin(plan, tile), end = block.seen_end(plan, tile);
            if (begin >= end) continue;
            const Index start = plan.tile_start[tile];
            sum_over_keys<T>(grad_scores.at(begin, start - first), grad_scores.panel_stride,
                             key_rows + head * ring.size(), ring.place + 2 * (block.panel_begin + begin), end - begin,
                             plan.tile_start[tile + 1] - start, grad_query + start * padded, padded);
        }
        for (Index panel = block.panel_begin; panel < block.panel_end; panel++) sum_grad_keys(block, panel);
    }

    // The same, but products are made one by one, for pairs that see each other: with numbers that are not finite the
    // others, of weight 0, would not be 0.
    VL_NOINLINE void differentiate_by_pairs(const Block& block) {
        const Index first = plan.tile_start[block.tile_begin], last = plan.tile_start[block.tile_end];
        const PanelMatrix<T> added =
            bias.of_block(plan, head, block.panel_begin, block.panel_end, first, last, block_bias);
        for (Index panel = block.panel_begin; panel < block.panel_end; panel++)
            for (Index i = first; i < last; i++)
                for (Index lane = 0; lane < PANEL<T>; lane++) {
                    const Index place = panel - block.panel_begin, key = panel * PANEL<T> + lane;
                    T* grad = grad_scores.at(place, i - first) + lane;
                    *grad = plan.sees(i, key) ? differentiate_pair(i, key, added.at(place, i - first)[lane]) : T(0);
                    if (wants_bias && bias.cached) bias.gradients_of(plan, head).at(panel, i)[lane] += *grad;
                }
    }

   private:
    // Adds to the gradients of a query, a key and its value; returns that of their score.
    T differentiate_pair(Index index, Index key, T score) {
        const Index head_start = head * ring.size(), row = head_start + ring.row_of(key, padded);
        const T *q = query + index * padded, *grad = grad_out + index * padded, *k = key_rows + row;
        const T* v = value_panels + head_start + ring.place[key / LANES<T>] + key % LANES<T>;
        T grad_weight = -delta[index];
        score -= lse[index];
        for (Index i = 0; i < dim; i++) {
            score += q[i] * k[i];
            grad_weight += grad[i] * v[i * LANES<T>];
        }
        const T weight = power_of_two<T>(broadcast<T>(score))[0], grad_score = weight * grad_weight;
        add_row<T>(k, dim, grad_score, grad_query + index * padded);
        add_row<T>(q, dim, grad_score, grad_keys + row);
        add_row<T>(grad, dim, weight, grad_values + row);
        return grad_score;
    }

    // Weights and gradients of the scores of the group's queries with the block's keys.
    void recompute(const Block& block) {
        const Index first = plan.tile_start[block.tile_begin], last = plan.tile_start[block.tile_end];
        const PanelMatrix<T> added =
            bias.of_block(plan, head, block.panel_begin, block.panel_end, first, last, block_bias);
        PanelMatrix<T> grad_bias = {nullptr, 0};
        if (wants_bias && bias.cached) {
            grad_bias = bias.gradients_of(plan, head);
            grad_bias.data = grad_bias.at(block.panel_begin, first);
        }
        for (Index panel = block.panel_begin; panel < block.panel_end; panel++)
            for (Index tile = block.tile_begin; tile < block.tile_end; tile++) {
                if (!block.sees(plan, tile, panel)) continue;
                prefetch.step();
                const Index start = plan.tile_start[tile], place = panel - block.panel_begin;
                with_constant<MICRO_ROWS>(plan.tile_start[tile + 1] - start, [&](auto rows) VL_LAMBDA {
                    recompute_tile<rows.value>(start, ring.place + 2 * panel, start - first, place, added, grad_bias);
                });
            }
    }

    template <int ROWS>
    VL_INLINE void recompute_tile(Index start, const Index* keys, Index row, Index panel, PanelMatrix<T> added,
                                  PanelMatrix<T> grad_bias) {
        T *weight = weights.at(panel, row), *grad = grad_scores.at(panel, row);
        const T *offset = added.at(panel, row), *row_lse = lse + start, *row_delta = delta + start;
        Tile<T, ROWS> sums;
        sums.each([=](Vector<T>& sum, int i, int j) VL_LAMBDA {
            sum = load<T>(offset + i * PANEL<T> + j * LANES<T>) - row_lse[i];
        });
        const T *key = key_panels + head * ring.size(), *value = value_panels + head * ring.size();
        sums.multiply(query + start * padded, padded, 1, key + keys[0], key + keys[1], LANES<T>, dim);
        sums.each([=](Vector<T>& sum, int i, int j) VL_LAMBDA {
            store<T>(weight + i * PANEL<T> + j * LANES<T>, power_of_two<T>(sum));
            sum = broadcast<T>(-row_delta[i]);
        });
        sums.multiply(grad_out + start * padded, padded, 1, value + keys[0], value + keys[1], LANES<T>, dim);
        sums.each([=](Vector<T>& sum, int i, int j) VL_LAMBDA {
            sum *= load<T>(weight + i * PANEL<T> + j * LANES<T>);
            store<T>(grad + i * PANEL<T> + j * LANES<T>, sum);
        });
        if (!grad_bias.data) return;
        T* target = grad_bias.at(panel, row);
        sums.each([=](Vector<T>& sum, int i, int j) VL_LAMBDA {
            T* entry = target + i * PANEL<T> + j * LANES<T>;
            store<T>(entry, load<T>(entry) + sum);
        });
    }

    // Gradients of a panel's keys and values from the group's queries.
    void sum_grad_keys(const Block& block, Index panel) {
        Index begin = block.tile_begin, end = block.tile_end;
        while (begin < end && !block.sees(plan, begin, panel)) begin++;
        while (begin < end && !block.sees(plan, end - 1, panel)) end--;
        const Index first = plan.tile_start[begin], count = plan.tile_start[end] - first;
        const Index row = first - plan.tile_start[block.tile_begin], place = panel - block.panel_begin;
        const Index *keys = ring.place + 2 * panel, head_start = head * ring.size();
        sum_over_queries(weights.at(place, row), grad_out + first * padded, count, grad_values + head_start, keys);
        sum_over_queries(grad_scores.at(place, row), query + first * padded, count, grad_keys + head_start, keys);
    }

    // target[key][:] += sum over queries of left[query][key] * right[query][:], for the keys of a panel, whose vectors
    // are at `place` of the target.
    void sum_over_queries(const T* left, const T* right, Index count, T* target, const Index* place) {
        for (Index tile = 0; tile < micro_tiles(PANEL<T>); tile++) {
            const Index key = micro_tile_start(PANEL<T>, tile), keys = micro_tile_start(PANEL<T>, tile + 1) - key;
            T* row_of[MICRO_ROWS];
            for (Index i = 0; i < keys; i++)
                row_of[i] = target + place[(key + i) / LANES<T>] + (key + i) % LANES<T> * padded;
            for (Index column = 0; column < padded; column += PANEL<T>)
                with_constant<MICRO_ROWS>(keys, [&](auto rows) VL_LAMBDA {
                    Tile<T, rows.value> sums;
                    sums.each([&](Vector<T>& sum, int i, int j) VL_LAMBDA {
                        sum = load<T>(row_of[i] + column + j * LANES<T>);
                    });
                    sums.multiply(left + key, 1, PANEL<T>, right + column, right + column + LANES<T>, padded, count);
                    sums.each([&](Vector<T>& sum, int i, int j) VL_LAMBDA {
                        store<T>(row_of[i] + column + j * LANES<T>, sum);
                    });
                });
        }
    }
};

}  // namespace VL_LEVEL
}  // namespace vision_longformer
