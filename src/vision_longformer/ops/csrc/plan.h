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
// Bias tables are kept reversed, so that consecutive keys of a row have consecutive entries. The entry of query (a, c) of
// the chunk and a key at (x, y) relative to it is at query_start + key_offset of
//     query_start = (w-1-a) * side + (w-1-c),    key_offset = (x+w) * side + (y+w),    side = 4w-1.
template <class T>
struct ChunkPlan {
    static constexpr Index GLOBAL = -1, PADDING = -2;  // in key_offset

    const Problem* problem;
    Index kind, queries, tiles, keys, panels;
    Index *query_token, *query_start;         // per query; tokens count from the first local one
    Index *tile_start;                        // per micro tile of queries, and the end
    Index *panel_begin, *panel_end;           // per micro tile: the panels its queries see
    Index *key_token, *key_offset, *key_row;  // per key; tokens count from the first global one, -1 for zeros

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
        for (Index** per_key : {&key_token, &key_offset, &key_row}) *per_key = arena.take<Index>(most_keys);
    }

    void build(Index chunk_row, Index chunk_column) {
        const Problem& p = *problem;
        const Index w = p.window;
        const AxisBlocks rows = axis_blocks(chunk_row, ceiling(p.height, w), p.height, w, p.rule);
        const AxisBlocks columns = axis_blocks(chunk_column, ceiling(p.width, w), p.width, w, p.rule);
        list_keys(rows, columns);
        list_queries(rows, columns);
        const Index new_kind = 4 * rows.kind + columns.kind;
        if (new_kind == kind) return;
        kind = new_kind;
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

    void add_key(Index token, Index offset, Index row) {
        key_token[keys] = token;
        key_offset[keys] = offset;
        key_row[keys++] = row;
    }

    void list_keys(const AxisBlocks& rows, const AxisBlocks& columns) {
        const Index w = problem->window, side = problem->bias_side();
        keys = 0;
        for (int row = -1; row <= 1; row++) {
            if (row == 0)
                for (Index token = 0; token < problem->global_tokens; token++) add_key(token, GLOBAL, 0);
            for (Index i = 0; i < rows.count[row + 1]; i++)
                for (int column = -1; column <= 1; column++) {
                    if (!chosen(row, column)) continue;
                    const Index x = row * w + i, offset = (x + w) * side + (column + 1) * w;
                    const Index stored = i < rows.stored[row + 1] ? columns.stored[column + 1] : 0;
                    const Index token = problem->global_tokens + (rows.first[row + 1] + i) * problem->width +
                                        columns.first[column + 1];
                    for (Index j = 0; j < stored; j++) add_key(token + j, offset + j, x);
                    for (Index j = stored; j < columns.count[column + 1]; j++) add_key(-1, offset + j, x);
                }
        }
        panels = ceiling(keys, PANEL<T>);
        const Index last_row = key_row[keys - 1], real = keys;
        while (keys < panels * PANEL<T>) add_key(-1, PADDING, last_row);
        keys = real;
    }

    void list_queries(const AxisBlocks& rows, const AxisBlocks& columns) {
        const Index w = problem->window, side = problem->bias_side();
        queries = 0;
        for (Index a = 0; a < rows.stored[1]; a++)
            for (Index c = 0; c < columns.stored[1]; c++) {
                query_token[queries] = (rows.first[1] + a) * problem->width + columns.first[1] + c;
                query_start[queries++] = (w - 1 - a) * side + (w - 1 - c);
            }
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
