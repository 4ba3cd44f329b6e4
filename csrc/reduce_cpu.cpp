// The gradient norm of each replica and the squares of a quotient, on the CPU: a partial sum for each chunk, then their
// sum in order, so that the result does not depend on the number of threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <numeric>
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

inline double add_square(double sum, float x) { return add_exact_product(x, x, sum); }
inline double add_square(double sum, double x) { return sum + x * x; }

// Adds the squares of quotient(x) of all values to the lanes, in double, which the square of a float cannot overflow.
// Writes the quotients to `out`, which may be `values`, if it is given.
template <typename T, typename Quotient>
inline __attribute__((always_inline)) void add_squares(const T* values, T* out, int64_t count, double* sums,
                                                       const Quotient& quotient) {
  double lanes[kLanes];  // of its own, so that they stay in registers
  std::copy_n(sums, kLanes, lanes);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    T found[kLanes];  // all are read before one is written
    for (int64_t k = 0; k < kLanes; ++k) found[k] = quotient(values[i + k]);
    if (out != nullptr) std::copy_n(found, kLanes, out + i);
    for (int64_t k = 0; k < kLanes; ++k) lanes[k] = add_square(lanes[k], found[k]);
  }
  for (; i < count; ++i) {
    const T found = quotient(values[i]);
    if (out != nullptr) out[i] = found;
    lanes[i % kLanes] = add_square(lanes[i % kLanes], found);
  }
  std::copy_n(lanes, kLanes, sums);
}

template <typename T>
static HDET_WIDEST void read(const T* values, int64_t count, double* sums) {
  add_squares<T>(values, nullptr, count, sums, [](T x) { return x; });
}

template <typename T>
static HDET_WIDEST void multiply(const T* values, T factor, T* out, int64_t count, double* sums) {
  add_squares(values, out, count, sums, [=](T x) { return x * factor; });
}

template <typename T>
static HDET_WIDEST void divide(const T* values, T divisor, T* out, int64_t count, double* sums) {
  add_squares(values, out, count, sums, [=](T x) { return x / divisor; });
}

template <typename T>
double sum_chunk(const Chunk& chunk, const Gradient& gradient) {
  T buffer[kBlock];
  double lanes[kLanes] = {};
  for (int64_t done = 0; done < chunk.count; done += kBlock) {
    const int64_t count = std::min(kBlock, chunk.count - done);
    const void* address = reinterpret_cast<const void*>(gradient.address);
    read(widened(address, gradient.type, chunk.start + done, count, buffer), count, lanes);
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

// The elements that one partial sum of `divide` is of.
constexpr int64_t kSpan = 16384;

template <typename T>
double divide_all(const T* from, T divisor, T* to, int64_t numel) {
  int exponent;
  const bool exact = std::frexp(divisor, &exponent) == T(0.5);  // a product has the same bits and takes less time
  std::vector<double> sums((numel + kSpan - 1) / kSpan);
  torch::stable::parallel_for(0, sums.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t start = i * kSpan, count = std::min(kSpan, numel - start);
      double lanes[kLanes] = {};
      if (exact) multiply(from + start, 1 / divisor, to + start, count, lanes);
      else divide(from + start, divisor, to + start, count, lanes);
      sums[i] = std::accumulate(lanes, lanes + kLanes, 0.0);
    }
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

double divide_cpu(Tensor values, double divisor, Tensor out) {
  const int64_t numel = values.numel();
  const auto type = values.scalar_type();
  if (type == ScalarType::Double)
    return divide_all(checked<const double>(values, "values", type, numel, values), divisor,
                      checked<double>(out, "out", type, numel, values), numel);
  return divide_all(checked<const float>(values, "values", ScalarType::Float, numel, values),
                    static_cast<float>(divisor), checked<float>(out, "out", ScalarType::Float, numel, values), numel);
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CPU, m) {
  m.impl("grad_norm", TORCH_BOX(&hdet::grad_norm_cpu));
  m.impl("divide", TORCH_BOX(&hdet::divide_cpu));
}
