// The step on the CPU: threads share the chunks. The rules run on float or double. Numbers that are stored in another
// type are converted in the loop of the rule. For replicas and stochastic rounding, which take several loops, they are
// converted in a small buffer that stays in the first-level cache.
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "companding_cpu.h"
#include "convert_cpu.h"
#include "step.h"

namespace hdet {
namespace {

// The fewest elements that torch gives to one thread.
constexpr int64_t kElementsPerThread = 32768;

template <typename T>
constexpr ScalarType kTypeOf = std::is_same_v<T, double> ? ScalarType::Double : ScalarType::Float;

// Steps parameters where they are stored, in one loop that converts them on the way. The rule is passed by value, so
// that the compiler knows that no store changes it, and vectorises.
template <int kStates, typename T, typename R, typename Params, typename Slope, typename State>
HDET_WIDEST void update_span(const R rule, const Params params, const Slope slope, const State first,
                             const State second, const State third, int64_t count) {
  for_each<typename Params::Format, T>(count, [&](auto type, int64_t i) {
    using V = decltype(type);
    V state[kMaxStates] = {};
    if constexpr (kStates > 0) state[0] = first.template read<V>(i);
    if constexpr (kStates > 1) state[1] = second.template read<V>(i);
    if constexpr (kStates > 2) state[2] = third.template read<V>(i);
    const V theta = params.template read<V>(i);
    const Push<V> push = rule.template push<kStates, false>(theta, slope.template read<V>(i), state);
    params.write(i, rule.template move<kStates, false>(theta, push));
    if constexpr (kStates > 0) first.write(i, state[0]);
    if constexpr (kStates > 1) second.write(i, state[1]);
    if constexpr (kStates > 2) third.write(i, state[2]);
  });
}

// Updates the states and stores the push. No parameter moves.
template <int kStates, typename T, typename R>
HDET_WIDEST void push_span(const R rule, const T* __restrict theta, const T* __restrict gradient, T* __restrict first,
                           T* __restrict second, T* __restrict third, T* __restrict direction, T* __restrict root,
                           int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    T state[kMaxStates] = {};
    if constexpr (kStates > 0) state[0] = first[i];
    if constexpr (kStates > 1) state[1] = second[i];
    if constexpr (kStates > 2) state[2] = third[i];
    const Push<T> push = rule.template push<kStates, false>(theta[i], gradient[i], state);
    direction[i] = push.direction;
    root[i] = push.root;
    if constexpr (kStates > 0) first[i] = state[0];
    if constexpr (kStates > 1) second[i] = state[1];
    if constexpr (kStates > 2) third[i] = state[2];
  }
}

template <int kStates, typename T, typename R>
HDET_WIDEST void move_span(const R rule, T* __restrict theta, const T* __restrict direction, const T* __restrict root,
                           int64_t count) {
  for (int64_t i = 0; i < count; ++i) theta[i] = rule.template move<kStates, false>(theta[i], {direction[i], root[i]});
}

// Calls run with the parameters of a replica from element `at` on.
template <typename T, typename Run>
void with_params(const Work& work, int64_t row, int64_t at, Run&& run) {
  const int64_t from = row * work.row_size + at;
  const auto narrow = [&]<typename S>() {
    if (work.master == nullptr) return run(plain<S>(work.param, from));
    auto* numbers = static_cast<uint16_t*>(work.param);
    if constexpr (std::is_same_v<S, BFloat16>) {
      if (work.split_master) return run(SplitMastered{numbers, static_cast<int16_t*>(work.master)}.from(from));
    }
    run(Mastered<S>{numbers, static_cast<float*>(work.master)}.from(from));
  };
  if (work.param_type == kTypeOf<T>) return run(plain<T>(work.param, from));
  if constexpr (std::is_same_v<T, float>) {
    if (work.param_type == ScalarType::BFloat16) return narrow.template operator()<BFloat16>();
    narrow.template operator()<Half>();
  }
}

// Whether parameters of type S are stepped in one loop. On x86-64, GCC vectorises the conversions of float16 only in
// loops of their own.
template <typename S>
constexpr bool kInOneLoop = !std::is_same_v<S, Half> || Stored<Half>::kLanes;

// Steps elements at .. at + count of the flat buffers, at most kBlock of them, where they are stored. `own` has the
// numbers of the slot.
template <int kStates, typename T, typename R>
void update_in_place(const Work& work, const Prepared<R>& own, const Gradient& gradient, int64_t start, int64_t at,
                     int64_t count) {
  const auto* address = reinterpret_cast<const void*>(gradient.address);
  with_params<T>(work, 0, at, [&]<typename Params>(const Params params) {
    if constexpr (kInOneLoop<typename Params::Number>) {
      const auto with_slope = [&](const auto slope) {
        const auto with_states = [&]<typename S>() {
          const auto state = [&](int k) { return kStates > k ? plain<S>(work.states[k], at) : Plain<S>{}; };
          update_span<kStates, T>(own.rule, params, slope, state(0), state(1), state(2), count);
        };
        if constexpr (std::is_same_v<T, float> && kStates > 0 && !std::is_same_v<typename Params::Number, Half>) {
          if (work.state_type == ScalarType::BFloat16) return with_states.template operator()<BFloat16>();
        }
        with_states.template operator()<T>();
      };
      if constexpr (!std::is_same_v<typename Params::Number, T>) {
        if (gradient.type == gradient_type<typename Params::Number>)
          return with_slope(plain<typename Params::Number>(address, start));
      }
      T buffer[kBlock];
      with_slope(plain<T>(widened(address, gradient.type, start, count, buffer), 0));
    }
  });
}

// Steps elements at .. at + count of the flat buffers, at most kBlock of them, in every replica, through buffers in the
// type of the arithmetic. `prepared` has the numbers of the slot. The scales of states that are codes are those from number
// `scale` on.
template <int kStates, typename T, typename R>
void update_block(const Work& work, const Prepared<R>* prepared, const Gradient& gradient, int64_t start, int64_t at,
                  int64_t count, int64_t scale) {
  T buffers[4 + kMaxStates][kBlock];
  T *direction = buffers[2], *root = buffers[3];
  const T* slope = widened(reinterpret_cast<const void*>(gradient.address), gradient.type, start, count, buffers[0]);
  const bool plain_states = work.state_type == kTypeOf<T>;
  const bool coded = work.scales[0] != nullptr;
  T* states[kMaxStates] = {};
  for (int k = 0; k < kStates; ++k) {
    states[k] = plain_states ? static_cast<T*>(work.states[k]) + at : buffers[4 + k];
    if (!plain_states && !coded) read_span(plain<BFloat16>(work.states[k], at), count, states[k]);
  }
  if constexpr (std::is_same_v<T, float>) {
    for (int k = 0; k < std::min(kStates, kMaxCoded) && coded; ++k)
      load_codes(work.states[k], work.scales[k] + scale, R::kSignedFirst && k == 0, at, count, states[k]);
  }
  for (int64_t row = 0; row < work.rows; ++row) {
    const Prepared<R>& own = prepared[row * work.slot_count];
    with_params<T>(work, row, at, [&]<typename Params>(const Params params) {
      constexpr bool kInPlace = std::is_same_v<Params, Plain<T>>;
      T* theta = buffers[1];
      if constexpr (kInPlace) theta = params.numbers;
      if constexpr (!kInPlace) read_span(params, count, theta);
      if (row == 0)
        push_span<kStates>(own.rule, theta, slope, states[0], states[1], states[2], direction, root, count);
      move_span<kStates>(own.rule, theta, direction, root, count);
      if constexpr (std::is_same_v<Params, Plain<BFloat16>>) {
        if (work.stochastic_rounding)
          return write_stochastically(theta, count, own.noise, kParamStream, at, params.numbers);
      }
      if constexpr (!kInPlace) write_span(theta, count, params);
    });
  }
  if constexpr (std::is_same_v<T, float>) {
    if (coded) {
      CodeBits bits;
      bits.draw(prepared[0].noise, at, count);
      for (int k = 0; k < std::min(kStates, kMaxCoded); ++k)
        store_codes(states[k], work.states[k], work.scales[k] + scale, R::kSignedFirst && k == 0, at, count, bits.data());
    }
  }
  for (int k = 0; k < kStates && !plain_states && !coded; ++k) {
    const auto stored = plain<BFloat16>(work.states[k], at);
    if (work.stochastic_rounding) {
      write_stochastically(states[k], count, prepared[0].noise, kStateStream + k, at, stored.numbers);
    } else {
      write_span(states[k], count, stored);
    }
  }
}

template <int kStates, typename T, typename R>
void update(const Work& work, const Prepared<R>* prepared, const Gradient& gradient, int64_t start, int64_t at,
            int64_t count, int64_t scale) {
  const bool in_one_loop = kInOneLoop<Half> || work.param_type != ScalarType::Half;
  if (work.rows == 1 && !work.stochastic_rounding && work.scales[0] == nullptr && in_one_loop) {
    update_in_place<kStates, T>(work, *prepared, gradient, start, at, count);
  } else {
    update_block<kStates, T>(work, prepared, gradient, start, at, count, scale);
  }
}

template <typename T, typename R>
void step(const Work& work) {
  if (work.found_inf != nullptr && *work.found_inf > 0) return;
  auto* prepared = static_cast<Prepared<R>*>(work.scratch);
  for (int64_t i = 0; i < work.slot_count; ++i) {
    if (work.gradients[i].address == kNoGradient) continue;
    const float before = work.steps[i];
    for (int64_t row = 0; row < work.rows; ++row) {
      work.steps[i] = before;
      prepared[row * work.slot_count + i] = prepare<R>(work, row, i, work.steps[i]);
    }
  }
  int64_t elements = 0;
  for (int64_t i = 0; i < work.slot_count; ++i) elements += work.rows * work.slots[i].count;
  const int64_t chunk = std::max<int64_t>(elements / std::max<int64_t>(work.chunk_count, 1), 1);
  const int64_t chunks_per_thread = std::max<int64_t>(kElementsPerThread / chunk, 1);
  torch::stable::parallel_for(0, work.chunk_count, chunks_per_thread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Chunk& chunk = work.chunks[i];
      const Gradient& gradient = work.gradients[chunk.slot];
      if (gradient.address == kNoGradient) continue;
      const Prepared<R>* own = prepared + chunk.slot;
      for (int64_t done = 0; done < chunk.count; done += kBlock) {
        const int64_t count = std::min(kBlock, chunk.count - done);
        const int64_t start = chunk.start + done, at = chunk.offset + done;
        const int64_t scale = kBlocksPerChunk * i + done / kStateBlock;
        if (uses_most_states(own->rule, work)) {
          update<R::kMostStates, T>(work, own, gradient, start, at, count, scale);
        } else {
          update<R::kFewestStates, T>(work, own, gradient, start, at, count, scale);
        }
      }
    }
  });
}

void run_step(const Work& work) {
  if (work.param_type == ScalarType::Double) {
    with_rule<double>(work, [&]<typename R>() { step<double, R>(work); });
  } else {
    with_rule<float>(work, [&]<typename R>() { step<float, R>(work); });
  }
}

void step_cpu(int64_t rule, Tensor param, std::optional<Tensor> master, std::optional<Tensor> state0,
              std::optional<Tensor> state1, std::optional<Tensor> state2, std::optional<Tensor> scales0,
              std::optional<Tensor> scales1, Tensor steps, Tensor table, Tensor slots, Tensor chunks, Tensor gradients,
              Tensor scratch, std::optional<Tensor> grad_scale, std::optional<Tensor> norm,
              std::optional<Tensor> found_inf, bool stochastic_rounding, int64_t rows) {
  run_step(checked_work(rule, param, master, {state0, state1, state2}, {scales0, scales1}, steps, table, slots, chunks,
                        gradients, scratch, grad_scale, norm, found_inf, stochastic_rounding, rows));
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CPU, m) { m.impl("step_", TORCH_BOX(&hdet::step_cpu)); }
