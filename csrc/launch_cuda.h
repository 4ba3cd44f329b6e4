// Shared parts of the launches: the device of the tensors, its current stream, and the widest possible loads.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include "check.h"
#include "rounding.h"
#include "table.h"

namespace hdet {

// Makes the device of a tensor current for the lifetime of this object.
class Launch {
 public:
  explicit Launch(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &current));
    stream_ = static_cast<cudaStream_t>(current);
  }
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

// kWidth neighbouring elements, moved by as few accesses of at most 16 bytes as possible.
template <typename S, int kWidth>
struct alignas(sizeof(S) * kWidth < 16 ? sizeof(S) * kWidth : 16) Pack {
  S values[kWidth];
};

template <typename P>
__device__ __forceinline__ P fetch(const void* from) {
  return *static_cast<const P*>(from);
}

template <typename P>
__device__ __forceinline__ void put(void* to, const P& pack) {
  *static_cast<P*>(to) = pack;
}

// kWidth neighbouring elements of a gradient, as they are stored. Their type is known only when the kernel runs; they
// are widened separately, so that all other loads can be issued before anything waits for these.
template <typename T, int kWidth>
struct GradientPack {
  static constexpr bool kWide = std::is_same_v<T, double>;
  static constexpr int kBytes = kWidth * sizeof(T);
  Pack<uint16_t, kBytes / 2> raw;

  static __device__ __forceinline__ int64_t alignment(GradientType type) {
    const int64_t bytes = kWidth * (kWide || type == GradientType::float32 ? sizeof(T) : 2);
    return bytes < 16 ? bytes : 16;
  }
  __device__ __forceinline__ void load(int64_t address, GradientType type, int64_t at) {
    if (kWide || type == GradientType::float32) {
      raw = fetch<decltype(raw)>(reinterpret_cast<const void*>(address + at * static_cast<int64_t>(sizeof(T))));
    } else if constexpr (!kWide) {
      using Narrow = Pack<uint16_t, kWidth>;
      const auto narrow = fetch<Narrow>(reinterpret_cast<const void*>(address + at * 2));
#pragma unroll
      for (int j = 0; j < kWidth; ++j) raw.values[j] = narrow.values[j];
    }
  }
  // The type is tested once for all elements of the pack.
  __device__ __forceinline__ void widen(GradientType type, T (&values)[kWidth]) const {
    if constexpr (kWide) {
      const auto doubles = bits_as<Pack<double, kWidth>>(raw);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] = doubles.values[j];
    } else if (type == GradientType::float32) {
      const auto floats = bits_as<Pack<float, kWidth>>(raw);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] = floats.values[j];
    } else if (type == GradientType::bfloat16) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] = bits_as<float>(static_cast<uint32_t>(raw.values[j]) << 16);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] = static_cast<float>(bits_as<Half>(raw.values[j]));
    }
  }
};

}  // namespace hdet
