// The step on CUDA with states in 8 bits. A warp steps the 256 elements of one block of codes, 8 in each thread, so that
// the largest magnitude of a block is one reduction within the warp. In bf16 the 8 are consecutive: 16 bytes of
// parameters and 8 bytes of codes are one access each.
//
// AdamW on bf16 parameters with stochastic rounding moves 10 bytes an element, so the number of instructions matters as
// much as memory: about 57 for an element of a full block (counted in the machine code for an H200).
// bench/results/h200_optim_step.json has the times.
#include <torch/csrc/stable/ops.h>

#include "companding_cuda.h"
#include "step_cuda.h"

namespace hdet {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kBlocks = kBlocksPerChunk;
constexpr int kCodesPerThread = static_cast<int>(kStateBlock) / kWarp;
// A warp steps four of the eight blocks of a full chunk, one after the other.
constexpr int kWarps = 2;
// Replicas that share a gradient: those whose parameters are loaded before the first is stored.
constexpr int kRowsInFlight = 2;

template <typename P, bool kMaster, bool kSplit = false>
struct CodedStorage : MasterStorage<kMaster, kSplit> {
  using Param = P;
  using State = uint8_t;
  using T = float;
  // Neighbouring elements of a thread: as many as 16 bytes of the widest buffer hold, so that the accesses of a warp to it
  // are without gaps.
  static constexpr int kWidth =
      std::min<int>(kCodesPerThread, 16 / std::max(sizeof(P), kMaster ? sizeof(typename CodedStorage::Master) : 0));
  // Thread blocks on a multiprocessor at a time: with 16, a thread has 64 registers, with 12 it has 80. And whether a
  // chunk is fetched ahead: of float32, so much would be under way that the L2 cache does not hold it. These are the
  // fastest of several, measured on an H200.
  static constexpr int kThreadBlocks = !kMaster ? 16 : kSplit ? 12 : 1;
  static constexpr bool kAhead = sizeof(P) == 2;
};

// The update rules are those of rules.h, with the steps from level to value and from push to move arranged for fewer
// instructions. Only the last bits of results differ.

// Pushes elements whose states are levels, which become values. `theta(j)` is the parameter of element j, and `units` are
// the values of level 1. What does not depend on the element is computed by the constructor.
template <int kStates, typename R>
struct PushLevels {
  R rule;
  explicit __device__ __forceinline__ PushLevels(const R& rule) : rule(rule) {}
  template <int kCount, int kWidth, typename Theta>
  __device__ __forceinline__ void operator()(const Theta& theta, float (&slopes)[kWidth], const float (&units)[kCount],
                                             float (&states)[kCount][kWidth], Push<float> (&pushes)[kWidth]) const {
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
};

// Adam's factors of gradient, level and moment are multiplied first, once for all elements. The gradient takes the root
// of the second moment's factor, because its square alone may overflow.
template <int kStates>
struct PushLevels<kStates, Adam<float>> {
  float l2, factor, take1, keep1, take2, keep2;
  explicit __device__ __forceinline__ PushLevels(const Adam<float>& rule)
      : l2(rule.l2), factor(rule.factor), keep1(1 - rule.take1), keep2(rule.keep2) {
    const float rest = l2 != 0 ? 1.0f : factor;
    take1 = rule.take1 * rest;
    take2 = root<kShortest>(rule.take2) * rest;
  }
  template <int kCount, int kWidth, typename Theta>
  __device__ __forceinline__ void operator()(const Theta& theta, float (&slopes)[kWidth], const float (&units)[kCount],
                                             float (&states)[kCount][kWidth], Push<float> (&pushes)[kWidth]) const {
    if (l2 != 0) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) slopes[j] = __fmaf_rn(l2, theta(j), slopes[j] * factor);
    }
    const float keep_first = keep1 * units[0], keep_second = keep2 * units[1];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float share = take2 * slopes[j];
      states[0][j] = __fmaf_rn(take1, slopes[j], keep_first * states[0][j]);
      states[1][j] = __fmaf_rn(share, share, keep_second * states[1][j]);
      pushes[j] = {states[0][j], root<kShortest>(states[1][j])};
    }
  }
};

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

// kWidth elements of the gradient and the states, which replicas share.
template <int kStates, int kWidth, typename Store, typename R>
struct SharedCodes {
  static constexpr int kCount = kStates > 0 ? kStates : 1;
  GradientPack<float, kWidth> slope;
  Codes<kWidth> codes[kCount];
  float states[kCount][kWidth];

  static constexpr bool is_signed(int state) { return R::kSignedFirst && state == 0; }

  __device__ __forceinline__ void load(const Buffers<Store>& from, int64_t gradient, GradientType type, unsigned at) {
    slope.load(gradient, type, at);
#pragma unroll
    for (int k = 0; k < kStates; ++k) codes[k].words = fetch<decltype(codes[k].words)>(from.states[k] + at);
  }

  __device__ __forceinline__ void push(const PushLevels<kStates, R>& pushed, const Parameters<Store, kWidth>& parameters,
                                       GradientType type, const float (&scales)[kCount], Push<float> (&pushes)[kWidth]) {
    float units[kCount], slopes[kWidth];
    decode<0>(scales, units);
    slope.widen(type, slopes);
    pushed([&](int j) { return parameters.value(j); }, slopes, units, states, pushes);
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

  // The new scales of the block, given the largest magnitude_bits of each state.
  static __device__ __forceinline__ void rescale(const uint32_t (&largest)[kCount], float (&scales)[kCount]) {
    if constexpr (kStates > 0) scales[0] = scale_of<is_signed(0)>(largest[0]);
    if constexpr (kStates > 1) scales[1] = scale_of<false>(largest[1]);
  }

  // Stores the codes of all states, given the new scales.
  __device__ __forceinline__ void store(const Buffers<Store>& to, unsigned at, const float (&scales)[kCount],
                                        const Random<kWidth>& random) {
    if constexpr (kStates > 0) store<0>(to, at, scales[0], random);
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
    if constexpr (k < kStates) {
      codes[k].template levels<is_signed(k)>(states[k]);
      units[k] = unit_of<is_signed(k)>(scales[k]) * (is_signed(k) ? 1.0f : 16.0f);
      decode<k + 1>(scales, units);
    }
  }
};

// Asks for `bytes` bytes, a multiple of 16, to come into the L2 cache: all but perhaps the last few, because only whole
// groups of 16 can be asked for.
__device__ __forceinline__ void fetch_ahead(const void* from, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  const uintptr_t address = reinterpret_cast<uintptr_t>(from) & ~uintptr_t{15};
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes));
#endif
}

// The steps of a warp over blocks of one chunk, in one replica or in all `work.rows`, kTogether at a time. `own` and
// `prepared` are as in ChunkStep.
template <int kStates, int kTogether, typename Store, typename R>
struct BlockStep {
  template <int kWidth>
  using Shared = SharedCodes<kStates, kWidth, Store, R>;
  static constexpr int kCount = Shared<1>::kCount;
  static constexpr bool kShared = kTogether > 1;
  const Work& work;
  const Buffers<Store>& buffers;
  const Prepared<R>& own;
  const Prepared<R>* prepared;
  const Chunk& chunk;
  const Gradient& gradient;
  // Of `own`, for all blocks: computed for each of them, these took 2 % of the instructions.
  const PushLevels<kStates, R> pushed{own.rule};
  const Move<kStates, R> moved{own.rule};

  // Asks for what the first `blocks` blocks will load to come into the L2 cache. A warp waits for the loads of one block
  // at a time; without this, only those would be under way.
  __device__ __forceinline__ void prefetch(unsigned blocks) const {
    const auto elements = blocks * static_cast<unsigned>(kStateBlock);
    fetch_ahead(reinterpret_cast<const void*>(gradient.address),
                elements * static_cast<unsigned>(GradientPack<float, 1>::alignment(gradient.type)));
    fetch_ahead(buffers.param, elements * sizeof(*buffers.param));
    if constexpr (Store::kHasMaster) fetch_ahead(buffers.master, elements * sizeof(*buffers.master));
#pragma unroll
    for (int k = 0; k < kStates; ++k) fetch_ahead(buffers.states[k], elements);
  }

  // Steps a full block, all elements of a thread at once, in groups of neighbours.
  __device__ __forceinline__ void step_whole(unsigned block, GradientType type) const {
    constexpr int kWidth = Store::kWidth;
    constexpr int kGroups = kCodesPerThread / kWidth;
    const auto at = [&](int group) {
      return block * static_cast<unsigned>(kStateBlock) + (group * kWarp + threadIdx.x % kWarp) * kWidth;
    };
    const int64_t rows = kShared ? work.rows : 1;
    Shared<kWidth> shared[kGroups];
    Parameters<Store, kWidth> parameters[kGroups][kTogether];
    Push<float> pushes[kGroups][kWidth];
    float scales[kCount];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      shared[g].load(buffers, gradient.address, type, at(g));
      load(parameters[g], 0, rows, at(g));
    }
    load_scales(block, scales);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) shared[g].push(pushed, parameters[g][0], type, scales, pushes[g]);
    uint32_t largest[kCount] = {};
    each_state<0>([&]<int k>() {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) largest[k] = shared[g].template largest<k>(largest[k]);
      largest[k] = __reduce_max_sync(0xffffffffu, largest[k]);
    });
    Shared<kWidth>::rescale(largest, scales);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const Random<kWidth> random(own.noise, chunk.offset + at(g));
      // The parameters first, so that no root of a push stays in a register.
      for (int64_t first = 0;;) {
        move(parameters[g], first, rows, at(g), pushes[g], random);
        first += kTogether;
        if (first >= rows) break;
        load(parameters[g], first, rows, at(g));
      }
      shared[g].store(buffers, at(g), scales, random);
    }
    store_scales(block, scales);
  }

  // Steps a block that is not full, or whose addresses allow no packs, one element of a thread after the other. The
  // push is computed twice, first for the scales and then for the codes.
  __device__ __forceinline__ void step_singly(unsigned block) const {
    const unsigned begin = block * kStateBlock + threadIdx.x % kWarp;
    const unsigned end = min(static_cast<unsigned>(chunk.count), (block + 1) * static_cast<unsigned>(kStateBlock));
    const int64_t rows = kShared ? work.rows : 1;
    Shared<1> shared;
    Parameters<Store, 1> parameter[1];
    Push<float> push[1];
    float before[kCount], scales[kCount];
    uint32_t largest[kCount] = {};
    load_scales(block, before);
    load_scales(block, scales);
    const auto push_at = [&](unsigned at) {
      shared.load(buffers, gradient.address, gradient.type, at);
      load(parameter, 0, 1, at);
      shared.push(pushed, parameter[0], gradient.type, before, push);
    };
#pragma unroll 1
    for (unsigned at = begin; at < end; at += kWarp) {
      push_at(at);
      each_state<0>([&]<int k>() { largest[k] = shared.template largest<k>(largest[k]); });
    }
    __syncwarp();
    each_state<0>([&]<int k>() { largest[k] = __reduce_max_sync(0xffffffffu, largest[k]); });
    Shared<1>::rescale(largest, scales);
#pragma unroll 1
    for (unsigned at = begin; at < end; at += kWarp) {
      push_at(at);
      const Random<1> random(own.noise, chunk.offset + at);
      shared.store(buffers, at, scales, random);
#pragma unroll 1
      for (int64_t row = 0; row < rows; ++row) {
        load(parameter, row, rows, at);
        move(parameter, row, rows, at, push, random);
      }
    }
    store_scales(block, scales);
  }

 private:
  template <int k, typename Run>
  __device__ __forceinline__ void each_state(const Run& run) const {
    if constexpr (k < kStates) {
      run.template operator()<k>();
      each_state<k + 1>(run);
    }
  }

  __device__ __forceinline__ void load_scales(unsigned block, float (&scales)[kCount]) const {
#pragma unroll
    for (int k = 0; k < kStates; ++k) scales[k] = work.scales[k][kBlocks * blockIdx.x + block];
  }

  __device__ __forceinline__ void store_scales(unsigned block, const float (&scales)[kCount]) const {
    if (threadIdx.x % kWarp != 0) return;
#pragma unroll
    for (int k = 0; k < kStates; ++k) work.scales[k][kBlocks * blockIdx.x + block] = scales[k];
  }

  template <int kMany, int kWidth>
  __device__ __forceinline__ void load(Parameters<Store, kWidth> (&parameters)[kMany], int64_t first, int64_t rows,
                                       unsigned at) const {
#pragma unroll
    for (int n = 0; n < kMany; ++n)
      if (first + n < rows) parameters[n].load(buffers, (first + n) * work.row_size + at);
  }

  // Moves and stores the parameters of replicas `first` and up. `random` is of replica 0.
  template <int kMany, int kWidth>
  __device__ __forceinline__ void move(Parameters<Store, kWidth> (&parameters)[kMany], int64_t first, int64_t rows,
                                       unsigned at, const Push<float> (&pushes)[kWidth],
                                       const Random<kWidth>& random) const {
#pragma unroll
    for (int n = 0; n < kMany; ++n) {
      if (first + n >= rows) break;
      const Prepared<R> mine = kShared ? fetch_words(prepared + (first + n) * work.slot_count) : own;
      const Move<kStates, R> by = kShared ? Move<kStates, R>(mine.rule) : moved;
      float theta[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) theta[j] = by(parameters[n].value(j), pushes[j]);
      parameters[n].keep(theta, work.stochastic_rounding, random.position, [&](int j) {
        return kShared ? mine.noise.drawn(kParamStream, random.position | j) : random.words[j / 4];
      });
      parameters[n].store(buffers, (first + n) * work.row_size + at);
    }
  }
};

// Whether all buffers lie at addresses that allow packs of kCodesPerThread.
template <int kStates, typename Store>
__device__ __forceinline__ bool aligned(const Buffers<Store>& buffers, int64_t row_size, const Chunk& chunk,
                                        const Gradient& gradient) {
  uintptr_t together = reinterpret_cast<uintptr_t>(buffers.param) % 16;
  if constexpr (Store::kHasMaster) together |= reinterpret_cast<uintptr_t>(buffers.master) % 16;
#pragma unroll
  for (int k = 0; k < kStates; ++k) together |= reinterpret_cast<uintptr_t>(buffers.states[k]) % kCodesPerThread;
  together |= static_cast<uintptr_t>(gradient.address) % 16;
  return together == 0 && chunk.offset % kCodesPerThread == 0 && row_size % kCodesPerThread == 0;
}

template <int kStates, int kTogether, typename Store, typename R>
__device__ __forceinline__ void step_chunk(const Work& work, const Buffers<Store>& buffers, const Prepared<R>& own,
                                           const Prepared<R>* prepared, const Chunk& chunk, const Gradient& gradient) {
  const BlockStep<kStates, kTogether, Store, R> walk{work, buffers, own, prepared, chunk, gradient};
  const auto count = static_cast<unsigned>(chunk.count);
  constexpr unsigned kSize = kStateBlock;
  const bool packs = aligned<kStates>(buffers, kTogether > 1 ? work.row_size : 0, chunk, gradient);
  const unsigned whole = packs ? count / kSize : 0;
  unsigned block = threadIdx.x / kWarp;
  if (Store::kAhead && kTogether == 1 && whole > 0 && threadIdx.x == 0) walk.prefetch(whole);
  const auto step_wholes = [&](GradientType type) {
#pragma unroll 1
    for (; block < whole; block += kWarps) walk.step_whole(block, type);
  };
  // The usual type is a constant in code of its own.
  if (gradient.type == GradientType::bfloat16) step_wholes(GradientType::bfloat16);
  else step_wholes(gradient.type);
#pragma unroll 1
  for (; block * kSize < count; block += kWarps) walk.step_singly(block);
}

template <int kTogether, typename Store, typename R>
__global__ void __launch_bounds__(kWarps * kWarp, kTogether > 1 ? 1 : Store::kThreadBlocks)
    walk_codes(const Work work, const Prepared<R>* __restrict__ prepared) {
  const Chunk chunk = work.chunks[blockIdx.x];
  Gradient gradient = work.gradients[chunk.slot];
  const Prepared<R> own = prepared[chunk.slot];
  if (gradient.address == kNoGradient || skipped(work)) return;
  Buffers<Store> buffers{static_cast<typename Store::Param*>(work.param) + chunk.offset,
                         master_at<Store>(work, chunk),
                         {}};
#pragma unroll
  for (int k = 0; k < kMaxCoded; ++k)
    if (k < work.state_count) buffers.states[k] = static_cast<uint8_t*>(work.states[k]) + chunk.offset;
  gradient.address += chunk.start * GradientPack<float, 1>::alignment(gradient.type);
  if constexpr (R::kMostStates <= kMaxCoded) {
    if (uses_most_states(own.rule, work))
      return step_chunk<R::kMostStates, kTogether>(work, buffers, own, prepared + chunk.slot, chunk, gradient);
  }
  step_chunk<R::kFewestStates, kTogether>(work, buffers, own, prepared + chunk.slot, chunk, gradient);
}

template <typename Store>
void step(const Work& work, const Tensor& param) {
  if (work.slot_count == 0) return;
  const Launch launch(param);
  with_rule<float>(work, [&]<typename R>() {
    const auto* prepared = advance_all<R>(work, launch);
    if (work.chunk_count == 0) return;
    const auto grid = static_cast<unsigned>(work.chunk_count);
    if (work.rows == 1) {
      walk_codes<1, Store, R><<<grid, kWarps * kWarp, 0, launch.stream()>>>(work, prepared);
    } else {
      walk_codes<kRowsInFlight, Store, R><<<grid, kWarps * kWarp, 0, launch.stream()>>>(work, prepared);
    }
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace

void step_coded(const Work& work, const Tensor& param) {
  if (work.param_type == ScalarType::Float) return step<CodedStorage<float, false>>(work, param);
  if (work.split_master) return step<CodedStorage<BFloat16, true, true>>(work, param);
  if (work.master != nullptr) return step<CodedStorage<BFloat16, true>>(work, param);
  step<CodedStorage<BFloat16, false>>(work, param);
}

}  // namespace hdet
