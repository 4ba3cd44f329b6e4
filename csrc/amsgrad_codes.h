// The two sums of squares of amsgrad in 8 bits: the largest one so far, and the current one as a share of it.
// hdet_kernels/ops/amsgrad_codes.py says why and has the equations, and gives the same bits.
#pragma once

#include "companding.h"

namespace hdet {

// The bits of a float that do not belong to the code of a largest sum, those of the value of code 0 without its scale, and
// the exponent of the smallest scale.
inline constexpr int kDroppedBits = 20;
inline constexpr uint32_t kLowestBits = (127u - 31) << 23;
inline constexpr uint32_t kSmallestExponent = 127 - 60;

// The highest square of a share, the share that is one of them, and what is missing from a value of 0: a little more than
// the highest square, so that no random number and no rounding of a root leads below it.
inline constexpr float kSquares = 255.0f * 255.0f;
inline constexpr float kPerSquare = 1.0625f / kSquares;
inline constexpr float kAllMissing = kSquares + 3.0f / 128;

// The bits of a largest sum, rounded to those of a code and its exponent. The highest finite number stays finite.
HDET_BOTH uint32_t rounded_largest(float value) {
  const uint32_t rounded = (magnitude_bits(value) + (1u << (kDroppedBits - 1))) >> kDroppedBits;
  return rounded < 0x7f7u ? rounded : 0x7f7u;
}

// The exponent of the scale of a block of largest sums, from the largest of its magnitude_bits.
HDET_BOTH uint32_t exponent_of_largest(uint32_t largest) {
  const uint32_t exponent = rounded_largest(bits_as<float>(largest)) >> 3;
  return exponent > kSmallestExponent ? exponent : kSmallestExponent;
}

// The scale itself: NaN where a value is not finite.
HDET_BOTH float scale_of_largest(uint32_t largest) {
  return bits_as<float>(largest >= 0x7f800000u ? 0x7fc00000u : exponent_of_largest(largest) << 23);
}

HDET_BOTH uint8_t encoded_largest(float value, uint32_t exponent) {
  const uint32_t rounded = rounded_largest(value), lowest = (exponent - 31) << 3;
  return static_cast<uint8_t>(rounded > lowest ? rounded - lowest : 0);
}

HDET_BOTH float decoded_largest(uint8_t code, float scale) {
  return bits_as<float>((static_cast<uint32_t>(code) << kDroppedBits) + kLowestBits) * scale;
}

// The value of a share's code, given that of the largest sum.
HDET_BOTH float decoded_share(uint8_t code, float largest) {
  const float steps = static_cast<float>(255 - static_cast<int>(code));
  return (kSquares - steps * steps) * (largest * kPerSquare);
}

// The code of a value, given the decoded largest sum and z, a uniform random number as for `encoded`.
HDET_BOTH uint8_t encoded_share(float value, float largest, float z) {
  using std::sqrt;
  const float missing = kAllMissing - value / (largest * kPerSquare);
  const float least = ((missing > 0 ? missing : 0.0f) - 0.25f) + z * z;  // 0 also where it is NaN
  const float steps = sqrt(least > 0 ? least : 0.0f) + z;
  const uint32_t rounded = bits_as<uint32_t>(steps + kRounding) - bits_as<uint32_t>(kRounding);
  return static_cast<uint8_t>(255u - (rounded < 255u ? rounded : 255u));
}

}  // namespace hdet
