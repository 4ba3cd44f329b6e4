// The gradient norm of each replica on CUDA: a bounded number of blocks read all gradients once and write a partial sum
// each, and one block for each replica adds those in order. The number of blocks does not depend on the GPU and there
// are no atomics, so the result is the same every time.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "launch_cuda.h"
#include "table.h"

namespace hdet {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
// The 16-byte loads that a thread has in flight.
constexpr int kInFlight = 4;
// The blocks that must fit on one multiprocessor: 40 registers a thread, the fewest without spilling.
constexpr int kBlocksPerProcessor = 6;
constexpr int64_t kMostBlocks = 2048;

// x² in double, which the square of a float cannot overflow.
template <typename T>
__device__ __forceinline__ double square(T value) {
  return static_cast<double>(value) * static_cast<double>(value);
}

// The sum over the block in a fixed order, valid in thread 0.
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

template <typename S>
__device__ __forceinline__ double sum_chunk(int64_t address, int64_t start, int count, int lane) {
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
      Packed loaded[kInFlight] = {};  // zeros add nothing
#pragma unroll
      for (int n = 0; n < kInFlight; ++n)
        if (first + n * kWarp < packs) loaded[n] = fetch<Packed>(values + (first + n * kWarp) * kWidth);
#pragma unroll
      for (int n = 0; n < kInFlight; ++n)
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum += square(static_cast<T>(loaded[n].values[j]));
    }
    done = packs * kWidth;
  }
  for (int at = done + lane; at < count; at += kWarp) sum += square(static_cast<T>(values[at]));
  return sum;
}

// Every warp walks chunks of its own: while one waits for the entries of its next chunk, others read. The first
// `blocks` blocks are those of replica 0, the next those of replica 1.
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    sum_squares(const Chunk* __restrict__ chunks, int64_t per_row, unsigned blocks,
                const Gradient* __restrict__ gradients, double* __restrict__ parts) {
  const int lane = threadIdx.x % kWarp;
  const unsigned row = blockIdx.x / blocks;
  const int64_t warp = static_cast<int64_t>(blockIdx.x % blocks) * kWarps + threadIdx.x / kWarp;
  const Chunk* own = chunks + row * per_row;
  double sum = 0;
  for (int64_t i = warp; i < per_row; i += static_cast<int64_t>(blocks) * kWarps) {
    const Chunk chunk = own[i];
    const Gradient gradient = gradients[chunk.slot];
    if (gradient.address == kNoGradient) continue;
    const auto count = static_cast<int>(chunk.count);
    sum += with_type(gradient.type, [&](auto type) {
      return sum_chunk<decltype(type)>(gradient.address, chunk.start, count, lane);
    });
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    finish(const double* __restrict__ parts, unsigned blocks, double* __restrict__ result) {
  const double* own = parts + static_cast<int64_t>(blockIdx.x) * blocks;
  double sum = 0;
  for (unsigned i = threadIdx.x; i < blocks; i += kThreads) sum += own[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) result[blockIdx.x] = sqrt(sum);
}

Tensor grad_norm_cuda(Tensor chunks, Tensor gradients, int64_t rows) {
  const Chunk* pieces = checked_rows<Chunk>(chunks, "chunks", 4, chunks);
  const Gradient* table = checked_rows<Gradient>(gradients, "gradients", 2, chunks);
  const int64_t per_row = chunks_per_row(chunks, rows);
  const Launch launch(chunks);
  Tensor result = torch::stable::new_empty(chunks, {rows}, std::make_optional(ScalarType::Double));
  if (per_row == 0) return torch::stable::fill_(result, 0.0);
  // The blocks of one replica: those of all replicas are at most kMostBlocks, but each replica has at least one.
  const auto blocks = static_cast<unsigned>(
      std::min((per_row + kWarps - 1) / kWarps, std::max<int64_t>(kMostBlocks / rows, 1)));
  const auto grid = static_cast<unsigned>(blocks * rows);
  const Tensor scratch = torch::stable::new_empty(chunks, {blocks * rows}, std::make_optional(ScalarType::Double));
  auto* parts = static_cast<double*>(scratch.data_ptr());
  sum_squares<<<grid, kThreads, 0, launch.stream()>>>(pieces, per_row, blocks, table, parts);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  finish<<<static_cast<unsigned>(rows), kThreads, 0, launch.stream()>>>(parts, blocks,
                                                                       static_cast<double*>(result.data_ptr()));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return result;
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CUDA, m) {
  m.impl("grad_norm", TORCH_BOX(&hdet::grad_norm_cuda));
}
