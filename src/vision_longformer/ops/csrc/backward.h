// Backward: recomputes the weights of a chunk from the kept log-sum-exp, and sums up all gradients in one pass.
#pragma once

#include "forward.h"

namespace vision_longformer {
namespace VL_LEVEL {

// Gradients of a tile of chunks that several tiles share: summed up apart, and added in a fixed order at the end.
// Per tile: keys and values of the global tokens, the table (reversed), the global bias.
template <class T>
struct SharedGradients {
    T* data;
    Index global_tokens, dim, table_size;

    Index size() const { return global_tokens * (2 * dim + 1) + table_size; }
    T* of(Index tile) const { return data + tile * size(); }
    T* keys(Index tile) const { return of(tile); }
    T* values(Index tile) const { return keys(tile) + global_tokens * dim; }
    T* global_bias(Index tile) const { return values(tile) + global_tokens * dim; }
    T* table(Index tile) const { return global_bias(tile) + global_tokens; }
};

template <class S>
class Backward {
   public:
    using T = Arithmetic<S>;
    static constexpr Index BLOCK_PANELS = 192 / (2 * VECTOR_BYTES);

    void allocate(const Problem& problem, Arena& arena) {
        problem_ = &problem;
        padded_ = round_up(problem.dim, LANES<T>);
        wants_bias_ = problem.grad_bias || problem.grad_global_bias;
        plan_.allocate(problem, arena);
        bias_.allocate(problem, plan_, wants_bias_, arena);
        const Index queries = plan_.largest_queries(), block = BLOCK_PANELS * PANEL<T>;
        zeros_ = arena.take<S>(problem.dim);
        for (T** rows : {&query_, &grad_out_, &grad_query_}) *rows = arena.take<T>(queries * padded_);
        for (T** per_query : {&lse_, &delta_}) *per_query = arena.take<T>(queries);
        for (T** keys : {&key_rows_, &key_panels_, &value_panels_, &grad_keys_, &grad_values_})
            *keys = arena.take<T>(block * padded_);
        value_rows_ = arena.take<T>(PANEL<T> * padded_);
        for (PanelMatrix<T>* matrix : {&weights_, &grad_scores_})
            *matrix = {arena.take<T>(GROUP_ROWS * block), GROUP_ROWS * PANEL<T>};
        block_bias_ = {arena.take<T>(bias_.cached ? 0 : GROUP_ROWS * block), GROUP_ROWS * PANEL<T>};
    }
    void start() { std::memset(static_cast<void*>(zeros_), 0, sizeof(S) * problem_->dim); }

    // All chunks of a tile; `shared` is its part of the shared gradients.
    void differentiate_tile(Index batch, Index head, const MapTiles& tiles, Index row, Index column,
                            const SharedGradients<T>& shared, Index unit) {
        shared_ = shared;
        unit_ = unit;
        std::memset(shared.of(unit), 0, sizeof(T) * shared.size());
        Index rows_of_kind[Bias<T>::KINDS], columns_of_kind[Bias<T>::KINDS];
        for (Index i = tiles.rows.first(row); i < tiles.rows.first(row + 1); i++)
            for (Index j = tiles.columns.first(column); j < tiles.columns.first(column + 1); j++) {
                plan_.build(i, j);
                rows_of_kind[plan_.kind] = i;
                columns_of_kind[plan_.kind] = j;
                differentiate(batch, head);
            }
        for (Index kind = 0; kind < Bias<T>::KINDS; kind++) {
            if (!bias_.has_gradients_of(kind)) continue;
            plan_.build(rows_of_kind[kind], columns_of_kind[kind]);
            fold(0, plan_.panels, 0, plan_.queries, bias_.take_gradients_of(plan_));
        }
    }

   private:
    const Problem* problem_;
    Index padded_, panel_begin_, panel_end_, tile_begin_, tile_end_, unit_;
    bool wants_bias_;
    ChunkPlan<T> plan_;
    Bias<T> bias_;
    SharedGradients<T> shared_;
    S* zeros_;
    T *query_, *grad_out_, *grad_query_, *lse_, *delta_;
    T *key_rows_, *key_panels_, *value_rows_, *value_panels_, *grad_keys_, *grad_values_;
    PanelMatrix<T> weights_, grad_scores_, block_bias_;

    void differentiate(Index batch, Index head) {
        const Problem& p = *problem_;
        bias_.select_head(head);
        load_queries(batch, head);
        const S* k = static_cast<const S*>(p.k) + batch * p.k_strides.batch + head * p.k_strides.head;
        const S* v = static_cast<const S*>(p.v) + batch * p.v_strides.batch + head * p.v_strides.head;
        const PanelSource<S> keys{k, p.k_strides.token, p.dim, padded_, zeros_};
        const PanelSource<S> values{v, p.v_strides.token, p.dim, padded_, zeros_};
        const Index blocks = ceiling(plan_.panels, BLOCK_PANELS), groups = ceiling(plan_.tiles, GROUP_TILES);
        for (Index block = 0; block < blocks; block++) {
            panel_begin_ = part_start(plan_.panels, blocks, block);
            panel_end_ = part_start(plan_.panels, blocks, block + 1);
            pack_block(keys, values);
            for (Index group = 0; group < groups; group++) {
                tile_begin_ = part_start(plan_.tiles, groups, group);
                tile_end_ = part_start(plan_.tiles, groups, group + 1);
                recompute();
                for (Index tile = tile_begin_; tile < tile_end_; tile++) sum_grad_query(tile);
                for (Index panel = panel_begin_; panel < panel_end_; panel++) sum_grad_keys(panel, group == 0);
            }
            add_grad_keys(batch, head);
        }
        write_grad_query(batch, head);
    }

    void load_queries(Index batch, Index head) {
        const Problem& p = *problem_;
        const S* q = static_cast<const S*>(p.q) + batch * p.q_strides.batch + head * p.q_strides.head;
        const Strides& strides = p.grad_out_strides;
        const S* grad = static_cast<const S*>(p.grad_out) + batch * strides.batch + head * strides.head;
        const S* out = static_cast<const S*>(p.out) + (batch * p.tokens() * p.heads + head) * p.dim;
        const T* lse = static_cast<const T*>(p.lse) + (batch * p.heads + head) * p.tokens();
        for (Index query = 0; query < plan_.queries; query++) {
            const Index token = plan_.query_token[query];
            T *grad_row = grad_out_ + query * padded_, *row = query_ + query * padded_;
            load_row<S>(out + token * p.heads * p.dim, p.dim, padded_, T(1), row);  // for a moment
            load_row<S>(grad + token * strides.token, p.dim, padded_, T(1), grad_row);
            Vector<T> product{};
            for (Index i = 0; i < padded_; i += LANES<T>) product += load<T>(row + i) * load<T>(grad_row + i);
            delta_[query] = sum_of_lanes<T>(product);
            lse_[query] = lse[token] * T(LOG2_E);
            load_row<S>(q + token * p.q_strides.token, p.dim, padded_, T(p.scale * LOG2_E), row);
        }
        std::memset(grad_query_, 0, sizeof(T) * plan_.queries * padded_);
    }

    void pack_block(const PanelSource<S>& keys, const PanelSource<S>& values) {
        for (Index panel = panel_begin_; panel < panel_end_; panel++) {
            const Index* tokens = plan_.key_token + panel * PANEL<T>;
            const Index place = (panel - panel_begin_) * PANEL<T> * padded_;
            pack_rows<S>(keys, tokens, key_rows_ + place);
            pack_panel<T>(key_rows_ + place, padded_, key_panels_ + place);
            pack_panel_directly<S>(values, tokens, value_rows_, value_panels_ + place);
        }
    }

    // Weights and gradients of the scores of the group's queries with the block's keys.
    void recompute() {
        const Index first = plan_.tile_start[tile_begin_], last = plan_.tile_start[tile_end_];
        PanelMatrix<T> bias = block_bias_, grad_bias = {nullptr, 0};
        if (bias_.cached) {
            bias = bias_.of(plan_);
            bias.data = bias.at(panel_begin_, first);
            if (wants_bias_) {
                grad_bias = bias_.gradients_of(plan_);
                grad_bias.data = grad_bias.at(panel_begin_, first);
            }
        } else {
            bias_.expand(plan_, panel_begin_, panel_end_, first, last, bias);
        }
        for (Index panel = panel_begin_; panel < panel_end_; panel++)
            for (Index tile = tile_begin_; tile < tile_end_; tile++) {
                if (panel < plan_.panel_begin[tile] || panel >= plan_.panel_end[tile]) continue;
                const Index start = plan_.tile_start[tile], place = panel - panel_begin_;
                with_constant<MICRO_ROWS>(plan_.tile_start[tile + 1] - start, [&](auto rows) VL_LAMBDA {
                    recompute_tile<rows.value>(start, start - first, place, bias, grad_bias);
                });
            }
        if (wants_bias_ && !bias_.cached)
            for (Index tile = tile_begin_; tile < tile_end_; tile++) fold_block(tile, first);
    }

    template <int ROWS>
    VL_INLINE void recompute_tile(Index query, Index row, Index panel, PanelMatrix<T> bias, PanelMatrix<T> grad_bias) {
        const Index place = panel * PANEL<T> * padded_, dim = problem_->dim;
        T *weights = weights_.at(panel, row), *grads = grad_scores_.at(panel, row);
        Tile<T, ROWS, 2> sums;
        const T *added = bias.at(panel, row), *lse = lse_ + query, *delta = delta_ + query;
        sums.each([=](Vector<T>& sum, int i, int j) VL_LAMBDA {
            sum = load<T>(added + i * PANEL<T> + j * LANES<T>) - lse[i];
        });
        sums.multiply(query_ + query * padded_, padded_, 1, key_panels_ + place, PANEL<T>, dim);
        sums.each([=](Vector<T>& sum, int i, int j) VL_LAMBDA {
            store<T>(weights + i * PANEL<T> + j * LANES<T>, power_of_two<T>(sum));
            sum = broadcast<T>(-delta[i]);
        });
        sums.multiply(grad_out_ + query * padded_, padded_, 1, value_panels_ + place, PANEL<T>, dim);
        sums.each([=](Vector<T>& sum, int i, int j) VL_LAMBDA {
            sum *= load<T>(weights + i * PANEL<T> + j * LANES<T>);
            store<T>(grads + i * PANEL<T> + j * LANES<T>, sum);
        });
        if (!grad_bias.data) return;
        T* target = grad_bias.at(panel, row);
        sums.each([=](Vector<T>& sum, int i, int j) VL_LAMBDA {
            T* place = target + i * PANEL<T> + j * LANES<T>;
            store<T>(place, load<T>(place) + sum);
        });
    }

    void fold(Index panels_from, Index panels_to, Index queries_from, Index queries_to, PanelMatrix<T> source) {
        T* table = problem_->grad_bias ? shared_.table(unit_) : nullptr;
        T* global = problem_->grad_global_bias ? shared_.global_bias(unit_) : nullptr;
        bias_.fold(plan_, panels_from, panels_to, queries_from, queries_to, source, table, global);
    }

    void fold_block(Index tile, Index first) {
        const Index begin = maximum(panel_begin_, plan_.panel_begin[tile]);
        const Index end = minimum(panel_end_, plan_.panel_end[tile]), start = plan_.tile_start[tile];
        PanelMatrix<T> source = grad_scores_;
        source.data = grad_scores_.at(begin - panel_begin_, start - first);
        if (begin < end) fold(begin, end, start, plan_.tile_start[tile + 1], source);
    }

    void sum_grad_query(Index tile) {
        const Index begin = maximum(panel_begin_, plan_.panel_begin[tile]) - panel_begin_;
        const Index end = minimum(panel_end_, plan_.panel_end[tile]) - panel_begin_;
        if (begin >= end) return;
        const Index start = plan_.tile_start[tile], first = start - plan_.tile_start[tile_begin_];
        each_column_tile<T>(padded_, [&](auto width, Index column) VL_LAMBDA {
            with_constant<MICRO_ROWS>(plan_.tile_start[tile + 1] - start, [&](auto rows) VL_LAMBDA {
                Tile<T, rows.value, width.value> sums;
                sums.read(grad_query_ + start * padded_ + column, padded_);
                for (Index panel = begin; panel < end; panel++)
                    sums.multiply(grad_scores_.at(panel, first), PANEL<T>, 1,
                                  key_rows_ + panel * PANEL<T> * padded_ + column, padded_, PANEL<T>);
                sums.write(grad_query_ + start * padded_ + column, padded_);
            });
        });
    }

    // Gradients of a panel's keys and values from the group's queries; `fresh` if these are the first queries.
    void sum_grad_keys(Index panel, bool fresh) {
        Index begin = tile_begin_, end = tile_end_;
        while (begin < end && (panel < plan_.panel_begin[begin] || panel >= plan_.panel_end[begin])) begin++;
        while (begin < end && (panel < plan_.panel_begin[end - 1] || panel >= plan_.panel_end[end - 1])) end--;
        const Index first = plan_.tile_start[begin], count = plan_.tile_start[end] - first;
        const Index row = first - plan_.tile_start[tile_begin_], place = (panel - panel_begin_) * PANEL<T> * padded_;
        const T *weights = weights_.at(panel - panel_begin_, row), *grads = grad_scores_.at(panel - panel_begin_, row);
        sum_over_queries(weights, grad_out_ + first * padded_, count, grad_values_ + place, fresh);
        sum_over_queries(grads, query_ + first * padded_, count, grad_keys_ + place, fresh);
    }

    // target[key][:] (+)= sum over queries of left[query][key] * right[query][:], for the keys of a panel.
    void sum_over_queries(const T* left, const T* right, Index count, T* target, bool fresh) {
        constexpr Index tiles = micro_tiles(PANEL<T>);
        for (Index tile = 0; tile < tiles; tile++) {
            const Index key = micro_tile_start(PANEL<T>, tile), end = micro_tile_start(PANEL<T>, tile + 1);
            each_column_tile<T>(padded_, [&](auto width, Index column) VL_LAMBDA {
                with_constant<MICRO_ROWS>(end - key, [&](auto rows) VL_LAMBDA {
                    Tile<T, rows.value, width.value> sums;
                    T* place = target + key * padded_ + column;
                    if (fresh)
                        sums.clear();
                    else
                        sums.read(place, padded_);
                    sums.multiply(left + key, 1, PANEL<T>, right + column, padded_, count);
                    sums.write(place, padded_);
                });
            });
        }
    }

    // Adds the block's sums to the gradients of its tokens.
    void add_grad_keys(Index batch, Index head) {
        const Problem& p = *problem_;
        const Index offset = (batch * (p.global_tokens + p.tokens()) * p.heads + head) * p.dim;
        T *keys = static_cast<T*>(p.grad_k) + offset, *values = static_cast<T*>(p.grad_v) + offset;
        for (Index panel = panel_begin_; panel < panel_end_; panel++)
            for (Index i = 0; i < PANEL<T>; i++) {
                const Index token = plan_.key_token[panel * PANEL<T> + i];
                if (token < 0) continue;
                const bool shared = token < p.global_tokens;
                const Index place = shared ? token * p.dim : token * p.heads * p.dim;
                const Index row = ((panel - panel_begin_) * PANEL<T> + i) * padded_;
                // Queries were loaded times log2 e.
                add_row<T>(grad_keys_ + row, p.dim, T(LN_2), (shared ? shared_.keys(unit_) : keys) + place);
                add_row<T>(grad_values_ + row, p.dim, T(1), (shared ? shared_.values(unit_) : values) + place);
            }
    }

    void write_grad_query(Index batch, Index head) {
        const Problem& p = *problem_;
        S* grad = static_cast<S*>(p.grad_q) + (batch * p.tokens() * p.heads + head) * p.dim;
        for (Index query = 0; query < plan_.queries; query++)
            store_row<S>(grad_query_ + query * padded_, p.dim, T(p.scale),
                         grad + plan_.query_token[query] * p.heads * p.dim);
    }
};

}  // namespace VL_LEVEL
}  // namespace vision_longformer
