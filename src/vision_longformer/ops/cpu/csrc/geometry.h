// Chunks along one axis of the map, and tiles of chunks that are worked on together.
#pragma once

#include "problem.h"

namespace vision_longformer {
namespace VL_LEVEL {

constexpr Index minimum(Index a, Index b) { return a < b ? a : b; }
constexpr Index maximum(Index a, Index b) { return a > b ? a : b; }
constexpr Index ceiling(Index a, Index b) { return (a + b - 1) / b; }
constexpr Index round_up(Index a, Index b) { return ceiling(a, b) * b; }

constexpr int AXIS_KINDS = 4;

// The blocks before, at and after a chunk, along one axis: the positions first .. first + stored of the keys exist, and
// `count` positions take part, more than exist only where zero padding is attended to.
struct AxisBlocks {
    Index first[3], stored[3], count[3];
    // Chunks of one kind (below AXIS_KINDS) have equal counts, so that they share an expanded bias.
    int kind;

    void find_kind(Index chunk, Index chunks, Index window) {
        const bool full = count[0] == window && count[1] == window && count[2] == window;
        kind = full ? 1 : chunk == 0 ? 0 : chunk == chunks - 1 ? 3 : 2;
    }
};

// Along an axis of `length` queries, whose keys wrap around.
inline AxisBlocks axis_blocks(Index chunk, Index length, const Problem& problem) {
    const Index window = problem.window, chunks = ceiling(length, window);
    AxisBlocks blocks;
    for (int block = 0; block < 3; block++) {
        const Index unwrapped = chunk + block - 1, source = (unwrapped + chunks) % chunks;
        const bool inside = unwrapped == source;
        blocks.first[block] = source * window;
        blocks.stored[block] = inside || problem.cyclic() ? minimum(window, length - source * window) : 0;
        blocks.count[block] = !inside && problem.rule == RULE_CYCLIC_RELEASE ? window : blocks.stored[block];
    }
    blocks.find_kind(chunk, chunks, window);
    return blocks;
}

inline AxisBlocks column_blocks(Index chunk, const Problem& problem) {
    return axis_blocks(chunk, problem.width, problem);
}

// Along the rows of a map, or of a band with more keys to either side.
inline AxisBlocks row_blocks(Index chunk, const Problem& problem) {
    if (!problem.banded) return axis_blocks(chunk, problem.height, problem);
    const Index window = problem.window, chunks = ceiling(problem.height, window);
    AxisBlocks blocks;
    for (int block = 0; block < 3; block++) {
        const Index source = chunk + block - 1, start = minimum(source * window, problem.height);
        blocks.first[block] = source < 0 ? 0 : problem.above + start;
        blocks.stored[block] = source < 0         ? problem.above
                               : source == chunks ? problem.below
                                                  : minimum(window, problem.height - start);
        blocks.count[block] = blocks.stored[block];
    }
    blocks.find_kind(chunk, chunks, window);
    return blocks;
}

// Heads are worked on in passes of nearly equal size. The heads of a token lie side by side in memory, so that a pass
// of several visits fewer pages.
struct HeadPasses {
    Index heads, count;

    Index first(Index pass) const { return pass * heads / count; }
    Index size(Index pass) const { return first(pass + 1) - first(pass); }
    Index largest() const { return ceiling(heads, count); }
};

// An axis of `chunks` chunks cut into tiles of at least `smallest` (or one tile).
//
// The gradients of keys in a tile and one chunk to either side of it are written while it is worked on. Tiles of one
// colour are far enough apart to be worked on at the same time: two colours in turn for tiles of two chunks or more,
// else three. Around a cycle whose tiles do not divide evenly, the last tiles have colours of their own.
struct AxisTiles {
    Index chunks, count, period, colours;

    AxisTiles(Index axis_chunks, Index smallest, bool cyclic) : chunks(axis_chunks) {
        count = maximum(1, chunks / smallest);
        period = minimum(count, smallest >= 2 ? 2 : 3);
        colours = period + (cyclic ? count % period : 0);
    }
    Index first(Index tile) const { return tile * chunks / count; }
    // Tiles of a colour below `period` are colour, colour + period, ...; the others have one tile each.
    Index tiles_of(Index colour) const {
        return colour >= period ? 1 : (regular() - colour + period - 1) / period;
    }
    Index tile_of(Index colour, Index index) const {
        return colour >= period ? regular() + colour - period : colour + index * period;
    }

   private:
    Index regular() const { return count - (colours - period); }
};

// How the whole map of chunks is cut: the same for any number of threads, because sums over a tile are made before sums
// over tiles.
struct MapTiles {
    AxisTiles rows, columns;

    // Two rows high, which is enough for two colours, and wide, because neighbours along a row share packed keys.
    static constexpr Index TALL = 2, WIDE = 8, FEWEST = 16;

    static MapTiles of(const Problem& problem) {
        return {AxisTiles(ceiling(problem.height, problem.window), TALL, problem.cyclic() && !problem.banded),
                AxisTiles(ceiling(problem.width, problem.window), WIDE, problem.cyclic())};
    }
    Index count() const { return rows.count * columns.count; }

    // So many passes of heads there should be for threads to share at least the fewest tiles.
    Index least_passes(Index batch) const { return ceiling(FEWEST, maximum(1, batch * count())); }
};

}  // namespace VL_LEVEL
}  // namespace vision_longformer
