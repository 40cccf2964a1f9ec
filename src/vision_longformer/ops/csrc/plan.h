// Which queries and keys a chunk has, in which order.
#pragma once

#include "geometry.h"
#include "microkernel.h"
#include "scratch.h"

namespace vision_longformer {
namespace VL_LEVEL {

// Keys are the chosen positions of the blocks, row by row, with the global tokens before the rows of the chunk's own
// block row. Rule `exact` hides the far rows from some queries; in this order the panels a query sees are contiguous.
//
// Bias tables are kept reversed, so that consecutive keys of a row have consecutive entries. The entry of query (a, c)
// of the chunk and a key at (x, y) relative to it is at query_start + key_offset of
//     query_start = (w-1-a) * side + (w-1-c),    key_offset = (x+w) * side + (y+w),    side = 4w-1.
template <class T>
struct ChunkPlan {
    static constexpr Index GLOBAL = -1, PADDING = -2;   // in key_offset
    static constexpr Index SCATTERED = -1, MIXED = -2;  // in key_run

    const Problem* problem;
    Index kind, queries, tiles, keys, panels;  // chunks of one kind differ in tokens only
    Index *query_token, *query_start;         // per query; tokens count from the first local one
    Index *tile_start;                        // per micro tile of queries, and the end
    Index *panel_begin, *panel_end;           // per micro tile: the panels its queries see
    Index *key_token, *key_offset, *key_row;  // per key; tokens count from the first global one, -1 for zeros
    Index* key_run;                           // per vector of keys: the first offset, if they are consecutive, or else
                                              // SCATTERED if all are local, MIXED if not

    Index largest_queries() const {
        return minimum(problem->window, problem->height) * minimum(problem->window, problem->width);
    }
    Index largest_panels() const {
        const Index keys = problem->global_tokens + axis_keys(problem->height) * axis_keys(problem->width);
        return ceiling(keys, PANEL<T>);
    }

    void allocate(const Problem& of, Arena& arena) {
        problem = &of;
        kind = -1;
        const Index most_queries = largest_queries(), most_keys = largest_panels() * PANEL<T>;
        for (Index** per_query : {&query_token, &query_start, &tile_start, &panel_begin, &panel_end})
            *per_query = arena.take<Index>(most_queries + 1);
        for (Index** per_key : {&key_token, &key_offset, &key_row, &key_run}) *per_key = arena.take<Index>(most_keys);
    }

    VL_NOINLINE void build(Index chunk_row, Index chunk_column) {
        const Problem& p = *problem;
        const Index w = p.window;
        const AxisBlocks rows = axis_blocks(chunk_row, ceiling(p.height, w), p.height, w, p.rule);
        const AxisBlocks columns = axis_blocks(chunk_column, ceiling(p.width, w), p.width, w, p.rule);
        list_tokens(rows, columns);
        const Index new_kind = 4 * rows.kind + columns.kind;
        if (new_kind == kind) return;
        kind = new_kind;
        list_offsets(rows, columns);
        tiles = micro_tiles(queries);
        for (Index tile = 0; tile <= tiles; tile++) tile_start[tile] = micro_tile_start(queries, tile);
        for (Index tile = 0; tile < tiles; tile++) find_visible_panels(tile, columns.stored[1]);
    }

   private:
    Index axis_keys(Index length) const {
        if (problem->rule == RULE_CYCLIC_RELEASE) return 3 * problem->window;
        const bool cyclic = problem->rule == RULE_CYCLIC;
        return cyclic ? 3 * minimum(problem->window, length) : minimum(3 * problem->window, length);
    }

    bool chosen(int row, int column) const {
        if (problem->neighbours == NEIGHBOURS_ALL || (row == 0 && column == 0)) return true;
        return problem->neighbours == NEIGHBOURS_ONE && row == problem->neighbour_row &&
               column == problem->neighbour_column;
    }

    // Calls `local(row, column, i)` for row i of every block, and `global()` in between, in the order of the keys.
    template <class Local, class Global>
    void each_run(const AxisBlocks& rows, Local local, Global global) const {
        for (int row = -1; row <= 1; row++) {
            if (row == 0) global();
            for (Index i = 0; i < rows.count[row + 1]; i++)
                for (int column = -1; column <= 1; column++)
                    if (chosen(row, column)) local(row, column, i);
        }
    }

    void list_tokens(const AxisBlocks& rows, const AxisBlocks& columns) {
        Index* next = key_token;
        each_run(
            rows,
            [&](int row, int column, Index i) {
                const Index stored = i < rows.stored[row + 1] ? columns.stored[column + 1] : 0;
                const Index first = problem->global_tokens + (rows.first[row + 1] + i) * problem->width;
                for (Index j = 0; j < columns.count[column + 1]; j++)
                    *next++ = j < stored ? first + columns.first[column + 1] + j : -1;
            },
            [&] {
                for (Index token = 0; token < problem->global_tokens; token++) *next++ = token;
            });
        keys = next - key_token;
        panels = ceiling(keys, PANEL<T>);
        while (next < key_token + panels * PANEL<T>) *next++ = -1;
        next = query_token;
        for (Index a = 0; a < rows.stored[1]; a++)
            for (Index c = 0; c < columns.stored[1]; c++)
                *next++ = (rows.first[1] + a) * problem->width + columns.first[1] + c;
        queries = next - query_token;
    }

    void list_offsets(const AxisBlocks& rows, const AxisBlocks& columns) {
        const Index w = problem->window, side = problem->bias_side();
        Index key = 0, query = 0;
        const auto add = [&](Index offset, Index row) {
            key_offset[key] = offset;
            key_row[key++] = row;
        };
        each_run(
            rows,
            [&](int row, int column, Index i) {
                const Index x = row * w + i, first = (x + w) * side + (column + 1) * w;
                for (Index j = 0; j < columns.count[column + 1]; j++) add(first + j, x);
            },
            [&] {
                for (Index token = 0; token < problem->global_tokens; token++) add(GLOBAL, 0);
            });
        while (key < panels * PANEL<T>) add(PADDING, key_row[key - 1]);
        for (key = 0; key < panels * PANEL<T>; key += LANES<T>) {
            bool consecutive = true, local = true;
            for (int lane = 0; lane < LANES<T>; lane++) {
                consecutive = consecutive && key_offset[key + lane] == key_offset[key] + lane;
                local = local && key_offset[key + lane] >= 0;
            }
            key_run[key / LANES<T>] = !local ? MIXED : consecutive ? key_offset[key] : SCATTERED;
        }
        for (Index a = 0; a < rows.stored[1]; a++)
            for (Index c = 0; c < columns.stored[1]; c++) query_start[query++] = (w - 1 - a) * side + (w - 1 - c);
    }

    void find_visible_panels(Index tile, Index queries_per_row) {
        panel_begin[tile] = 0;
        panel_end[tile] = panels;
        if (problem->rule != RULE_EXACT) return;
        const Index lowest = tile_start[tile] / queries_per_row - problem->window;
        const Index highest = (tile_start[tile + 1] - 1) / queries_per_row + problem->window;
        while (key_row[(panel_begin[tile] + 1) * PANEL<T> - 1] < lowest) panel_begin[tile]++;
        while (key_row[(panel_end[tile] - 1) * PANEL<T>] > highest) panel_end[tile]--;
    }
};

}  // namespace VL_LEVEL
}  // namespace vision_longformer
