// Conversion of blocks of stored numbers to and from the type of the arithmetic (T: float or double), on the CPU.
#pragma once

#include <algorithm>
#include <type_traits>

#include "check.h"
#include "stored_cpu.h"
#include "table.h"
#include "typed.h"

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
  with_type(type, [&](auto stored) { read_span(plain<decltype(stored)>(gradient, start), count, buffer); });
  return buffer;
}

// The words of random bits of `count` quads of neighbours from quad `first` on, two for each. Noise::word has the same
// bits; here the upper half of the number of a quad is told from the lower one, which keeps its arithmetic in 32 bits.
HDET_WIDEST inline void random_words(const Noise noise, uint32_t stream, uint64_t first, int count,
                                     uint32_t* __restrict words) {
  const auto low = static_cast<uint32_t>(first), high = static_cast<uint32_t>(first >> 32);
  for (int i = 0; i < count; ++i) {
    const uint32_t quad = low + static_cast<uint32_t>(i);
    const Noise::Words both = Noise::words(mix(quad ^ noise.key) + (quad < low ? high + 1 : high), stream);
    words[2 * i] = both.first;
    words[2 * i + 1] = both.second;
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
  uint32_t words[kBlock / 2 + 2];
  const auto* halves = reinterpret_cast<const uint16_t*>(words);  // the low half of a word comes first
  const int64_t skipped = at & 3;
  random_words(noise, stream, static_cast<uint64_t>(at) >> 2, static_cast<int>(skipped + count + 3) / 4, words);
  round_span(values, halves + skipped, count, to);
}

}  // namespace hdet
