// The step on the CPU: threads share the chunks. The rules run on float or double. Numbers that are stored in another
// type are converted in a small buffer that stays in the first-level cache.
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

// The rule is passed by value and the buffers as restricted arguments, so that the compiler knows that no store changes
// the rule or another buffer, and vectorises. With kShared the push is stored in `direction` and `root` and no
// parameter moves.
template <int kStates, bool kShared, typename T, typename R>
HDET_WIDEST void update_span(const R rule, T* __restrict theta, const T* __restrict gradient, T* __restrict first,
                 T* __restrict second, T* __restrict third, T* __restrict direction, T* __restrict root,
                 int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    T state[kMaxStates] = {};
    if constexpr (kStates > 0) state[0] = first[i];
    if constexpr (kStates > 1) state[1] = second[i];
    if constexpr (kStates > 2) state[2] = third[i];
    const Push<T> push = rule.template push<kStates, false>(theta[i], gradient[i], state);
    if constexpr (kShared) {
      direction[i] = push.direction;
      root[i] = push.root;
    } else {
      theta[i] = rule.template move<kStates, false>(theta[i], push);
    }
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

// The parameters of one replica.
struct Replica {
  void* param;
  float* master;  // may be null
};

inline Replica replica_of(const Work& work, int64_t row) {
  const int64_t size = work.param_type == ScalarType::Double ? 8 : work.param_type == ScalarType::Float ? 4 : 2;
  const int64_t from = row * work.row_size;
  return {static_cast<char*>(work.param) + from * size, work.master == nullptr ? nullptr : work.master + from};
}

// Steps elements at .. at + count of the flat buffers, at most kBlock of them, in every replica. `prepared` has the
// numbers of the slot. The scales of states that are codes are those from number `scale` on.
template <int kStates, typename T, typename R>
void update_block(const Work& work, const Prepared<R>* prepared, const Gradient& gradient, int64_t start, int64_t at,
                  int64_t count, int64_t scale) {
  T buffers[4 + kMaxStates][kBlock];
  T *direction = buffers[2], *root = buffers[3];
  const T* slope = widened(reinterpret_cast<const void*>(gradient.address), gradient.type, start, count, buffers[0]);
  const bool plain = work.param_type == kTypeOf<T>, plain_states = work.state_type == kTypeOf<T>;
  T* states[kMaxStates] = {};
  for (int k = 0; k < kStates; ++k) {
    states[k] = plain_states ? static_cast<T*>(work.states[k]) + at : buffers[4 + k];
    if (plain_states) continue;
    if constexpr (std::is_same_v<T, float>) {
      if (work.scales[k] != nullptr) {
        load_codes(work.states[k], work.scales[k] + scale, R::kSignedFirst && k == 0, at, count, states[k]);
        continue;
      }
    }
    load(work.states[k], work.state_type, at, count, states[k]);
  }
  const auto noise_of = [&](const Prepared<R>& own) { return work.stochastic_rounding ? &own.noise : nullptr; };
  for (int64_t row = 0; row < work.rows; ++row) {
    const Replica replica = replica_of(work, row);
    const Prepared<R>& own = prepared[row * work.slot_count];
    T* theta = plain ? static_cast<T*>(replica.param) + at : buffers[1];
    if (!plain) {
      load(replica.param, work.param_type, at, count, theta);
      if (replica.master != nullptr)
        prefer_master(replica.master + at, replica.param, work.param_type, at, count, theta);
    }
    if (work.rows == 1) {
      update_span<kStates, false>(own.rule, theta, slope, states[0], states[1], states[2], direction, root, count);
    } else {
      if (row == 0)
        update_span<kStates, true>(own.rule, theta, slope, states[0], states[1], states[2], direction, root, count);
      move_span<kStates>(own.rule, theta, direction, root, count);
    }
    if (!plain) {
      if (replica.master != nullptr) std::copy_n(theta, count, replica.master + at);
      store(theta, replica.param, work.param_type, at, count, noise_of(own), kParamStream);
    }
  }
  for (int k = 0; k < kStates && !plain_states; ++k) {
    if constexpr (std::is_same_v<T, float>) {
      if (work.scales[k] != nullptr) {
        store_codes(states[k], work.states[k], work.scales[k] + scale, R::kSignedFirst && k == 0, at, count,
                    prepared[0].noise, kStateStream + k);
        continue;
      }
    }
    store(states[k], work.states[k], work.state_type, at, count, noise_of(prepared[0]), kStateStream + k);
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
          update_block<R::kMostStates, T>(work, own, gradient, start, at, count, scale);
        } else {
          update_block<R::kFewestStates, T>(work, own, gradient, start, at, count, scale);
        }
      }
    }
  });
}

void step_cpu(int64_t rule, Tensor param, std::optional<Tensor> master, std::optional<Tensor> state0,
              std::optional<Tensor> state1, std::optional<Tensor> state2, std::optional<Tensor> scales0,
              std::optional<Tensor> scales1, std::optional<Tensor> scales2, Tensor steps, Tensor table, Tensor slots,
              Tensor chunks, Tensor gradients, Tensor scratch, std::optional<Tensor> grad_scale,
              std::optional<Tensor> norm, std::optional<Tensor> found_inf, bool stochastic_rounding, int64_t rows) {
  const Work work = checked_work(rule, param, master, {state0, state1, state2}, {scales0, scales1, scales2}, steps,
                                 table, slots, chunks, gradients, scratch, grad_scale, norm, found_inf,
                                 stochastic_rounding, rows);
  if (work.param_type == ScalarType::Double) {
    with_rule<double>(work, [&]<typename R>() { step<double, R>(work); });
  } else {
    with_rule<float>(work, [&]<typename R>() { step<float, R>(work); });
  }
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CPU, m) { m.impl("step_", TORCH_BOX(&hdet::step_cpu)); }
