// Conversion of the two sums of squares of amsgrad between codes of 8 bits and floats, on CUDA. It gives the codes of
// amsgrad_codes.h, but for the last bits of quotients and roots, where a random number falls between.
#pragma once

#include "amsgrad_codes.h"
#include "companding_cuda.h"

namespace hdet {
namespace {

// The largest sums, in units of their scale.
template <int kWidth>
__device__ __forceinline__ void levels_of_largest(const Codes<kWidth>& codes, float (&levels)[kWidth]) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) levels[j] = decoded_largest(static_cast<uint8_t>(codes.byte(j)), 1.0f);
}

// The current sums, in the units in which the largest ones are given.
template <int kWidth>
__device__ __forceinline__ void levels_of_shares(const Codes<kWidth>& codes, const float (&largest)[kWidth],
                                                 float (&levels)[kWidth]) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) levels[j] = decoded_share(static_cast<uint8_t>(codes.byte(j)), largest[j]);
}

// The code of a share in a number of more bytes.
__device__ __forceinline__ uint32_t encoded_share_above(float value, float largest, float z) {
  const float missing = __fmaf_rn(-value, approximate_inverse(largest * kPerSquare), kAllMissing);
  const float least = __fmaf_rn(z, z, fmaxf(missing, 0.0f) - 0.25f);  // fmaxf of NaN and 0 is 0
  const float steps = fminf(root<kShortest>(fmaxf(least, 0.0f)) + z, 255.0f);
  return 255u - (__float_as_uint(steps + kRounding) - __float_as_uint(kRounding));
}

// Encodes both sums, the current ones as shares. `scale` is that of the largest ones.
template <int kWidth>
__device__ __forceinline__ void encode_amsgrad(const float (&current)[kWidth], const float (&largest)[kWidth],
                                               float scale, const Random<kWidth>& random, Codes<kWidth>& shares,
                                               Codes<kWidth>& codes) {
  const uint32_t exponent = __float_as_uint(scale) >> 23;
  uint32_t below[kWidth], above[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    above[j] = encoded_largest(largest[j], exponent);
    const float stored = decoded_largest(static_cast<uint8_t>(above[j]), scale);
    below[j] = encoded_share_above(current[j], stored, random.of_states(j) * (1 / kShrunken));
  }
  shares.pack(below);
  codes.pack(above);
}

}  // namespace
}  // namespace hdet
