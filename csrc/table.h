// The layout of the tables that Python writes and the kernels read. hdet_kernels/ops/table.py and chunks.py have the
// same layout; tests/ops/test_chunks.py compares them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rounding.h"

namespace hdet {

// The hyperparameters of one parameter group. max_grad_norm is 0 for no clipping, seed is a whole number below 2³², and
// the last three are flags, 0 or 1.
struct Row {
  double lr;
  double weight_decay;
  double beta1;
  double beta2;
  double eps;
  double momentum;
  double dampening;
  double lr_decay;
  double max_grad_norm;
  double seed;
  double nesterov;
  double amsgrad;
  double maximize;
};
inline constexpr int64_t kColumns = 13;
static_assert(sizeof(Row) == kColumns * sizeof(double), "a row is its columns and nothing else");
static_assert(offsetof(Row, maximize) == (kColumns - 1) * sizeof(double));

// One parameter: `count` elements of the flat buffers from `offset` on, stepped with row `row` of the hyperparameters.
struct Slot {
  int64_t offset;
  int64_t count;
  int64_t row;
};
static_assert(sizeof(Slot) == 3 * sizeof(int64_t));

// The elements that one thread block works on: `start` .. `start + count` of a slot, which lie at `offset` in the flat
// buffers. CHUNK in chunks.py bounds `count`.
struct alignas(16) Chunk {
  int64_t offset;
  int64_t start;
  int64_t count;
  int64_t slot;
};
static_assert(sizeof(Chunk) == 4 * sizeof(int64_t));

enum class GradientType : int64_t { float32, float64, bfloat16, float16 };

// The address and type of the gradient of a slot.
struct alignas(16) Gradient {
  int64_t address;
  GradientType type;
};
static_assert(sizeof(Gradient) == 2 * sizeof(int64_t));

// Values in place of an address: there is no gradient (skip the slot), or it has no elements (nothing to read, but the
// step is counted).
inline constexpr int64_t kNoGradient = 0;
inline constexpr int64_t kEmptyGradient = 1;

// Returns function(S{}) with S the type of the elements, which is known only when a kernel runs.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <typename Function>
HDET_BOTH auto with_type(GradientType type, Function&& function) {
  switch (type) {
    case GradientType::float32:
      return function(float{});
    case GradientType::float64:
      return function(double{});
    case GradientType::bfloat16:
      return function(BFloat16{});
    default:
      return function(Half{});
  }
}

}  // namespace hdet
