// The step on CUDA. A small launch advances the step counts and derives each parameter's rule. A second one has one
// block for each chunk, of one replica or of all that share a gradient. The host reads nothing, so a captured graph
// uses new hyperparameters at every replay.
#include <torch/csrc/stable/ops.h>

#include "step_cuda.h"

namespace hdet {
namespace {

// Launch shapes, chosen on an H200 by the time of AdamW on the models of bench/test_optim_step.py (share of the
// bandwidth of a copy of 1 GiB; gpt2-124M / llama-1.2B / recsys-mix, and many-small-10k in ms), for chunks of 2048:
//   float32, packs of 4:  128 threads 97 98 98 % 0.055 ms, 256: 98 99 99 % 0.062 ms, 512: 92 95 93 % 0.111 ms
//   bf16, packs of 8:     128 threads 95 100 98 %,         256: 92 97 92 %,          512: 69 71 69 %
// The choice means that a thread moves two packs of each buffer, one after the other. With both in flight at once it
// was 90 %, because fewer blocks fit. Chunks of 4096 need twice the threads for the same share (and take 0.11 ms for
// many-small-10k). Streaming loads and stores, and overlapping the two launches, changed less than one percent.
// Rounding a number stochastically takes 9.6 instructions (machine code for an H200); with a hash for each pair of
// neighbours and a test for numbers that are not finite it took 16.6, and AdamW in bf16 about 86 an element, now 65.
constexpr int kPacksPerThread = 2;
constexpr int kTypicalChunk = 2048;
// For replicas that share a gradient, a thread loads a pack of this many of them before it stores the first; of more in
// fp32 without master if there are many replicas. AdamW on 2²⁸ parameters, share of the bandwidth of a copy at 2 / 4 /
// 8 / 16 replicas, with packs of 4 floats:
//   2 packs a thread, 2 in flight: 99 98 96 95 %, 4: 98 97 96 95 %, 8: 96 97 96 96 %, 16: 81 88 96 97 %
//   1 pack a thread,  2 in flight: 96 96 96 95 %, 4: 95 96 95 95 %, 8: 69 79 91 92 %
//   4 packs a thread,                                               8: 97 96 95 95 %
// Streaming loads and stores cost 1 to 5 %.
constexpr int kRowsInFlight = 4;
constexpr int kManyRows = 16;
constexpr int kPacksPerThreadOfRows = 2;

// The storage of numbers: parameters as P, states as S, with or without a float32 master, which may be split.
template <typename P, typename S, bool kMaster, bool kSplit = false>
struct Storage : MasterStorage<kMaster, kSplit> {
  using Param = P;
  using State = S;
  using T = std::conditional_t<std::is_same_v<P, double>, double, float>;
  // The elements of a pack: the buffer of the widest type is moved 16 bytes at a time.
  static constexpr bool kCopy = kMaster && !kSplit;
  static constexpr int kWidest = kCopy || sizeof(S) > sizeof(P) ? (sizeof(S) > 4 ? sizeof(S) : 4) : sizeof(P);
  static constexpr int kWidth = 16 / kWidest;
  static constexpr int threads(bool shared) {
    return kTypicalChunk / (kWidth * (shared ? kPacksPerThreadOfRows : kPacksPerThread));
  }
};

// kWidth elements of the gradient and the states, which replicas share.
template <int kStates, typename Store, int kWidth>
struct Shared {
  using T = typename Store::T;
  using S = typename Store::State;
  GradientPack<T, kWidth> gradient;
  Numbers<S, kWidth> stored[kStates > 0 ? kStates : 1];
  T states[kStates > 0 ? kStates : 1][kWidth];

  __device__ __forceinline__ void load(const Buffers<Store>& from, const Gradient& slope, int64_t start, int64_t at) {
    gradient.load(slope.address, slope.type, start + at);
#pragma unroll
    for (int k = 0; k < kStates; ++k) stored[k] = fetch<Numbers<S, kWidth>>(from.states[k] + at);
  }

  template <bool kShort, typename R>
  __device__ __forceinline__ void push(const R& rule, const Parameters<Store, kWidth>& parameters, GradientType type,
                                       Push<T> (&pushes)[kWidth]) {
    T slope[kWidth];
    gradient.widen(type, slope);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      T own[kMaxStates] = {};
#pragma unroll
      for (int k = 0; k < kStates; ++k) own[k] = stored[k].template value<T>(j);
      pushes[j] = rule.template push<kStates, kShort>(parameters.value(j), slope[j], own);
#pragma unroll
      for (int k = 0; k < kStates; ++k) states[k][j] = own[k];
    }
  }

  __device__ __forceinline__ void store(const Buffers<Store>& to, int64_t at, bool stochastic, const Noise& noise,
                                        int64_t position) {
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      round(states[k], stored[k], stochastic, position,
            [&](int j) { return noise.drawn(kStateStream + k, position | j); });
      put(to.states[k] + at, stored[k]);
    }
  }
};

// The walk over one chunk, of one replica or of all `work.rows`, kTogether at a time. The rules of the replicas are in
// `prepared`, work.slot_count apart. `own` is the rule of the only replica, or of replica 0.
template <int kStates, int kTogether, typename Store, typename R>
struct ChunkStep {
  using T = typename Store::T;
  static constexpr bool kShared = kTogether > 1;
  static constexpr bool kShort = sizeof(typename Store::Param) == 2 && !Store::kHasMaster;
  const Work& work;
  const Buffers<Store>& buffers;
  const Prepared<R>& own;
  const Prepared<R>* prepared;
  const Chunk& chunk;
  const Gradient& gradient;

  // Steps kWidth elements from element `at` of the chunk on.
  template <int kWidth>
  __device__ __forceinline__ void step(int64_t at) const {
    const int64_t rows = kShared ? work.rows : 1, position = chunk.offset + at;
    const bool stochastic = work.stochastic_rounding;
    Shared<kStates, Store, kWidth> shared;
    Parameters<Store, kWidth> parameters[kTogether];
    Push<T> pushes[kWidth];
    shared.load(buffers, gradient, chunk.start, at);
    load(parameters, 0, rows, at);
    shared.template push<kShort>(own.rule, parameters[0], gradient.type, pushes);
    // States are stored before the parameters if there are several replicas, and after them if there is one, so that
    // no push has to stay in a register.
    if (kShared) shared.store(buffers, at, stochastic, own.noise, position);
    for (int64_t first = 0;;) {
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        if (first + n >= rows) break;
        const Prepared<R> mine = kShared ? fetch_words(prepared + (first + n) * work.slot_count) : own;
        T theta[kWidth];
#pragma unroll
        for (int j = 0; j < kWidth; ++j)
          theta[j] = mine.rule.template move<kStates, kShort>(parameters[n].value(j), pushes[j]);
        parameters[n].keep(theta, stochastic, position,
                           [&](int j) { return mine.noise.drawn(kParamStream, position | j); });
        parameters[n].store(buffers, (first + n) * work.row_size + at);
      }
      first += kTogether;
      if (first >= rows) break;
      load(parameters, first, rows, at);
    }
    if (!kShared) shared.store(buffers, at, stochastic, own.noise, position);
  }

 private:
  template <int kWidth>
  __device__ __forceinline__ void load(Parameters<Store, kWidth> (&parameters)[kTogether], int64_t first, int64_t rows,
                                       int64_t at) const {
#pragma unroll
    for (int n = 0; n < kTogether; ++n)
      if (first + n < rows) parameters[n].load(buffers, (first + n) * work.row_size + at);
  }
};

// Whether all buffers lie at addresses that allow packs.
template <int kStates, typename Store>
__device__ __forceinline__ bool aligned(const Buffers<Store>& buffers, int64_t row_size, const Chunk& chunk,
                                        const Gradient& gradient) {
  using T = typename Store::T;
  constexpr int kWidth = Store::kWidth;
  uintptr_t together = reinterpret_cast<uintptr_t>(buffers.param) % (kWidth * sizeof(typename Store::Param));
  if constexpr (Store::kHasMaster)
    together |= reinterpret_cast<uintptr_t>(buffers.master) % (kWidth * sizeof(typename Store::Master));
#pragma unroll
  for (int k = 0; k < kStates; ++k)
    together |= reinterpret_cast<uintptr_t>(buffers.states[k]) % (kWidth * sizeof(typename Store::State));
  const int64_t size = GradientPack<T, 1>::alignment(gradient.type);
  together |= static_cast<uintptr_t>(gradient.address + chunk.start * size) %
              GradientPack<T, kWidth>::alignment(gradient.type);
  return together == 0 && chunk.offset % kWidth == 0 && row_size % kWidth == 0;
}

template <int kStates, int kTogether, typename Store, typename R>
__device__ __forceinline__ void update_chunk(const Work& work, const Buffers<Store>& buffers, const Prepared<R>& own,
                                             const Prepared<R>* prepared, const Chunk& chunk,
                                             const Gradient& gradient) {
  constexpr int kWidth = Store::kWidth, kThreads = Store::threads(kTogether > 1);
  const ChunkStep<kStates, kTogether, Store, R> walk{work, buffers, own, prepared, chunk, gradient};
  int64_t done = 0;
  if (aligned<kStates>(buffers, kTogether > 1 ? work.row_size : 0, chunk, gradient)) {
    const int packs = static_cast<int>(chunk.count / kWidth);
    for (int pack = threadIdx.x; pack < packs; pack += kThreads) walk.template step<kWidth>(pack * kWidth);
    done = static_cast<int64_t>(packs) * kWidth;
  }
  for (int64_t at = done + threadIdx.x; at < chunk.count; at += kThreads) walk.template step<1>(at);
}

template <int kTogether, typename Store, typename R>
__global__ void __launch_bounds__(Store::threads(kTogether > 1))
    walk(const Work work, const Prepared<R>* __restrict__ prepared) {
  const Chunk chunk = work.chunks[blockIdx.x];
  const Gradient gradient = work.gradients[chunk.slot];
  const Prepared<R> own = prepared[chunk.slot];
  if (gradient.address == kNoGradient || skipped(work)) return;
  Buffers<Store> buffers{static_cast<typename Store::Param*>(work.param) + chunk.offset,
                         master_at<Store>(work, chunk),
                         {}};
#pragma unroll
  for (int k = 0; k < kMaxStates; ++k)
    if (k < work.state_count) buffers.states[k] = static_cast<typename Store::State*>(work.states[k]) + chunk.offset;
  if (uses_most_states(own.rule, work)) {
    update_chunk<R::kMostStates, kTogether>(work, buffers, own, prepared + chunk.slot, chunk, gradient);
  } else {
    update_chunk<R::kFewestStates, kTogether>(work, buffers, own, prepared + chunk.slot, chunk, gradient);
  }
}

template <typename Store>
void step(const Work& work, const Tensor& param) {
  if (work.slot_count == 0) return;
  const Launch launch(param);
  with_rule<typename Store::T>(work, [&]<typename R>() {
    const auto* prepared = advance_all<R>(work, launch);
    if (work.chunk_count == 0) return;
    const auto grid = static_cast<unsigned>(work.chunk_count);
    constexpr int kMost = std::is_same_v<Store, Storage<float, float, false>> ? kManyRows : kRowsInFlight;
    if (work.rows == 1) {
      walk<1, Store, R><<<grid, Store::threads(false), 0, launch.stream()>>>(work, prepared);
    } else if (work.rows < kManyRows) {
      walk<kRowsInFlight, Store, R><<<grid, Store::threads(true), 0, launch.stream()>>>(work, prepared);
    } else {
      walk<kMost, Store, R><<<grid, Store::threads(true), 0, launch.stream()>>>(work, prepared);
    }
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

template <typename P, bool kMaster, bool kSplit = false>
void with_state(const Work& work, const Tensor& param) {
  if constexpr (!std::is_same_v<P, Half>) {
    if (work.state_type == ScalarType::BFloat16) return step<Storage<P, BFloat16, kMaster, kSplit>>(work, param);
  }
  step<Storage<P, float, kMaster, kSplit>>(work, param);
}

template <typename P>
void with_master(const Work& work, const Tensor& param) {
  if constexpr (std::is_same_v<P, BFloat16>) {
    if (work.split_master) return with_state<P, true, true>(work, param);
  }
  if (work.master != nullptr) return with_state<P, true>(work, param);
  with_state<P, false>(work, param);
}

void run_step(const Work& work, const Tensor& param) {
  if (work.state_type == ScalarType::Byte) return step_coded(work, param);
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

void step_cuda(int64_t rule, Tensor param, std::optional<Tensor> master, std::optional<Tensor> state0,
               std::optional<Tensor> state1, std::optional<Tensor> state2, std::optional<Tensor> scales0,
               std::optional<Tensor> scales1, Tensor steps, Tensor table, Tensor slots, Tensor chunks, Tensor gradients,
               Tensor scratch, std::optional<Tensor> grad_scale, std::optional<Tensor> norm,
               std::optional<Tensor> found_inf, bool stochastic_rounding, int64_t rows) {
  const Work work = checked_work(rule, param, master, {state0, state1, state2}, {scales0, scales1}, steps, table, slots,
                                 chunks, gradients, scratch, grad_scale, norm, found_inf, stochastic_rounding, rows);
  run_step(work, param);
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CUDA, m) { m.impl("step_", TORCH_BOX(&hdet::step_cuda)); }
