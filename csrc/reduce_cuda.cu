// Gradient norm and finite check on CUDA: a bounded number of blocks read all gradients once and leave a number each,
// and one block sums those in order. The number of blocks does not depend on the GPU and nothing is added atomically, so
// the result is the same every time.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "launch_cuda.h"

namespace hdet {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
// 16-byte loads that a thread has in flight.
constexpr int kInFlight = 4;
// Blocks that shall fit on one multiprocessor: 40 registers a thread, the fewest that spill nothing.
constexpr int kBlocksPerProcessor = 6;
constexpr int64_t kMostBlocks = 2048;

// Σ x², in double: the square of no float overflows it.
struct SumOfSquares {
  using Result = double;
  template <typename T>
  static __device__ __forceinline__ double of(T value) {
    return static_cast<double>(value) * static_cast<double>(value);
  }
  static __device__ __forceinline__ double finish(double sum) { return sqrt(sum); }
};

// How many elements are not finite.
struct NotFinite {
  using Result = bool;
  template <typename T>
  static __device__ __forceinline__ double of(T value) {
    return isfinite(value) ? 0.0 : 1.0;
  }
  static __device__ __forceinline__ bool finish(double count) { return count == 0; }
};

// The sum over the block, in a fixed order; valid in thread 0.
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double warps[kWarps];
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += warps[warp];
  }
  return sum;
}

template <typename Measure, typename S>
__device__ __forceinline__ double measure_chunk(int64_t address, int64_t start, int count, int lane) {
  const S* values = reinterpret_cast<const S*>(address) + start;
  constexpr int kWidth = 16 / sizeof(S);
  using Packed = Pack<S, kWidth>;
  using T = std::conditional_t<std::is_same_v<S, double>, double, float>;
  double sum = 0;
  int done = 0;
  if (reinterpret_cast<uintptr_t>(values) % sizeof(Packed) == 0) {
    const int packs = count / kWidth;
#pragma unroll 1
    for (int first = lane; first < packs; first += kInFlight * kWarp) {
      Packed loaded[kInFlight] = {};  // zeros count for nothing
#pragma unroll
      for (int n = 0; n < kInFlight; ++n)
        if (first + n * kWarp < packs) loaded[n] = fetch<Packed>(values + (first + n * kWarp) * kWidth);
#pragma unroll
      for (int n = 0; n < kInFlight; ++n)
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum += Measure::of(static_cast<T>(loaded[n].values[j]));
    }
    done = packs * kWidth;
  }
  for (int at = done + lane; at < count; at += kWarp) sum += Measure::of(static_cast<T>(values[at]));
  return sum;
}

// Every warp walks chunks of its own: while one waits for the rows of its next chunk, others read.
template <typename Measure>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    measure(const Chunk* __restrict__ chunks, int64_t chunk_count, const Gradient* __restrict__ gradients,
            double* __restrict__ parts) {
  const int lane = threadIdx.x % kWarp;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  double sum = 0;
  for (int64_t i = warp; i < chunk_count; i += static_cast<int64_t>(gridDim.x) * kWarps) {
    const Chunk chunk = chunks[i];
    const Gradient gradient = gradients[chunk.slot];
    if (gradient.address == kNoGradient) continue;
    const auto count = static_cast<int>(chunk.count);
    switch (gradient.type) {
      case GradientType::float32:
        sum += measure_chunk<Measure, float>(gradient.address, chunk.start, count, lane);
        break;
      case GradientType::float64:
        sum += measure_chunk<Measure, double>(gradient.address, chunk.start, count, lane);
        break;
      case GradientType::bfloat16:
        sum += measure_chunk<Measure, BFloat16>(gradient.address, chunk.start, count, lane);
        break;
      case GradientType::float16:
        sum += measure_chunk<Measure, Half>(gradient.address, chunk.start, count, lane);
        break;
    }
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

template <typename Measure>
__global__ void __launch_bounds__(kThreads)
    finish(const double* __restrict__ parts, int count, typename Measure::Result* __restrict__ result) {
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) sum += parts[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *result = Measure::finish(sum);
}

template <typename Measure>
Tensor reduce(const Tensor& chunks, const Tensor& gradients, ScalarType type) {
  const Chunk* rows = checked_rows<Chunk>(chunks, "chunks", 4, chunks);
  const Gradient* table = checked_rows<Gradient>(gradients, "gradients", 2, chunks);
  const Launch launch(chunks);
  if (chunks.size(0) == 0) {
    Tensor nothing = torch::stable::new_empty(chunks, {}, std::make_optional(type));
    return torch::stable::fill_(nothing, type == ScalarType::Bool ? 1.0 : 0.0);
  }
  const int64_t blocks = std::min((chunks.size(0) + kWarps - 1) / kWarps, kMostBlocks);
  const Tensor scratch = torch::stable::new_empty(chunks, {blocks}, std::make_optional(ScalarType::Double));
  auto* parts = static_cast<double*>(scratch.data_ptr());
  Tensor result = torch::stable::new_empty(chunks, {}, std::make_optional(type));
  measure<Measure><<<static_cast<unsigned>(blocks), kThreads, 0, launch.stream()>>>(rows, chunks.size(0), table, parts);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  finish<Measure><<<1, kThreads, 0, launch.stream()>>>(parts, static_cast<int>(blocks),
                                                       static_cast<typename Measure::Result*>(result.data_ptr()));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return result;
}

Tensor grad_norm_cuda(Tensor chunks, Tensor gradients) {
  return reduce<SumOfSquares>(chunks, gradients, ScalarType::Double);
}

Tensor all_finite_cuda(Tensor chunks, Tensor gradients) {
  return reduce<NotFinite>(chunks, gradients, ScalarType::Bool);
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CUDA, m) {
  m.impl("grad_norm", TORCH_BOX(&hdet::grad_norm_cuda));
  m.impl("all_finite", TORCH_BOX(&hdet::all_finite_cuda));
}
