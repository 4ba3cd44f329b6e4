// The update rules, each written once for the host and the device. hdet_kernels/ops/torch/rules.py has the
// equations.
//
// A rule is a struct of the numbers that are the same for every element of one parameter at one step. `derive` computes
// them in double from the hyperparameters and rounds once. An element is stepped in two parts: `push` updates the
// states by the gradient and returns a direction, and `move` applies it to one parameter. Replicas that share a
// gradient share the push of replica 0, and each moves by numbers of its own. T is the type of the arithmetic: double
// for double, float for all others. kShort says that results are stored in 16 bits: then the last two of a quotient's
// 24 bits may be wrong, which takes a third of the instructions on a GPU. kShortest: the states are stored in 8 bits, so
// products are also fused with sums, and numbers below 2⁻¹²⁶ count as 0 in quotients and roots.
#pragma once

#include <cmath>
#include <type_traits>

#include "rounding.h"
#include "table.h"

namespace hdet {

// The order of STATES in hdet_kernels/ops/step.py.
enum class Rule : int64_t { sgd, adam, adamw, adagrad, lion, muon };

// The inputs of `derive`.
struct Moment {
  Rule rule;
  double t;       // the number of this step, from 1
  bool first;     // no step with momentum came before
  double factor;  // the factor of the gradient
};

// The factor of the gradient: it undoes AMP's scale, clips by the norm of the stored gradients (may be null) as
// clip_grad_norm_ does, and is negative where the objective is maximised.
HDET_BOTH double gradient_factor(const Row& row, const float* grad_scale, const double* norm) {
  double factor = grad_scale == nullptr ? 1.0 : 1.0 / static_cast<double>(*grad_scale);
  if (norm != nullptr && row.max_grad_norm > 0) {
    const double clip = row.max_grad_norm / (*norm * factor + 1e-6);
    if (!(clip >= 1)) factor *= clip;  // NaN propagates, as in torch
  }
  return row.maximize != 0 ? -factor : factor;
}

// Advances a slot's step count. For sgd it is negative until the first step with momentum.
HDET_BOTH Moment advanced(Rule rule, const Row& row, float& steps, const float* grad_scale, const double* norm) {
  const bool first = steps <= 0;
  const float t = (steps < 0 ? -steps : steps) + 1;
  steps = rule == Rule::sgd && first && row.momentum == 0 ? -t : t;
  return {rule, t, first, gradient_factor(row, grad_scale, norm)};
}

inline constexpr int kShortest = 2;

// a·b + c
template <int kShort, typename A, typename V, typename C>
HDET_BOTH V sum(A a, V b, C c) {
#ifdef __CUDA_ARCH__
  if constexpr (kShort == kShortest && std::is_same_v<V, float>) return __fmaf_rn(a, b, c);
#endif
  return a * b + c;
}

template <int kShort, typename T>
HDET_BOTH T quotient(T a, T b) {
#ifdef __CUDA_ARCH__
  if constexpr (kShort == kShortest && sizeof(T) == 4) {
    float y;
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  }
  if constexpr (kShort && sizeof(T) == 4) return __fdividef(a, b);
#endif
  return a / b;
}

template <int kShort, typename T>
HDET_BOTH T root(T x) {
#ifdef __CUDA_ARCH__
  if constexpr (kShort == kShortest && sizeof(T) == 4) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  if constexpr (kShort && sizeof(T) == 4) {
    float y;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
#endif
#ifdef HDET_LANES
  if constexpr (std::is_same_v<T, Lanes>) return vsqrtq_f32(x);
  else
#endif
    return std::sqrt(x);
}

// The result of a push. Adam and Adagrad divide the direction by the root; the other rules do not use it.
template <typename T>
struct Push {
  T direction;
  T root;
};

template <typename T>
struct Sgd {
  // Whether the first state can be negative. All others are sums of squares.
  static constexpr bool kSignedFirst = true;
  static constexpr int kFewestStates = 0;
  static constexpr int kMostStates = 1;
  T factor, decay, momentum, take, lr;
  int states;  // the number of state buffers that this parameter uses: 1 with momentum, else 0
  bool first, nesterov;

  static HDET_BOTH Sgd derive(const Row& row, const Moment& now) {
    return {static_cast<T>(now.factor),
            static_cast<T>(row.weight_decay),
            static_cast<T>(row.momentum),
            static_cast<T>(1 - row.dampening),
            static_cast<T>(row.lr),
            row.momentum != 0 ? 1 : 0,
            now.first,
            row.nesterov != 0};
  }

  template <int kStates, int kShort, typename V>
  HDET_BOTH Push<V> push(V theta, V g, V* state) const {
    g *= factor;
    if constexpr (kStates == 1) {
      g = with_l2<kShort>(theta, g);
      state[0] = first ? g : sum<kShort>(take, g, momentum * state[0]);
      g = nesterov ? sum<kShort>(momentum, state[0], g) : state[0];
    }
    return {g, V{} + T(1)};
  }

  // Without a state, each replica can have a weight decay of its own.
  template <int kStates, int kShort, typename V>
  HDET_BOTH V move(V theta, const Push<V>& push) const {
    return sum<kShort>(-lr, kStates == 0 ? with_l2<kShort>(theta, push.direction) : push.direction, theta);
  }

  // A decay of 0 is skipped, because 0·θ is not 0 where θ is infinite.
  template <int kShort, typename V>
  HDET_BOTH V with_l2(V theta, V g) const { return decay != 0 ? sum<kShort>(decay, theta, g) : g; }
};

// Adam and AdamW: weight decay is added to the gradient (l2) or shrinks the parameter (keep).
template <typename T>
struct Adam {
  static constexpr bool kSignedFirst = true;
  static constexpr int kFewestStates = 2;
  static constexpr int kMostStates = 3;
  T keep, size, per_root, eps;  // the numbers of `move`, in 16 bytes for one load
  T factor, l2, take1, keep2, take2;
  int states;  // 2: first and second moment; 3 with amsgrad: the largest second moment too

  static HDET_BOTH Adam derive(const Row& row, const Moment& now) {
    using std::pow, std::sqrt;
    const bool decoupled = now.rule == Rule::adamw;
    return {static_cast<T>(decoupled ? 1 - row.lr * row.weight_decay : 1),
            static_cast<T>(row.lr / (1 - pow(row.beta1, now.t))),
            static_cast<T>(1 / sqrt(1 - pow(row.beta2, now.t))),
            static_cast<T>(row.eps),
            static_cast<T>(now.factor),
            static_cast<T>(decoupled ? 0 : row.weight_decay),
            static_cast<T>(1 - row.beta1),
            static_cast<T>(row.beta2),
            static_cast<T>(1 - row.beta2),
            row.amsgrad != 0 ? 3 : 2};
  }

  template <int kStates, int kShort, typename V>
  HDET_BOTH Push<V> push(V theta, V g, V* state) const {
    g *= factor;
    if (l2 != 0) g = sum<kShort>(l2, theta, g);
    state[0] = sum<kShort>(take1, g - state[0], state[0]);
    // In this order, as torch: g² alone overflows from 1.9e19 on.
    state[1] = sum<kShort>(take2 * g, g, keep2 * state[1]);
    V second = state[1];
    if constexpr (kStates == 3) {
      // NaN propagates, as in torch.maximum.
      second = (second > state[2]) | (second != second) ? second : state[2];
      state[2] = second;
    }
    return {state[0], root<kShort>(second)};
  }

  template <int kStates, int kShort, typename V>
  HDET_BOTH V move(V theta, const Push<V>& push) const {
    const V divisor = sum<kShort>(per_root, push.root, eps);
    return sum<kShort>(-size, quotient<kShort>(push.direction, divisor), theta * keep);
  }
};

template <typename T>
struct Adagrad {
  static constexpr bool kSignedFirst = false;
  static constexpr int kFewestStates = 1;
  static constexpr int kMostStates = 1;
  T factor, decay, size, eps;
  int states;

  static HDET_BOTH Adagrad derive(const Row& row, const Moment& now) {
    return {static_cast<T>(now.factor), static_cast<T>(row.weight_decay),
            static_cast<T>(row.lr / (1 + (now.t - 1) * row.lr_decay)), static_cast<T>(row.eps), 1};
  }

  template <int kStates, int kShort, typename V>
  HDET_BOTH Push<V> push(V theta, V g, V* state) const {
    g *= factor;
    if (decay != 0) g = sum<kShort>(decay, theta, g);
    state[0] = sum<kShort>(g, g, state[0]);
    return {g, root<kShort>(state[0])};
  }

  template <int kStates, int kShort, typename V>
  HDET_BOTH V move(V theta, const Push<V>& push) const {
    return sum<kShort>(-size, quotient<kShort>(push.direction, push.root + eps), theta);
  }
};

template <typename T>
struct Lion {
  static constexpr bool kSignedFirst = true;
  static constexpr int kFewestStates = 1;
  static constexpr int kMostStates = 1;
  T factor, keep, lr, keep1, take1, keep2, take2;
  int states;

  static HDET_BOTH Lion derive(const Row& row, const Moment& now) {
    return {static_cast<T>(now.factor),
            static_cast<T>(1 - row.lr * row.weight_decay),
            static_cast<T>(row.lr),
            static_cast<T>(row.beta1),
            static_cast<T>(1 - row.beta1),
            static_cast<T>(row.beta2),
            static_cast<T>(1 - row.beta2),
            1};
  }

  template <int kStates, int kShort, typename V>
  HDET_BOTH Push<V> push(V theta, V g, V* state) const {
    g *= factor;
    const V blend = sum<kShort>(take1, g, keep1 * state[0]);
    state[0] = sum<kShort>(take2, g, keep2 * state[0]);
    // sign(0) = 0, and NaN stays NaN.
    return {blend > 0 ? V{} + T(1) : blend < 0 ? V{} - T(1) : blend, V{} + T(1)};
  }

  template <int kStates, int kShort, typename V>
  HDET_BOTH V move(V theta, const Push<V>& push) const {
    return sum<kShort>(-lr, push.direction, theta * keep);
  }
};

// The two passes of Muon around the orthogonalisation of its update. With the state, the pass before it: the state is
// the momentum, and what is stored as the parameter is the update. Without, the pass after it: the gradient is the
// orthogonal update, by which the parameter moves.
template <typename T>
struct Muon {
  static constexpr int kFewestStates = 0;
  static constexpr int kMostStates = 1;
  static constexpr bool kSignedFirst = true;
  T factor, keep, lr, take;
  int states;
  bool nesterov;

  static HDET_BOTH Muon derive(const Row& row, const Moment& now) {
    return {static_cast<T>(now.factor),
            static_cast<T>(1 - row.lr * row.weight_decay),
            static_cast<T>(row.lr),
            static_cast<T>(1 - row.momentum),
            1,
            row.nesterov != 0};
  }

  template <int kStates, int kShort, typename V>
  HDET_BOTH Push<V> push(V theta, V g, V* state) const {
    g *= factor;
    if constexpr (kStates == 1) {
      state[0] = sum<kShort>(take, g - state[0], state[0]);
      g = nesterov ? sum<kShort>(take, g - state[0], state[0]) : state[0];
    }
    return {g, V{} + T(1)};
  }

  template <int kStates, int kShort, typename V>
  HDET_BOTH V move(V theta, const Push<V>& push) const {
    return kStates == 1 ? push.direction : sum<kShort>(-lr, push.direction, theta * keep);
  }
};

}  // namespace hdet
