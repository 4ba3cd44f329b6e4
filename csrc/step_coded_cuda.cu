// The step on CUDA with states in 8 bits. A warp steps the 256 elements of one block of codes, 8 consecutive ones a
// thread: 16 bytes of bf16 and 8 bytes of codes are one access each, and the largest magnitude of a block is one
// reduction within the warp.
//
// AdamW on bf16 parameters with stochastic rounding moves 10 bytes an element, so instructions are what limits it:
// about 105 for an element (counted in the machine code for an H200, full blocks). Of these 6 load, 30 decode and push,
// 26 encode the first moment, 34 encode the second and move (random bits included), and 7 round the parameter. Roots
// and quotients that do not treat numbers below 2⁻¹²⁶ apart, and signs without comparisons, saved 20 more.
#include <torch/csrc/stable/ops.h>

#include "step_cuda.h"

namespace hdet {
namespace {

constexpr int kWarp = 32;
constexpr int kCodesPerThread = static_cast<int>(kStateBlock) / kWarp;
// A warp steps two of the eight blocks of a full chunk, one after the other.
constexpr int kWarps = 4;
// The registers of AdamW allow six thread blocks on a multiprocessor, whose loads are 36 KiB in flight.
constexpr int kThreadBlocks = 6;
// Replicas that share a gradient: those whose parameters are loaded before the first is stored.
constexpr int kRowsInFlight = 2;

template <typename P, bool kMaster, bool kSplit = false>
struct CodedStorage : MasterStorage<kMaster, kSplit> {
  using Param = P;
  using State = uint8_t;
  using T = float;
};

// The byte of a word, plus 2²³, as float: without a conversion, which a GPU does at an eighth of the rate of a sum.
__device__ __forceinline__ float byte_above(uint32_t word, int byte) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u | byte));
}

// (half + ½)/2¹⁶ for the lower or upper half of a word.
__device__ __forceinline__ float uniform_of(uint32_t word, int half) {
  return __uint_as_float(__byte_perm(word, 0x4300u, half == 0 ? 0x5410u : 0x5432u)) - (128.0f - 0x1p-17f);
}

// Uniform numbers of kWidth positions, which begin at a multiple of 4 if there are several.
template <int kWidth>
__device__ __forceinline__ void uniforms(const Noise& noise, uint32_t stream, int64_t position,
                                         float (&values)[kWidth]) {
  if constexpr (kWidth == 1) {
    values[0] = uniform_of(Noise::half(noise.word(stream, position), position), 0);
  } else {
    Noise::Words words{};
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (j % 4 == 0) words = Noise::words(noise.base(position + j), stream);
      values[j] = uniform_of(j % 4 < 2 ? words.first : words.second, j % 2);
    }
  }
}

// The codes of kWidth elements, 4 to a word.
template <int kWidth>
struct Codes {
  Pack<uint8_t, kWidth> bytes;

  template <bool kSigned>
  __device__ __forceinline__ void decode(float unit, float (&values)[kWidth]) const {
    constexpr float kOffset = 0x1p23f + (kSigned ? 128 : 0);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if constexpr (kWidth == 1) {
        values[j] = value_of<kSigned>(byte_above(bytes.values[0], 0) - kOffset, unit);
      } else {
        const auto words = bits_as<Pack<uint32_t, kWidth / 4>>(bytes);
        values[j] = value_of<kSigned>(byte_above(words.values[j / 4], j % 4) - kOffset, unit);
      }
    }
  }

  template <bool kSigned>
  __device__ __forceinline__ void encode(const float (&values)[kWidth], float inverse, const float (&uniform)[kWidth]) {
    constexpr float kOffset = 0x1p23f + (kSigned ? 128 : 0);
    uint32_t above[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      above[j] = __float_as_uint(steps_of<kSigned>(values[j], inverse, uniform[j]) + kOffset);
    if constexpr (kWidth == 1) {
      bytes.values[0] = static_cast<uint8_t>(above[0]);
    } else {
      Pack<uint32_t, kWidth / 4> words;
#pragma unroll
      for (int w = 0; w < kWidth / 4; ++w) {
        const uint32_t low = __byte_perm(above[4 * w], above[4 * w + 1], 0x0040);
        const uint32_t high = __byte_perm(above[4 * w + 2], above[4 * w + 3], 0x0040);
        words.values[w] = __byte_perm(low, high, 0x5410);
      }
      bytes = bits_as<Pack<uint8_t, kWidth>>(words);
    }
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

  __device__ __forceinline__ void load(const Buffers<Store>& from, const Gradient& gradient, int64_t start,
                                       int64_t at) {
    slope.load(gradient.address, gradient.type, start + at);
#pragma unroll
    for (int k = 0; k < kStates; ++k) codes[k].bytes = fetch<Pack<uint8_t, kWidth>>(from.states[k] + at);
  }

  template <int kShort>
  __device__ __forceinline__ void push(const R& rule, const Parameters<Store, kWidth>& parameters, GradientType type,
                                       const float (&scales)[kCount], Push<float> (&pushes)[kWidth]) {
    decode<0>(scales);
    float wide[kWidth];
    slope.widen(type, wide);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      float own[kMaxStates] = {};
#pragma unroll
      for (int k = 0; k < kStates; ++k) own[k] = states[k][j];
      pushes[j] = rule.template push<kStates, kShort>(parameters.value(j), wide[j], own);
#pragma unroll
      for (int k = 0; k < kStates; ++k) states[k][j] = own[k];
    }
  }

  // The largest of `others` and the magnitude_bits of state k. A sum of squares has no sign, and the NaN of a GPU's
  // arithmetic has none either.
  __device__ __forceinline__ uint32_t largest(int k, uint32_t others) const {
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      others = max(others, is_signed(k) ? magnitude_bits(states[k][j]) : __float_as_uint(states[k][j]));
    return others;
  }

  // Stores the codes of state k, given the scale of the block.
  template <int k>
  __device__ __forceinline__ void store(const Buffers<Store>& to, int64_t at, float scale, const Noise& noise,
                                        int64_t position) {
    float uniform[kWidth];
    uniforms(noise, kStateStream + k, position, uniform);
    codes[k].template encode<is_signed(k)>(states[k], inverse_of<is_signed(k)>(scale), uniform);
    put_words(to.states[k] + at, codes[k].bytes);
  }

 private:
  template <int k>
  __device__ __forceinline__ void decode(const float (&scales)[kCount]) {
    if constexpr (k < kStates) {
      codes[k].template decode<is_signed(k)>(unit_of<is_signed(k)>(scales[k]), states[k]);
      decode<k + 1>(scales);
    }
  }
};

// The steps of a warp over blocks of one chunk, in one replica or in all `work.rows`, kTogether at a time. `own` and
// `prepared` are as in ChunkStep.
template <int kStates, int kTogether, typename Store, typename R>
struct BlockStep {
  template <int kWidth>
  using Shared = SharedCodes<kStates, kWidth, Store, R>;
  static constexpr int kCount = Shared<1>::kCount;
  static constexpr bool kShared = kTogether > 1;
  static constexpr int kShort = sizeof(typename Store::Param) == 2 && !Store::kHasMaster ? kShortest : 0;
  const Work& work;
  const Buffers<Store>& buffers;
  const Prepared<R>& own;
  const Prepared<R>* prepared;
  const Chunk& chunk;
  const Gradient& gradient;

  // Steps a full block, all elements of a thread at once.
  __device__ __forceinline__ void step_whole(int block) const {
    constexpr int kWidth = kCodesPerThread;
    const int64_t at = block * kStateBlock + (threadIdx.x % kWarp) * kWidth, position = chunk.offset + at;
    const int64_t rows = kShared ? work.rows : 1;
    Shared<kWidth> shared;
    Parameters<Store, kWidth> parameters[kTogether];
    Push<float> pushes[kWidth];
    float scales[kCount];
    shared.load(buffers, gradient, chunk.start, at);
    load(parameters, 0, rows, at);
    load_scales(block, scales);
    shared.template push<kShort>(own.rule, parameters[0], gradient.type, scales, pushes);
    each_state<0>([&]<int k>() {
      scales[k] = scale_of<Shared<1>::is_signed(k)>(__reduce_max_sync(kAllLanes, shared.largest(k, 0)));
      shared.template store<k>(buffers, at, scales[k], own.noise, position);
    });
    store_scales(block, scales);
    for (int64_t first = 0;;) {
      move(parameters, first, rows, at, pushes);
      first += kTogether;
      if (first >= rows) break;
      load(parameters, first, rows, at);
    }
  }

  // Steps a block that is not full, or whose addresses allow no packs, one element of a thread after the other. The
  // push is computed twice, first for the scales and then for the codes.
  __device__ __forceinline__ void step_singly(int block) const {
    const int64_t begin = block * kStateBlock + threadIdx.x % kWarp;
    const int64_t end = chunk.count < (block + 1) * kStateBlock ? chunk.count : (block + 1) * kStateBlock;
    const int64_t rows = kShared ? work.rows : 1;
    Shared<1> shared;
    Parameters<Store, 1> parameter[1];
    Push<float> push[1];
    float before[kCount], scales[kCount];
    uint32_t largest[kCount] = {};
    load_scales(block, before);
    const auto push_at = [&](int64_t at) {
      shared.load(buffers, gradient, chunk.start, at);
      load(parameter, 0, 1, at);
      shared.template push<kShort>(own.rule, parameter[0], gradient.type, before, push);
    };
#pragma unroll 1
    for (int64_t at = begin; at < end; at += kWarp) {
      push_at(at);
#pragma unroll
      for (int k = 0; k < kStates; ++k) largest[k] = shared.largest(k, largest[k]);
    }
    __syncwarp();
    each_state<0>([&]<int k>() {
      scales[k] = scale_of<Shared<1>::is_signed(k)>(__reduce_max_sync(kAllLanes, largest[k]));
    });
#pragma unroll 1
    for (int64_t at = begin; at < end; at += kWarp) {
      push_at(at);
      each_state<0>(
          [&]<int k>() { shared.template store<k>(buffers, at, scales[k], own.noise, chunk.offset + at); });
#pragma unroll 1
      for (int64_t row = 0; row < rows; ++row) {
        load(parameter, row, rows, at);
        move(parameter, row, rows, at, push);
      }
    }
    store_scales(block, scales);
  }

 private:
  static constexpr unsigned kAllLanes = 0xffffffffu;

  template <int k, typename Run>
  __device__ __forceinline__ void each_state(const Run& run) const {
    if constexpr (k < kStates) {
      run.template operator()<k>();
      each_state<k + 1>(run);
    }
  }

  __device__ __forceinline__ void load_scales(int block, float (&scales)[kCount]) const {
#pragma unroll
    for (int k = 0; k < kStates; ++k) scales[k] = work.scales[k][kBlocksPerChunk * blockIdx.x + block];
  }

  __device__ __forceinline__ void store_scales(int block, const float (&scales)[kCount]) const {
    if (threadIdx.x % kWarp != 0) return;
#pragma unroll
    for (int k = 0; k < kStates; ++k) work.scales[k][kBlocksPerChunk * blockIdx.x + block] = scales[k];
  }

  template <int kMany, int kWidth>
  __device__ __forceinline__ void load(Parameters<Store, kWidth> (&parameters)[kMany], int64_t first, int64_t rows,
                                       int64_t at) const {
#pragma unroll
    for (int n = 0; n < kMany; ++n)
      if (first + n < rows) parameters[n].load(buffers, (first + n) * work.row_size + at);
  }

  // Moves and stores the parameters of replicas `first` and up.
  template <int kMany, int kWidth>
  __device__ __forceinline__ void move(Parameters<Store, kWidth> (&parameters)[kMany], int64_t first, int64_t rows,
                                       int64_t at, const Push<float> (&pushes)[kWidth]) const {
#pragma unroll
    for (int n = 0; n < kMany; ++n) {
      if (first + n >= rows) break;
      const Prepared<R> mine = kShared ? fetch_words(prepared + (first + n) * work.slot_count) : own;
      float theta[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        theta[j] = mine.rule.template move<kStates, kShort>(parameters[n].value(j), pushes[j]);
      parameters[n].keep(theta, work.stochastic_rounding, mine.noise, chunk.offset + at);
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
  const int64_t size = GradientPack<float, 1>::alignment(gradient.type);
  together |= static_cast<uintptr_t>(gradient.address + chunk.start * size) % 16;
  return together == 0 && chunk.offset % kCodesPerThread == 0 && row_size % kCodesPerThread == 0;
}

template <int kStates, int kTogether, typename Store, typename R>
__device__ __forceinline__ void step_chunk(const Work& work, const Buffers<Store>& buffers, const Prepared<R>& own,
                                           const Prepared<R>* prepared, const Chunk& chunk, const Gradient& gradient) {
  const BlockStep<kStates, kTogether, Store, R> walk{work, buffers, own, prepared, chunk, gradient};
  const bool packs = aligned<kStates>(buffers, kTogether > 1 ? work.row_size : 0, chunk, gradient);
  for (int block = threadIdx.x / kWarp; block * kStateBlock < chunk.count; block += kWarps) {
    if (packs && (block + 1) * kStateBlock <= chunk.count) {
      walk.step_whole(block);
    } else {
      walk.step_singly(block);
    }
  }
}

template <int kTogether, typename Store, typename R>
__global__ void __launch_bounds__(kWarps * kWarp, kTogether > 1 || Store::kHasMaster ? 1 : kThreadBlocks)
    walk_codes(const Work work, const Prepared<R>* __restrict__ prepared) {
  const Chunk chunk = work.chunks[blockIdx.x];
  const Gradient gradient = work.gradients[chunk.slot];
  const Prepared<R> own = prepared[chunk.slot];
  if (gradient.address == kNoGradient || skipped(work)) return;
  Buffers<Store> buffers{static_cast<typename Store::Param*>(work.param) + chunk.offset,
                         master_at<Store>(work, chunk),
                         {}};
#pragma unroll
  for (int k = 0; k < kMaxStates; ++k)
    if (k < work.state_count) buffers.states[k] = static_cast<uint8_t*>(work.states[k]) + chunk.offset;
  if (uses_most_states(own.rule, work)) {
    step_chunk<R::kMostStates, kTogether>(work, buffers, own, prepared + chunk.slot, chunk, gradient);
  } else {
    step_chunk<R::kFewestStates, kTogether>(work, buffers, own, prepared + chunk.slot, chunk, gradient);
  }
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
