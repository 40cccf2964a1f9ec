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

    static HeadPasses passes(const Problem& problem) {
        return head_passes<T>(problem, BackwardCore<T>::ARRAYS, MapTiles::of(problem).least_passes(problem.batch));
    }

    void allocate(const Problem& problem, const SharedGradients<T>& shared, Arena& arena) {
        problem_ = &problem;
        shared_ = shared;
        core_.allocate(problem, passes(problem).largest(), arena);
        next_.allocate(core_.plan, arena);
        zeros_ = arena.take<S>(problem.dim);
        value_rows_ = arena.take<T>(LANES<T> * core_.padded);
    }
    void start() {
        std::memset(static_cast<void*>(zeros_), 0, sizeof(S) * problem_->dim);
        core_.start();
    }

    // All chunks of a tile, for `heads` heads from `head` on. `unit` is the number of tile and first head among the
    // shared gradients, and `unit_stride` the way to the next head.
    void differentiate(Index batch, Index head, Index heads, const MapTiles& tiles, Index row, Index column, Index unit,
                       Index unit_stride) {
        const Problem& p = *problem_;
        const Index entry = batch * p.tokens() * p.heads + head, key_entry = batch * p.key_tokens() * p.heads + head;
        heads_ = heads;
        unit_ = unit;
        unit_stride_ = unit_stride;
        queries_ = static_cast<const S*>(p.q) + batch * p.q_strides.batch + head * p.q_strides.head;
        grad_results_ =
            static_cast<const S*>(p.grad_out) + batch * p.grad_out_strides.batch + head * p.grad_out_strides.head;
        results_ = static_cast<const S*>(p.out) + entry * p.dim;
        grad_queries_ = static_cast<S*>(p.grad_q) + entry * p.dim;
        lse_ = static_cast<const T*>(p.lse) + (batch * p.heads + head) * p.tokens();
        grad_keys_ = static_cast<T*>(p.grad_k) + key_entry * p.dim;
        grad_values_ = static_cast<T*>(p.grad_v) + key_entry * p.dim;
        keys_ = key_source<S>(p, p.k, p.k_strides, batch, head, zeros_);
        values_ = key_source<S>(p, p.v, p.v_strides, batch, head, zeros_);
        for (Index i = 0; i < heads; i++)
            std::memset(shared_.keys(unit + i * unit_stride), 0, sizeof(T) * shared_.size());
        core_.bias.select_heads(head, heads);
        for (Index i = tiles.rows.first(row); i < tiles.rows.first(row + 1); i++)
            differentiate_row(i, tiles.columns.first(column), tiles.columns.first(column + 1));
    }

   private:
    const Problem* problem_;
    SharedGradients<T> shared_;
    BackwardCore<T> core_;
    NextChunk<T> next_;
    S *zeros_, *grad_queries_;
    const S *queries_, *results_, *grad_results_;
    const T* lse_;
    T *value_rows_, *grad_keys_, *grad_values_;
    KeySource<S> keys_, values_;
    Index heads_, unit_, unit_stride_;

    // The chunks `first .. last` of a row of chunks.
    void differentiate_row(Index chunk_row, Index first, Index last) {
        const auto add = [this](const KeyGroup<T>& group) { add_grad_keys(group); };
        const bool gather_bias = core_.wants_bias && core_.bias.cached;
        Index column_of_kind[AXIS_KINDS] = {-1, -1, -1, -1};
        for (Index chunk_column = first; chunk_column < last; chunk_column++) {
            core_.plan.build(chunk_row, chunk_column);
            Index& known = column_of_kind[core_.plan.columns.kind];
            for (Index head = 0; gather_bias && known < 0 && head < heads_; head++)
                core_.bias.clear_gradients_of(core_.plan, head);
            known = chunk_column;
            core_.ring.turn_to(core_.plan, chunk_column, add, [this](const KeyGroup<T>& group) { pack(group); });
            prefetch(chunk_column, last);
            for (core_.head = 0; core_.head < heads_; core_.head++) differentiate_chunk();
        }
        core_.ring.drop_all(add);
        for (Index chunk_column : column_of_kind) {
            if (chunk_column < 0 || !gather_bias) continue;
            core_.plan.build(chunk_row, chunk_column);
            for (core_.head = 0; core_.head < heads_; core_.head++)
                fold(0, core_.plan.panels, 0, core_.plan.queries, core_.bias.gradients_of(core_.plan, core_.head));
        }
    }

    void differentiate_chunk() {
        core_.clear();
        load_queries();
        const bool fold_at_once = core_.wants_bias && !core_.bias.cached;
        const bool by_pairs = problem_->rule == RULE_EXACT && !core_.finite();  // other rules hide no key of a chunk's
        each_block(core_.plan, core_.BLOCK_PANELS, [&](const Block& block) {
            by_pairs ? core_.differentiate_by_pairs(block) : core_.differentiate(block);
            if (fold_at_once) fold_block(block);
        });
        write_grad_query();
    }

    void load_queries() {
        const Problem& p = *problem_;
        const Index head = core_.head, padded = core_.padded;
        const S *q = queries_ + head * p.q_strides.head, *out = results_ + head * p.dim;
        const S* grad = grad_results_ + head * p.grad_out_strides.head;
        const T* lse = lse_ + head * p.tokens();
        const T factor = T(p.scale * LOG2_E);
        for (Index i = 0; i < core_.plan.queries; i++) {
            const Index token = core_.plan.query_token[i];
            T *grad_row = core_.grad_out + i * padded, *row = core_.query + i * padded;
            load_row<S>(out + token * p.heads * p.dim, p.dim, padded, row);  // the result, until the query comes
            load_row<S>(grad + token * p.grad_out_strides.token, p.dim, padded, grad_row);
            Vector<T> product{};
            for (Index j = 0; j < padded; j += LANES<T>) product += load<T>(row + j) * load<T>(grad_row + j);
            core_.delta[i] = sum_of_lanes<T>(product);
            core_.lse[i] = lse[token] * T(LOG2_E);
            load_row<S>(q + token * p.q_strides.token, p.dim, padded, row,
                        [=](Vector<T> value) VL_LAMBDA { return value * factor; });
        }
    }

    // The keys and values of a group, and no gradients for them yet.
    void pack(const KeyGroup<T>& group) {
        const Index size = LANES<T> * core_.padded;
        for (Index head = 0; head < heads_; head++)
            for (T* grads : {core_.grad_keys, core_.grad_values})
                std::memset(grads + head * core_.ring.size() + group.place, 0, sizeof(T) * group.vectors * size);
        for (Index i = 0; i < group.vectors; i++)
            for (Index head = 0; head < heads_; head++) {
                const Index* tokens = group.tokens + i * LANES<T>;
                const Index place = head * core_.ring.size() + group.place + i * size;
                pack_rows<S>(keys_.after(head), tokens, core_.key_rows + place);
                transpose_packed_rows<T>(core_.key_rows + place, core_.padded, core_.key_panels + place);
                pack_columns<S>(values_.after(head), tokens, value_rows_, core_.value_panels + place);
            }
    }

    // While a chunk is worked on: where its gradients go, and what the next one needs.
    void prefetch(Index chunk_column, Index last) {
        const Problem& p = *problem_;
        const Index dim = p.dim, heads = heads_, stride = p.heads * dim;
        const KeyGroup<T>& leaving = core_.ring.leaving(chunk_column);
        Prefetch& fetch = core_.prefetch;
        fetch.clear();
        fetch.add(core_.plan.query_token, core_.plan.queries, grad_queries_, stride, dim, dim, heads);
        for (T* grads : {grad_keys_, grad_values_})
            fetch.add(leaving.tokens, leaving.count(), grads, stride, dim, dim, heads);
        if (chunk_column + 1 < last) {
            next_.list(core_.plan, chunk_column + 1);
            for (const KeySource<S>* source : {&keys_, &values_})
                fetch.add(next_.keys.tokens, next_.keys.count(), source->base, source->token_stride,
                          source->head_stride, dim, heads);
            const Strides &q = p.q_strides, &grad = p.grad_out_strides;
            fetch.add(next_.queries, next_.query_count, queries_, q.token, q.head, dim, heads);
            fetch.add(next_.queries, next_.query_count, grad_results_, grad.token, grad.head, dim, heads);
            fetch.add(next_.queries, next_.query_count, results_, stride, dim, dim, heads);
        }
        fetch.spread(core_.plan.panels * core_.plan.tiles * heads);
    }

    // Where the head at work gathers the gradients it shares with other tiles.
    Index shared_unit(Index head) const { return unit_ + head * unit_stride_; }

    // Adds gradients of expanded bias to those of the table and of the global bias.
    void fold(Index panel_begin, Index panel_end, Index query_begin, Index query_end, PanelMatrix<T> source) {
        T* table = problem_->grad_bias ? shared_.table(shared_unit(core_.head)) : nullptr;
        T* global = problem_->grad_global_bias ? shared_.global_bias(shared_unit(core_.head)) : nullptr;
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

    // Adds what a group has gathered to the gradients of its tokens.
    void add_grad_keys(const KeyGroup<T>& group) {
        const Problem& p = *problem_;
        for (Index i = 0; i < group.count(); i++)
            for (Index head = 0; group.tokens[i] >= 0 && head < heads_; head++) {
                const Index token = group.tokens[i], unit = shared_unit(head);
                const Index from = head * core_.ring.size() + group.place + i * core_.padded;
                const bool shared = token < p.global_tokens;
                const Index to = shared ? token * p.dim : (token * p.heads + head) * p.dim;
                // Queries were loaded times log2 e.
                add_row<T>(core_.grad_keys + from, p.dim, T(LN_2), (shared ? shared_.keys(unit) : grad_keys_) + to);
                add_row<T>(core_.grad_values + from, p.dim, T(1), (shared ? shared_.values(unit) : grad_values_) + to);
            }
    }

    void write_grad_query() {
        const Problem& p = *problem_;
        for (Index i = 0; i < core_.plan.queries; i++)
            store_row<S>(core_.grad_query + i * core_.padded, p.dim, T(p.scale),
                         grad_queries_ + (core_.plan.query_token[i] * p.heads + core_.head) * p.dim);
    }
};

}  // namespace VL_LEVEL
}  // namespace vision_longformer
