// The layout of the tables that Python writes and the kernels read. hdet_kernels/ops/table.py and chunks.py have the
// same; tests/test_ops.py compares them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hdet {

// Elements of a chunk: what one thread block works on at a time.
inline constexpr int64_t kChunk = 4096;

// Hyperparameters of one parameter group. The last three are flags, 0 or 1.
struct Row {
  double lr;
  double weight_decay;
  double beta1;
  double beta2;
  double eps;
  double momentum;
  double dampening;
  double lr_decay;
  double nesterov;
  double amsgrad;
  double maximize;
};
inline constexpr int64_t kColumns = 11;
static_assert(sizeof(Row) == kColumns * sizeof(double), "a row is its columns and nothing else");
static_assert(offsetof(Row, maximize) == (kColumns - 1) * sizeof(double));

// One parameter: `count` elements of the flat buffers from `offset` on, stepped with hyperparameters `row`.
struct Slot {
  int64_t offset;
  int64_t count;
  int64_t row;
};
static_assert(sizeof(Slot) == 3 * sizeof(int64_t));

// Elements index·kChunk .. (index + 1)·kChunk of one slot, as far as the slot reaches.
struct Chunk {
  int32_t slot;
  int32_t index;
};
static_assert(sizeof(Chunk) == 2 * sizeof(int32_t));

// What stands in the table of gradient addresses instead of one: no gradient (leave the slot alone), or one without
// elements (nothing to read, but the step counts).
inline constexpr int64_t kNoGradient = 0;
inline constexpr int64_t kEmptyGradient = 1;

}  // namespace hdet
