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

// The bf16 in the lower or upper half of a word.
__device__ __forceinline__ float bf16_of(uint32_t word, int half) {
  return __uint_as_float(half == 0 ? word << 16 : word & 0xffff0000u);
}

// A pack whose numbers of 16 bits lie in words, two in each. From separate ones, the compiler would put the words
// together, and take them apart, once more wherever two branches meet.
template <typename S, int kWidth>
struct Numbers {
  static constexpr bool kPaired = sizeof(S) == 2 && kWidth > 1;
  static_assert(!kPaired || kWidth % 2 == 0);
  Pack<std::conditional_t<kPaired, uint32_t, S>, kPaired ? kWidth / 2 : kWidth> raw;

  __device__ __forceinline__ S stored(int j) const {
    if constexpr (kPaired) return bits_as<S>(static_cast<uint16_t>(raw.values[j / 2] >> (16 * (j % 2))));
    else return raw.values[j];
  }
  template <typename T>
  __device__ __forceinline__ T value(int j) const {
    if constexpr (kPaired && std::is_same_v<S, BFloat16>) return static_cast<T>(bf16_of(raw.values[j / 2], j % 2));
    else return static_cast<T>(stored(j));
  }
  // Rounds to nearest.
  template <typename T>
  __device__ __forceinline__ void keep(const T (&from)[kWidth]) {
    if constexpr (kPaired) {
#pragma unroll
      for (int j = 0; j < kWidth; j += 2)
        raw.values[j / 2] = bits_as<uint16_t>(static_cast<S>(from[j])) |
                            static_cast<uint32_t>(bits_as<uint16_t>(static_cast<S>(from[j + 1]))) << 16;
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) raw.values[j] = static_cast<S>(from[j]);
    }
  }
};

// kWidth neighbouring elements of a gradient, as they are stored. Their type is known only when the kernel runs; they
// are widened separately, so that all other loads can be issued before anything waits for these.
template <typename T, int kWidth>
struct GradientPack {
  static constexpr bool kWide = std::is_same_v<T, double>;
  static constexpr int kNarrowWords = (kWidth + 1) / 2;  // two numbers of 16 bits lie in a word: see Numbers
  Pack<uint32_t, kWidth * sizeof(T) / 4> raw;

  static __device__ __forceinline__ int64_t alignment(GradientType type) {
    const int64_t bytes = kWidth * (kWide || type == GradientType::float32 ? sizeof(T) : 2);
    return bytes < 16 ? bytes : 16;
  }
  __device__ __forceinline__ void load(int64_t address, GradientType type, int64_t at) {
    if (kWide || type == GradientType::float32) {
      raw = fetch<decltype(raw)>(reinterpret_cast<const void*>(address + at * static_cast<int64_t>(sizeof(T))));
    } else if constexpr (!kWide) {
      if constexpr (kWidth == 1) {
        raw.values[0] = fetch<uint16_t>(reinterpret_cast<const void*>(address + at * 2));
      } else {
        const auto narrow = fetch<Pack<uint32_t, kNarrowWords>>(reinterpret_cast<const void*>(address + at * 2));
#pragma unroll
        for (int j = 0; j < kNarrowWords; ++j) raw.values[j] = narrow.values[j];
      }
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
      for (int j = 0; j < kWidth; ++j) values[j] = bf16_of(raw.values[j / 2], j % 2);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        values[j] = static_cast<float>(bits_as<Half>(static_cast<uint16_t>(raw.values[j / 2] >> (16 * (j % 2)))));
    }
  }
};

}  // namespace hdet
