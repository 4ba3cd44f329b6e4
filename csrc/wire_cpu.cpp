// The compressed average on the CPU: threads share the blocks, and a block stays in the first-level cache until it is
// done.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "convert_cpu.h"
#include "wire.h"

namespace hdet {
namespace {

// 32768 elements, the fewest that torch gives to one thread.
constexpr int64_t kBlocksPerThread = 32768 / kShared;

// The number of elements of the block at `first` that lie within `numel`.
int64_t inside(int64_t first, int64_t numel) { return std::clamp<int64_t>(numel - first, 0, kShared); }

HDET_WIDEST void subtract(const float* __restrict x, const float* __restrict consensus, int64_t count,
                          float* __restrict difference) {
  for (int64_t i = 0; i < count; ++i) difference[i] = x[i] - consensus[i];
}

HDET_WIDEST void add(const float* __restrict more, int64_t count, float* __restrict sum) {
  for (int64_t i = 0; i < count; ++i) sum[i] += more[i];
}

HDET_WIDEST void divide(float* __restrict numbers, float divisor) {
  for (int64_t i = 0; i < kShared; ++i) numbers[i] /= divisor;
}

HDET_WIDEST int32_t largest_of(const float* numbers) {
  int32_t largest = 0;
  for (int64_t i = 0; i < kShared; ++i) largest = std::max(largest, magnitude(numbers[i]));
  return largest;
}

template <typename F>
HDET_WIDEST void to_codes(const F format, const float* __restrict numbers, typename F::Code* __restrict codes) {
  for (int64_t i = 0; i < kShared; ++i) codes[i] = format.code(numbers[i]);
}

template <typename F>
HDET_WIDEST void to_values(const F format, const typename F::Code* __restrict codes, float* __restrict values) {
  for (int64_t i = 0; i < kShared; ++i) values[i] = format.value(codes[i]);
}

// Encodes the numbers of a block. What the encoding loses is written to `error`, if given.
template <typename F>
void keep(const float* numbers, const Shard<F>& shard, int64_t block, float* error, int64_t count) {
  typename F::Code* codes = shard.codes + block * kShared;
  const F format = F::fitting(largest_of(numbers));
  shard.keep(block, format);
  to_codes(format, numbers, codes);
  if (error == nullptr) return;
  float values[kShared];
  to_values(format, codes, values);
  subtract(numbers, values, count, error);
}

// Calls block(row, index of the block in the row, first element in the bucket) for every block of the wire.
template <typename F, typename Block>
void for_each_block(const Wire<F>& wire, Block&& block) {
  torch::stable::parallel_for(0, wire.rows * wire.blocks(), kBlocksPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) block(wire.row(i / wire.blocks()), i % wire.blocks(), i * kShared);
  });
}

template <typename F>
void encode(const Encoding<F>& work) {
  for_each_block(work.wire, [&](const Shard<F>& shard, int64_t block, int64_t first) {
    const int64_t count = inside(first, work.numel);
    float* error = work.error == nullptr ? nullptr : work.error + first;
    float numbers[kShared] = {};
    subtract(work.x + first, work.consensus + first, count, numbers);
    if (error != nullptr) add(error, count, numbers);
    keep(numbers, shard, block, error, count);
  });
}

template <typename F>
void merge(const Merging<F>& work) {
  for_each_block(work.wire, [&](const Shard<F>& shard, int64_t block, int64_t first) {
    float sum[kShared], values[kShared];
    for (int64_t i = 0; i < work.wires.rows; ++i) {
      const Shard<F> received = work.wires.row(i);
      to_values(received.format(block), received.codes + first, i == 0 ? sum : values);
      if (i > 0) add(values, kShared, sum);
    }
    divide(sum, work.divisor);
    float* error = work.error == nullptr ? nullptr : work.error + first;
    if (error != nullptr) add(error, kShared, sum);
    keep(sum, shard, block, error, kShared);
  });
}

template <typename F>
void decode(const Decoding<F>& work) {
  for_each_block(work.wire, [&](const Shard<F>& shard, int64_t block, int64_t first) {
    const int64_t count = inside(first, work.numel);
    float values[kShared];
    to_values(shard.format(block), shard.codes + block * kShared, values);
    add(values, count, work.consensus + first);
    if (work.target != nullptr) std::copy_n(work.consensus + first, count, work.target + first);
  });
}

void encode_cpu(int64_t format, Tensor x, Tensor consensus, std::optional<Tensor> error, Tensor wire) {
  with_format(format, [&]<typename F>() { encode(Encoding<F>::checked_of(x, consensus, error, wire)); });
}

void merge_cpu(int64_t format, Tensor wires, double divisor, std::optional<Tensor> error, Tensor wire) {
  with_format(format, [&]<typename F>() { merge(Merging<F>::checked_of(wires, divisor, error, wire)); });
}

void decode_cpu(int64_t format, Tensor wire, Tensor consensus, std::optional<Tensor> target) {
  with_format(format, [&]<typename F>() { decode(Decoding<F>::checked_of(wire, consensus, target)); });
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CPU, m) {
  m.impl("encode", TORCH_BOX(&hdet::encode_cpu));
  m.impl("merge", TORCH_BOX(&hdet::merge_cpu));
  m.impl("decode", TORCH_BOX(&hdet::decode_cpu));
}
