// Vectors of four floats for the loops that GCC does not vectorise itself: on Arm it has no vector form of the rounding
// of float32 to float16. The operators of a vector act on each of its elements.
#pragma once

#if defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#include <arm_neon.h>

#define HDET_LANES
namespace hdet {
using Lanes = float32x4_t;
}  // namespace hdet
#endif
