// The forward pass of chunks: between tensors as they are stored and the arithmetic of forward_core.h.
#pragma once

#include "forward_core.h"

namespace vision_longformer {
namespace VL_LEVEL {

template <class S>
class Forward {
   public:
    using T = Arithmetic<S>;

    static HeadPasses passes(const Problem& problem) { return head_passes<T>(problem, ForwardCore<T>::ARRAYS, 1); }

    void allocate(const Problem& problem, Arena& arena) {
        problem_ = &problem;
        core_.allocate(problem, passes(problem).largest(), arena);
        next_.allocate(core_.plan, arena);
        zeros_ = arena.take<S>(problem.dim);
        key_rows_ = arena.take<T>(LANES<T> * core_.padded);
    }
    void start() {
        std::memset(static_cast<void*>(zeros_), 0, sizeof(S) * problem_->dim);
        core_.start();
    }

    // The chunks `first .. last` of a row of chunks, for `heads` heads from `head` on.
    void attend(Index batch, Index head, Index heads, Index chunk_row, Index first, Index last) {
        const Problem& p = *problem_;
        heads_ = heads;
        queries_ = static_cast<const S*>(p.q) + batch * p.q_strides.batch + head * p.q_strides.head;
        results_ = static_cast<S*>(p.out) + (batch * p.tokens() * p.heads + head) * p.dim;
        lse_ = static_cast<T*>(p.lse) + (batch * p.heads + head) * p.tokens();
        keys_ = key_source<S>(p, p.k, p.k_strides, batch, head, zeros_);
        values_ = key_source<S>(p, p.v, p.v_strides, batch, head, zeros_);
        core_.bias.select_heads(head, heads);
        core_.ring.drop_all(nothing);
        for (Index chunk_column = first; chunk_column < last; chunk_column++) {
            core_.plan.build(chunk_row, chunk_column);
            core_.ring.turn_to(core_.plan, chunk_column, nothing, [this](const KeyGroup<T>& group) { pack(group); });
            prefetch(chunk_column, last);
            for (core_.head = 0; core_.head < heads; core_.head++) attend_chunk();
        }
    }

   private:
    const Problem* problem_;
    ForwardCore<T> core_;
    NextChunk<T> next_;
    S *zeros_, *results_;
    const S* queries_;
    T *key_rows_, *lse_;
    KeySource<S> keys_, values_;
    Index heads_;

    static void nothing(const KeyGroup<T>&) {}

    void pack(const KeyGroup<T>& group) {
        for (Index i = 0; i < group.vectors; i++)
            for (Index head = 0; head < heads_; head++) {
                const Index* tokens = group.tokens + i * LANES<T>;
                const Index place = head * core_.ring.size() + group.place + i * LANES<T> * core_.padded;
                pack_columns<S>(keys_.after(head), tokens, key_rows_, core_.key_panels + place);
                pack_rows<S>(values_.after(head), tokens, core_.value_rows + place);
            }
    }

    // While a chunk is worked on: where its results go, and what the next one needs.
    void prefetch(Index chunk_column, Index last) {
        const Problem& p = *problem_;
        const Index dim = p.dim, heads = heads_;
        Prefetch& fetch = core_.prefetch;
        fetch.clear();
        fetch.add(core_.plan.query_token, core_.plan.queries, results_, p.heads * dim, dim, dim, heads);
        if (chunk_column + 1 < last) {
            next_.list(core_.plan, chunk_column + 1);
            for (const KeySource<S>* source : {&keys_, &values_})
                fetch.add(next_.keys.tokens, next_.keys.count(), source->base, source->token_stride,
                          source->head_stride, dim, heads);
            fetch.add(next_.queries, next_.query_count, queries_, p.q_strides.token, p.q_strides.head, dim, heads);
        }
        fetch.spread(core_.plan.panels * core_.plan.tiles * heads);
    }

    void attend_chunk() {
        load_queries();
        if (!core_.attend()) {
            refer_to_own_keys();
            core_.attend();
        }
        core_.attend_failed();
        write_results();
    }

    void load_queries() {
        const Problem& p = *problem_;
        const S* q = queries_ + core_.head * p.q_strides.head;
        const T factor = T(p.scale * LOG2_E);
        for (Index i = 0; i < core_.plan.queries; i++) {
            load_row<S>(q + core_.plan.query_token[i] * p.q_strides.token, p.dim, core_.padded,
                        core_.query + i * core_.padded, [=](Vector<T> value) VL_LAMBDA { return value * factor; });
            core_.reference[i] = 0;
        }
    }

    // The score of a query's own key as its reference: never too high, because that key always takes part.
    void refer_to_own_keys() {
        const KeySource<S> keys = keys_.after(core_.head);
        const Index first = problem_->global_tokens + problem_->above * problem_->width;
        for (Index i = 0; i < core_.plan.queries; i++) {
            const S* key = keys.row(first + core_.plan.query_token[i]);
            const T score =
                core_.bias.of_own_key(core_.head) + dot_row<S>(key, problem_->dim, core_.query + i * core_.padded);
            core_.reference[i] = score > -T(INFINITY) ? score : T(0);
        }
    }

    void write_results() {
        const Problem& p = *problem_;
        S* out = results_ + core_.head * p.dim;
        T* lse = lse_ + core_.head * p.tokens();
        for (Index i = 0; i < core_.plan.queries; i++) {
            const Index token = core_.plan.query_token[i];
            store_row<S>(core_.result + i * core_.padded, p.dim, T(1) / core_.sum[i], out + token * p.heads * p.dim);
            lse[token] = core_.reference[i] * T(LN_2) + T(std::log(core_.sum[i]));
        }
    }
};

}  // namespace VL_LEVEL
}  // namespace vision_longformer
