// Gradient norm and finite check on the CPU: a number for each chunk, then their sum in order, so that the result does
// not depend on the threads.
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

// Σ x², in double: the square of no float overflows it.
struct SumOfSquares {
  template <typename T>
  static double of(const T* values, int64_t count) {
    double lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
      for (int64_t k = 0; k < kLanes; ++k) lanes[k] += static_cast<double>(values[i + k]) * values[i + k];
    for (; i < count; ++i) lanes[i % kLanes] += static_cast<double>(values[i]) * values[i];
    double sum = 0;
    for (const double lane : lanes) sum += lane;
    return sum;
  }
};

// How many elements are not finite.
struct NotFinite {
  template <typename T>
  static double of(const T* values, int64_t count) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) found += !(std::abs(values[i]) <= std::numeric_limits<T>::max());
    return static_cast<double>(found);
  }
};

template <typename T, typename Measure>
double measure_chunk(const Chunk& chunk, const Gradient& gradient) {
  T buffer[kBlock];
  double sum = 0;
  for (int64_t done = 0; done < chunk.count; done += kBlock) {
    const int64_t count = std::min(kBlock, chunk.count - done);
    const void* address = reinterpret_cast<const void*>(gradient.address);
    sum += Measure::of(widened(address, gradient.type, chunk.start + done, count, buffer), count);
  }
  return sum;
}

template <typename Measure>
double measure(const Tensor& chunks, const Tensor& gradients) {
  const Chunk* rows = checked_rows<Chunk>(chunks, "chunks", 4, chunks);
  const Gradient* table = checked_rows<Gradient>(gradients, "gradients", 2, chunks);
  std::vector<double> sums(chunks.size(0));
  torch::stable::parallel_for(0, chunks.size(0), kChunksPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Gradient& gradient = table[rows[i].slot];
      if (gradient.address == kNoGradient) continue;
      sums[i] = gradient.type == GradientType::float64 ? measure_chunk<double, Measure>(rows[i], gradient)
                                                       : measure_chunk<float, Measure>(rows[i], gradient);
    }
  });
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

Tensor grad_norm_cpu(Tensor chunks, Tensor gradients) {
  Tensor norm = torch::stable::new_empty(chunks, {}, std::make_optional(ScalarType::Double));
  *static_cast<double*>(norm.data_ptr()) = std::sqrt(measure<SumOfSquares>(chunks, gradients));
  return norm;
}

Tensor all_finite_cpu(Tensor chunks, Tensor gradients) {
  Tensor finite = torch::stable::new_empty(chunks, {}, std::make_optional(ScalarType::Bool));
  *static_cast<bool*>(finite.data_ptr()) = measure<NotFinite>(chunks, gradients) == 0;
  return finite;
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CPU, m) {
  m.impl("grad_norm", TORCH_BOX(&hdet::grad_norm_cpu));
  m.impl("all_finite", TORCH_BOX(&hdet::all_finite_cpu));
}
