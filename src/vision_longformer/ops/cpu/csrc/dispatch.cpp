// The C interface, and the choice among the levels of instructions that were built and that this machine has.
#include "levels.h"
#include "parallel.h"

#define VL_EXPORT extern "C" __attribute__((visibility("default")))

namespace vision_longformer {

ThreadRuntime thread_runtime = {nullptr, nullptr};

static bool available(Index level) {
#if defined(VL_HAS_AVX512)
    if (level == LEVEL_AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
#if defined(VL_HAS_AVX2)
    if (level == LEVEL_AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return level == LEVEL_PORTABLE;
}

}  // namespace vision_longformer

using namespace vision_longformer;

// Size of the structure, by which Python checks that both sides mean the same.
VL_EXPORT Index vl_problem_size() { return sizeof(Problem); }

// Whether a level was built and can run here.
VL_EXPORT int vl_available(Index level) { return available(level); }

VL_EXPORT void vl_set_thread_runtime(void* parallel, void* barrier) {
    thread_runtime.parallel = reinterpret_cast<decltype(thread_runtime.parallel)>(parallel);
    thread_runtime.barrier = reinterpret_cast<decltype(thread_runtime.barrier)>(barrier);
}

// 0 on success, 1 without memory, 2 if the level is not available.
VL_EXPORT int vl_run(const Problem* problem, Index level, int backward_pass) {
    if (!available(level)) return 2;
    auto forward_of = portable::forward, backward_of = portable::backward;
#if defined(VL_HAS_AVX2)
    if (level == LEVEL_AVX2) forward_of = avx2::forward, backward_of = avx2::backward;
#endif
#if defined(VL_HAS_AVX512)
    if (level == LEVEL_AVX512) forward_of = avx512::forward, backward_of = avx512::backward;
#endif
    return (backward_pass ? backward_of : forward_of)(*problem) ? 0 : 1;
}
