// Shared parts of the steps on CUDA: the launch that advances the step counts, and the parameters of one replica.
#pragma once

#include <algorithm>

#include "launch_cuda.h"
#include "step.h"

namespace hdet {

// The step with states in 8 bits.
void step_coded(const Work& work, const Tensor& param);

namespace {

constexpr int kAdvanceThreads = 128;

__device__ __forceinline__ bool skipped(const Work& work) { return work.found_inf != nullptr && *work.found_inf > 0; }

// The threads of a block share its slots and their replicas: no thread may write a count that another still has to
// read.
template <typename R>
__global__ void __launch_bounds__(kAdvanceThreads)
    advance(const Work work, int slots_per_block, Prepared<R>* __restrict__ prepared) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * slots_per_block;
  float counted = 0;
  for (int64_t i = threadIdx.x; i < slots_per_block * work.rows; i += kAdvanceThreads) {
    const int64_t row = i / slots_per_block, slot = first + i % slots_per_block;
    if (slot >= work.slot_count) continue;
    float steps = work.steps[slot];
    prepared[row * work.slot_count + slot] = prepare<R>(work, row, slot, steps);
    if (row == 0) counted = steps;
  }
  __syncthreads();
  const int64_t slot = first + threadIdx.x;
  if (threadIdx.x < slots_per_block && slot < work.slot_count && work.gradients[slot].address != kNoGradient &&
      !skipped(work))
    work.steps[slot] = counted;
}

// The flat buffers, beginning at one chunk; the parameters are those of replica 0.
template <typename Store>
struct Buffers {
  typename Store::Param* param;
  typename Store::Master* master;
  typename Store::State* states[kMaxStates];
};

// Loads a struct in words of 16 bytes; a word that is not used is not loaded. By itself the compiler would load each
// number where it is used, one of them after a division that waits for the others.
template <typename P>
__device__ __forceinline__ P fetch_words(const P* from) {
  constexpr int kWords = sizeof(P) / sizeof(uint4);
  static_assert(sizeof(P) == kWords * sizeof(uint4));
  struct { uint4 words[kWords]; } whole;
#pragma unroll
  for (int k = 0; k < kWords; ++k) whole.words[k] = __ldg(reinterpret_cast<const uint4*>(from) + k);
  return bits_as<P>(whole);
}

// One access; by itself the compiler would split it for some of the rows.
template <typename P>
__device__ __forceinline__ void put_words(void* to, const P& pack) {
  if constexpr (sizeof(P) == sizeof(uint4)) {
    const auto words = bits_as<uint4>(pack);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words.x),
                 "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
  } else if constexpr (sizeof(P) == sizeof(uint2)) {
    const auto words = bits_as<uint2>(pack);
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(words.x), "r"(words.y)
                 : "memory");
  } else {
    put(to, pack);
  }
}

// The choice is made once for all elements of the pack. draw(j) returns the random words of element j and its three
// neighbours.
template <typename T, typename Stored, int kWidth, typename Draw>
__device__ __forceinline__ void round(const T (&from)[kWidth], Numbers<Stored, kWidth>& to, bool stochastic,
                                      int64_t position, const Draw& draw) {
  if constexpr (std::is_same_v<Stored, BFloat16>) {
    if (stochastic) {
      if constexpr (kWidth == 1) {
        to.raw.values[0] = round_stochastically(from[0], Noise::half(Noise::word(draw(0), position), position));
      } else {
        // A pack starts at a multiple of its width, so four neighbours share a hash.
        static_assert(kWidth % 4 == 0);
#pragma unroll
        for (int j = 0; j < kWidth; j += 2) {
          const uint32_t word = Noise::word(draw(j), j);
          // The upper halves of two numbers, by one instruction.
          to.raw.values[j / 2] =
              __byte_perm(raised(from[j], word & 0xffffu), raised(from[j + 1], word >> 16), 0x7632);
        }
      }
      return;
    }
  }
  to.keep(from);
}

// How a store keeps the master weights: as a float32 copy, or split from their parameters.
template <bool kHas, bool kSplit>
struct MasterStorage {
  using Master = std::conditional_t<kSplit, int16_t, float>;
  static constexpr bool kHasMaster = kHas;
  static constexpr bool kSplitMaster = kSplit;
  static_assert(kHas || !kSplit);
};

// The master weights from a chunk on, or null.
template <typename Store>
__device__ __forceinline__ typename Store::Master* master_at(const Work& work, const Chunk& chunk) {
  return Store::kHasMaster ? static_cast<typename Store::Master*>(work.master) + chunk.offset : nullptr;
}

// kWidth parameters of one replica.
template <typename Store, int kWidth>
struct Parameters {
  using T = typename Store::T;
  Numbers<typename Store::Param, kWidth> param;
  Pack<typename Store::Master, Store::kHasMaster ? kWidth : 1> master;

  __device__ __forceinline__ void load(const Buffers<Store>& from, int64_t at) {
    param = fetch<decltype(param)>(from.param + at);
    if constexpr (Store::kHasMaster) master = fetch<decltype(master)>(from.master + at);
  }

  __device__ __forceinline__ T value(int j) const {
    if constexpr (Store::kSplitMaster) return joined_master(bits_as<uint16_t>(param.stored(j)), master.values[j]);
    else if constexpr (Store::kHasMaster) return in_full(param.stored(j), master.values[j]);
    else return param.template value<T>(j);
  }

  template <typename Draw>
  __device__ __forceinline__ void keep(const T (&theta)[kWidth], bool stochastic, int64_t position, const Draw& draw) {
    if constexpr (Store::kSplitMaster) {
      BFloat16 halves[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const SplitMaster split = split_master(theta[j]);
        halves[j] = bits_as<BFloat16>(split.param);
        master.values[j] = split.low;
      }
      param.keep(halves);
      return;
    } else if constexpr (Store::kHasMaster) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) master.values[j] = theta[j];
    }
    round(theta, param, stochastic, position, draw);
  }

  __device__ __forceinline__ void store(const Buffers<Store>& to, int64_t at) const {
    put_words(to.param + at, param);
    if constexpr (Store::kHasMaster) put_words(to.master + at, master);
  }
};

// Advances the step counts, and returns the numbers of every slot of every replica.
template <typename R>
const Prepared<R>* advance_all(const Work& work, const Launch& launch) {
  auto* prepared = static_cast<Prepared<R>*>(work.scratch);
  const auto slots_per_block = static_cast<int>(std::max<int64_t>(kAdvanceThreads / work.rows, 1));
  const auto blocks = static_cast<unsigned>((work.slot_count + slots_per_block - 1) / slots_per_block);
  advance<R><<<blocks, kAdvanceThreads, 0, launch.stream()>>>(work, slots_per_block, prepared);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return prepared;
}

}  // namespace
}  // namespace hdet
