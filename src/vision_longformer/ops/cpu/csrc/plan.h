// Which queries and keys a chunk has, in which order.
#pragma once

#include "geometry.h"
#include "microkernel.h"
#include "scratch.h"

namespace vision_longformer {
namespace VL_LEVEL {

// The keys of a block column, in the order of the plan.
template <class T>
struct KeyGroup {
    Index *tokens, vectors;  // tokens count from the first global one and are -1 for zeros
    Index place;             // in arrays of packed keys

    Index count() const { return vectors * LANES<T>; }
};

// Keys come in up to three groups, one per block column, each padded to whole vectors, all together to whole panels. A
// group goes column by column, and so do the queries: rule `exact` hides the far columns from some queries, and in this
// order the panels that a query sees are contiguous. Every group ends with the global tokens, because vectors mostly
// have room for them there; they count in the chunk's own group only.
//
// Bias tables are kept reversed and column by column, so that consecutive keys of a column have consecutive entries.
// The entry of the query at row a and column c of the chunk and a key at row x and column y relative to it is at
// query_start + key_offset of
//     query_start = (w-1-c) * side + (w-1-a),    key_offset = (y+w) * side + (x+w),    side = 4w-1.
template <class T>
struct ChunkPlan {
    static constexpr Index PADDING = -1, FIRST_GLOBAL = -2;  // in key_offset; the next global token is one less
    static constexpr Index SCATTERED = -1, MIXED = -2;       // in key_run

    const Problem* problem;
    AxisBlocks rows, columns;
    Index kind, queries, tiles, panels;  // chunks of one kind differ in tokens only
    Index *query_token, *query_start;    // per query; tokens count from the first query
    Index *tile_start;                   // per micro tile of queries, and the end
    Index *panel_begin, *panel_end;      // per micro tile: the panels its queries see
    Index *key_offset, *key_column;      // per key
    Index* key_run;                      // per vector of keys: the first offset, if they are consecutive, or else
                                         // SCATTERED if all are local, MIXED if not

    Index largest_queries() const {
        return minimum(problem->window, problem->height) * minimum(problem->window, problem->width);
    }
    Index largest_group_vectors() const {
        const Index w = problem->window, height = problem->height, width = problem->width;
        const bool wraps = problem->rule == RULE_CYCLIC && !problem->banded;
        const Index tall = wraps ? 3 * minimum(w, height) : minimum(3 * w, problem->key_rows());
        const Index keys = problem->rule == RULE_CYCLIC_RELEASE ? 3 * w * w : tall * minimum(w, width);
        return ceiling(keys + problem->global_tokens, LANES<T>);
    }
    Index largest_panels() const { return ceiling(3 * largest_group_vectors(), 2); }

    void allocate(const Problem& of, Arena& arena) {
        problem = &of;
        kind = -1;
        const Index most_queries = largest_queries(), most_keys = largest_panels() * PANEL<T>;
        for (Index** per_query : {&query_token, &query_start, &tile_start, &panel_begin, &panel_end})
            *per_query = arena.take<Index>(most_queries + 1);
        for (Index** per_key : {&key_offset, &key_column, &key_run}) *per_key = arena.take<Index>(most_keys);
    }

    VL_NOINLINE void build(Index chunk_row, Index chunk_column) {
        rows = row_blocks(chunk_row, *problem);
        columns = column_blocks(chunk_column, *problem);
        queries = list_queries(columns, query_token);
        const Index new_kind = AXIS_KINDS * rows.kind + columns.kind;
        if (new_kind == kind) return;
        kind = new_kind;
        list_offsets();
        find_runs();
        tiles = micro_tiles(queries);
        for (Index tile = 0; tile <= tiles; tile++) tile_start[tile] = micro_tile_start(queries, tile);
        for (Index tile = 0; tile < tiles; tile++) find_visible_panels(tile);
    }

    // Whether a query sees a key, by their numbers in this chunk: what rule `exact` hides and padding it does not.
    bool sees(Index query, Index key) const {
        const Index w = problem->window, side = problem->bias_side(), offset = key_offset[key];
        if (offset < 0) return offset != PADDING;
        // Rows and columns of query minus key, from query_start and key_offset as they are composed.
        const Index down = 2 * w - 1 - (query_start[query] % side + offset % side);
        const Index across = 2 * w - 1 - (query_start[query] / side + offset / side);
        return problem->rule != RULE_EXACT || (down >= -w && down <= w && across >= -w && across <= w);
    }

    // The tokens of the queries of this chunk or of another in its row, which has `blocks` around it; returns how many.
    Index list_queries(const AxisBlocks& blocks, Index* tokens) const {
        Index* next = tokens;
        for (Index c = 0; c < blocks.stored[1]; c++)
            for (Index a = 0; a < rows.stored[1]; a++)
                *next++ = (rows.first[1] - problem->above + a) * problem->width + blocks.first[1] + c;
        return next - tokens;
    }

    // The keys of a block column (-1, 0 or 1) of this chunk or of another in its row, which has `blocks` around it, and
    // after them the global tokens, padded to whole vectors.
    void list_keys(int column, const AxisBlocks& blocks, KeyGroup<T>& group) const {
        Index* next = group.tokens;
        each_key(column, blocks, [&](int row, Index i, Index j) {
            const bool stored = i < rows.stored[row + 1] && j < blocks.stored[column + 1];
            const Index y = rows.first[row + 1] + i, x = blocks.first[column + 1] + j;
            *next++ = stored ? problem->global_tokens + y * problem->width + x : -1;
        });
        const bool empty = next == group.tokens;
        for (Index token = 0; !empty && token < problem->global_tokens; token++) *next++ = token;
        group.vectors = ceiling(next - group.tokens, LANES<T>);
        while (next < group.tokens + group.count()) *next++ = -1;
    }

   private:
    bool chosen(int row, int column) const {
        if (problem->neighbours == NEIGHBOURS_ALL || (row == 0 && column == 0)) return true;
        return problem->neighbours == NEIGHBOURS_ONE && row == problem->neighbour_row &&
               column == problem->neighbour_column;
    }

    // Calls `body(row, i, j)` for the local keys of a block column in order: row i and column j of block row `row`.
    template <class Body>
    void each_key(int column, const AxisBlocks& blocks, Body body) const {
        for (Index j = 0; j < blocks.count[column + 1]; j++)
            for (int row = -1; row <= 1; row++)
                for (Index i = 0; i < rows.count[row + 1] && chosen(row, column); i++) body(row, i, j);
    }

    void list_offsets() {
        const Index w = problem->window, side = problem->bias_side();
        Index keys = 0, query = 0;
        const auto add = [&](Index offset, Index column) {
            key_offset[keys] = offset;
            key_column[keys++] = column;
        };
        for (int column = -1; column <= 1; column++) {
            const Index before = keys;
            each_key(column, columns, [&](int row, Index i, Index j) {
                const Index x = row * w + i, y = column * w + j;
                add((y + w) * side + x + w, y);
            });
            if (keys == before) continue;
            for (Index token = 0; token < problem->global_tokens; token++)
                add(column == 0 ? FIRST_GLOBAL - token : PADDING, key_column[keys - 1]);
            while (keys % LANES<T>) add(PADDING, key_column[keys - 1]);
        }
        while (keys % PANEL<T>) add(PADDING, key_column[keys - 1]);
        panels = keys / PANEL<T>;
        for (Index c = 0; c < columns.stored[1]; c++)
            for (Index a = 0; a < rows.stored[1]; a++) query_start[query++] = (w - 1 - c) * side + (w - 1 - a);
    }

    void find_runs() {
        for (Index key = 0; key < panels * PANEL<T>; key += LANES<T>) {
            bool consecutive = true, local = true;
            for (int lane = 0; lane < LANES<T>; lane++) {
                consecutive = consecutive && key_offset[key + lane] == key_offset[key] + lane;
                local = local && key_offset[key + lane] >= 0;
            }
            key_run[key / LANES<T>] = !local ? MIXED : consecutive ? key_offset[key] : SCATTERED;
        }
    }

    void find_visible_panels(Index tile) {
        panel_begin[tile] = 0;
        panel_end[tile] = panels;
        if (problem->rule != RULE_EXACT) return;
        const Index lowest = tile_start[tile] / rows.stored[1] - problem->window;
        const Index highest = (tile_start[tile + 1] - 1) / rows.stored[1] + problem->window;
        while (key_column[(panel_begin[tile] + 1) * PANEL<T> - 1] < lowest) panel_begin[tile]++;
        while (key_column[(panel_end[tile] - 1) * PANEL<T>] > highest) panel_end[tile]--;
    }
};

}  // namespace VL_LEVEL
}  // namespace vision_longformer
