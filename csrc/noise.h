// Standard normal numbers that are a function of a key and a position alone, and the arguments of add_noise_, for the
// CPU and CUDA. hdet_kernels/ops/reference_noise.py and triton_noise.py give the same bits: apart from the square root,
// which is correctly rounded, there are only sums and products, each rounded once.
#pragma once

#include <cmath>
#include <type_traits>

#include "check.h"
#include "rounding.h"
#include "table.h"

namespace hdet {

// ln u for u in [2⁻³², 1], within 0.9 units in the last place (tested exhaustively); negative except for ln 1 = 0. With
// u = 2ᵏ·(1 + f), f between √½ − 1 and √2 − 1, ln(1 + f) is a polynomial. ln 2 is split into two parts, the larger of
// which has so few bits that its product with k is exact. The coefficients are those of Cephes' logf.
HDET_BOTH float log_of(float u) {
  const auto bits = bits_as<int32_t>(u);
  const int32_t k = (bits - 0x3f3504f3) >> 23;
  const float f = bits_as<float>(bits - k * (1 << 23)) - 1.0f;
  const auto power = static_cast<float>(k);
  const float square = f * f;
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  p = p * f * square - 2.12194440e-4f * power - 0.5f * square;
  return f + p + 0.693359375f * power;
}

// cos(2π·word/2³²), within 3 units in the last place, even near its zeros: subtracting the nearest quarter turn from
// the word is exact and leaves an angle of at most π/4. The coefficients are those of Cephes' sinf and cosf.
HDET_BOTH float cos_of_turn(uint32_t word) {
  const uint32_t quarter = (word + (1u << 29)) >> 30;
  const float x = static_cast<float>(static_cast<int32_t>(word - (quarter << 30))) * 1.4629180792671596e-9f;
  const float square = x * x;
  float c = 2.443315711809948e-5f * square - 1.388731625493765e-3f;
  c = (c * square + 4.166664568298827e-2f) * square * square - 0.5f * square + 1.0f;
  float s = -1.9515295891e-4f * square + 8.3321608736e-3f;
  s = (s * square - 1.6666654611e-1f) * square * x + x;
  const float value = (quarter & 1) != 0 ? s : c;
  return (((quarter + 1) >> 1) & 1) != 0 ? -value : value;
}

// The standard normal numbers of one key.
class Normals {
 public:
  // Rounds of a Feistel network: different keys stay different, and keys that differ in one bit then differ in about
  // half of them. Without it, neighbouring keys would give the same numbers in another order.
  static HDET_BOTH Normals of(int64_t key) {
    auto low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(static_cast<uint64_t>(key) >> 32);
    high ^= mix(low + kGolden);
    low ^= mix(high + 2 * kGolden);
    high ^= mix(low + 3 * kGolden);
    low ^= mix(high + 4 * kGolden);
    const Words first{low, high};
    high ^= mix(low + 5 * kGolden);
    low ^= mix(high + 6 * kGolden);
    return {first, {low, high}};
  }

  // Box–Muller: √(−2 ln u)·cos(2π v) with u in (0, 1] and v in [0, 1), of 32 bits each. Its magnitude is at most 6.7.
  HDET_BOTH float at(int64_t position) const {
    const float u = (static_cast<float>(radius_.at(position)) + 1.0f) * 0x1p-32f;
    return sqrtf(-2.0f * log_of(u)) * cos_of_turn(angle_.at(position));
  }

 private:
  // One random word for each position.
  struct Words {
    uint32_t low, high;

    HDET_BOTH uint32_t at(int64_t position) const {
      const auto whole = static_cast<uint64_t>(position);
      return mix(mix(static_cast<uint32_t>(whole) ^ low) + static_cast<uint32_t>(whole >> 32) + high);
    }
  };

  HDET_BOTH Normals(Words radius, Words angle) : radius_(radius), angle_(angle) {}

  Words radius_, angle_;
};

// The type of the arithmetic on numbers stored as S.
template <typename S>
using Arithmetic = std::conditional_t<std::is_same_v<S, double>, double, float>;

struct Noising {
  const Chunk* chunks;
  int64_t chunk_count;
  const Gradient* tensors;  // addresses and types of the tensors, as in the gradient table
  const int64_t* keys;      // one for each slot
  const double* scales;     // one for each slot
};

inline Noising checked_noising(const Tensor& chunks, const Tensor& tensors, const Tensor& keys, const Tensor& scales) {
  const auto* table = checked_rows<Gradient>(tensors, "tensors", 2, chunks);
  const int64_t slots = tensors.size(0);
  return {checked_rows<Chunk>(chunks, "chunks", 4, chunks), chunks.size(0), table,
          checked<const int64_t>(keys, "keys", ScalarType::Long, slots, chunks),
          checked<const double>(scales, "scales", ScalarType::Double, slots, chunks)};
}

}  // namespace hdet
