// The compressed average on CUDA: a warp keeps a block of elements in registers, from the single read of the inputs
// until the codes and the error are written.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "launch_cuda.h"
#include "wire.h"

namespace hdet {
namespace {

// Launch shapes. A lane loads 16 bytes of a buffer at a time, twice for each block. These are the blocks that a warp
// has in flight: encoding reads three buffers, so that one block is enough; decoding reads one and a quarter.
// bench/test_wire.py measures them.
constexpr int kThreads = 256;
constexpr int kEncodeBlocks = 1;
constexpr int kMergeBlocks = 1;
constexpr int kDecodeBlocks = 2;
// The rows whose loads are in flight at once in a sum.
constexpr int kRowsInFlight = 8;

constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr int kWidth = 4;
constexpr int kPerLane = kShared / kWarp;
constexpr int kPacks = kPerLane / kWidth;

// Whether all of these addresses allow packs. Null addresses are ignored.
template <typename... T>
bool packs_fit(const T*... addresses) {
  return (reinterpret_cast<uintptr_t>(addresses) | ...) % sizeof(float4) == 0;
}

// A lane has kPacks packs of a block; the packs of a warp lie side by side.
__device__ __forceinline__ int place(int pack) { return (pack * kWarp + threadIdx.x % kWarp) * kWidth; }

// Loads the lane's floats of the block that begins at `first`, from a buffer that ends at `end`. With kWide the block
// is whole and the buffers are aligned, and packs are loaded. Otherwise floats are loaded one by one, with zeros beyond
// the end.
template <bool kWide>
__device__ __forceinline__ void load(const float* from, int64_t first, int64_t end, float (&values)[kPerLane]) {
#pragma unroll
  for (int pack = 0; pack < kPacks; ++pack) {
    const int64_t at = first + place(pack);
    float* own = values + pack * kWidth;
    if constexpr (kWide) {
      const auto four = fetch<float4>(from + at);
      own[0] = four.x, own[1] = four.y, own[2] = four.z, own[3] = four.w;
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) own[j] = at + j < end ? from[at + j] : 0.0f;
    }
  }
}

template <bool kWide>
__device__ __forceinline__ void store(float* to, int64_t first, int64_t end, const float (&values)[kPerLane]) {
#pragma unroll
  for (int pack = 0; pack < kPacks; ++pack) {
    const int64_t at = first + place(pack);
    const float* own = values + pack * kWidth;
    if constexpr (kWide) {
      // An intrinsic, because the compiler sometimes splits a plain assignment; streaming, because the values are not
      // read again soon.
      __stcs(reinterpret_cast<float4*>(to + at), make_float4(own[0], own[1], own[2], own[3]));
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        if (at + j < end) to[at + j] = own[j];
    }
  }
}

// The lane's codes of a block of a shard, moved as whole words.
template <typename F>
struct Codes {
  using Code = typename F::Code;
  using Word = std::conditional_t<sizeof(Code) == 1, uint32_t, uint64_t>;
  static_assert(sizeof(Word) == kWidth * sizeof(Code));
  Word words[kPacks];

  __device__ __forceinline__ void load(const Shard<F>& shard, int64_t block) {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) words[pack] = fetch<Word>(shard.codes + block * kShared + place(pack));
  }
  __device__ __forceinline__ void store(const Shard<F>& shard, int64_t block) const {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) put(shard.codes + block * kShared + place(pack), words[pack]);
  }
  __device__ __forceinline__ Code get(int i) const {
    return static_cast<Code>(words[i / kWidth] >> (8 * sizeof(Code) * (i % kWidth)));
  }
  // The words must be zero before.
  __device__ __forceinline__ void set(int i, Code code) {
    const auto bits = static_cast<Word>(static_cast<std::make_unsigned_t<Code>>(code));
    words[i / kWidth] |= bits << (8 * sizeof(Code) * (i % kWidth));
  }
};

// Encodes and stores the numbers of a block, and leaves in `numbers` what the encoding lost.
template <typename F>
__device__ __forceinline__ void keep(float (&numbers)[kPerLane], const Shard<F>& shard, int64_t block) {
  int32_t largest = 0;
  if constexpr (F::kScaled) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) largest = max(largest, magnitude(numbers[i]));
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  const F format = F::fitting(largest);
  Codes<F> codes = {};
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const auto code = format.code(numbers[i]);
    codes.set(i, code);
    numbers[i] -= format.value(code);
  }
  codes.store(shard, block);
  if (threadIdx.x % kWarp == 0) shard.keep(block, format);
}

// The three operations. Each first loads all inputs of a lane's part of a block, before anything waits for them, and
// then finishes the block. It is block `block` of row `row` of the wire; its elements begin at `first` in the float
// buffers.
template <typename F>
struct Encode {
  using Work = Encoding<F>;
  static constexpr int kBlocks = kEncodeBlocks;
  float x[kPerLane], consensus[kPerLane], error[kPerLane];

  static bool packed(const Work& work) { return packs_fit(work.x, work.consensus, work.error); }
  static __device__ __forceinline__ int64_t end(const Work& work) { return work.numel; }

  template <bool kWide>
  __device__ __forceinline__ void load(const Work& work, int64_t, int64_t, int64_t first) {
    hdet::load<kWide>(work.x, first, work.numel, x);
    hdet::load<kWide>(work.consensus, first, work.numel, consensus);
    if (work.error != nullptr) hdet::load<kWide>(work.error, first, work.numel, error);
  }
  template <bool kWide>
  __device__ __forceinline__ void finish(const Work& work, int64_t row, int64_t block, int64_t first) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      x[i] -= consensus[i];
      if (work.error != nullptr) x[i] += error[i];
    }
    keep(x, work.wire.row(row), block);
    if (work.error != nullptr) store<kWide>(work.error, first, work.numel, x);
  }
};

template <typename F>
struct Merge {
  using Work = Merging<F>;
  static constexpr int kBlocks = kMergeBlocks;
  float sum[kPerLane], error[kPerLane];

  static bool packed(const Work& work) { return packs_fit(work.error); }
  static __device__ __forceinline__ int64_t end(const Work& work) { return work.wire.shard; }

  template <bool kWide>
  __device__ __forceinline__ void load(const Work& work, int64_t, int64_t block, int64_t first) {
    if (work.error != nullptr) hdet::load<kWide>(work.error, first, work.wire.shard, error);
    int64_t row = 0;
    for (; row + kRowsInFlight <= work.wires.rows; row += kRowsInFlight) add<kRowsInFlight>(work, row, block);
    for (; row < work.wires.rows; ++row) add<1>(work, row, block);
  }
  template <bool kWide>
  __device__ __forceinline__ void finish(const Work& work, int64_t row, int64_t block, int64_t first) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      sum[i] /= work.divisor;
      if (work.error != nullptr) sum[i] += error[i];
    }
    keep(sum, work.wire.row(row), block);
    if (work.error != nullptr) store<kWide>(work.error, first, work.wire.shard, sum);
  }

 private:
  template <int kRows>
  __device__ __forceinline__ void add(const Work& work, int64_t row, int64_t block) {
    Codes<F> codes[kRows];
    F formats[kRows];
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const Shard<F> received = work.wires.row(row + n);
      codes[n].load(received, block);
      formats[n] = received.format(block);
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n)
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const float value = formats[n].value(codes[n].get(i));
        sum[i] = row + n == 0 ? value : sum[i] + value;
      }
  }
};

template <typename F>
struct Decode {
  using Work = Decoding<F>;
  static constexpr int kBlocks = kDecodeBlocks;
  Codes<F> codes;
  F format;
  float consensus[kPerLane];

  static bool packed(const Work& work) { return packs_fit(work.consensus, work.target); }
  static __device__ __forceinline__ int64_t end(const Work& work) { return work.numel; }

  template <bool kWide>
  __device__ __forceinline__ void load(const Work& work, int64_t row, int64_t block, int64_t first) {
    const Shard<F> shard = work.wire.row(row);
    codes.load(shard, block);
    format = shard.format(block);
    hdet::load<kWide>(work.consensus, first, work.numel, consensus);
  }
  template <bool kWide>
  __device__ __forceinline__ void finish(const Work& work, int64_t, int64_t, int64_t first) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) consensus[i] += format.value(codes.get(i));
    store<kWide>(work.consensus, first, work.numel, consensus);
    if (work.target != nullptr) store<kWide>(work.target, first, work.numel, consensus);
  }
};

// Processes a warp's blocks of a row: those from `block` on, in steps of kWarps.
template <typename Operation, bool kWide>
__device__ __forceinline__ void walk(const typename Operation::Work& work, int64_t row, int64_t block) {
  constexpr int kBlocks = Operation::kBlocks;
  const int64_t blocks = work.wire.blocks(), first = (row * blocks + block) * kShared;
  Operation own[kBlocks];
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
    if (kWide || block + n * kWarps < blocks)
      own[n].template load<kWide>(work, row, block + n * kWarps, first + n * (kWarps * kShared));
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
    if (kWide || block + n * kWarps < blocks)
      own[n].template finish<kWide>(work, row, block + n * kWarps, first + n * (kWarps * kShared));
}

// blockIdx.y is the row of the wire.
template <typename Operation>
__global__ void __launch_bounds__(kThreads) walk_wire(const typename Operation::Work work, const bool packed) {
  const int64_t row = blockIdx.y, blocks = work.wire.blocks();
  const int64_t block = static_cast<int64_t>(blockIdx.x) * (kWarps * Operation::kBlocks) + threadIdx.x / kWarp;
  const int64_t last = block + (Operation::kBlocks - 1) * kWarps;
  if (packed && last < blocks && (row * blocks + last + 1) * kShared <= Operation::end(work)) {
    walk<Operation, true>(work, row, block);
  } else {
    walk<Operation, false>(work, row, block);
  }
}

template <typename Operation>
void launch_over(const typename Operation::Work& work, const Tensor& like) {
  if (work.wire.shard == 0) return;
  constexpr int64_t kEach = kWarps * Operation::kBlocks;
  HDET_CHECK(work.wire.rows <= 65535, "a wire has at most 65535 rows, got ", work.wire.rows);
  const Launch launch(like);
  const int64_t along = (work.wire.blocks() + kEach - 1) / kEach;
  const dim3 grid(static_cast<unsigned>(along), static_cast<unsigned>(work.wire.rows));
  walk_wire<Operation><<<grid, kThreads, 0, launch.stream()>>>(work, Operation::packed(work));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void encode_cuda(int64_t format, Tensor x, Tensor consensus, std::optional<Tensor> error, Tensor wire) {
  with_format(format, [&]<typename F>() {
    launch_over<Encode<F>>(Encoding<F>::checked_of(x, consensus, error, wire), x);
  });
}

void merge_cuda(int64_t format, Tensor wires, double divisor, std::optional<Tensor> error, Tensor wire) {
  with_format(format, [&]<typename F>() {
    launch_over<Merge<F>>(Merging<F>::checked_of(wires, divisor, error, wire), wires);
  });
}

void decode_cuda(int64_t format, Tensor wire, Tensor consensus, std::optional<Tensor> target) {
  with_format(format, [&]<typename F>() {
    launch_over<Decode<F>>(Decoding<F>::checked_of(wire, consensus, target), consensus);
  });
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CUDA, m) {
  m.impl("encode", TORCH_BOX(&hdet::encode_cuda));
  m.impl("merge", TORCH_BOX(&hdet::merge_cuda));
  m.impl("decode", TORCH_BOX(&hdet::decode_cuda));
}
