// The step on the CPU: threads share the chunks.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "step.h"

namespace hdet {
namespace {

// As many elements as torch gives at least to one thread.
constexpr int64_t kChunksPerThread = 32768 / kChunk;

// The rule comes by value and the buffers as restricted arguments: so the compiler knows that no store changes the
// rule or another buffer, and vectorises.
template <int kStates, typename S, typename R>
void update_span(const R rule, S* __restrict theta, const S* __restrict gradient, S* __restrict first,
                 S* __restrict second, S* __restrict third, int64_t count) {
  using T = Arithmetic<S>;
  for (int64_t i = 0; i < count; ++i) {
    T value = static_cast<T>(theta[i]);
    T state[kMaxStates] = {};
    if constexpr (kStates > 0) state[0] = static_cast<T>(first[i]);
    if constexpr (kStates > 1) state[1] = static_cast<T>(second[i]);
    if constexpr (kStates > 2) state[2] = static_cast<T>(third[i]);
    rule.template update<kStates>(value, static_cast<T>(gradient[i]), state);
    theta[i] = static_cast<S>(value);
    if constexpr (kStates > 0) first[i] = static_cast<S>(state[0]);
    if constexpr (kStates > 1) second[i] = static_cast<S>(state[1]);
    if constexpr (kStates > 2) third[i] = static_cast<S>(state[2]);
  }
}

template <typename S, typename R>
void step(const Work& work) {
  if (work.found_inf != nullptr && *work.found_inf > 0) return;
  const double multiplier = work.multiplier == nullptr ? 1.0 : *work.multiplier;
  std::vector<R> rules(work.slot_count);
  for (int64_t i = 0; i < work.slot_count; ++i) {
    if (work.addresses[i] == kNoGradient) continue;
    const Row& row = work.table[work.slots[i].row];
    if (R::counts(row)) work.steps[i] += 1;
    rules[i] = R::derive(row, work.steps[i], multiplier);
  }
  torch::stable::parallel_for(0, work.chunk_count, kChunksPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Chunk chunk = work.chunks[i];
      const int64_t address = work.addresses[chunk.slot];
      if (address == kNoGradient) continue;
      const Slot& slot = work.slots[chunk.slot];
      const R& rule = rules[chunk.slot];
      const int64_t start = chunk.index * kChunk;
      const int64_t count = std::min(kChunk, slot.count - start);
      const int64_t at = slot.offset + start;
      S* states[kMaxStates];
      for (int k = 0; k < kMaxStates; ++k)
        states[k] = k < work.state_count ? static_cast<S*>(work.states[k]) + at : nullptr;
      S* theta = static_cast<S*>(work.param) + at;
      const S* gradient = reinterpret_cast<const S*>(address) + start;
      if (uses_most_states(rule, work)) {
        update_span<R::kMostStates>(rule, theta, gradient, states[0], states[1], states[2], count);
      } else {
        update_span<R::kFewestStates>(rule, theta, gradient, states[0], states[1], states[2], count);
      }
    }
  });
}

void step_cpu(int64_t rule, Tensor param, std::optional<Tensor> state0, std::optional<Tensor> state1,
              std::optional<Tensor> state2, Tensor steps, Tensor table, Tensor slots, Tensor chunks, Tensor addresses,
              std::optional<Tensor> multiplier, std::optional<Tensor> found_inf) {
  const Work work =
      checked_work(param, {state0, state1, state2}, steps, table, slots, chunks, addresses, multiplier, found_inf);
  with_rule_and_type(rule, param.scalar_type(), work, [&]<typename S, typename R>() { step<S, R>(work); });
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CPU, m) { m.impl("step_", TORCH_BOX(&hdet::step_cpu)); }
