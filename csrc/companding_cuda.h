// Conversion of state between codes of 8 bits and floats, on CUDA. It gives the codes of companding.h, but for the last
// bits of products and roots, where a random number falls between. A GPU does conversions and roots at an eighth of the
// rate of sums and products, and comparisons, choices and logic at half of it; so nearly all is fused products.
#pragma once

#include "companding.h"
#include "launch_cuda.h"
#include "rules.h"

namespace hdet {
namespace {

// Levels of a signed state are computed as parts of 2¹⁴, and their roots as parts of 2⁷, so that the instruction that
// adds also limits them to 0 and 1.
constexpr float kShrunken = 0x1p-7f;

__device__ __forceinline__ float approximate_inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The factor that turns the values of a block into levels, without a division. A quarter of the scale has an inverse
// that is not flushed to 0.
template <bool kSigned>
__device__ __forceinline__ float to_levels(float scale) {
  constexpr float kHighest = kTop<kSigned> * (kSigned ? kShrunken * kShrunken : 1.0f);
  return approximate_inverse(scale * 0.25f) * (0.25f * kHighest);
}

// a·b + c, at least 0 and at most 1; 0 for NaN.
__device__ __forceinline__ float limited_sum(float a, float b, float c) {
  float y;
  asm("fma.rn.ftz.sat.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
  return y;
}

// The larger magnitude, or NaN.
__device__ __forceinline__ float larger(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(fabsf(a)), "f"(fabsf(b)));
  return y;
}

// The byte of a word, plus 2²³, as float. The constant comes first, because it is then held in a register: it is the
// order of the bytes that an instruction can hold.
__device__ __forceinline__ float byte_above(uint32_t word, int byte) {
  return __uint_as_float(__byte_perm(0x4b000000u, word, 0x3004u | byte));
}

// (half + ½)/2¹⁶ − ½ for the lower or upper half of a word, in parts of 2⁷. The half is first put behind a 1. A float has
// no room for the constant that would take away that 1 and the middle between two halves; a factor of 1 − 2⁻¹⁶ moves the
// middle to a float, and no result is as large as ½.
__device__ __forceinline__ float centred(uint32_t word, int half) {
  const float above = __uint_as_float(__byte_perm(0x3f80u, word, half == 0 ? 0x1054u : 0x1076u));
  return __fmaf_rn(above, 1.0f - 0x1p-16f, -(1.0f + 32639 * 0x1p-23f));
}

// The random numbers of kWidth positions, which begin at a multiple of 4 if there are several.
template <int kWidth>
struct Random {
  static constexpr int kQuads = (kWidth + 3) / 4;
  Noise::Words words[kQuads];
  int64_t position;

  __device__ __forceinline__ Random(const Noise& noise, int64_t position) : position(position) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) words[q] = noise.drawn(kParamStream, position | (4 * q));
  }
  // The centred number of the states of element j.
  __device__ __forceinline__ float of_states(int j) const {
    const int64_t at = position_of_bits(kWidth == 1 ? position : j);
    const uint32_t word = Noise::word(words[j / 4], at);
    if constexpr (kWidth == 1) return centred(Noise::half(word, at), 0);
    return centred(word, at & 1);
  }
};

// A number whose lowest byte is the code of the value. That of NaN is any.
template <bool kSigned>
__device__ __forceinline__ uint32_t encoded_above(float value, float inverse, float z) {
  if constexpr (kSigned) {
    constexpr float kQuarter = 0.25f * kShrunken * kShrunken;
    const float least = limited_sum(z, z, __fmaf_rn(fabsf(value), inverse, -kQuarter));
    return __float_as_uint(copysignf(root<kShortest>(least) - z, value) + (0x1p23f + 128) * kShrunken);
  } else {
    const float y = __fmaf_rn(value, inverse, 4.0f);
    // The code is one less than half of the even number between the roots of the levels; 255 more in the lowest byte.
    const float above = __fmaf_rn(root<kShortest>(root<kShortest>(y)), 0.5f, 0x1p23f + 255);
    const float even = __fmaf_rn(above, 2.0f, -2 * (0x1p23f + 255));
    const float square = __fmaf_rn(even, even, 1.0f);
    const float mean = __fmaf_rn(even, __fmaf_rn(z, 8 / kShrunken, even), 5.0f);
    const float missing = __fmaf_rn(square, mean, -y);
    return __float_as_uint(above) + (__float_as_uint(missing) >> 31);  // one more if it is negative
  }
}

// The codes of kWidth elements, 4 to a word.
template <int kWidth>
struct Codes {
  static_assert(kWidth == 1 || kWidth % 4 == 0);
  using Word = std::conditional_t<kWidth == 1, uint8_t, uint32_t>;
  Pack<Word, (kWidth + 3) / 4> words;

  // The levels, those of a state of one sign in units of 16.
  template <bool kSigned>
  __device__ __forceinline__ void levels(float (&values)[kWidth]) const {
    constexpr float kOffset = kSigned ? 0x1p23f + 128 : 0x1p23f - 0.5f;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float steps = byte_above(words.values[j / 4], j % 4) - kOffset;
      values[j] = kSigned ? steps * fabsf(steps) : (steps * steps) * (steps * steps);
    }
  }

  template <bool kSigned>
  __device__ __forceinline__ void encode(const float (&values)[kWidth], float inverse, const Random<kWidth>& random) {
    uint32_t above[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) above[j] = encoded_above<kSigned>(values[j], inverse, random.of_states(j));
    pack(above);
  }

  // Takes the lowest byte of each number.
  __device__ __forceinline__ void pack(const uint32_t (&above)[kWidth]) {
    if constexpr (kWidth == 1) {
      words.values[0] = static_cast<uint8_t>(above[0]);
    } else {
#pragma unroll
      for (int w = 0; w < kWidth / 4; ++w) {
        const uint32_t low = __byte_perm(above[4 * w], above[4 * w + 1], 0x0040);
        const uint32_t high = __byte_perm(above[4 * w + 2], above[4 * w + 3], 0x0040);
        words.values[w] = __byte_perm(low, high, 0x5410);
      }
    }
  }
};

}  // namespace
}  // namespace hdet
