// How numbers are stored, on the CPU, and their conversion to and from the type of the arithmetic (T: float or double): of
// an element, of four at once (Lanes), and of blocks. Conversions have no branches, so that the compiler vectorises the
// loops around them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "check.h"
#include "rounding.h"
#include "table.h"

namespace hdet {

// By default x86-64 code is compiled for processors of 2003, with vectors of four floats. A function with this
// attribute is compiled three times, and the loader picks the widest version that the processor supports. All give the
// same bits. Elsewhere it only stays a function of its own, because GCC vectorises fewer loops after inlining.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define HDET_WIDEST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define HDET_WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define HDET_WIDEST __attribute__((noinline))
#endif

// Before a loop: no iteration reads what another one writes.
#ifdef __clang__
#define HDET_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define HDET_INDEPENDENT _Pragma("GCC ivdep")
#endif

#ifdef __aarch64__
inline float float_of_half(uint16_t bits) { return static_cast<float>(bits_as<Half>(bits)); }
inline uint16_t half_bits(float value) { return bits_as<uint16_t>(static_cast<Half>(value)); }
#else
// The exponents of float16 and float32 differ by 112. A float16 subnormal is a whole number of 2⁻²⁴: added to 2⁻¹⁴ it
// needs no exponent of its own.
inline float float_of_half(uint16_t bits) {
  const uint32_t magnitude = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
  const uint32_t finite = magnitude + (112u << 23);
  const uint32_t normal = magnitude >= (31u << 23) ? finite + (112u << 23) : finite;
  const auto small = bits_as<uint32_t>(bits_as<float>(magnitude + (113u << 23)) - 0x1p-14f);
  return bits_as<float>(sign | (magnitude < (1u << 23) ? small : normal));
}

// Rounds to nearest, ties to even, and every NaN to one NaN of its sign. Adding 0.5 rounds a number below 2⁻¹⁴ to a
// multiple of 2⁻²⁴, the last bit of that sum.
inline uint16_t half_bits(float value) {
  const auto bits = bits_as<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
  const uint32_t normal = ((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10);
  const uint32_t small = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - (126u << 23);
  const uint32_t finite = magnitude < (113u << 23) ? small : normal;
  const uint32_t number = magnitude >= (143u << 23) ? 0x7c00u : finite;
  return static_cast<uint16_t>(sign | (magnitude > (255u << 23) ? 0x7e00u : number));
}
#endif

// Numbers of type S in memory, as Raw. kLanes says that loops over them use Lanes.
template <typename S>
struct Stored {
  using Raw = S;
  static constexpr bool kLanes = false;

  template <typename V>
  static V read(const Raw* from) {
#ifdef HDET_LANES
    if constexpr (std::is_same_v<V, Lanes>) return vld1q_f32(from);
    else
#endif
      return static_cast<V>(*from);
  }
  template <typename V>
  static void write(V value, Raw* to) {
#ifdef HDET_LANES
    if constexpr (std::is_same_v<V, Lanes>) vst1q_f32(to, value);
    else
#endif
      *to = static_cast<Raw>(value);
  }
};

template <>
struct Stored<BFloat16> {
  using Raw = uint16_t;
  static constexpr bool kLanes = false;

  template <typename V>
  static V read(const Raw* from) {
    return float_of_bf16(*from);
  }
  template <typename V>
  static void write(V value, Raw* to) {
    *to = bf16_bits(static_cast<float>(value));
  }
};

template <>
struct Stored<Half> {
  using Raw = uint16_t;
#ifdef HDET_LANES
  static constexpr bool kLanes = true;
#else
  static constexpr bool kLanes = false;
#endif

  template <typename V>
  static V read(const Raw* from) {
#ifdef HDET_LANES
    if constexpr (std::is_same_v<V, Lanes>) return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
    else
#endif
      return float_of_half(*from);
  }
  template <typename V>
  static void write(V value, Raw* to) {
#ifdef HDET_LANES
    if constexpr (std::is_same_v<V, Lanes>) vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(value)));
    else
#endif
      *to = half_bits(static_cast<float>(value));
  }
};

// Parameters without a master, states and gradients.
template <typename S>
struct Plain {
  using Number = S;
  using Format = Stored<S>;
  typename Format::Raw* numbers;

  Plain from(int64_t at) const { return {numbers + at}; }
  template <typename V>
  V read(int64_t i) const {
    return Format::template read<V>(numbers + i);
  }
  template <typename V>
  void write(int64_t i, V value) const {
    Format::write(value, numbers + i);
  }
};

// Parameters with a float32 master. One that is not the rounding of its master has been written by other code and
// counts itself, see in_full.
template <typename S>
struct Mastered {
  using Number = S;
  using Format = Stored<S>;
  uint16_t* numbers;
  float* masters;

  Mastered from(int64_t at) const { return {numbers + at, masters + at}; }
  template <typename V>
  V read(int64_t i) const {
#ifdef HDET_LANES
    if constexpr (std::is_same_v<V, Lanes>) {
      const Lanes master = vld1q_f32(masters + i);
      const uint16x4_t rounded = vreinterpret_u16_f16(vcvt_f16_f32(master));
      const int16x4_t same = vreinterpret_s16_u16(vceq_u16(rounded, vld1_u16(numbers + i)));
      return vbslq_f32(vreinterpretq_u32_s32(vmovl_s16(same)), master, Format::template read<V>(numbers + i));
    } else
#endif
    {
      const float master = masters[i];
      const V stored = Format::template read<V>(numbers + i);
      uint16_t rounded;
      Format::write(master, &rounded);
      return rounded == numbers[i] ? static_cast<V>(master) : stored;
    }
  }
  template <typename V>
  void write(int64_t i, V value) const {
    Stored<float>::write(value, masters + i);
    Format::write(value, numbers + i);
  }
};

// bf16 parameters with a split master. What other code writes to a parameter counts by itself: the master is always
// within half a step of it.
struct SplitMastered {
  using Number = BFloat16;
  using Format = Stored<BFloat16>;
  uint16_t* numbers;
  int16_t* lows;

  SplitMastered from(int64_t at) const { return {numbers + at, lows + at}; }
  template <typename V>
  V read(int64_t i) const {
    return static_cast<V>(joined_master(numbers[i], lows[i]));
  }
  template <typename V>
  void write(int64_t i, V value) const {
    const SplitMaster split = split_master(static_cast<float>(value));
    numbers[i] = split.param;
    lows[i] = split.low;
  }
};

// Calls run(V{}, i) for the elements of a loop: with Lanes for four of them where `Format` asks for that and T is
// float, else with T.
template <typename Format, typename T, typename Run>
inline __attribute__((always_inline)) void for_each(int64_t count, const Run& run) {
  int64_t i = 0;
#ifdef HDET_LANES
  if constexpr (Format::kLanes && std::is_same_v<T, float>)
    for (; i + 4 <= count; i += 4) run(Lanes{}, i);
#endif
  HDET_INDEPENDENT
  for (; i < count; ++i) run(T{}, i);
}

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
