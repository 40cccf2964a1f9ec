// Threads of torch's own OpenMP runtime. Python finds its entry points, so that nothing is linked and no second pool of
// threads exists; without them everything runs in the calling thread.
#pragma once

#include "problem.h"

namespace vision_longformer {

struct ThreadRuntime {
    void (*parallel)(void (*body)(void*), void* context, unsigned threads, unsigned flags);  // GOMP_parallel
    void (*barrier)();                                                                       // GOMP_barrier
};
extern ThreadRuntime thread_runtime;  // dispatch.cpp

namespace VL_LEVEL {

// A team works through phases of independent tasks. Which thread takes which task is left to chance; what a task
// computes may not depend on it.
class Team {
   public:
    // Runs `body()` in every thread of a team of at most `threads`.
    template <class Body>
    void run(Index threads, Body& body) {
        threaded_ = threads > 1 && thread_runtime.parallel && thread_runtime.barrier;
        if (threaded_)
            thread_runtime.parallel([](void* context) { (*static_cast<Body*>(context))(); }, &body, unsigned(threads),
                                    0);
        else
            body();
    }

    // Called by every thread of the team: shares out the tasks 0 .. count, and returns when all are done.
    template <class Task>
    void phase(Index number, Index count, Task task) {
        Index* next = &next_[number % PHASES];
        for (;;) {
            const Index index = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
            if (index >= count) break;
            task(index);
        }
        if (!threaded_) {
            next_[(number + 1) % PHASES] = 0;
            return;
        }
        // Nobody uses the counter of the next phase but one yet, and nobody leaves before all have arrived.
        __atomic_store_n(&next_[(number + 2) % PHASES], 0, __ATOMIC_RELAXED);
        thread_runtime.barrier();
    }

   private:
    static constexpr Index PHASES = 3;
    Index next_[PHASES] = {0, 0, 0};
    bool threaded_ = false;
};

}  // namespace VL_LEVEL
}  // namespace vision_longformer
