// The update rules on states in 8 bits, on CUDA: rules.h, with the steps from level to value and from push to move
// arranged for fewer instructions. Only the last bits of results differ.
#pragma once

#include "companding_cuda.h"

namespace hdet {
namespace {

// Pushes kWidth elements. `theta(j)` is the parameter of element j, and `units` the values of level 1. The states are
// levels, and become values.
template <int kStates, int kCount, int kWidth, typename R, typename Theta>
__device__ __forceinline__ void push_levels(const R& rule, const Theta& theta, float (&slopes)[kWidth],
                                            const float (&units)[kCount], float (&states)[kCount][kWidth],
                                            Push<float> (&pushes)[kWidth]) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    float own[kCount];
#pragma unroll
    for (int k = 0; k < kStates; ++k) own[k] = states[k][j] * units[k];
    pushes[j] = rule.template push<kStates, kShortest>(theta(j), slopes[j], own);
#pragma unroll
    for (int k = 0; k < kStates; ++k) states[k][j] = own[k];
  }
}

// Adam's factors of gradient, level and moment are multiplied first, once for all elements. The gradient takes the root
// of the second moment's factor, because its square alone may overflow.
template <int kStates, int kCount, int kWidth, typename Theta>
__device__ __forceinline__ void push_levels(const Adam<float>& rule, const Theta& theta, float (&slopes)[kWidth],
                                            const float (&units)[kCount], float (&states)[kCount][kWidth],
                                            Push<float> (&pushes)[kWidth]) {
  float factor = rule.factor;
  if (rule.l2 != 0) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) slopes[j] = __fmaf_rn(rule.l2, theta(j), slopes[j] * factor);
    factor = 1;
  }
  const float take1 = rule.take1 * factor, keep1 = (1 - rule.take1) * units[0];
  const float take2 = root<kShortest>(rule.take2) * factor, keep2 = rule.keep2 * units[1];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const float share = take2 * slopes[j];
    states[0][j] = __fmaf_rn(take1, slopes[j], keep1 * states[0][j]);
    states[1][j] = __fmaf_rn(share, share, keep2 * states[1][j]);
    float second = states[1][j];
    if constexpr (kStates == 3) {
      states[2][j] *= units[2];
      if (rule.states == 3) second = states[2][j] = larger(second, states[2][j]);
    }
    pushes[j] = {states[0][j], root<kShortest>(second)};
  }
}

// Moves parameters by pushes.
template <int kStates, typename R>
struct Move {
  R rule;
  explicit __device__ __forceinline__ Move(const R& rule) : rule(rule) {}
  __device__ __forceinline__ float operator()(float theta, const Push<float>& push) const {
    return rule.template move<kStates, kShortest>(theta, push);
  }
};

// Adam's learning rate divides the divisor. One below 2⁻¹⁰⁰, whose inverse might overflow, counts as 0.
template <int kStates>
struct Move<kStates, Adam<float>> {
  float keep, per_root, eps;
  explicit __device__ __forceinline__ Move(const Adam<float>& rule) : keep(rule.keep) {
    const bool still = fabsf(rule.size) < 0x1p-100f;
    const float inverse = -approximate_inverse(rule.size);
    per_root = still ? 0.0f : rule.per_root * inverse;
    eps = still ? INFINITY : rule.eps * inverse;
  }
  __device__ __forceinline__ float operator()(float theta, const Push<float>& push) const {
    return __fmaf_rn(push.direction, approximate_inverse(__fmaf_rn(per_root, push.root, eps)), theta * keep);
  }
};

}  // namespace
}  // namespace hdet
