// Normal noise on CUDA: one launch with one block for each chunk, whatever the number of tensors. The loop over packs
// has 36 to 37 instructions for each element, so that fp32 is limited by memory accesses and 16 bits by arithmetic.
#include <torch/csrc/stable/library.h>

#include "launch_cuda.h"
#include "noise.h"
#include "typed.h"

namespace hdet {
namespace {

// A thread has eight 16-byte packs of a chunk of 2048 floats. On an H200, blocks of 32 / 64 / 128 threads reached 88 93
// 96 % of the copy bandwidth in fp32 and 64 62 59 % in bf16. Seven rounds of the hash take 11 % of the time of bf16
// more than four would, and sums fused with products would take 11 % less, but not every backend has them.
constexpr int kThreads = 64;

template <typename S>
__device__ __forceinline__ S with_noise(S value, Arithmetic<S> scale, float normal) {
  using T = Arithmetic<S>;
  return static_cast<S>(static_cast<T>(value) + scale * static_cast<T>(normal));
}

template <typename S>
__device__ __forceinline__ void add_to_chunk(const Chunk& chunk, int64_t address, int64_t key, double scale) {
  constexpr int kWidth = 16 / sizeof(S);
  using Packed = Pack<S, kWidth>;
  const Normals normals(key);
  const auto factor = static_cast<Arithmetic<S>>(scale);
  const auto count = static_cast<int>(chunk.count);
  S* values = reinterpret_cast<S*>(address) + chunk.start;
  const auto first = static_cast<uint64_t>(chunk.start) >> 1;
  const auto low = static_cast<uint32_t>(first), high = static_cast<uint32_t>(first >> 32);
  int done = 0;
  // Packs of whole pairs, of which the lower word alone changes in the chunk.
  if (reinterpret_cast<uintptr_t>(values) % sizeof(Packed) == 0 && chunk.start % 2 == 0 && low + count / 2 >= low) {
    done = count / kWidth * kWidth;
#pragma unroll 1
    for (int at = threadIdx.x * kWidth; at < done; at += kThreads * kWidth) {
      auto pack = fetch<Packed>(values + at);
      const uint32_t pair = low + static_cast<uint32_t>(at) / 2;
#pragma unroll
      for (int j = 0; j < kWidth; j += 2) {
        const TwoNormals both = normals.of_pair(pair + j / 2, high);
        pack.values[j] = with_noise(pack.values[j], factor, both.even);
        pack.values[j + 1] = with_noise(pack.values[j + 1], factor, both.odd);
      }
      put(values + at, pack);
    }
  }
#pragma unroll 1
  for (int at = done + threadIdx.x; at < count; at += kThreads)
    values[at] = with_noise(values[at], factor, normals.at(chunk.start + at));
}

__global__ void __launch_bounds__(kThreads) add_noise(const Noising work) {
  const Chunk chunk = work.chunks[blockIdx.x];
  const Gradient tensor = work.tensors[chunk.slot];
  if (tensor.address == kNoGradient) return;
  const int64_t key = work.keys[chunk.slot];
  const double scale = work.scales[chunk.slot];
  with_type(tensor.type, [&](auto type) { add_to_chunk<decltype(type)>(chunk, tensor.address, key, scale); });
}

void add_noise_cuda(Tensor chunks, Tensor tensors, Tensor keys, Tensor scales) {
  const Noising work = checked_noising(chunks, tensors, keys, scales);
  if (work.chunk_count == 0) return;
  const Launch launch(chunks);
  add_noise<<<static_cast<unsigned>(work.chunk_count), kThreads, 0, launch.stream()>>>(work);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CUDA, m) { m.impl("add_noise_", TORCH_BOX(&hdet::add_noise_cuda)); }
