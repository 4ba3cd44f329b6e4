// Optimizer state in 8 bits: codes of one byte, and a float scale for every block of them. hdet_kernels/ops/companding.py
// has the equations, and gives the same bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "rounding.h"

namespace hdet {

// Elements that share a scale: consecutive ones of a chunk, whose last block may be shorter.
inline constexpr int64_t kStateBlock = 256;
// Block b of chunk k has scale kBlocksPerChunk·k + b. CHUNK in chunks.py is kStateBlock·kBlocksPerChunk.
inline constexpr int64_t kBlocksPerChunk = 8;
// In place of 16 random bits plus ½: rounding to nearest.
inline constexpr float kNearest = 32768.0f;

// Levels of a state of either sign are (c/127)², stored as 128 ± c, and those of sums of squares (c/255)⁴, stored as c.
template <bool kSigned>
HDET_BOTH float level(float steps) {
  const float part = steps * (kSigned ? 1.0f / 127 : 1.0f / 255);
  const float square = part * part;
  return kSigned ? square : square * square;
}

template <bool kSigned>
HDET_BOTH float decoded(uint8_t code, float scale) {
  const float steps = static_cast<float>(static_cast<int>(code) - (kSigned ? 128 : 0));
  const float part = level<kSigned>(steps);
  return (kSigned && steps < 0 ? -part : part) * scale;
}

// The bits of a magnitude. As whole numbers they are in the order of the magnitudes, and those of infinities and NaNs
// are the largest, so the largest of a block says all that its scale needs.
HDET_BOTH uint32_t magnitude_bits(float value) { return bits_as<uint32_t>(value) & 0x7fffffffu; }

// The scale of a block from the largest of its magnitude_bits: 0 below the smallest normal number, NaN where a value is
// not finite.
HDET_BOTH float scale_of(uint32_t largest) {
  return bits_as<float>(largest < 0x00800000u ? 0u : largest >= 0x7f800000u ? 0x7fc00000u : largest);
}

// The factor of the values of a block: 1/scale, or 0 where the scale is 0 or NaN.
HDET_BOTH float inverse_of(float scale) { return scale > 0 ? 1.0f / scale : 0.0f; }

// Rounds a value to a neighbouring level, up with a probability equal to its distance from the lower one, given 16
// uniform random bits plus ½. A root that is wrong in its last bits does no harm: x then lies just outside of the two
// levels, and is rounded to the nearer one. A positive sum of squares never gets code 0.
template <bool kSigned>
HDET_BOTH uint8_t encoded(float value, float inverse, float noise) {
  using std::sqrt;
  float x = (value < 0 ? -value : value) * inverse;
  x = x < 1 ? x : 1.0f;  // also where it is NaN
  const float root = kSigned ? sqrt(x) : sqrt(sqrt(x));
  const int below = static_cast<int>(root * (kSigned ? 127.0f : 255.0f));
  const float low = level<kSigned>(static_cast<float>(below)), high = level<kSigned>(static_cast<float>(below + 1));
  const int steps = below + ((x - low) * 65536.0f > noise * (high - low) ? 1 : 0);
  if constexpr (kSigned) return static_cast<uint8_t>(128 + (value < 0 ? -steps : steps));
  return static_cast<uint8_t>(steps == 0 ? (x > 0 ? 1 : 0) : steps);  // in a form that the compiler vectorises
}

}  // namespace hdet
