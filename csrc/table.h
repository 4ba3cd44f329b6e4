// The layout of the tables that Python writes and the kernels read. hdet_kernels/ops/table.py and chunks.py have the
// same; tests/test_chunks.py compares them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hdet {

// Hyperparameters of one parameter group. max_grad_norm is 0 for no clipping, seed a whole number below 2³²; the last
// three are flags, 0 or 1.
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

// One parameter: `count` elements of the flat buffers from `offset` on, stepped with hyperparameters `row`.
struct Slot {
  int64_t offset;
  int64_t count;
  int64_t row;
};
static_assert(sizeof(Slot) == 3 * sizeof(int64_t));

// What one thread block works on: elements `start` .. `start + count` of a slot, which lie at `offset` in the flat
// buffers. How many that are is decided where the table is made (CHUNK in chunks.py).
struct alignas(16) Chunk {
  int64_t offset;
  int64_t start;
  int64_t count;
  int64_t slot;
};
static_assert(sizeof(Chunk) == 4 * sizeof(int64_t));

enum class GradientType : int64_t { float32, float64, bfloat16, float16 };

// Where the gradient of a slot is, and of what type.
struct alignas(16) Gradient {
  int64_t address;
  GradientType type;
};
static_assert(sizeof(Gradient) == 2 * sizeof(int64_t));

// What stands in the table instead of an address: no gradient (leave the slot alone), or one without elements (nothing
// to read, but the step counts).
inline constexpr int64_t kNoGradient = 0;
inline constexpr int64_t kEmptyGradient = 1;

}  // namespace hdet
