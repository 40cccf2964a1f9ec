// Where the keys of a chunk are packed.
#pragma once

#include "plan.h"

namespace vision_longformer {
namespace VL_LEVEL {

// Chunks of a row share block columns, so that three groups of keys are kept, and each is packed once for three chunks.
// The ring knows the places only; arrays of `size()` elements hold what is packed, LANES * padded elements per vector.
template <class T>
class KeyRing {
   public:
    Index* place;  // per vector of the plan's keys

    void allocate(const ChunkPlan<T>& plan, Index padded, Arena& arena) {
        const Index vectors = plan.largest_group_vectors();
        vector_size_ = LANES<T> * padded;
        zeros_ = GROUPS * vectors * vector_size_;
        place = arena.take<Index>(2 * plan.largest_panels());
        for (Index slot = 0; slot < GROUPS; slot++) {
            name_[slot] = NOTHING;
            group_[slot] = {arena.take<Index>(vectors * LANES<T>), 0, slot * vectors * vector_size_};
        }
    }
    Index size() const { return zeros_ + vector_size_; }
    // Where arrays of rows have that of a key of the plan.
    Index row_of(Index key, Index padded) const { return place[key / LANES<T>] + key % LANES<T> * padded; }
    // Where arrays have a vector of zeros, for padding.
    Index zeros() const { return zeros_; }

    // Makes the groups of the plan's chunk present. Calls `drop(group)` for those that go, `pack(group)` for new ones.
    template <class Drop, class Pack>
    void turn_to(const ChunkPlan<T>& plan, Index chunk_column, Drop drop, Pack pack) {
        // Where not all neighbours are chosen, a block column has other keys for every chunk.
        const bool shared = plan.problem->neighbours == NEIGHBOURS_ALL;
        Index* next = place;
        for (int column = -1; column <= 1; column++) {
            const Index slot = slot_of(chunk_column + column), name = GROUPS * (chunk_column + column);
            KeyGroup<T>& group = group_[slot];
            if (name_[slot] != name + (shared ? 0 : column)) {
                drop_group(slot, drop);
                name_[slot] = name + (shared ? 0 : column);
                plan.list_keys(column, plan.columns, group);
                pack(group);
            }
            for (Index i = 0; i < group.vectors; i++) *next++ = group.place + i * vector_size_;
        }
        while (next < place + 2 * plan.panels) *next++ = zeros_;
    }

    // The group that goes when the next chunk of the row comes.
    const KeyGroup<T>& leaving(Index chunk_column) const { return group_[slot_of(chunk_column - 1)]; }

    template <class Drop>
    void drop_all(Drop drop) {
        for (Index slot = 0; slot < GROUPS; slot++) drop_group(slot, drop);
    }

   private:
    static constexpr Index GROUPS = 3, NOTHING = -1000;
    KeyGroup<T> group_[GROUPS];
    Index name_[GROUPS], vector_size_, zeros_;

    static Index slot_of(Index unwrapped_column) { return (unwrapped_column + GROUPS) % GROUPS; }

    template <class Drop>
    void drop_group(Index slot, Drop drop) {
        if (name_[slot] != NOTHING) drop(group_[slot]);
        name_[slot] = NOTHING;
    }
};

// The keys and queries that come with the next chunk of a row; for prefetching.
template <class T>
struct NextChunk {
    KeyGroup<T> keys;
    Index *queries, query_count;

    void allocate(const ChunkPlan<T>& plan, Arena& arena) {
        keys = {arena.take<Index>(plan.largest_group_vectors() * LANES<T>), 0, 0};
        queries = arena.take<Index>(plan.largest_queries());
    }
    void list(const ChunkPlan<T>& plan, Index chunk_column) {
        const AxisBlocks columns = column_blocks(chunk_column, *plan.problem);
        plan.list_keys(1, columns, keys);
        query_count = plan.list_queries(columns, queries);
    }
};

}  // namespace VL_LEVEL
}  // namespace vision_longformer
