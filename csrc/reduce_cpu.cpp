// The gradient norm of each replica on the CPU: a partial sum for each chunk, then their sum in order, so that the
// result does not depend on the number of threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "convert_cpu.h"

namespace hdet {
namespace {

constexpr int64_t kChunksPerThread = 8;
constexpr int64_t kLanes = 16;

// Σ x² in double, which the square of a float cannot overflow.
template <typename T>
double sum_of_squares(const T* values, int64_t count) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int64_t k = 0; k < kLanes; ++k) lanes[k] += static_cast<double>(values[i + k]) * values[i + k];
  for (; i < count; ++i) lanes[i % kLanes] += static_cast<double>(values[i]) * values[i];
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

template <typename T>
double sum_chunk(const Chunk& chunk, const Gradient& gradient) {
  T buffer[kBlock];
  double sum = 0;
  for (int64_t done = 0; done < chunk.count; done += kBlock) {
    const int64_t count = std::min(kBlock, chunk.count - done);
    const void* address = reinterpret_cast<const void*>(gradient.address);
    sum += sum_of_squares(widened(address, gradient.type, chunk.start + done, count, buffer), count);
  }
  return sum;
}

Tensor grad_norm_cpu(Tensor chunks, Tensor gradients, int64_t rows) {
  const Chunk* pieces = checked_rows<Chunk>(chunks, "chunks", 4, chunks);
  const Gradient* table = checked_rows<Gradient>(gradients, "gradients", 2, chunks);
  const int64_t per_row = chunks_per_row(chunks, rows);
  std::vector<double> sums(chunks.size(0));
  torch::stable::parallel_for(0, chunks.size(0), kChunksPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Gradient& gradient = table[pieces[i].slot];
      if (gradient.address == kNoGradient) continue;
      sums[i] = gradient.type == GradientType::float64 ? sum_chunk<double>(pieces[i], gradient)
                                                       : sum_chunk<float>(pieces[i], gradient);
    }
  });
  Tensor result = torch::stable::new_empty(chunks, {rows}, std::make_optional(ScalarType::Double));
  for (int64_t row = 0; row < rows; ++row) {
    double sum = 0;
    for (int64_t i = row * per_row; i < (row + 1) * per_row; ++i) sum += sums[i];
    static_cast<double*>(result.data_ptr())[row] = std::sqrt(sum);
  }
  return result;
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CPU, m) {
  m.impl("grad_norm", TORCH_BOX(&hdet::grad_norm_cpu));
}
