// Packing and unpacking on CUDA: one launch with one block for each chunk, whatever the number of tensors.
//
// A tensor usually lies at a multiple of 16 bytes, but its place in the staging buffer may have any alignment. Where
// both are aligned, a thread moves 16 bytes of the staging buffer at a time. Otherwise it moves single elements, as
// many of them in flight, and neighbouring threads move neighbours, so that a warp still accesses whole cache lines.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <type_traits>

#include "launch_cuda.h"
#include "pack.h"

namespace hdet {
namespace {

// Launch shapes. A thread loads kPacks packs of each of kRows rows before it waits for any of them: 64 bytes of one
// row, 128 bytes of eight. So a chunk of 2048 floats is one round of loads, or four.
constexpr int kThreads = 128;
constexpr int kPacksOfOne = 4;
constexpr int kRowsTogether = 8;
constexpr int kPacksOfRows = 1;
// The bytes of a cache line.
constexpr int kLine = 128;

template <typename T>
constexpr int kWidth = 16 / static_cast<int>(sizeof(T));

template <int kElements, typename S, typename T>
__device__ __forceinline__ bool aligned(const S* tensor, const T* staging) {
  return reinterpret_cast<uintptr_t>(tensor) % sizeof(Pack<S, kElements>) == 0 &&
         reinterpret_cast<uintptr_t>(staging) % sizeof(Pack<T, kElements>) == 0;
}

// Calls run.operator()<S>() with the type of the tensor's elements.
template <typename T, typename Run>
__device__ __forceinline__ void with_type(GradientType type, Run&& run) {
  if constexpr (std::is_same_v<T, double>) {
    run.template operator()<double>();
  } else if (type == GradientType::float32) {
    run.template operator()<float>();
  } else if (type == GradientType::bfloat16) {
    run.template operator()<BFloat16>();
  } else {
    run.template operator()<Half>();
  }
}

// Sums `packs` packs of kElements elements over the rows: the one row at `from`, or kRows rows at a time.
template <int kRows, int kPacks, int kElements, typename S, typename T>
__device__ __forceinline__ void gather(const S* from, int64_t stride, const Rows& rows, T divisor, T* to, int packs) {
  // With single elements a warp begins at a cache line of the staging buffer, so that it writes whole sectors.
  const int skew = kElements == 1 ? static_cast<int>(reinterpret_cast<uintptr_t>(to) % kLine / sizeof(T)) : 0;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x) - skew; first < packs; first += kPacks * kThreads) {
    const auto inside = [&](int n) {
      return first + n * kThreads < packs && (kElements > 1 || first + n * kThreads >= 0);
    };
    T sums[kPacks][kElements];
#pragma unroll
    for (int n = 0; n < kPacks; ++n)
#pragma unroll
      for (int j = 0; j < kElements; ++j) sums[n][j] = rows.count > 0 ? T(-0.0) : T(0);  // −0 + x is x, for −0 too
#pragma unroll 1
    for (int row = 0; row < (kRows == 1 ? 1 : rows.count); row += kRows) {
      Pack<S, kElements> loaded[kRows][kPacks] = {};
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        if (kRows > 1 && row + k >= rows.count) continue;
        const S* own = kRows == 1 ? from : from + rows.index[row + k] * stride;
#pragma unroll
        for (int n = 0; n < kPacks; ++n)
          if (inside(n))
            loaded[k][n] = fetch<Pack<S, kElements>>(own + (first + n * kThreads) * kElements);
      }
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        if (kRows > 1 && row + k >= rows.count) continue;
#pragma unroll
        for (int n = 0; n < kPacks; ++n)
#pragma unroll
          for (int j = 0; j < kElements; ++j) {
            const T value = static_cast<T>(loaded[k][n].values[j]);
            sums[n][j] = kRows == 1 ? value : sums[n][j] + value;
          }
      }
    }
#pragma unroll
    for (int n = 0; n < kPacks; ++n) {
      if (!inside(n)) continue;
      Pack<T, kElements> out;
#pragma unroll
      for (int j = 0; j < kElements; ++j) out.values[j] = divisor == 1 ? sums[n][j] : sums[n][j] / divisor;
      put(to + (first + n * kThreads) * kElements, out);
    }
  }
}

template <int kPacks, int kElements, typename S, typename T>
__device__ __forceinline__ void scatter(const T* from, T divisor, S* to, int64_t stride, int rows, int packs) {
#pragma unroll 1
  for (int first = threadIdx.x; first < packs; first += kPacks * kThreads) {
    Pack<T, kElements> loaded[kPacks] = {};
#pragma unroll
    for (int n = 0; n < kPacks; ++n)
      if (first + n * kThreads < packs)
        loaded[n] = fetch<Pack<T, kElements>>(from + (first + n * kThreads) * kElements);
    Pack<S, kElements> rounded[kPacks];
#pragma unroll
    for (int n = 0; n < kPacks; ++n)
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        const T value = loaded[n].values[j];
        rounded[n].values[j] = static_cast<S>(divisor == 1 ? value : value / divisor);
      }
#pragma unroll 1
    for (int row = 0; row < rows; ++row) {
      S* own = to + row * stride;
#pragma unroll
      for (int n = 0; n < kPacks; ++n)
        if (first + n * kThreads < packs) put(own + (first + n * kThreads) * kElements, rounded[n]);
    }
  }
}

template <typename T, int kRows, int kPacks>
__global__ void __launch_bounds__(kThreads)
    pack(const Packing work, const __grid_constant__ Rows rows, const T divisor) {
  const Chunk chunk = work.chunks[blockIdx.x];
  const Gradient place = work.places[chunk.slot];
  const int64_t stride = work.strides[chunk.slot];
  const auto count = static_cast<int>(chunk.count);
  T* to = static_cast<T*>(work.staging) + chunk.offset;
  with_type<T>(place.type, [&]<typename S>() {
    const S* from = reinterpret_cast<const S*>(place.address) + chunk.start;
    if constexpr (kRows == 1) from += rows.index[0] * stride;
    int done = 0;
    if (aligned<kWidth<T>>(from, to) && (kRows == 1 || stride % kWidth<T> == 0)) {
      const int packs = count / kWidth<T>;
      gather<kRows, kPacks, kWidth<T>>(from, stride, rows, divisor, to, packs);
      done = packs * kWidth<T>;
    }
    gather<kRows, kPacks * kWidth<T>, 1>(from + done, stride, rows, divisor, to + done, count - done);
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads) unpack(const Packing work, const int rows, const T divisor) {
  const Chunk chunk = work.chunks[blockIdx.x];
  const Gradient place = work.places[chunk.slot];
  const int64_t stride = work.strides[chunk.slot];
  const auto count = static_cast<int>(chunk.count);
  const T* from = static_cast<const T*>(work.staging) + chunk.offset;
  with_type<T>(place.type, [&]<typename S>() {
    S* to = reinterpret_cast<S*>(place.address) + chunk.start;
    int done = 0;
    if (aligned<kWidth<T>>(to, from) && (rows == 1 || stride % kWidth<T> == 0)) {
      const int packs = count / kWidth<T>;
      scatter<kPacksOfOne, kWidth<T>>(from, divisor, to, stride, rows, packs);
      done = packs * kWidth<T>;
    }
    scatter<kPacksOfOne * kWidth<T>, 1>(from + done, divisor, to + done, stride, rows, count - done);
  });
}

template <typename T>
void launch_pack(const Packing& work, const Rows& rows, T divisor, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(work.chunk_count);
  if (rows.count == 1) {
    pack<T, 1, kPacksOfOne><<<blocks, kThreads, 0, stream>>>(work, rows, divisor);
  } else {
    pack<T, kRowsTogether, kPacksOfRows><<<blocks, kThreads, 0, stream>>>(work, rows, divisor);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename T>
void launch_unpack(const Packing& work, int rows, T divisor, cudaStream_t stream) {
  unpack<T><<<static_cast<unsigned>(work.chunk_count), kThreads, 0, stream>>>(work, rows, divisor);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void pack_cuda(Tensor chunks, Tensor places, Tensor strides, int64_t included, double divisor, Tensor staging) {
  const Packing work = checked_packing(chunks, places, strides, staging);
  if (work.chunk_count == 0) return;
  const Rows rows = Rows::of(included);
  const Launch launch(staging);
  work.wide ? launch_pack<double>(work, rows, divisor, launch.stream())
            : launch_pack<float>(work, rows, static_cast<float>(divisor), launch.stream());
}

void unpack_cuda(Tensor chunks, Tensor places, Tensor strides, int64_t rows, double divisor, Tensor staging) {
  const Packing work = checked_packing(chunks, places, strides, staging);
  const auto count = static_cast<int>(checked_row_count(rows));
  if (work.chunk_count == 0) return;
  const Launch launch(staging);
  work.wide ? launch_unpack<double>(work, count, divisor, launch.stream())
            : launch_unpack<float>(work, count, static_cast<float>(divisor), launch.stream());
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CUDA, m) {
  m.impl("pack", TORCH_BOX(&hdet::pack_cuda));
  m.impl("unpack", TORCH_BOX(&hdet::unpack_cuda));
}
