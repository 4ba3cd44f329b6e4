// Row-wise Adagrad on CUDA: a warp for each entry of the gradient; the first entry of a row does its work. A row is read
// twice, for its mean square and for its update; the second time it comes from the cache.
#include <torch/csrc/stable/library.h>

#include "launch_cuda.h"
#include "rowwise.h"

namespace hdet {
namespace {

constexpr int kWarp = 32;
constexpr int kWarpsPerBlock = 4;

// The summed gradient of column `i` of the row that begins at `entry`.
template <typename P, typename V, typename T>
__device__ __forceinline__ T gradient_at(const RowWise& work, const RowWiseNumbers<T>& numbers, int64_t entry,
                                         const P* w, int64_t i) {
  T g = 0;
  for (int64_t at = entry;; ++at) {
    const int64_t source = work.order == nullptr ? at : work.order[at];
    g += static_cast<T>(static_cast<const V*>(work.values)[source * work.width + i]);
    if (!work.goes_on(at)) break;
  }
  g *= numbers.factor;
  if (!work.decoupled) g += numbers.decay * static_cast<T>(w[i]);
  return g;
}

template <typename P, typename V, typename T>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock) update_rows(const RowWise work) {
  const int64_t entry = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp;
  if (entry >= work.count || !work.begins_row(entry) || work.skipped()) return;
  const int lane = threadIdx.x % kWarp;
  const auto numbers = RowWiseNumbers<T>::of(work);
  const int64_t row = work.rows == nullptr ? entry : work.rows[entry];
  P* w = static_cast<P*>(work.param) + row * work.width;
  T square = 0;
  for (int64_t i = lane; i < work.width; i += kWarp) {
    const T g = gradient_at<P, V, T>(work, numbers, entry, w, i);
    square += g * g;
  }
  // Every lane gets the same sum: the additions of a butterfly are commutative.
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) square += __shfl_xor_sync(0xffffffffu, square, distance);
  T* sums = static_cast<T*>(work.sums);
  const T sum = sums[row] + square / static_cast<T>(work.width);
  __syncwarp();  // all lanes have read the old sum
  if (lane == 0) sums[row] = sum;
  const T rate = numbers.rate / (sqrt(sum) + numbers.eps);
  const T kept = work.decoupled ? numbers.kept : T(1);
  for (int64_t i = lane; i < work.width; i += kWarp) {
    const T g = gradient_at<P, V, T>(work, numbers, entry, w, i);
    w[i] = stored_as<P>(static_cast<T>(w[i]) * kept - rate * g, work, numbers.noise, row * work.width + i);
  }
}

void rowwise_adagrad_cuda(Tensor param, Tensor sums, Tensor steps, Tensor table, int64_t table_row, Tensor values,
                          std::optional<Tensor> rows, std::optional<Tensor> order, std::optional<Tensor> grad_scale,
                          std::optional<Tensor> found_inf, bool decoupled, bool stochastic_rounding) {
  const RowWise work = checked_rowwise(param, sums, steps, table, table_row, values, rows, order, grad_scale, found_inf,
                                       decoupled, stochastic_rounding);
  if (work.count == 0 || work.width == 0) return;
  const Launch launch(param);
  const auto blocks = static_cast<unsigned>((work.count + kWarpsPerBlock - 1) / kWarpsPerBlock);
  with_row_types(work, [&]<typename P, typename V, typename T>() {
    update_rows<P, V, T><<<blocks, kWarp * kWarpsPerBlock, 0, launch.stream()>>>(work);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CUDA, m) { m.impl("rowwise_adagrad_", TORCH_BOX(&hdet::rowwise_adagrad_cuda)); }
