// The step on CUDA: a small launch that advances the step counts and derives each parameter's rule, then one block a
// chunk. Nothing is read on the host, so a captured graph sees new hyperparameters at every replay.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include "step.h"

namespace hdet {
namespace {

constexpr int kThreads = 512;
constexpr int kAdvanceThreads = 128;
constexpr int kAccessBytes = 16;

// As many elements as one 16-byte access moves.
template <typename S>
struct alignas(kAccessBytes) Pack {
  static constexpr int kWidth = kAccessBytes / sizeof(S);
  S values[kWidth];
};

__device__ __forceinline__ bool skipped(const Work& work) { return work.found_inf != nullptr && *work.found_inf > 0; }

template <typename R>
__global__ void __launch_bounds__(kAdvanceThreads) advance(const Work work, R* __restrict__ rules) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kAdvanceThreads + threadIdx.x;
  if (i >= work.slot_count || work.addresses[i] == kNoGradient || skipped(work)) return;
  const Row& row = work.table[work.slots[i].row];
  float t = work.steps[i];
  if (R::counts(row)) work.steps[i] = t += 1;
  rules[i] = R::derive(row, t, work.multiplier == nullptr ? 1.0 : *work.multiplier);
}

template <int kStates, typename S, typename R>
__device__ __forceinline__ void update_one(const R& rule, S* theta, S gradient, S* const (&states)[kMaxStates],
                                           int64_t i) {
  using T = Arithmetic<S>;
  T value = static_cast<T>(theta[i]);
  T state[kMaxStates] = {};
#pragma unroll
  for (int k = 0; k < kStates; ++k) state[k] = static_cast<T>(states[k][i]);
  rule.template update<kStates>(value, static_cast<T>(gradient), state);
  theta[i] = static_cast<S>(value);
#pragma unroll
  for (int k = 0; k < kStates; ++k) states[k][i] = static_cast<S>(state[k]);
}

// A whole chunk at aligned addresses: every thread has all its loads in flight before it computes.
template <int kStates, typename S, typename R>
__device__ __forceinline__ void update_whole(const R& rule, S* theta, const S* gradient,
                                             S* const (&states)[kMaxStates]) {
  using T = Arithmetic<S>;
  using P = Pack<S>;
  constexpr int kPacks = kChunk / (kThreads * P::kWidth);
  static_assert(kPacks * kThreads * P::kWidth == kChunk, "a chunk is a whole number of accesses of every thread");
  P value[kPacks], slope[kPacks], state[kStates > 0 ? kStates : 1][kPacks];
#pragma unroll
  for (int n = 0; n < kPacks; ++n) {
    const int at = n * kThreads + threadIdx.x;
    value[n] = reinterpret_cast<const P*>(theta)[at];
    slope[n] = reinterpret_cast<const P*>(gradient)[at];
#pragma unroll
    for (int k = 0; k < kStates; ++k) state[k][n] = reinterpret_cast<const P*>(states[k])[at];
  }
#pragma unroll
  for (int n = 0; n < kPacks; ++n) {
#pragma unroll
    for (int j = 0; j < P::kWidth; ++j) {
      T x = static_cast<T>(value[n].values[j]);
      T own[kMaxStates] = {};
#pragma unroll
      for (int k = 0; k < kStates; ++k) own[k] = static_cast<T>(state[k][n].values[j]);
      rule.template update<kStates>(x, static_cast<T>(slope[n].values[j]), own);
      value[n].values[j] = static_cast<S>(x);
#pragma unroll
      for (int k = 0; k < kStates; ++k) state[k][n].values[j] = static_cast<S>(own[k]);
    }
    const int at = n * kThreads + threadIdx.x;
    reinterpret_cast<P*>(theta)[at] = value[n];
#pragma unroll
    for (int k = 0; k < kStates; ++k) reinterpret_cast<P*>(states[k])[at] = state[k][n];
  }
}

template <int kStates, typename S, typename R>
__device__ __forceinline__ void update_chunk(const R& rule, S* theta, const S* gradient,
                                             S* const (&states)[kMaxStates], int64_t count) {
  uintptr_t together = reinterpret_cast<uintptr_t>(theta) | reinterpret_cast<uintptr_t>(gradient);
#pragma unroll
  for (int k = 0; k < kStates; ++k) together |= reinterpret_cast<uintptr_t>(states[k]);
  if (count == kChunk && together % kAccessBytes == 0) {
    update_whole<kStates>(rule, theta, gradient, states);
  } else {
    for (int64_t i = threadIdx.x; i < count; i += kThreads) update_one<kStates>(rule, theta, gradient[i], states, i);
  }
}

template <typename S, typename R>
__global__ void __launch_bounds__(kThreads) walk(const Work work, const R* __restrict__ rules) {
  const Chunk chunk = work.chunks[blockIdx.x];
  const int64_t address = work.addresses[chunk.slot];
  if (address == kNoGradient || skipped(work)) return;
  const Slot slot = work.slots[chunk.slot];
  const R rule = rules[chunk.slot];
  const int64_t start = chunk.index * kChunk;
  const int64_t left = slot.count - start;
  const int64_t count = left < kChunk ? left : kChunk;
  const int64_t at = slot.offset + start;
  S* states[kMaxStates];
#pragma unroll
  for (int k = 0; k < kMaxStates; ++k) states[k] = k < work.state_count ? static_cast<S*>(work.states[k]) + at : nullptr;
  S* theta = static_cast<S*>(work.param) + at;
  const S* gradient = reinterpret_cast<const S*>(address) + start;
  if (uses_most_states(rule, work)) {
    update_chunk<R::kMostStates>(rule, theta, gradient, states, count);
  } else {
    update_chunk<R::kFewestStates>(rule, theta, gradient, states, count);
  }
}

template <typename S, typename R>
void step(const Work& work, const Tensor& param) {
  if (work.slot_count == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(param.get_device_index());
  void* current = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(param.get_device_index(), &current));
  const auto stream = static_cast<cudaStream_t>(current);
  const Tensor scratch = torch::stable::new_empty(
      param, {work.slot_count * static_cast<int64_t>(sizeof(R))}, std::make_optional(ScalarType::Byte));
  R* rules = static_cast<R*>(scratch.data_ptr());
  const auto blocks = static_cast<unsigned>((work.slot_count + kAdvanceThreads - 1) / kAdvanceThreads);
  advance<R><<<blocks, kAdvanceThreads, 0, stream>>>(work, rules);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (work.chunk_count == 0) return;
  walk<S, R><<<static_cast<unsigned>(work.chunk_count), kThreads, 0, stream>>>(work, rules);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void step_cuda(int64_t rule, Tensor param, std::optional<Tensor> state0, std::optional<Tensor> state1,
               std::optional<Tensor> state2, Tensor steps, Tensor table, Tensor slots, Tensor chunks, Tensor addresses,
               std::optional<Tensor> multiplier, std::optional<Tensor> found_inf) {
  const Work work =
      checked_work(param, {state0, state1, state2}, steps, table, slots, chunks, addresses, multiplier, found_inf);
  with_rule_and_type(rule, param.scalar_type(), work, [&]<typename S, typename R>() { step<S, R>(work, param); });
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CUDA, m) { m.impl("step_", TORCH_BOX(&hdet::step_cuda)); }
