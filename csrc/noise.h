// Standard normal numbers that are a function of a key and a position alone, and the arguments of add_noise_, for the
// CPU and CUDA. hdet_kernels/ops/reference_noise.py and triton_noise.py give the same bits: apart from the square root,
// which is correctly rounded, there are only sums and products, each rounded once. The polynomials are minimax fits, no
// longer than noise needs: a GPU spends its time on their operations, not on memory accesses.
#pragma once

#include <cmath>
#include <type_traits>

#include "check.h"
#include "rounding.h"
#include "table.h"

namespace hdet {

// −2 ln u for u in [2⁻³³, 1), relative error below 1.3e-6; positive. With u = 2ᵏ·(1 − f), f between 1 − √2 and 1 − √½,
// −2 ln(1 − f) is f times a polynomial.
HDET_BOTH float square_of_radius(float u) {
  const auto bits = bits_as<int32_t>(u);
  const int32_t power = (bits - 0x3f3504f3) & ~0x7fffff;  // k·2²³
  const float f = 1.0f - bits_as<float>(bits - power);
  float p = 0.23792216181755066f;
  p = p * f + 0.3733570873737335f;
  p = p * f + 0.40992656350135803f;
  p = p * f + 0.4981948733329773f;
  p = p * f + 0.6662901639938354f;
  p = p * f + 1.000022292137146f;
  p = p * f + 2.000001907348633f;
  return p * f - static_cast<float>(power) * (1.3862943611198906f * 0x1p-23f);
}

// √x, correctly rounded, for x from 2⁻²⁴ to 64.
HDET_BOTH float root_of(float x) {
#ifdef __CUDA_ARCH__
  // The operations of sqrtf, without its branch for numbers near the ends of the range of floats.
  float inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  const float root = x * inverse;
  return __fmaf_rn(__fmaf_rn(-root, root, x), 0.5f * inverse, root);
#else
  return sqrtf(x);
#endif
}

// The numbers of positions 2·pair and 2·pair + 1.
struct TwoNormals {
  float even, odd;
};

// The standard normal numbers of one key.
class Normals {
 public:
  explicit HDET_BOTH Normals(int64_t key) {
    const auto low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(static_cast<uint64_t>(key) >> 32);
#ifdef __CUDACC__
#pragma unroll
#endif
    for (uint32_t round = 0; round < kRounds; ++round) {
      keys_[round] = (round % 2 == 0 ? low : high) + round * kGolden;
#ifdef __CUDA_ARCH__
      asm volatile("" : "+r"(keys_[round]));  // or the compiler would add again for each pair
#endif
    }
  }

  // Box–Muller: √(−2 ln u)·(cos, sin)(2π v), with u in (0, 1) and v of 32 random bits each, at most 6.8 in magnitude.
  // The words are those of half the position.
  HDET_BOTH TwoNormals of_pair(uint32_t first, uint32_t second) const {
    // Philox 2×32, with the words of the key in turn: keys that differ in one bit give unrelated numbers.
#ifdef __CUDACC__
#pragma unroll
#endif
    for (uint32_t round = 0; round < kRounds; ++round) {
      const uint64_t product = static_cast<uint64_t>(first) * 0xd256d193u;
      first = static_cast<uint32_t>(product >> 32) ^ second ^ keys_[round];
      second = static_cast<uint32_t>(product);
    }
    const float radius = root_of(square_of_radius(static_cast<float>(first) * kBelow + 0x1p-33f));
    // The highest bit is the sign of both, the others an angle between −π/2 and π/2, in a unit in which the highest
    // coefficient of the cosine is 1.
    const float signed_radius = bits_as<float>(bits_as<uint32_t>(radius) ^ (second & 0x80000000u));
    const float x = static_cast<float>(static_cast<int32_t>(second << 1)) * 1.9264959072451404e-10f;
    const float y = x * x;
    float c = y - 4.150471210479736f;
    c = c * y + 8.658533096313477f;
    c = c * y - 7.207971096038818f;
    c = c * y + 0.9999999403953552f;
    float s = -2.1030359268188477f * y + 6.558581352233887f;
    s = s * y - 9.121904373168945f;
    s = s * y + 3.796833038330078f;
    return {signed_radius * c, signed_radius * (s * x)};
  }

  HDET_BOTH float at(int64_t position) const {
    const auto whole = static_cast<uint64_t>(position);
    const TwoNormals both = of_pair(static_cast<uint32_t>(whole >> 1), static_cast<uint32_t>(whole >> 33));
    return (whole & 1) != 0 ? both.odd : both.even;
  }

 private:
  static constexpr uint32_t kRounds = 7;
  // The largest number below 2⁻³²: u stays below 1 where the word is rounded up to 2³².
  static constexpr float kBelow = 0x1.fffffep-33f;

  uint32_t keys_[kRounds];  // of the rounds
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
