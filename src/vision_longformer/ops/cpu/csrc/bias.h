// The bias of all pairs of queries and keys of a chunk, expanded from its table, and the way back for gradients.
#pragma once

#include <cmath>

#include "plan.h"

namespace vision_longformer {
namespace VL_LEVEL {

constexpr double LOG2_E = 1.4426950408889634074, LN_2 = 0.69314718055994530942;

// Part of a matrix of queries by keys, panel by panel: element (query, key) of it is at
// data[key / PANEL * panel_stride + query * PANEL + key % PANEL].
template <class T>
struct PanelMatrix {
    T* data;
    Index panel_stride;

    VL_INLINE T* at(Index panel, Index query) const { return data + panel * panel_stride + query * PANEL<T>; }
};

// Expanded once per head and kind of chunk and kept for a row of chunks, unless windows are so large that it would not
// fit a cache; then expanded anew for every block. Scores are in base 2, so that softmax takes powers of two: all is
// times log2 e. Heads are those of a pass, counted from its first.
template <class T>
class Bias {
   public:
    static constexpr Index LARGEST_CACHE_BYTES = 8 << 20;
    bool cached;

    void allocate(const Problem& problem, const ChunkPlan<T>& plan, Index heads, bool gradients, Arena& arena) {
        problem_ = &problem;
        first_head_ = row_kind_ = -1;
        kinds_ = heads * AXIS_KINDS;
        slot_ = slot_size(plan);
        cached = heads <= most_heads_cached(plan);
        tables_ = arena.take<T>(heads * problem.bias_side() * problem.bias_side());
        globals_ = arena.take<T>(heads * problem.global_tokens);
        valid_ = arena.take<bool>(kinds_);
        expanded_ = arena.take<T>(cached ? kinds_ * slot_ : 0);
        gradients_ = arena.take<T>(cached && gradients ? kinds_ * slot_ : 0);
    }

    static Index most_heads_cached(const ChunkPlan<T>& plan) {
        return LARGEST_CACHE_BYTES / (AXIS_KINDS * slot_size(plan) * Index(sizeof(T)));
    }

    // Bias of some panels and queries of the plan's chunk; element (0, 0) of the result is (first panel, first query).
    // `space` is where to expand it if it is not kept.
    PanelMatrix<T> of_block(const ChunkPlan<T>& plan, Index head, Index panel_begin, Index panel_end,
                            Index query_begin, Index query_end, PanelMatrix<T> space) {
        if (!cached) {
            expand(plan, head, panel_begin, panel_end, query_begin, query_end, space);
            return space;
        }
        if (plan.rows.kind != row_kind_) forget_expanded(plan.rows.kind);
        const Index kind = kind_of(plan, head);
        PanelMatrix<T> matrix{expanded_ + kind * slot_, plan.queries * PANEL<T>};
        if (!valid_[kind]) expand(plan, head, 0, plan.panels, 0, plan.queries, matrix);
        valid_[kind] = true;
        matrix.data = matrix.at(panel_begin, query_begin);
        return matrix;
    }

    // Of a query and the key of the same token.
    T of_own_key(Index head) const { return table_of(head)[problem_->bias_side() * problem_->bias_side() / 2]; }

    // Where gradients of the plan's kind of chunk are summed up.
    PanelMatrix<T> gradients_of(const ChunkPlan<T>& plan, Index head) const {
        return {gradients_ + kind_of(plan, head) * slot_, plan.queries * PANEL<T>};
    }

    void clear_gradients_of(const ChunkPlan<T>& plan, Index head) {
        std::memset(gradients_of(plan, head).data, 0, sizeof(T) * plan.queries * plan.panels * PANEL<T>);
    }

    // Must be called before the bias of other heads is asked for.
    VL_NOINLINE void select_heads(Index first, Index count) {
        if (first == first_head_) return;
        first_head_ = first;
        forget_expanded(row_kind_);
        for (Index head = 0; head < count; head++) read_tables(head);
    }

    // Adds `source` to a reversed gradient of the table and to that of the global bias; either may be null.
    VL_NOINLINE void fold(const ChunkPlan<T>& plan, Index panel_begin, Index panel_end, Index query_begin,
                          Index query_end, PanelMatrix<T> source, T* table, T* global) const {
        each_vector(panel_begin, panel_end, query_begin, query_end, source, [&](Index query, Index key, T* values) {
            T* row = table ? table + plan.query_start[query] : nullptr;
            const Index run = plan.key_run[key / LANES<T>], *offset = plan.key_offset + key;
            if (run == ChunkPlan<T>::MIXED) {
                for (int lane = 0; lane < LANES<T>; lane++)
                    if (offset[lane] >= 0 && row)
                        row[offset[lane]] += values[lane];
                    else if (offset[lane] < ChunkPlan<T>::PADDING && global)
                        global[ChunkPlan<T>::FIRST_GLOBAL - offset[lane]] += values[lane];
            } else if (row && run >= 0) {
                store<T>(row + run, load<T>(row + run) + load<T>(values));
            } else if (row) {
                for (int lane = 0; lane < LANES<T>; lane++) row[offset[lane]] += values[lane];
            }
        });
    }

   private:
    const Problem* problem_;
    T *tables_, *globals_, *expanded_, *gradients_;
    bool* valid_;
    Index first_head_, row_kind_, kinds_, slot_;

    static Index slot_size(const ChunkPlan<T>& plan) {
        return plan.largest_queries() * plan.largest_panels() * PANEL<T>;
    }
    static Index kind_of(const ChunkPlan<T>& plan, Index head) { return head * AXIS_KINDS + plan.columns.kind; }
    T* table_of(Index head) const { return tables_ + head * problem_->bias_side() * problem_->bias_side(); }

    void forget_expanded(Index row_kind) {
        row_kind_ = row_kind;
        for (Index kind = 0; kind < kinds_; kind++) valid_[kind] = false;
    }

    void read_tables(Index index) {
        const Index side = problem_->bias_side(), size = side * side, w = problem_->window, head = first_head_ + index;
        const T* table = static_cast<const T*>(problem_->bias);
        T *reversed = table_of(index), *globals = globals_ + index * problem_->global_tokens;
        for (Index row = 0; row < side; row++)
            for (Index column = 0; column < side; column++) {
                const Index entry = row * side + column, dy = row - (2 * w - 1), dx = column - (2 * w - 1);
                const bool near = dy >= -w && dy <= w && dx >= -w && dx <= w;
                const T value = table ? table[head * size + entry] * T(LOG2_E) : T(0);
                const bool hidden = problem_->rule == RULE_EXACT && !near;
                reversed[size - 1 - (column * side + row)] = hidden ? -T(INFINITY) : value;
            }
        const T* global = static_cast<const T*>(problem_->global_bias);
        for (Index token = 0; token < problem_->global_tokens; token++)
            globals[token] = global ? global[head * problem_->global_tokens + token] * T(LOG2_E) : T(0);
    }

    // Fills `target` for some panels and queries of the plan.
    void expand(const ChunkPlan<T>& plan, Index head, Index panel_begin, Index panel_end, Index query_begin,
                Index query_end, PanelMatrix<T> target) const {
        const T *table = table_of(head), *globals = globals_ + head * problem_->global_tokens;
        each_vector(panel_begin, panel_end, query_begin, query_end, target, [&](Index query, Index key, T* values) {
            const T* row = table + plan.query_start[query];
            const Index run = plan.key_run[key / LANES<T>];
            if (run >= 0) return store<T>(values, load<T>(row + run));
            for (int lane = 0; lane < LANES<T>; lane++) {
                const Index offset = plan.key_offset[key + lane];
                values[lane] = offset >= 0                       ? row[offset]
                               : offset == ChunkPlan<T>::PADDING ? -T(INFINITY)
                                                                 : globals[ChunkPlan<T>::FIRST_GLOBAL - offset];
            }
        });
    }

    // Calls `body(query, key, values)` for every query and every vector of keys from `key` on. Queries come in the
    // outer loop: neighbours among them have overlapping entries, which are slow to store and load again at once.
    template <class Body>
    static VL_INLINE void each_vector(Index panel_begin, Index panel_end, Index query_begin, Index query_end,
                                      PanelMatrix<T> matrix, Body body) {
        for (Index query = query_begin; query < query_end; query++)
            for (Index panel = panel_begin; panel < panel_end; panel++)
                for (int part = 0; part < PANEL<T>; part += LANES<T>)
                    body(query, panel * PANEL<T> + part, matrix.at(panel - panel_begin, query - query_begin) + part);
    }
};

}  // namespace VL_LEVEL
}  // namespace vision_longformer
