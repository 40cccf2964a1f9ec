// The forward pass of a chunk: between tensors as they are stored and the arithmetic of forward_core.h.
#pragma once

#include "forward_core.h"

namespace vision_longformer {
namespace VL_LEVEL {

template <class S>
class Forward {
   public:
    using T = Arithmetic<S>;

    void allocate(const Problem& problem, Arena& arena) {
        problem_ = &problem;
        core_.allocate(problem, arena);
        zeros_ = arena.take<S>(problem.dim);
        key_rows_ = arena.take<T>(PANEL<T> * core_.padded);
    }
    void start() { std::memset(static_cast<void*>(zeros_), 0, sizeof(S) * problem_->dim); }

    void attend(Index batch, Index head, Index chunk_row, Index chunk_column) {
        const Problem& p = *problem_;
        core_.plan.build(chunk_row, chunk_column);
        core_.bias.select_head(head);
        load_queries(batch, head);
        const PanelSource<S> keys = panel_source<S>(p, p.k, p.k_strides, batch, head, zeros_);
        const PanelSource<S> values = panel_source<S>(p, p.v, p.v_strides, batch, head, zeros_);
        if (!attend(keys, values)) {
            refer_to_own_keys(keys);
            attend(keys, values);
        }
        write_results(batch, head);
    }

   private:
    const Problem* problem_;
    ForwardCore<T> core_;
    S* zeros_;
    T* key_rows_;

    void load_queries(Index batch, Index head) {
        const Problem& p = *problem_;
        const S* q = static_cast<const S*>(p.q) + batch * p.q_strides.batch + head * p.q_strides.head;
        const T factor = T(p.scale * LOG2_E);
        for (Index i = 0; i < core_.plan.queries; i++) {
            load_row<S>(q + core_.plan.query_token[i] * p.q_strides.token, p.dim, core_.padded,
                        core_.query + i * core_.padded, [=](Vector<T> value) VL_LAMBDA { return value * factor; });
            core_.reference[i] = 0;
        }
    }

    // All keys of the chunk; false if some query's scores are too low for its reference.
    bool attend(const PanelSource<S>& keys, const PanelSource<S>& values) {
        core_.clear();
        each_block(
            core_.plan, core_.BLOCK_PANELS,
            [&](const Block& block) {
                pack(block, keys, values);
                prefetch(block, keys, values);
            },
            [&](const Block& block, bool) { core_.attend(block); }, [](const Block&) {});
        return core_.finish();
    }

    // The score of a query's own key as its reference: never too high, because that key always takes part.
    void refer_to_own_keys(const PanelSource<S>& keys) {
        for (Index i = 0; i < core_.plan.queries; i++) {
            const S* key = keys.row(problem_->global_tokens + core_.plan.query_token[i]);
            const T score = core_.bias.of_own_key() + dot_row<S>(key, problem_->dim, core_.query + i * core_.padded);
            core_.reference[i] = score > -T(INFINITY) ? score : T(0);
        }
    }

    void pack(const Block& block, const PanelSource<S>& keys, const PanelSource<S>& values) {
        for (Index panel = block.panel_begin; panel < block.panel_end; panel++) {
            const Index* tokens = core_.plan.key_token + panel * PANEL<T>;
            const Index place = (panel - block.panel_begin) * PANEL<T> * core_.padded;
            pack_panel_directly<S>(keys, tokens, key_rows_, core_.key_panels + place);
            pack_rows<S>(values, tokens, core_.value_rows + place);
        }
    }

    // While a block is worked on: the keys and values of the next one.
    void prefetch(const Block& block, const PanelSource<S>& keys, const PanelSource<S>& values) {
        const Index panels = block.panel_end - block.panel_begin;
        const Index ahead = minimum(core_.plan.panels - block.panel_end, panels);
        const Index* tokens = core_.plan.key_token + block.panel_end * PANEL<T>;
        core_.prefetch.start(tokens, ahead * PANEL<T>, keys.base, keys.token_stride, values.base, values.token_stride,
                             keys.size, panels * core_.plan.tiles);
    }

    void write_results(Index batch, Index head) {
        const Problem& p = *problem_;
        S* out = static_cast<S*>(p.out) + (batch * p.tokens() * p.heads + head) * p.dim;
        T* lse = static_cast<T*>(p.lse) + (batch * p.heads + head) * p.tokens();
        for (Index i = 0; i < core_.plan.queries; i++) {
            const Index token = core_.plan.query_token[i];
            store_row<S>(core_.result + i * core_.padded, p.dim, T(1) / core_.sum[i], out + token * p.heads * p.dim);
            lse[token] = core_.reference[i] * T(LN_2) + T(std::log(core_.sum[i]));
        }
    }
};

}  // namespace VL_LEVEL
}  // namespace vision_longformer
