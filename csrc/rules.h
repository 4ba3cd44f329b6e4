// The update rules, each written once for the host and the device. hdet_kernels/ops/reference.py has the equations.
//
// A rule is a struct of what is the same for every element of one parameter at one step. `derive` forms it in double
// from the hyperparameters and rounds once; `update` moves one element. T is the type of the arithmetic: double for
// double, float for all others.
#pragma once

#include <cmath>

#include "table.h"

#ifdef __CUDACC__
#define HDET_BOTH __host__ __device__ __forceinline__
#else
#define HDET_BOTH inline
#endif

namespace hdet {

// The order of _RULES in hdet_kernels/ops/native.py.
enum class Rule : int64_t { sgd, adam, adamw, adagrad, lion };

// Gradients come scaled (AMP, clipping), and negated where the objective is to grow.
HDET_BOTH double gradient_factor(const Row& row, double multiplier) {
  return row.maximize != 0 ? -multiplier : multiplier;
}

template <typename T>
struct Sgd {
  static constexpr int kFewestStates = 0;
  static constexpr int kMostStates = 1;
  T factor, decay, momentum, take, lr;
  int states;  // how many state buffers this parameter uses: the momentum, or none
  bool first, nesterov;

  // The first step with momentum is told by its count, so steps without momentum do not count.
  static HDET_BOTH bool counts(const Row& row) { return row.momentum != 0; }

  static HDET_BOTH Sgd derive(const Row& row, double t, double multiplier) {
    return {static_cast<T>(gradient_factor(row, multiplier)),
            static_cast<T>(row.weight_decay),
            static_cast<T>(row.momentum),
            static_cast<T>(1 - row.dampening),
            static_cast<T>(row.lr),
            row.momentum != 0 ? 1 : 0,
            t <= 1,
            row.nesterov != 0};
  }

  template <int kStates>
  HDET_BOTH void update(T& theta, T g, T* state) const {
    g *= factor;
    if (decay != 0) g += decay * theta;  // 0·θ is not 0 where θ is infinite
    if constexpr (kStates == 1) {
      state[0] = first ? g : momentum * state[0] + take * g;
      g = nesterov ? g + momentum * state[0] : state[0];
    }
    theta -= lr * g;
  }
};

template <typename T, bool kDecoupled>
struct AdamFamily {
  static constexpr int kFewestStates = 2;
  static constexpr int kMostStates = 3;
  T factor, decay, take1, keep2, take2, size, per_root, eps;
  int states;  // first and second moment, and with amsgrad the largest second moment

  static HDET_BOTH bool counts(const Row&) { return true; }

  static HDET_BOTH AdamFamily derive(const Row& row, double t, double multiplier) {
    using std::pow, std::sqrt;
    return {static_cast<T>(gradient_factor(row, multiplier)),
            static_cast<T>(kDecoupled ? 1 - row.lr * row.weight_decay : row.weight_decay),
            static_cast<T>(1 - row.beta1),
            static_cast<T>(row.beta2),
            static_cast<T>(1 - row.beta2),
            static_cast<T>(row.lr / (1 - pow(row.beta1, t))),
            static_cast<T>(1 / sqrt(1 - pow(row.beta2, t))),
            static_cast<T>(row.eps),
            row.amsgrad != 0 ? 3 : 2};
  }

  template <int kStates>
  HDET_BOTH void update(T& theta, T g, T* state) const {
    using std::sqrt;
    g *= factor;
    if constexpr (kDecoupled) {
      theta *= decay;
    } else if (decay != 0) {
      g += decay * theta;
    }
    state[0] += take1 * (g - state[0]);
    state[1] = keep2 * state[1] + take2 * (g * g);
    T second = state[1];
    if constexpr (kStates == 3) {
      // A NaN wins, as in torch.maximum.
      second = second > state[2] || second != second ? second : state[2];
      state[2] = second;
    }
    theta -= size * (state[0] / (sqrt(second) * per_root + eps));
  }
};

template <typename T>
using Adam = AdamFamily<T, false>;
template <typename T>
using AdamW = AdamFamily<T, true>;

template <typename T>
struct Adagrad {
  static constexpr int kFewestStates = 1;
  static constexpr int kMostStates = 1;
  T factor, decay, size, eps;
  int states;

  static HDET_BOTH bool counts(const Row&) { return true; }

  static HDET_BOTH Adagrad derive(const Row& row, double t, double multiplier) {
    return {static_cast<T>(gradient_factor(row, multiplier)), static_cast<T>(row.weight_decay),
            static_cast<T>(row.lr / (1 + (t - 1) * row.lr_decay)), static_cast<T>(row.eps), 1};
  }

  template <int kStates>
  HDET_BOTH void update(T& theta, T g, T* state) const {
    using std::sqrt;
    g *= factor;
    if (decay != 0) g += decay * theta;
    state[0] += g * g;
    theta -= size * (g / (sqrt(state[0]) + eps));
  }
};

template <typename T>
struct Lion {
  static constexpr int kFewestStates = 1;
  static constexpr int kMostStates = 1;
  T factor, keep, lr, keep1, take1, keep2, take2;
  int states;

  static HDET_BOTH bool counts(const Row&) { return true; }

  static HDET_BOTH Lion derive(const Row& row, double, double multiplier) {
    return {static_cast<T>(gradient_factor(row, multiplier)),
            static_cast<T>(1 - row.lr * row.weight_decay),
            static_cast<T>(row.lr),
            static_cast<T>(row.beta1),
            static_cast<T>(1 - row.beta1),
            static_cast<T>(row.beta2),
            static_cast<T>(1 - row.beta2),
            1};
  }

  template <int kStates>
  HDET_BOTH void update(T& theta, T g, T* state) const {
    g *= factor;
    const T blend = keep1 * state[0] + take1 * g;
    // sign(0) = 0, and a NaN stays one.
    const T sign = blend > 0 ? T(1) : blend < 0 ? T(-1) : blend;
    theta = theta * keep - lr * sign;
    state[0] = keep2 * state[0] + take2 * g;
  }
};

}  // namespace hdet
