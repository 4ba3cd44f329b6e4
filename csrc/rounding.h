// Storage of numbers in 16 bits: rounded to nearest, stochastically, or as the rounding of a float32 master, which is
// kept as a copy or split.
// hdet_kernels/ops/torch/rounding.py has the same functions and gives the same random bits.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstring>

// Vectors of four floats for the loops that GCC does not vectorise itself: on Arm it has no vector form of the rounding of
// float32 to float16. The operators of a vector act on each of its elements.
#if defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#include <arm_neon.h>

#define HDET_LANES
#endif

#ifdef __CUDACC__
#define HDET_BOTH __host__ __device__ __forceinline__
#else
#define HDET_BOTH inline
#endif

namespace hdet {

using BFloat16 = torch::headeronly::BFloat16;
using Half = torch::headeronly::Half;
#ifdef HDET_LANES
using Lanes = float32x4_t;
#endif

inline constexpr uint32_t kGolden = 0x9e3779b9u;

// MurmurHash3's finaliser.
HDET_BOTH uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// The stream of random bits of each buffer: that of the parameters, and kStateStream + k for their k-th state in 16
// bits. States in 8 bits use that of the parameters: see position_of_bits.
inline constexpr uint32_t kParamStream = 0;
inline constexpr uint32_t kStateStream = 2;

// The random bits of one slot at one step, a function of the key and the position in the flat buffer alone. One hash of
// 64 bits serves four neighbours with 16 bits each. It mixes with wide products, because a GPU computes both halves of
// one in one instruction.
struct Noise {
  uint32_t key;

  // The bits of positions 4·quad .. 4·quad + 3, the lower half of each word before its upper half.
  struct Words {
    uint32_t first, second;
  };

  static HDET_BOTH Noise of(double seed, double t) {
    return {mix(static_cast<uint32_t>(seed) + kGolden * static_cast<uint32_t>(t))};
  }
  // The part of the hash that the streams share.
  HDET_BOTH uint32_t base(int64_t position) const {
    const auto quad = static_cast<uint64_t>(position) >> 2;
    return mix(static_cast<uint32_t>(quad) ^ key) + static_cast<uint32_t>(quad >> 32);
  }
  static HDET_BOTH Words words(uint32_t base, uint32_t stream) {
    const Words once = product(base + stream * kGolden, 0xd2511f53u);
    const Words twice = product(once.second ^ once.first, 0xcd9e8d57u);
    return {twice.first ^ once.second, twice.second ^ (twice.first << 16 | twice.first >> 16)};
  }
  // The lower and the upper half of a product. By itself the compiler would compute the lower one of a GPU twice.
  static HDET_BOTH Words product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    Words both;
    asm("{.reg .b64 wide; mul.wide.u32 wide, %2, %3; mov.b64 {%0, %1}, wide;}"
        : "=r"(both.first), "=r"(both.second)
        : "r"(a), "r"(b));
    return both;
#else
    const uint64_t wide = static_cast<uint64_t>(a) * b;
    return {static_cast<uint32_t>(wide), static_cast<uint32_t>(wide >> 32)};
#endif
  }
  // The words of a position and its neighbours.
  HDET_BOTH Words drawn(uint32_t stream, int64_t position) const { return words(base(position), stream); }
  // The word with the bits of a position and of the one that differs in its lowest bit.
  static HDET_BOTH uint32_t word(const Words& both, int64_t position) {
    return (position & 2) != 0 ? both.second : both.first;
  }
  static HDET_BOTH uint32_t half(uint32_t word, int64_t position) { return (word >> (16 * (position & 1))) & 0xffffu; }
};

template <typename To, typename From>
HDET_BOTH To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To bits;
  memcpy(&bits, &value, sizeof(To));
  return bits;
}

// Rounds to nearest, ties to even, and every NaN to one NaN. It has no branches, so that the compiler vectorises it. The
// CPU's form works on the two 16-bit halves: a vector holds twice as many of them.
HDET_BOTH uint16_t bf16_bits(float value) {
  const auto bits = bits_as<uint32_t>(value);
#ifdef __CUDA_ARCH__
  const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : nearest);
#else
  const auto high = static_cast<uint16_t>(bits >> 16), low = static_cast<uint16_t>(bits);
  const auto most = static_cast<uint16_t>(0x8000u - (high & 1u));  // the largest low half that is rounded down
  const auto nearest = static_cast<uint16_t>(high + (low > most));
  return value != value ? uint16_t{0x7fc0} : nearest;
#endif
}

HDET_BOTH float float_of_bf16(uint16_t bits) { return bits_as<float>(static_cast<uint32_t>(bits) << 16); }

#ifdef __CUDACC__
// The bits of a number whose upper half is a float32 rounded stochastically. The arithmetic of a GPU has one NaN,
// 0x7fffffff, to which nothing can be added. As whole numbers, all other floats are less than 0x7fc00000, and infinity
// plus the noise is still infinity above the bits that are cut off.
__device__ __forceinline__ uint32_t raised(float value, uint32_t noise) {
  return static_cast<uint32_t>(min(__float_as_int(value), 0x7fc00000)) + noise;
}
#endif

// Rounds float32 to bf16, up with a probability equal to the fraction that is cut off, given 16 uniform random bits.
HDET_BOTH BFloat16 round_stochastically(float value, uint32_t noise) {
#ifdef __CUDA_ARCH__
  return bits_as<BFloat16>(static_cast<uint16_t>(raised(value, noise) >> 16));
#else
  const auto bits = bits_as<uint32_t>(value);
  if ((bits & 0x7f800000u) == 0x7f800000u) return BFloat16(value);
  return bits_as<BFloat16>(static_cast<uint16_t>((bits + noise) >> 16));
#endif
}

// The full value of a parameter: its master, if the parameter is the master's rounding bit for bit. If it is not, other
// code has written the parameter since (loading a checkpoint, averaging), and the parameter counts.
template <typename P>
HDET_BOTH float in_full(P param, float master) {
  return bits_as<uint16_t>(param) == bits_as<uint16_t>(static_cast<P>(master)) ? master : static_cast<float>(param);
}

// A float32 master, split: the bf16 parameter is its rounding to nearest, ties away from zero, and `low` is the lower
// half of its bits, as a signed number. hdet_kernels/split_master.py has the same functions.
struct SplitMaster {
  uint16_t param;
  int16_t low;
};

// Every NaN becomes one NaN, which rounding cannot turn into infinity.
HDET_BOTH SplitMaster split_master(float master) {
  const uint32_t bits = master != master ? 0x7fc00000u : bits_as<uint32_t>(master);
  const auto low = static_cast<uint16_t>(bits);
  return {static_cast<uint16_t>(static_cast<uint16_t>(bits >> 16) + (low >> 15)), static_cast<int16_t>(low)};
}

// Other code may have written the parameter, and `low` belongs to the one before: below zero or above infinity the sum
// would be a NaN, and it ends there.
HDET_BOTH float joined_master(uint16_t param, int16_t low) {
  const int32_t rounded = (param & 0x7fff) << 16;
  const int32_t most = rounded > 0x7f800000 ? rounded : 0x7f800000;
  const int32_t sum = rounded + low;
  const int32_t magnitude = sum < 0 ? 0 : sum > most ? most : sum;
  return bits_as<float>(static_cast<uint32_t>(magnitude) | (param & 0x8000u) << 16);
}

}  // namespace hdet
