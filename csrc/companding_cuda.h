// Conversion of state between codes of 8 bits and floats, on CUDA. It gives the codes of companding.h, but for the last
// bits of products and roots, where a random number falls between. A GPU does conversions and roots at an eighth of the
// rate of sums and products, and comparisons, choices and logic at half of it; so nearly all is fused products.
#pragma once

#include "companding.h"
#include "launch_cuda.h"

namespace hdet {
namespace {

__device__ __forceinline__ float approximate_root(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// inverse_of without a division. A quarter of the scale has an inverse that is not flushed to 0.
template <bool kSigned>
__device__ __forceinline__ float approximate_inverse(float scale) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(scale * 0.25f));
  return y * (0.25f * kTop<kSigned>);
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

// (half + ½)/2¹⁶ for the lower or upper half of a word.
__device__ __forceinline__ float uniform_of(uint32_t word, int half) {
  return __uint_as_float(__byte_perm(0x4300u, word, half == 0 ? 0x1054u : 0x1076u)) - (128.0f - 0x1p-17f);
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
  // The uniform number of state k of element j.
  __device__ __forceinline__ float uniform(int k, int j) const {
    const int64_t at = position_of_bits(kWidth == 1 ? position : j, k);
    const uint32_t word = Noise::word(words[j / 4], at);
    if constexpr (kWidth == 1) return uniform_of(Noise::half(word, at), 0);
    return uniform_of(word, at & 1);
  }
};

// A number whose lowest byte is the code of the value. That of NaN is any.
template <bool kSigned>
__device__ __forceinline__ uint32_t encoded_above(float value, float inverse, float uniform) {
  if constexpr (kSigned) {
    const float least = __fmaf_rn(fabsf(value), inverse, -__fmaf_rn(-uniform, uniform, uniform));
    const float root = copysignf(approximate_root(fmaxf(least, 0.0f)), value);
    return __float_as_uint(__fadd_rd(root + uniform, 0x1p23f + 128));
  } else {
    const float x = value * inverse;
    const float above = __fadd_rd(approximate_root(approximate_root(x)), 0x1p23f);
    const float below = above - 0x1p23f;
    // The difference of two fourth powers, but 0 between the levels 0 and 1: a positive x never gets code 0.
    const float least = __saturatef(above - 0x1p23f);
    const float width = __fmaf_rn(__fmaf_rn(__fmaf_rn(below, 4.0f, 6.0f), below, 4.0f), below, least);
    const float square = below * below;
    const float missing = __fmaf_rn(uniform, width, __fmaf_rn(square, square, -x));
    return __float_as_uint(above) + (__float_as_uint(missing) >> 31);  // one more if it is negative
  }
}

// The codes of kWidth elements, 4 to a word.
template <int kWidth>
struct Codes {
  static_assert(kWidth == 1 || kWidth % 4 == 0);
  using Word = std::conditional_t<kWidth == 1, uint8_t, uint32_t>;
  Pack<Word, (kWidth + 3) / 4> words;

  template <bool kSigned>
  __device__ __forceinline__ void decode(float unit, float (&values)[kWidth]) const {
    constexpr float kOffset = 0x1p23f + (kSigned ? 128 : 0);
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      values[j] = value_of<kSigned>(byte_above(words.values[j / 4], j % 4) - kOffset, unit);
  }

  // Encodes state k.
  template <bool kSigned>
  __device__ __forceinline__ void encode(const float (&values)[kWidth], float inverse, int k,
                                         const Random<kWidth>& random) {
    uint32_t above[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) above[j] = encoded_above<kSigned>(values[j], inverse, random.uniform(k, j));
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
