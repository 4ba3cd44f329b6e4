// The gradient norm of each replica on the CPU: a partial sum for each chunk, then their sum in order, so that the
// result does not depend on the number of threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "convert_cpu.h"

namespace hdet {
namespace {

constexpr int64_t kChunksPerThread = 8;
constexpr int64_t kLanes = 16;

// a·b + c of a product that is exact in double, so that both forms give the same bits. Without an instruction for the
// first, it would be a function call.
inline double add_exact_product(double a, double b, double c) {
#ifdef __FP_FAST_FMA
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// Adds x² to the lanes, in double, which the square of a float cannot overflow.
template <typename T>
void add_squares(const T* values, int64_t count, double* sums) {
  double lanes[kLanes];  // of its own, so that they stay in registers
  std::copy_n(sums, kLanes, lanes);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int64_t k = 0; k < kLanes; ++k) {
      const double x = values[i + k];
      lanes[k] = std::is_same_v<T, float> ? add_exact_product(x, x, lanes[k]) : lanes[k] + x * x;
    }
  for (; i < count; ++i) lanes[i % kLanes] += static_cast<double>(values[i]) * values[i];
  std::copy_n(lanes, kLanes, sums);
}

template <typename T>
double sum_chunk(const Chunk& chunk, const Gradient& gradient) {
  T buffer[kBlock];
  double lanes[kLanes] = {};
  for (int64_t done = 0; done < chunk.count; done += kBlock) {
    const int64_t count = std::min(kBlock, chunk.count - done);
    const void* address = reinterpret_cast<const void*>(gradient.address);
    add_squares(widened(address, gradient.type, chunk.start + done, count, buffer), count, lanes);
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
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
