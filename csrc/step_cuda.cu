// The step on CUDA: a small launch that advances the step counts and derives each parameter's rule, then one block a
// chunk. Nothing is read on the host, so a captured graph sees new hyperparameters at every replay.
#include <torch/csrc/stable/ops.h>

#include "launch_cuda.h"
#include "step.h"

namespace hdet {
namespace {

// Launch shapes, chosen on an H200 by the time of AdamW on the models of bench/test_optim_step.py (share of the bandwidth
// of a copy of 1 GiB; gpt2-124M / llama-1.2B / recsys-mix, and many-small-10k in ms), for chunks of 2048:
//   float32, packs of 4:  128 threads 97 98 98 % 0.055 ms, 256: 98 99 99 % 0.062 ms, 512: 92 95 93 % 0.111 ms
//   bf16, packs of 8:     128 threads 95 100 98 %,         256: 92 97 92 %,          512: 69 71 69 %
// that is, a thread moves two packs of each buffer, one after the other. With both in flight at once, 90 %: fewer blocks
// fit. Chunks of 4096 need twice the threads for the same share (and take 0.11 ms for many-small-10k). Streaming loads
// and stores, and overlapping the two launches, changed less than one percent.
constexpr int kPacksPerThread = 2;
constexpr int kTypicalChunk = 2048;
constexpr int kAdvanceThreads = 128;

// How numbers are stored: parameters as P, states as S, and with a float32 master or without.
template <typename P, typename S, bool kMaster>
struct Storage {
  using Param = P;
  using State = S;
  using T = std::conditional_t<std::is_same_v<P, double>, double, float>;
  static constexpr bool kHasMaster = kMaster;
  // Elements of a pack: the widest of the buffers is moved 16 bytes at a time.
  static constexpr int kWidest = kMaster || sizeof(S) > sizeof(P) ? (sizeof(S) > 4 ? sizeof(S) : 4) : sizeof(P);
  static constexpr int kWidth = 16 / kWidest;
  static constexpr int kThreads = kTypicalChunk / (kWidth * kPacksPerThread);
};

__device__ __forceinline__ bool skipped(const Work& work) { return work.found_inf != nullptr && *work.found_inf > 0; }

template <typename R>
__global__ void __launch_bounds__(kAdvanceThreads) advance(const Work work, Prepared<R>* __restrict__ prepared) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kAdvanceThreads + threadIdx.x;
  if (i >= work.slot_count) return;
  const Row row = work.table[work.slots[i].row];
  float steps = work.steps[i];
  const Moment now = advanced(work.rule, row, steps, work.grad_scale, work.norm);
  prepared[i] = {R::derive(row, now), Noise::of(row.seed, now.t)};
  if (work.gradients[i].address != kNoGradient && !skipped(work)) work.steps[i] = steps;
}

// The flat buffers from one chunk on.
template <typename Store>
struct Buffers {
  typename Store::Param* param;
  float* master;
  typename Store::State* states[kMaxStates];
};

// What one thread moves at a time: kWidth elements of every buffer.
template <int kStates, typename Store, typename R, int kWidth>
struct Elements {
  using T = typename Store::T;
  using P = typename Store::Param;
  using S = typename Store::State;
  Pack<P, kWidth> param;
  Pack<float, Store::kHasMaster ? kWidth : 1> master;
  Pack<S, kWidth> states[kStates > 0 ? kStates : 1];
  GradientPack<T, kWidth> gradient;

  __device__ __forceinline__ void load(const Buffers<Store>& from, int64_t address, GradientType type, int64_t start,
                                       int64_t at) {
    gradient.load(address, type, start + at);
    param = fetch<decltype(param)>(from.param + at);
    if constexpr (Store::kHasMaster) master = fetch<decltype(master)>(from.master + at);
#pragma unroll
    for (int k = 0; k < kStates; ++k) states[k] = fetch<Pack<S, kWidth>>(from.states[k] + at);
  }

  __device__ __forceinline__ void update(const Prepared<R>& own, GradientType type, bool stochastic,
                                         int64_t position) {
    constexpr bool kShort = sizeof(P) == 2 && !Store::kHasMaster;
    T slope[kWidth], theta[kWidth], state[kStates > 0 ? kStates : 1][kWidth];
    gradient.widen(type, slope);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if constexpr (Store::kHasMaster) {
        theta[j] = in_full(param.values[j], master.values[j]);
      } else {
        theta[j] = static_cast<T>(param.values[j]);
      }
      T own_state[kMaxStates] = {};
#pragma unroll
      for (int k = 0; k < kStates; ++k) own_state[k] = static_cast<T>(states[k].values[j]);
      own.rule.template update<kStates, kShort>(theta[j], slope[j], own_state);
#pragma unroll
      for (int k = 0; k < kStates; ++k) state[k][j] = own_state[k];
      if constexpr (Store::kHasMaster) master.values[j] = theta[j];
    }
    round(theta, param.values, stochastic, own.noise, kParamStream, position);
#pragma unroll
    for (int k = 0; k < kStates; ++k)
      round(state[k], states[k].values, stochastic, own.noise, kStateStream + k, position);
  }

  __device__ __forceinline__ void store(const Buffers<Store>& to, int64_t at) const {
    put(to.param + at, param);
    if constexpr (Store::kHasMaster) put(to.master + at, master);
#pragma unroll
    for (int k = 0; k < kStates; ++k) put(to.states[k] + at, states[k]);
  }

 private:
  // One choice for all elements of the pack.
  template <typename Stored>
  static __device__ __forceinline__ void round(const T (&from)[kWidth], Stored (&to)[kWidth], bool stochastic,
                                               const Noise& noise, uint32_t stream, int64_t position) {
    if constexpr (std::is_same_v<Stored, BFloat16>) {
      if (stochastic) {
        uint32_t word = 0;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          // A pack starts at an even position: two neighbours share a word.
          if (j % 2 == 0) word = noise.word(stream, position + j);
          const uint32_t half = kWidth == 1 ? Noise::half(word, position) : j % 2 == 0 ? word & 0xffffu : word >> 16;
          to[j] = round_stochastically(from[j], half);
        }
        return;
      }
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) to[j] = static_cast<Stored>(from[j]);
  }
};

// Whether everything lies at addresses that packs can be moved from and to.
template <int kStates, typename Store>
__device__ __forceinline__ bool aligned(const Buffers<Store>& buffers, const Chunk& chunk, const Gradient& gradient) {
  using T = typename Store::T;
  constexpr int kWidth = Store::kWidth;
  uintptr_t together = reinterpret_cast<uintptr_t>(buffers.param) % (kWidth * sizeof(typename Store::Param));
  if constexpr (Store::kHasMaster) together |= reinterpret_cast<uintptr_t>(buffers.master) % 16;
#pragma unroll
  for (int k = 0; k < kStates; ++k)
    together |= reinterpret_cast<uintptr_t>(buffers.states[k]) % (kWidth * sizeof(typename Store::State));
  const int64_t size = GradientPack<T, 1>::alignment(gradient.type);
  together |= static_cast<uintptr_t>(gradient.address + chunk.start * size) %
              GradientPack<T, kWidth>::alignment(gradient.type);
  return together == 0 && chunk.offset % kWidth == 0;
}

template <int kStates, typename Store, typename R>
__device__ __forceinline__ void update_chunk(const Buffers<Store>& buffers, const Prepared<R>& own, const Chunk& chunk,
                                             const Gradient& gradient, bool stochastic) {
  using T = typename Store::T;
  constexpr int kWidth = Store::kWidth;
  using Packed = Elements<kStates, Store, R, kWidth>;
  using Single = Elements<kStates, Store, R, 1>;
  int64_t done = 0;
  if (aligned<kStates>(buffers, chunk, gradient)) {
    const int packs = static_cast<int>(chunk.count / kWidth);
    for (int pack = threadIdx.x; pack < packs; pack += Store::kThreads) {
      Packed elements;
      elements.load(buffers, gradient.address, gradient.type, chunk.start, pack * kWidth);
      elements.update(own, gradient.type, stochastic, chunk.offset + pack * kWidth);
      elements.store(buffers, pack * kWidth);
    }
    done = static_cast<int64_t>(packs) * kWidth;
  }
  for (int64_t at = done + threadIdx.x; at < chunk.count; at += Store::kThreads) {
    Single element;
    element.load(buffers, gradient.address, gradient.type, chunk.start, at);
    element.update(own, gradient.type, stochastic, chunk.offset + at);
    element.store(buffers, at);
  }
}

template <typename Store, typename R>
__global__ void __launch_bounds__(Store::kThreads) walk(const Work work, const Prepared<R>* __restrict__ prepared) {
  const Chunk chunk = work.chunks[blockIdx.x];
  const Gradient gradient = work.gradients[chunk.slot];
  const Prepared<R> own = prepared[chunk.slot];
  if (gradient.address == kNoGradient || skipped(work)) return;
  Buffers<Store> buffers{static_cast<typename Store::Param*>(work.param) + chunk.offset,
                         Store::kHasMaster ? work.master + chunk.offset : nullptr,
                         {}};
#pragma unroll
  for (int k = 0; k < kMaxStates; ++k)
    if (k < work.state_count) buffers.states[k] = static_cast<typename Store::State*>(work.states[k]) + chunk.offset;
  if (uses_most_states(own.rule, work)) {
    update_chunk<R::kMostStates>(buffers, own, chunk, gradient, work.stochastic_rounding);
  } else {
    update_chunk<R::kFewestStates>(buffers, own, chunk, gradient, work.stochastic_rounding);
  }
}

template <typename Store>
void step(const Work& work, const Tensor& param) {
  if (work.slot_count == 0) return;
  const Launch launch(param);
  with_rule<typename Store::T>(work, [&]<typename R>() {
    auto* prepared = static_cast<Prepared<R>*>(work.scratch);
    const auto blocks = static_cast<unsigned>((work.slot_count + kAdvanceThreads - 1) / kAdvanceThreads);
    advance<R><<<blocks, kAdvanceThreads, 0, launch.stream()>>>(work, prepared);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    if (work.chunk_count == 0) return;
    walk<Store, R><<<static_cast<unsigned>(work.chunk_count), Store::kThreads, 0, launch.stream()>>>(work, prepared);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

template <typename P, bool kMaster>
void with_state(const Work& work, const Tensor& param) {
  if constexpr (!std::is_same_v<P, Half>) {
    if (work.state_type == ScalarType::BFloat16) return step<Storage<P, BFloat16, kMaster>>(work, param);
  }
  step<Storage<P, float, kMaster>>(work, param);
}

template <typename P>
void with_master(const Work& work, const Tensor& param) {
  if (work.master != nullptr) return with_state<P, true>(work, param);
  with_state<P, false>(work, param);
}

void step_cuda(int64_t rule, Tensor param, std::optional<Tensor> master, std::optional<Tensor> state0,
               std::optional<Tensor> state1, std::optional<Tensor> state2, Tensor steps, Tensor table, Tensor slots,
               Tensor chunks, Tensor gradients, Tensor scratch, std::optional<Tensor> grad_scale,
               std::optional<Tensor> norm, std::optional<Tensor> found_inf, bool stochastic_rounding) {
  const Work work = checked_work(rule, param, master, {state0, state1, state2}, steps, table, slots, chunks, gradients,
                                 scratch, grad_scale, norm, found_inf, stochastic_rounding);
  switch (work.param_type) {
    case ScalarType::Double:
      return step<Storage<double, double, false>>(work, param);
    case ScalarType::BFloat16:
      return with_master<BFloat16>(work, param);
    case ScalarType::Half:
      return with_master<Half>(work, param);
    default:
      return with_state<float, false>(work, param);
  }
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CUDA, m) { m.impl("step_", TORCH_BOX(&hdet::step_cuda)); }
