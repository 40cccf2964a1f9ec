// Runs the fused CPU kernel for another process, so that it can be emulated: see emulator.py.
//
// A call comes on standard input: whether it is a backward pass, the number of bytes of all tensors, the problem with
// places among these bytes instead of pointers (0 for none), the bytes. The status and the bytes go back.
#include <cstdio>
#include <cstdlib>

#include "levels.h"

using namespace vision_longformer;

extern "C" Index vl_problem_size();
extern "C" int vl_run(const Problem* problem, Index level, int backward_pass);

static bool read(void* target, size_t bytes) { return std::fread(target, 1, bytes, stdin) == bytes; }

int main() {
    Index backward, bytes;
    Problem problem;
    while (read(&backward, sizeof backward) && read(&bytes, sizeof bytes) && read(&problem, sizeof problem)) {
        char* tensors = static_cast<char*>(std::malloc(bytes));
        if (!tensors || !read(tensors, bytes)) return 1;
        char** pointers = reinterpret_cast<char**>(&problem + 1);
        for (char** pointer = pointers - 13; pointer < pointers; pointer++)
            if (*pointer) *pointer = tensors + reinterpret_cast<size_t>(*pointer);
        const Index status = vl_run(&problem, LEVEL_PORTABLE, int(backward));
        std::fwrite(&status, sizeof status, 1, stdout);
        std::fwrite(tensors, 1, bytes, stdout);
        std::fflush(stdout);
        std::free(tensors);
    }
}
