// The kernel for one instruction set. Compiled once per level, with VL_LEVEL naming it and the flags that go with it.
//
// No templates or inline functions of the standard library are used in here: the linker could merge their copies from
// different levels and run instructions that the machine lacks.
#include "backward.h"
#include "forward.h"
#include "levels.h"
#include "parallel.h"

namespace vision_longformer {
namespace VL_LEVEL {

// Each thread keeps its working memory; forward and backward take turns in it.
static thread_local Arena arena;

constexpr Index PARTS_PER_THREAD = 16;

template <class S>
static bool run_forward(const Problem& problem) {
    const Index rows = ceiling(problem.height, problem.window), columns = ceiling(problem.width, problem.window);
    const HeadPasses passes = Forward<S>::passes(problem);
    const Index entries = problem.batch * passes.count;
    // Parts of rows, enough of them for all threads; what is computed does not depend on it.
    const Index parts = minimum(columns, ceiling(PARTS_PER_THREAD * problem.threads, maximum(1, entries * rows)));
    const Index units = entries * rows * parts;
    Team team;
    bool failed = false;
    auto body = [&] {
        Forward<S> worker;
        const bool ready = arena.fill([&](Arena& memory) { worker.allocate(problem, memory); });
        if (!ready) __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
        if (ready) worker.start();
        team.phase(0, units, [&](Index unit) {
            const Index part = unit % parts, row = unit / parts % rows, entry = unit / (parts * rows);
            const Index batch = entry % problem.batch, pass = entry / problem.batch;
            if (ready)
                worker.attend(batch, passes.first(pass), passes.size(pass), row, part * columns / parts,
                              (part + 1) * columns / parts);
        });
    };
    team.run(minimum(problem.threads, units), body);
    return !failed;
}

// Sums of the shared gradients over tiles: task 0 .. heads for the bias, then one task per batch entry and head for the
// global tokens.
template <class T>
static void sum_shared(const Problem& p, const SharedGradients<T>& shared, Index tiles, Index task) {
    if (task < p.heads) {
        T* table = p.grad_bias ? static_cast<T*>(p.grad_bias) + task * shared.table_size : nullptr;
        T* global = p.grad_global_bias ? static_cast<T*>(p.grad_global_bias) + task * p.global_tokens : nullptr;
        const Index side = p.bias_side();
        if (table) std::memset(table, 0, sizeof(T) * shared.table_size);
        if (global) std::memset(global, 0, sizeof(T) * p.global_tokens);
        for (Index unit = task * p.batch * tiles; unit < (task + 1) * p.batch * tiles; unit++) {
            const T *from = shared.table(unit), *global_from = shared.global_bias(unit);
            for (Index i = 0; table && i < shared.table_size; i++)
                table[i] += from[shared.table_size - 1 - (i % side * side + i / side)];
            for (Index i = 0; global && i < p.global_tokens; i++) global[i] += global_from[i];
        }
        return;
    }
    const Index head = (task - p.heads) / p.batch, batch = (task - p.heads) % p.batch;
    const Index offset = (batch * p.key_tokens() * p.heads + head) * p.dim;
    for (Index tile = 0; tile < tiles; tile++)
        for (Index token = 0; token < p.global_tokens; token++) {
            const Index unit = (task - p.heads) * tiles + tile, place = offset + token * p.heads * p.dim;
            add_row<T>(shared.keys(unit) + token * p.dim, p.dim, T(1), static_cast<T*>(p.grad_k) + place);
            add_row<T>(shared.values(unit) + token * p.dim, p.dim, T(1), static_cast<T*>(p.grad_v) + place);
        }
}

template <class S>
static bool run_backward(const Problem& problem) {
    using T = Arithmetic<S>;
    const HeadPasses passes = Backward<S>::passes(problem);
    const Index entries = problem.batch * passes.count;
    const MapTiles tiles = MapTiles::of(problem);
    const Index table_size = problem.grad_bias ? problem.bias_side() * problem.bias_side() : 0;
    SharedGradients<T> shared{nullptr, problem.global_tokens, problem.dim, table_size};
    const Index shared_units = problem.batch * problem.heads * tiles.count();
    shared.data = static_cast<T*>(std::malloc(sizeof(T) * (shared_units * shared.size() + 1)));
    if (!shared.data) return false;
    const Index grad_tokens = problem.batch * problem.key_tokens();
    const Index token_size = problem.heads * problem.dim, tokens_per_task = 1 + 65536 / token_size;
    Team team;
    bool failed = false;
    auto body = [&] {
        Backward<S> worker;
        const bool ready = arena.fill([&](Arena& memory) { worker.allocate(problem, shared, memory); });
        if (!ready) __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
        if (ready) worker.start();
        Index phase = 0;
        team.phase(phase++, ceiling(grad_tokens, tokens_per_task), [&](Index task) {
            const Index from = task * tokens_per_task, count = minimum(tokens_per_task, grad_tokens - from);
            for (void* grad : {problem.grad_k, problem.grad_v})
                std::memset(static_cast<T*>(grad) + from * token_size, 0, sizeof(T) * count * token_size);
        });
        for (Index row_colour = 0; row_colour < tiles.rows.colours; row_colour++)
            for (Index column_colour = 0; column_colour < tiles.columns.colours; column_colour++) {
                const Index high = tiles.rows.tiles_of(row_colour), wide = tiles.columns.tiles_of(column_colour);
                team.phase(phase++, entries * high * wide, [&](Index task) {
                    const Index entry = task / (high * wide);
                    const Index row = tiles.rows.tile_of(row_colour, task / wide % high);
                    const Index column = tiles.columns.tile_of(column_colour, task % wide);
                    const Index batch = entry % problem.batch, pass = entry / problem.batch, head = passes.first(pass);
                    const Index tile = row * tiles.columns.count + column, stride = problem.batch * tiles.count();
                    if (ready)
                        worker.differentiate(batch, head, passes.size(pass), tiles, row, column,
                                             head * stride + batch * tiles.count() + tile, stride);
                });
            }
        team.phase(phase++, problem.heads + problem.batch * problem.heads,
                   [&](Index task) { sum_shared<T>(problem, shared, tiles.count(), task); });
    };
    team.run(minimum(problem.threads, maximum(1, entries * tiles.count())), body);
    std::free(shared.data);
    return !failed;
}

bool forward(const Problem& problem) {
    switch (problem.data_type) {
        case TYPE_FLOAT32: return run_forward<float>(problem);
        case TYPE_FLOAT64: return run_forward<double>(problem);
        case TYPE_BFLOAT16: return run_forward<BFloat16>(problem);
        default: return run_forward<Float16>(problem);
    }
}

bool backward(const Problem& problem) {
    switch (problem.data_type) {
        case TYPE_FLOAT32: return run_backward<float>(problem);
        case TYPE_FLOAT64: return run_backward<double>(problem);
        case TYPE_BFLOAT16: return run_backward<BFloat16>(problem);
        default: return run_backward<Float16>(problem);
    }
}

}  // namespace VL_LEVEL
}  // namespace vision_longformer
