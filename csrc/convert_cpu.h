// Conversion of blocks of stored numbers to and from the type of the arithmetic (T: float or double), on the CPU.
#pragma once

#include <algorithm>
#include <type_traits>

#include "check.h"
#include "stored_cpu.h"
#include "table.h"

namespace hdet {

// The elements that are converted at a time. Five buffers of that many floats fit into the first-level cache.
inline constexpr int64_t kBlock = 1024;

template <typename S>
Plain<S> plain(const void* numbers, int64_t at) {
  return Plain<S>{static_cast<typename Stored<S>::Raw*>(const_cast<void*>(numbers))}.from(at);
}

template <typename T, typename Numbers>
static HDET_WIDEST void read_span(const Numbers numbers, int64_t count, T* out) {
  for_each<typename Numbers::Format, T>(count, [&](auto type, int64_t i) {
    using V = decltype(type);
    Stored<T>::write(numbers.template read<V>(i), out + i);
  });
}

template <typename T, typename Numbers>
static HDET_WIDEST void write_span(const T* values, int64_t count, const Numbers numbers) {
  for_each<typename Numbers::Format, T>(count, [&](auto type, int64_t i) {
    using V = decltype(type);
    numbers.write(i, Stored<T>::template read<V>(values + i));
  });
}

template <typename S>
inline constexpr GradientType gradient_type = std::is_same_v<S, double>     ? GradientType::float64
                                              : std::is_same_v<S, BFloat16> ? GradientType::bfloat16
                                              : std::is_same_v<S, Half>     ? GradientType::float16
                                                                            : GradientType::float32;

// Returns the gradient from element `start` on: in place if it has the type of the arithmetic, else copied to `buffer`.
template <typename T>
const T* widened(const void* gradient, GradientType type, int64_t start, int64_t count, T* buffer) {
  if (type == gradient_type<T>) return static_cast<const T*>(gradient) + start;
  switch (type) {
    case GradientType::float32:
      read_span(plain<float>(gradient, start), count, buffer);
      break;
    case GradientType::float64:
      read_span(plain<double>(gradient, start), count, buffer);
      break;
    case GradientType::bfloat16:
      read_span(plain<BFloat16>(gradient, start), count, buffer);
      break;
    case GradientType::float16:
      read_span(plain<Half>(gradient, start), count, buffer);
      break;
  }
  return buffer;
}

// The words of `count` pairs of positions that have the same upper half, as 16 bits for each position.
static HDET_WIDEST void random_halves(const Noise noise, uint32_t stream, uint32_t low, uint32_t high, int64_t count,
                                      uint16_t* __restrict halves) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t word = noise.word_of_pair(stream, low + static_cast<uint32_t>(i), high);
    halves[2 * i] = static_cast<uint16_t>(word);
    halves[2 * i + 1] = static_cast<uint16_t>(word >> 16);
  }
}

// As round_stochastically, without branches.
template <typename T>
static HDET_WIDEST void round_span(const T* __restrict values, const uint16_t* __restrict noise, int64_t count,
                                   uint16_t* __restrict to) {
  for (int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<float>(values[i]);
    const auto bits = bits_as<uint32_t>(value);
    const uint32_t more = noise[i];
    const uint32_t raised = bits + ((bits & 0x7f800000u) == 0x7f800000u ? 0u : more);
    to[i] = value != value ? uint16_t{0x7fc0} : static_cast<uint16_t>(raised >> 16);
  }
}

// Rounds at most kBlock values stochastically to bf16. They lie at position `at` of their flat buffer.
template <typename T>
void write_stochastically(const T* values, int64_t count, const Noise& noise, uint32_t stream, int64_t at,
                          uint16_t* to) {
  uint16_t halves[kBlock + 2];
  const auto pair = static_cast<uint64_t>(at) >> 1, end = (static_cast<uint64_t>(at + count) + 1) >> 1;
  const uint64_t carry = ((pair >> 32) + 1) << 32;  // the first pair with another upper half
  const uint64_t middle = std::min(end, carry);
  const auto fill = [&](uint64_t begin, uint64_t until) {
    random_halves(noise, stream, static_cast<uint32_t>(begin), static_cast<uint32_t>(begin >> 32),
                  static_cast<int64_t>(until - begin), halves + 2 * (begin - pair));
  };
  fill(pair, middle);
  if (middle < end) fill(middle, end);
  round_span(values, halves + (at & 1), count, to);
}

}  // namespace hdet
