// The entry points of every level of instructions.
#pragma once

#include "problem.h"

#define VL_DECLARE(LEVEL)                    \
    namespace vision_longformer {            \
    namespace LEVEL {                        \
    bool forward(const Problem& problem);    \
    bool backward(const Problem& problem);   \
    }                                        \
    }

VL_DECLARE(portable)
VL_DECLARE(avx2)
VL_DECLARE(avx512)
#undef VL_DECLARE
