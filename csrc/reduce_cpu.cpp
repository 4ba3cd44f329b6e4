// Gradient norm and finite check on the CPU, by rows of chunks: a number for each chunk, then their sums in order, so
// that the result does not depend on the threads.
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

// What `finish` makes of the sum of each row.
template <typename Measure, typename Result>
Tensor reduce(const Tensor& chunks, const Tensor& gradients, int64_t rows, ScalarType type, Result (*finish)(double)) {
  const Chunk* pieces = checked_rows<Chunk>(chunks, "chunks", 4, chunks);
  const Gradient* table = checked_rows<Gradient>(gradients, "gradients", 2, chunks);
  const int64_t per_row = chunks_per_row(chunks, rows);
  std::vector<double> sums(chunks.size(0));
  torch::stable::parallel_for(0, chunks.size(0), kChunksPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Gradient& gradient = table[pieces[i].slot];
      if (gradient.address == kNoGradient) continue;
      sums[i] = gradient.type == GradientType::float64 ? measure_chunk<double, Measure>(pieces[i], gradient)
                                                       : measure_chunk<float, Measure>(pieces[i], gradient);
    }
  });
  Tensor result = torch::stable::new_empty(chunks, {rows}, std::make_optional(type));
  for (int64_t row = 0; row < rows; ++row) {
    double sum = 0;
    for (int64_t i = row * per_row; i < (row + 1) * per_row; ++i) sum += sums[i];
    static_cast<Result*>(result.data_ptr())[row] = finish(sum);
  }
  return result;
}

Tensor grad_norm_cpu(Tensor chunks, Tensor gradients, int64_t rows) {
  return reduce<SumOfSquares, double>(chunks, gradients, rows, ScalarType::Double,
                                      [](double sum) { return std::sqrt(sum); });
}

Tensor all_finite_cpu(Tensor chunks, Tensor gradients, int64_t rows) {
  return reduce<NotFinite, bool>(chunks, gradients, rows, ScalarType::Bool, [](double count) { return count == 0; });
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CPU, m) {
  m.impl("grad_norm", TORCH_BOX(&hdet::grad_norm_cpu));
  m.impl("all_finite", TORCH_BOX(&hdet::all_finite_cpu));
}
