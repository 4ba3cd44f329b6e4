// Optimizer state in 8 bits: codes of one byte, and a float scale for every block of them.
// hdet_kernels/ops/companding.py has the equations, and gives the same bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "rounding.h"

namespace hdet {

// Elements that share a scale: consecutive ones of a chunk, whose last block may be shorter.
inline constexpr int64_t kStateBlock = 256;
// Block b of chunk k has scale kBlocksPerChunk·k + b. CHUNK in chunks.py is kStateBlock·kBlocksPerChunk.
inline constexpr int64_t kBlocksPerChunk = 8;
// In place of a uniform random number: rounding to nearest.
inline constexpr float kNearest = 0.5f;

// Levels are whole numbers: c² for a state of either sign, stored as 128 ± c, and c⁴ for sums of squares, stored as c.
// kTop is the level of the scale.
template <bool kSigned>
inline constexpr float kTop = kSigned ? 16129.0f : 4228250624.0f;

// The smallest scale. With it, the value of level 1 is a normal number, and kTop/scale is finite.
template <bool kSigned>
inline constexpr float kSmallestScale = kSigned ? 0x1p-112f : 0x1p-94f;

template <bool kSigned>
HDET_BOTH float level(float steps) {
  const float square = steps * steps;
  return kSigned ? square : square * square;
}

// The value of level 1.
template <bool kSigned>
HDET_BOTH float unit_of(float scale) {
  return scale * (1.0f / kTop<kSigned>);
}

// The value of a code, given as code − 128 for a state of either sign.
template <bool kSigned>
HDET_BOTH float value_of(float steps, float unit) {
  return (kSigned ? steps * fabsf(steps) : level<kSigned>(steps)) * unit;
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

HDET_BOTH float root_of_level(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  using std::sqrt;
  return sqrt(x);
#endif
}

// The whole part of a number from 0 to 2²³.
HDET_BOTH float whole_part(float x) {
#ifdef __CUDA_ARCH__
  return __fadd_rd(x, 0x1p23f) - 0x1p23f;
#else
  return static_cast<float>(static_cast<int>(x));
#endif
}

// The level of a value between 0 and the top, which is also that of NaN. A positive sum of squares is at least level 1,
// so that it never gets code 0.
template <bool kSigned>
HDET_BOTH float exact_level(float value, float inverse) {
  const float x = fabsf(value) * inverse;
#ifdef __CUDA_ARCH__
  const float y = fminf(x, kTop<kSigned>);
  return !kSigned && y > 0 ? fmaxf(y, 1.0f) : y;
#else
  const float y = x < kTop<kSigned> ? x : kTop<kSigned>;
  return !kSigned && y > 0 && y < 1 ? 1.0f : y;
#endif
}

// Rounds a value to a neighbouring level, up with a probability equal to its distance from the lower one, given a
// uniform random number: 16 random bits plus ½, over 2¹⁶. Returns the signed number of steps, between −127 and 127 or 0
// and 255. A root that is wrong in its last bits does no harm: x then lies just outside of the two levels, and is
// rounded to the nearer one.
template <bool kSigned>
HDET_BOTH float steps_of(float value, float inverse, float uniform) {
  const float x = exact_level<kSigned>(value, inverse);
  const float root = root_of_level(x);
  const float below = whole_part(kSigned ? root : root_of_level(root));
  const float low = level<kSigned>(below);
  // The difference of two squares is 2c + 1, exactly.
  const float width = kSigned ? below + (below + 1) : level<kSigned>(below + 1) - low;
  const float steps = uniform * width < x - low ? below + 1 : below;
#ifdef __CUDA_ARCH__
  return kSigned ? copysignf(steps, value) : steps;
#else
  return kSigned && value < 0 ? -steps : steps;
#endif
}

template <bool kSigned>
HDET_BOTH uint8_t encoded(float value, float inverse, float uniform) {
  return static_cast<uint8_t>(static_cast<int>(steps_of<kSigned>(value, inverse, uniform)) + (kSigned ? 128 : 0));
}

}  // namespace hdet
