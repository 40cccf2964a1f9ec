// The backward pass of a tile of chunks: between tensors as they are stored and the arithmetic of backward_core.h.
#pragma once

#include "backward_core.h"

namespace vision_longformer {
namespace VL_LEVEL {

// Gradients that several tiles share, summed up apart for each tile and added in a fixed order at the end. Per tile:
// keys and values of the global tokens, the global bias, the table (reversed, as in bias.h).
template <class T>
struct SharedGradients {
    T* data;
    Index global_tokens, dim, table_size;

    Index size() const { return global_tokens * (2 * dim + 1) + table_size; }
    T* keys(Index unit) const { return data + unit * size(); }
    T* values(Index unit) const { return keys(unit) + global_tokens * dim; }
    T* global_bias(Index unit) const { return values(unit) + global_tokens * dim; }
    T* table(Index unit) const { return global_bias(unit) + global_tokens; }
};

template <class S>
class Backward {
   public:
    using T = Arithmetic<S>;

    void allocate(const Problem& problem, const SharedGradients<T>& shared, Arena& arena) {
        problem_ = &problem;
        shared_ = shared;
        core_.allocate(problem, arena);
        zeros_ = arena.take<S>(problem.dim);
        value_rows_ = arena.take<T>(PANEL<T> * core_.padded);
    }
    void start() { std::memset(static_cast<void*>(zeros_), 0, sizeof(S) * problem_->dim); }

    // All chunks of a tile; `unit` is its number among the shared gradients.
    void differentiate(Index batch, Index head, const MapTiles& tiles, Index row, Index column, Index unit) {
        unit_ = unit;
        std::memset(shared_.keys(unit), 0, sizeof(T) * shared_.size());
        core_.bias.select_head(head);
        Index rows_of_kind[Bias<T>::KINDS], columns_of_kind[Bias<T>::KINDS];
        for (Index i = tiles.rows.first(row); i < tiles.rows.first(row + 1); i++)
            for (Index j = tiles.columns.first(column); j < tiles.columns.first(column + 1); j++) {
                core_.plan.build(i, j);
                rows_of_kind[core_.plan.kind] = i;
                columns_of_kind[core_.plan.kind] = j;
                differentiate_chunk(batch, head);
            }
        for (Index kind = 0; kind < Bias<T>::KINDS; kind++) {
            if (!core_.bias.has_gradients_of(kind)) continue;
            core_.plan.build(rows_of_kind[kind], columns_of_kind[kind]);
            fold(0, core_.plan.panels, 0, core_.plan.queries, core_.bias.take_gradients_of(core_.plan));
        }
    }

   private:
    const Problem* problem_;
    SharedGradients<T> shared_;
    BackwardCore<T> core_;
    S* zeros_;
    T* value_rows_;
    Index unit_;

    void differentiate_chunk(Index batch, Index head) {
        const Problem& p = *problem_;
        core_.clear();
        load_queries(batch, head);
        const PanelSource<S> keys = panel_source<S>(p, p.k, p.k_strides, batch, head, zeros_);
        const PanelSource<S> values = panel_source<S>(p, p.v, p.v_strides, batch, head, zeros_);
        const bool fold_at_once = core_.wants_bias && !core_.bias.cached;
        each_block(
            core_.plan, core_.BLOCK_PANELS,
            [&](const Block& block) {
                pack(block, keys, values);
                prefetch(block, keys, values, batch, head);
            },
            [&](const Block& block, bool fresh) {
                core_.differentiate(block, fresh);
                if (fold_at_once) fold_block(block);
            },
            [&](const Block& block) { add_grad_keys(block, batch, head); });
        write_grad_query(batch, head);
    }

    void load_queries(Index batch, Index head) {
        const Problem& p = *problem_;
        const S* q = static_cast<const S*>(p.q) + batch * p.q_strides.batch + head * p.q_strides.head;
        const Strides& strides = p.grad_out_strides;
        const S* grad = static_cast<const S*>(p.grad_out) + batch * strides.batch + head * strides.head;
        const S* out = static_cast<const S*>(p.out) + (batch * p.tokens() * p.heads + head) * p.dim;
        const T* lse = static_cast<const T*>(p.lse) + (batch * p.heads + head) * p.tokens();
        const T factor = T(p.scale * LOG2_E);
        for (Index i = 0; i < core_.plan.queries; i++) {
            const Index token = core_.plan.query_token[i], padded = core_.padded;
            T *grad_row = core_.grad_out + i * padded, *row = core_.query + i * padded;
            load_row<S>(out + token * p.heads * p.dim, p.dim, padded, row);  // the result, until the query comes
            load_row<S>(grad + token * strides.token, p.dim, padded, grad_row);
            Vector<T> product{};
            for (Index j = 0; j < padded; j += LANES<T>) product += load<T>(row + j) * load<T>(grad_row + j);
            core_.delta[i] = sum_of_lanes<T>(product);
            core_.lse[i] = lse[token] * T(LOG2_E);
            load_row<S>(q + token * p.q_strides.token, p.dim, padded, row,
                        [=](Vector<T> value) VL_LAMBDA { return value * factor; });
        }
    }

    void pack(const Block& block, const PanelSource<S>& keys, const PanelSource<S>& values) {
        for (Index panel = block.panel_begin; panel < block.panel_end; panel++) {
            const Index* tokens = core_.plan.key_token + panel * PANEL<T>;
            const Index place = (panel - block.panel_begin) * PANEL<T> * core_.padded;
            pack_rows<S>(keys, tokens, core_.key_rows + place);
            pack_panel<T>(core_.key_rows + place, core_.padded, core_.key_panels + place);
            pack_panel_directly<S>(values, tokens, value_rows_, core_.value_panels + place);
        }
    }

    // While a block is worked on: the keys and values of the next one, and the gradients it will be added to.
    void prefetch(const Block& block, const PanelSource<S>& keys, const PanelSource<S>& values, Index batch,
                  Index head) {
        const Index panels = block.panel_end - block.panel_begin, steps = panels * core_.plan.tiles;
        const Index ahead = minimum(core_.plan.panels - block.panel_end, panels);
        const Index* tokens = core_.plan.key_token + block.panel_begin * PANEL<T>;
        core_.prefetch_inputs.start(tokens + panels * PANEL<T>, ahead * PANEL<T>, keys.base, keys.token_stride,
                                    values.base, values.token_stride, keys.size, steps);
        const Index stride = problem_->heads * problem_->dim;
        core_.prefetch_gradients.start(tokens, panels * PANEL<T>, gradients(problem_->grad_k, batch, head), stride,
                                       gradients(problem_->grad_v, batch, head), stride, problem_->dim, steps);
    }

    // Gradients of keys or values of one batch entry and head.
    T* gradients(void* tensor, Index batch, Index head) const {
        const Index tokens = problem_->global_tokens + problem_->tokens();
        return static_cast<T*>(tensor) + (batch * tokens * problem_->heads + head) * problem_->dim;
    }

    // Adds gradients of expanded bias to those of the table and of the global bias.
    void fold(Index panel_begin, Index panel_end, Index query_begin, Index query_end, PanelMatrix<T> source) {
        T* table = problem_->grad_bias ? shared_.table(unit_) : nullptr;
        T* global = problem_->grad_global_bias ? shared_.global_bias(unit_) : nullptr;
        core_.bias.fold(core_.plan, panel_begin, panel_end, query_begin, query_end, source, table, global);
    }

    void fold_block(const Block& block) {
        const ChunkPlan<T>& plan = core_.plan;
        for (Index tile = block.tile_begin; tile < block.tile_end; tile++) {
            const Index begin = block.seen_begin(plan, tile), end = block.seen_end(plan, tile);
            const Index start = plan.tile_start[tile], first = plan.tile_start[block.tile_begin];
            PanelMatrix<T> source = core_.grad_scores;
            source.data = source.at(begin, start - first);
            if (begin < end)
                fold(block.panel_begin + begin, block.panel_begin + end, start, plan.tile_start[tile + 1], source);
        }
    }

    // Adds the block's sums to the gradients of its tokens.
    void add_grad_keys(const Block& block, Index batch, Index head) {
        const Problem& p = *problem_;
        T *keys = gradients(p.grad_k, batch, head), *values = gradients(p.grad_v, batch, head);
        const Index* tokens = core_.plan.key_token + block.panel_begin * PANEL<T>;
        for (Index i = 0; i < (block.panel_end - block.panel_begin) * PANEL<T>; i++) {
            const Index token = tokens[i], row = i * core_.padded;
            if (token < 0) continue;
            const bool shared = token < p.global_tokens;
            const Index place = shared ? token * p.dim : token * p.heads * p.dim;
            // Queries were loaded times log2 e.
            add_row<T>(core_.grad_keys + row, p.dim, T(LN_2), (shared ? shared_.keys(unit_) : keys) + place);
            add_row<T>(core_.grad_values + row, p.dim, T(1), (shared ? shared_.values(unit_) : values) + place);
        }
    }

    void write_grad_query(Index batch, Index head) {
        const Problem& p = *problem_;
        S* grad = static_cast<S*>(p.grad_q) + (batch * p.tokens() * p.heads + head) * p.dim;
        for (Index i = 0; i < core_.plan.queries; i++)
            store_row<S>(core_.grad_query + i * core_.padded, p.dim, T(p.scale),
                         grad + core_.plan.query_token[i] * p.heads * p.dim);
    }
};

}  // namespace VL_LEVEL
}  // namespace vision_longformer
