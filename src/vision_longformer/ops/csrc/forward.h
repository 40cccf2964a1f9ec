// Forward: attention of one chunk after the other, keys block by block with a running softmax.
#pragma once

#include "bias.h"
#include "pack.h"
#include "parallel.h"

namespace vision_longformer {
namespace VL_LEVEL {

// A block of keys and a group of queries are sized so that their scores stay in the first-level cache.
constexpr Index GROUP_TILES = 60 / MICRO_ROWS;
constexpr Index GROUP_ROWS = GROUP_TILES * MICRO_ROWS;

// First of `count` things in part `index` of `parts` nearly equal ones.
constexpr Index part_start(Index count, Index parts, Index index) { return index * count / parts; }

template <class S>
class Forward {
   public:
    using T = Arithmetic<S>;
    static constexpr Index BLOCK_PANELS = 384 / (2 * VECTOR_BYTES);

    void allocate(const Problem& problem, Arena& arena) {
        problem_ = &problem;
        padded_ = round_up(problem.dim, LANES<T>);
        plan_.allocate(problem, arena);
        bias_.allocate(problem, plan_, false, arena);
        const Index queries = plan_.largest_queries(), block = BLOCK_PANELS * PANEL<T>;
        zeros_ = arena.take<S>(problem.dim);
        query_ = arena.take<T>(queries * padded_);
        result_ = arena.take<T>(queries * padded_);
        peak_ = arena.take<T>(queries);
        total_ = arena.take<T>(queries * LANES<T>);
        key_rows_ = arena.take<T>(PANEL<T> * padded_);
        key_panels_ = arena.take<T>(block * padded_);
        value_rows_ = arena.take<T>(block * padded_);
        scores_ = {arena.take<T>(GROUP_ROWS * block), GROUP_ROWS * PANEL<T>};
        block_bias_ = {arena.take<T>(bias_.cached ? 0 : GROUP_ROWS * block), GROUP_ROWS * PANEL<T>};
    }
    void start() { std::memset(static_cast<void*>(zeros_), 0, sizeof(S) * problem_->dim); }

    void attend(Index batch, Index head, Index chunk_row, Index chunk_column) {
        const Problem& p = *problem_;
        plan_.build(chunk_row, chunk_column);
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
                score();
                for (Index tile = tile_begin_; tile < tile_end_; tile++) weigh_and_sum(tile);
            }
        }
        write_results(batch, head);
    }

   private:
    static constexpr T LOWEST = T(-1e30);  // below any score, yet finite: differences to -infinity stay defined
    static constexpr T SLACK = 8;          // weights may reach 2**8 before the running maximum is raised

    const Problem* problem_;
    Index padded_, panel_begin_, panel_end_, tile_begin_, tile_end_;  // the current block and group
    ChunkPlan<T> plan_;
    Bias<T> bias_;
    S* zeros_;
    T *query_, *result_, *peak_, *total_, *key_rows_, *key_panels_, *value_rows_;
    PanelMatrix<T> scores_, block_bias_;

    void load_queries(Index batch, Index head) {
        const Problem& p = *problem_;
        const S* q = static_cast<const S*>(p.q) + batch * p.q_strides.batch + head * p.q_strides.head;
        const T factor = T(p.scale * LOG2_E);
        for (Index query = 0; query < plan_.queries; query++) {
            const S* source = q + plan_.query_token[query] * p.q_strides.token;
            load_row<S>(source, p.dim, padded_, factor, query_ + query * padded_);
            peak_[query] = LOWEST;
        }
        std::memset(result_, 0, sizeof(T) * plan_.queries * padded_);
        std::memset(total_, 0, sizeof(T) * plan_.queries * LANES<T>);
    }

    void pack_block(const PanelSource<S>& keys, const PanelSource<S>& values) {
        for (Index panel = panel_begin_; panel < panel_end_; panel++) {
            const Index* tokens = plan_.key_token + panel * PANEL<T>;
            const Index place = (panel - panel_begin_) * PANEL<T> * padded_;
            pack_panel_directly<S>(keys, tokens, key_rows_, key_panels_ + place);
            pack_rows<S>(values, tokens, value_rows_ + place);
        }
    }

    // Scores of the group's queries with the block's keys: bias plus product.
    void score() {
        const Index first = plan_.tile_start[tile_begin_];
        PanelMatrix<T> bias = block_bias_;
        if (bias_.cached) {
            bias = bias_.of(plan_);
            bias.data = bias.at(panel_begin_, first);
        } else {
            bias_.expand(plan_, panel_begin_, panel_end_, first, plan_.tile_start[tile_end_], bias);
        }
        for (Index panel = panel_begin_; panel < panel_end_; panel++)
            for (Index tile = tile_begin_; tile < tile_end_; tile++) {
                if (panel < plan_.panel_begin[tile] || panel >= plan_.panel_end[tile]) continue;
                const Index start = plan_.tile_start[tile], place = panel - panel_begin_;
                const T* key_panel = key_panels_ + place * PANEL<T> * padded_;
                with_constant<MICRO_ROWS>(plan_.tile_start[tile + 1] - start, [&](auto rows) VL_LAMBDA {
                    Tile<T, rows.value, 2> sums;
                    sums.read(bias.at(place, start - first), PANEL<T>);
                    sums.multiply(query_ + start * padded_, padded_, 1, key_panel, PANEL<T>, problem_->dim);
                    sums.write(scores_.at(place, start - first), PANEL<T>);
                });
            }
    }

    // Scores of a micro tile to weights, and weights times values onto its results.
    void weigh_and_sum(Index tile) {
        const Index begin = maximum(panel_begin_, plan_.panel_begin[tile]) - panel_begin_;
        const Index end = minimum(panel_end_, plan_.panel_end[tile]) - panel_begin_;
        if (begin >= end) return;
        const Index start = plan_.tile_start[tile], first = start - plan_.tile_start[tile_begin_];
        const Index count = plan_.tile_start[tile + 1] - start;
        for (Index row = 0; row < count; row++) weigh(start + row, scores_.at(begin, first + row), end - begin);
        each_column_tile<T>(padded_, [&](auto width, Index column) VL_LAMBDA {
            with_constant<MICRO_ROWS>(count, [&](auto rows) VL_LAMBDA {
                Tile<T, rows.value, width.value> sums;
                sums.read(result_ + start * padded_ + column, padded_);
                for (Index panel = begin; panel < end; panel++)
                    sums.multiply(scores_.at(panel, first), PANEL<T>, 1,
                                  value_rows_ + panel * PANEL<T> * padded_ + column, padded_, PANEL<T>);
                sums.write(result_ + start * padded_ + column, padded_);
            });
        });
    }

    // One query: scores to powers of two relative to a running maximum.
    VL_INLINE void weigh(Index query, T* scores, Index panels) {
        Vector<T> highest = load<T>(scores);
        for (Index panel = 0; panel < panels; panel++) {
            const T* part = scores + panel * scores_.panel_stride;
            highest = maximum(highest, maximum(load<T>(part), load<T>(part + LANES<T>)));
        }
        if (any_above<T>(highest, peak_[query] + SLACK)) raise_peak(query, largest_lane<T>(highest));
        const Vector<T> peak = broadcast<T>(peak_[query]);
        Vector<T> total = load<T>(total_ + query * LANES<T>);
        for (Index panel = 0; panel < panels; panel++) {
            T* part = scores + panel * scores_.panel_stride;
            const Vector<T> left = power_of_two<T>(load<T>(part) - peak);
            const Vector<T> right = power_of_two<T>(load<T>(part + LANES<T>) - peak);
            store<T>(part, left);
            store<T>(part + LANES<T>, right);
            total += left + right;
        }
        store<T>(total_ + query * LANES<T>, total);
    }

    void raise_peak(Index query, T peak) {
        const Vector<T> factor = power_of_two<T>(broadcast<T>(peak_[query] - peak));
        peak_[query] = peak;
        T *total = total_ + query * LANES<T>, *result = result_ + query * padded_;
        store<T>(total, load<T>(total) * factor);
        for (Index i = 0; i < padded_; i += LANES<T>) store<T>(result + i, load<T>(result + i) * factor);
    }

    void write_results(Index batch, Index head) {
        const Problem& p = *problem_;
        S* out = static_cast<S*>(p.out) + (batch * p.tokens() * p.heads + head) * p.dim;
        T* lse = static_cast<T*>(p.lse) + (batch * p.heads + head) * p.tokens();
        for (Index query = 0; query < plan_.queries; query++) {
            const Index token = plan_.query_token[query];
            const T total = sum_of_lanes<T>(load<T>(total_ + query * LANES<T>));
            store_row<S>(result_ + query * padded_, p.dim, T(1) / total, out + token * p.heads * p.dim);
            lse[token] = peak_[query] * T(LN_2) + T(std::log(total));
        }
    }
};

}  // namespace VL_LEVEL
}  // namespace vision_longformer
