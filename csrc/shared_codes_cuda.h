// What replicas of a step on CUDA share where states are in 8 bits: some neighbouring elements of the gradient and the
// states, which are loaded, decoded, pushed, encoded and stored.
#pragma once

#include "amsgrad_codes_cuda.h"
#include "rules_coded_cuda.h"
#include "step_cuda.h"

namespace hdet {
namespace {

// kWidth elements of the gradient and the states, which replicas share.
template <int kStates, int kWidth, typename Store, typename R>
struct SharedCodes {
  static constexpr int kCount = kStates > 0 ? kStates : 1;
  static constexpr bool kAmsgrad = kStates == 3;
  GradientPack<float, kWidth> slope;
  Codes<kWidth> codes[kCount];
  float states[kCount][kWidth];

  static constexpr bool is_signed(int state) { return R::kSignedFirst && state == 0; }

  __device__ __forceinline__ void load(const Buffers<Store>& from, int64_t gradient, GradientType type, unsigned at) {
    slope.load(gradient, type, at);
#pragma unroll
    for (int k = 0; k < kStates; ++k) codes[k].words = fetch<decltype(codes[k].words)>(from.states[k] + at);
  }

  __device__ __forceinline__ void push(const R& rule, const Parameters<Store, kWidth>& parameters, GradientType type,
                                       const float (&scales)[kCount], Push<float> (&pushes)[kWidth]) {
    float units[kCount], slopes[kWidth];
    decode<0>(scales, units);
    if constexpr (kAmsgrad) {
      levels_of_largest(codes[2], states[2]);
      units[2] = scales[2];
      if (scales[1] < 0) {
        levels_of_shares(codes[1], states[2], states[1]);
        units[1] = scales[2];
      }
    }
    slope.widen(type, slopes);
    push_levels<kStates>(rule, [&](int j) { return parameters.value(j); }, slopes, units, states, pushes);
  }

  // The bits of the largest of `others` and the magnitudes of state k. See magnitude_bits.
  template <int k>
  __device__ __forceinline__ uint32_t largest(uint32_t others) const {
    if constexpr (is_signed(k)) {
      float most = __uint_as_float(others);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) most = larger(most, states[k][j]);
      return __float_as_uint(most);
    } else {
#pragma unroll
      for (int j = 0; j + 1 < kWidth; j += 2)
        others = __vimax3_u32(others, __float_as_uint(states[k][j]), __float_as_uint(states[k][j + 1]));
      return kWidth % 2 == 0 ? others : max(others, __float_as_uint(states[k][kWidth - 1]));
    }
  }

  // The new scales of the block, given the largest magnitude_bits of each state and the scales before.
  static __device__ __forceinline__ void rescale(const R& rule, const uint32_t (&largest)[kCount],
                                                 float (&scales)[kCount]) {
    if constexpr (kStates > 0) scales[0] = scale_of<is_signed(0)>(largest[0]);
    if constexpr (kStates > 1) scales[1] = scale_of<false>(largest[1]);
    if constexpr (kAmsgrad) {
      if (rule.states < 3) return;
      scales[2] = scale_of_largest(largest[2]);
      scales[1] = -scales[2];
    }
  }

  // Stores the codes of all states, given the new scales. Without amsgrad, the largest second moments stay.
  __device__ __forceinline__ void store(const R& rule, const Buffers<Store>& to, unsigned at,
                                        const float (&scales)[kCount], const Random<kWidth>& random) {
    if constexpr (kStates > 0) store<0>(to, at, scales[0], random);
    if constexpr (kAmsgrad) {
      if (rule.states == 3) {
        encode_amsgrad(states[1], states[2], scales[2], random, codes[1], codes[2]);
        put_words(to.states[1] + at, codes[1].words);
        put_words(to.states[2] + at, codes[2].words);
        return;
      }
    }
    if constexpr (kStates > 1) store<1>(to, at, scales[1], random);
  }

 private:
  // Stores the codes of state k, given the scale of the block.
  template <int k>
  __device__ __forceinline__ void store(const Buffers<Store>& to, unsigned at, float scale,
                                        const Random<kWidth>& random) {
    codes[k].template encode<is_signed(k)>(states[k], to_levels<is_signed(k)>(scale), random);
    put_words(to.states[k] + at, codes[k].words);
  }

  template <int k>
  __device__ __forceinline__ void decode(const float (&scales)[kCount], float (&units)[kCount]) {
    if constexpr (k < std::min(kStates, 2)) {
      codes[k].template levels<is_signed(k)>(states[k]);
      units[k] = unit_of<is_signed(k)>(scales[k]) * (is_signed(k) ? 1.0f : 16.0f);
      decode<k + 1>(scales, units);
    }
  }
};

}  // namespace
}  // namespace hdet
