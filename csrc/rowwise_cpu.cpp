// Row-wise Adagrad on the CPU: threads share the entries of the gradient.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "rowwise.h"

namespace hdet {
namespace {

// The fewest elements that a thread gets.
constexpr int64_t kElementsPerThread = 32768;

// Writes the summed gradient of the row that begins at `entry` to `g`.
template <typename P, typename V, typename T>
void sum_gradient(const RowWise& work, const RowWiseNumbers<T>& numbers, int64_t entry, const P* __restrict w,
                  T* __restrict g) {
  std::fill_n(g, work.width, T(0));
  for (int64_t at = entry;; ++at) {
    const int64_t source = work.order == nullptr ? at : work.order[at];
    const V* __restrict values = static_cast<const V*>(work.values) + source * work.width;
    for (int64_t i = 0; i < work.width; ++i) g[i] += static_cast<T>(values[i]);
    if (!work.goes_on(at)) break;
  }
  for (int64_t i = 0; i < work.width; ++i) g[i] *= numbers.factor;
  if (work.decoupled) return;
  for (int64_t i = 0; i < work.width; ++i) g[i] += numbers.decay * static_cast<T>(w[i]);
}

// The sum of squares in 16 parts: a single one would make every addition wait for the one before.
template <typename T>
T sum_of_squares(const T* __restrict g, int64_t width) {
  T parts[16] = {};
  int64_t i = 0;
  for (; i + 16 <= width; i += 16)
    for (int64_t j = 0; j < 16; ++j) parts[j] += g[i + j] * g[i + j];
  T total = 0;
  for (; i < width; ++i) total += g[i] * g[i];
  for (const T part : parts) total += part;
  return total;
}

template <typename P, typename V, typename T>
void update_row(const RowWise& work, const RowWiseNumbers<T>& numbers, int64_t entry, T* g) {
  const int64_t row = work.rows == nullptr ? entry : work.rows[entry];
  P* w = static_cast<P*>(work.param) + row * work.width;
  sum_gradient<P, V, T>(work, numbers, entry, w, g);
  T& sum = static_cast<T*>(work.sums)[row];
  sum += sum_of_squares(g, work.width) / static_cast<T>(work.width);
  const T rate = numbers.rate / (std::sqrt(sum) + numbers.eps);
  const T kept = work.decoupled ? numbers.kept : T(1);
  for (int64_t i = 0; i < work.width; ++i)
    w[i] = stored_as<P>(static_cast<T>(w[i]) * kept - rate * g[i], work, numbers.noise, row * work.width + i);
}

void rowwise_adagrad_cpu(Tensor param, Tensor sums, Tensor steps, Tensor table, int64_t table_row, Tensor values,
                         std::optional<Tensor> rows, std::optional<Tensor> order, std::optional<Tensor> grad_scale,
                         std::optional<Tensor> found_inf, bool decoupled, bool stochastic_rounding) {
  const RowWise work = checked_rowwise(param, sums, steps, table, table_row, values, rows, order, grad_scale, found_inf,
                                       decoupled, stochastic_rounding);
  if (work.skipped() || work.width == 0) return;
  const int64_t entries = std::max<int64_t>(kElementsPerThread / work.width, 1);
  with_row_types(work, [&]<typename P, typename V, typename T>() {
    const auto numbers = RowWiseNumbers<T>::of(work);
    torch::stable::parallel_for(0, work.count, entries, [&](int64_t begin, int64_t end) {
      std::vector<T> g(work.width);
      for (int64_t entry = begin; entry < end; ++entry)
        if (work.begins_row(entry)) update_row<P, V, T>(work, numbers, entry, g.data());
    });
  });
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CPU, m) { m.impl("rowwise_adagrad_", TORCH_BOX(&hdet::rowwise_adagrad_cpu)); }
