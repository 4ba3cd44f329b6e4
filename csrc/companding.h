// Optimizer state in 8 bits: codes of one byte, and a float scale for every block of them.
// hdet_kernels/ops/torch/companding.py has the equations, and gives the same bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "rounding.h"

namespace hdet {

// Elements that share a scale: consecutive ones of a chunk, whose last block may be shorter.
inline constexpr int64_t kStateBlock = 256;
// Block b of chunk k has scale kBlocksPerChunk·k + b. CHUNK in chunks.py is kStateBlock·kBlocksPerChunk.
inline constexpr int64_t kBlocksPerChunk = 8;

// Levels are whole numbers: c² for a state of either sign, stored as 128 ± c, and (2c + 1)⁴ for sums of squares, stored
// as c. kTop is the level of the scale. It is the highest level less a millionth of it, so that no rounding of a product
// or a root leads above that level.
template <bool kSigned>
inline constexpr float kTop = kSigned ? 16128.984375f : 68184113152.0f;

// The smallest scale. With it, the value of level 1 is a normal number, and kTop/scale is finite.
template <bool kSigned>
inline constexpr float kSmallestScale = kSigned ? 0x1p-112f : 0x1p-90f;

// The value of level 1.
template <bool kSigned>
HDET_BOTH float unit_of(float scale) {
  return scale * (1.0f / kTop<kSigned>);
}

// The value of a code, given as code − 128 for a state of either sign.
template <bool kSigned>
HDET_BOTH float value_of(float code, float unit) {
  if constexpr (kSigned) {
    return code * fabsf(code) * unit;
  } else {
    const float odd = 2 * code + 1;
    const float square = odd * odd;
    return square * square * unit;
  }
}

template <bool kSigned>
HDET_BOTH float decoded(uint8_t code, float scale) {
  return value_of<kSigned>(static_cast<float>(static_cast<int>(code) - (kSigned ? 128 : 0)), unit_of<kSigned>(scale));
}

// The bits of a magnitude. As whole numbers they are in the order of the magnitudes, and those of infinities and NaNs
// are the largest, so the largest of a block says all that its scale needs.
HDET_BOTH uint32_t magnitude_bits(float value) { return bits_as<uint32_t>(value) & 0x7fffffffu; }

// The scale of a block from the largest of its magnitude_bits: NaN where a value is not finite.
template <bool kSigned>
HDET_BOTH float scale_of(uint32_t largest) {
  const auto smallest = bits_as<uint32_t>(kSmallestScale<kSigned>);
  return bits_as<float>(largest >= 0x7f800000u ? 0x7fc00000u : largest < smallest ? smallest : largest);
}

// The factor that turns the values of a block into levels.
template <bool kSigned>
HDET_BOTH float inverse_of(float scale) {
  return kTop<kSigned> / scale;
}

// Where the 16 random bits of the codes of an element lie: those of the parameter at this position. Four neighbours share
// a hash of 64 bits, of which a parameter and its states use different parts.
HDET_BOTH int64_t position_of_bits(int64_t position) { return (position & ~int64_t{3}) | ((position + 1) & 3); }

// Added to a number between −2²² and 2²², this rounds it to a whole number, ties to even, whose lowest byte is then that
// of the sum's bits.
inline constexpr float kRounding = 0x1.8p23f;

// The code of a value: that of one of the neighbouring levels, with the probabilities that make the expectation exact,
// given z, a uniform random number: 16 random bits plus ½, over 2¹⁶, less ½. companding.py has the equations. A root
// that is wrong in its last bits does no harm: x then lies just outside of the two levels, and is rounded to the nearer
// one. companding_cuda.h has the same in fewer instructions of a GPU.
template <bool kSigned>
inline uint8_t encoded(float value, float inverse, float z) {
  using std::sqrt;
  const float product = fabsf(value) * inverse;
  const float x = product < kTop<kSigned> ? product : kTop<kSigned>;  // also where it is NaN
  if constexpr (kSigned) {
    const float least = (x - 0.25f) + z * z;
    const float root = sqrt(least > 0 ? least : 0.0f);
    const float steps = root - z;
    return static_cast<uint8_t>(bits_as<uint32_t>((value < 0 ? -steps : steps) + (kRounding + 128)));
  } else {
    const float y = x + 4;
    const float above = 0.5f * sqrt(sqrt(y)) + kRounding;  // the upper code
    const float even = 2 * (above - kRounding);
    const float square = even * even;
    const float least = (square + 1) * ((square + 5) + 8 * z * even);
    return static_cast<uint8_t>(bits_as<uint32_t>(above) - (least < y ? 0 : 1));
  }
}

}  // namespace hdet
