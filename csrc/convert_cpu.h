// Conversion of blocks of stored numbers to and from the type of the arithmetic (T: float or double), on the CPU.
#pragma once

#include <algorithm>
#include <type_traits>

#include "check.h"
#include "rounding.h"
#include "table.h"

namespace hdet {

// The elements that are converted at a time. Five buffers of that many floats fit into the first-level cache.
inline constexpr int64_t kBlock = 1024;

// By default x86-64 code is compiled for processors of 2003, with vectors of four floats. A function with this
// attribute is compiled three times, and the loader picks the widest version that the processor supports. All give the
// same bits.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define HDET_WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define HDET_WIDEST
#endif

template <typename S, typename T>
void load_as(const void* stored, int64_t at, int64_t count, T* __restrict out) {
  if constexpr (std::is_same_v<S, BFloat16>) {
    const uint16_t* __restrict from = static_cast<const uint16_t*>(stored) + at;
    for (int64_t i = 0; i < count; ++i) out[i] = float_of_bf16(from[i]);
  } else {
    const S* __restrict from = static_cast<const S*>(stored) + at;
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(from[i]);
  }
}

template <typename T>
void load(const void* stored, ScalarType type, int64_t at, int64_t count, T* out) {
  if (type == ScalarType::BFloat16) return load_as<BFloat16>(stored, at, count, out);
  load_as<Half>(stored, at, count, out);
}

// Returns the gradient from element `start` on: in place if it has the type of the arithmetic, else copied to `buffer`.
template <typename T>
const T* widened(const void* gradient, GradientType type, int64_t start, int64_t count, T* buffer) {
  constexpr GradientType kOwn = std::is_same_v<T, double> ? GradientType::float64 : GradientType::float32;
  if (type == kOwn) return static_cast<const T*>(gradient) + start;
  switch (type) {
    case GradientType::float32:
      load_as<float>(gradient, start, count, buffer);
      break;
    case GradientType::float64:
      load_as<double>(gradient, start, count, buffer);
      break;
    case GradientType::bfloat16:
      load_as<BFloat16>(gradient, start, count, buffer);
      break;
    case GradientType::float16:
      load_as<Half>(gradient, start, count, buffer);
      break;
  }
  return buffer;
}

// Replaces the parameters that are the roundings of their masters by the masters.
template <typename T>
void prefer_master(const float* __restrict master, const void* param, ScalarType type, int64_t at, int64_t count,
                   T* __restrict theta) {
  const uint16_t* __restrict bits = static_cast<const uint16_t*>(param) + at;
  if (type == ScalarType::BFloat16) {
    for (int64_t i = 0; i < count; ++i) theta[i] = bits[i] == bf16_bits(master[i]) ? T(master[i]) : theta[i];
  } else {
    for (int64_t i = 0; i < count; ++i) theta[i] = in_full(bits_as<Half>(bits[i]), master[i]);
  }
}

// Stores values rounded to nearest or, where `noise` is not null, stochastically to bf16.
template <typename T>
void store(const T* __restrict values, void* stored, ScalarType type, int64_t at, int64_t count, const Noise* noise,
           uint32_t stream) {
  if (type == ScalarType::Half) {
    Half* __restrict to = static_cast<Half*>(stored) + at;
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<Half>(static_cast<float>(values[i]));
    return;
  }
  uint16_t* __restrict to = static_cast<uint16_t*>(stored) + at;
  if (noise == nullptr) {
    for (int64_t i = 0; i < count; ++i) to[i] = bf16_bits(static_cast<float>(values[i]));
    return;
  }
  const Noise own = *noise;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t half = Noise::half(own.word(stream, at + i), at + i);
    to[i] = bits_as<uint16_t>(round_stochastically(static_cast<float>(values[i]), half));
  }
}

}  // namespace hdet
