// The mean of two replicas on the CPU: this one's tensors, wherever they lie, and what the other one has sent. In one
// pass the tensors are overwritten and the distance of the two is measured. Its squares are summed for each chunk, and
// the chunks in order, so that the result does not depend on the number of threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "convert_cpu.h"
#include "pack.h"

namespace hdet {
namespace {

// The fewest elements that torch gives to one thread, in chunks of 2048.
constexpr int64_t kChunksPerThread = 16;

// Vectors of 16 bytes, which every processor has: GCC does not vectorise the loop itself, because `to` may be `own`.
template <typename T>
struct Vector {
  typedef T Type __attribute__((vector_size(16)));
  static constexpr int kWidth = 16 / sizeof(T);

  static Type read(const T* from) {
    Type value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
};

// Writes the means to `to`, which may be `own`, and returns Σ (own - other)². The sum is formed in T: of at most kBlock
// elements each lane adds so few that little is rounded.
template <typename T>
double average(const T* own, const T* other, T* to, int64_t count) {
  constexpr int kVectors = 4, kWidth = Vector<T>::kWidth;
  typename Vector<T>::Type lanes[kVectors] = {};
  int64_t i = 0;
  for (; i + kVectors * kWidth <= count; i += kVectors * kWidth)
    for (int k = 0; k < kVectors; ++k) {
      const int64_t at = i + k * kWidth;
      const auto mine = Vector<T>::read(own + at), theirs = Vector<T>::read(other + at);
      const auto mean = (mine + theirs) * T(0.5), difference = mine - theirs;
      std::memcpy(to + at, &mean, sizeof(mean));
      lanes[k] += difference * difference;
    }
  double sum = 0;
  for (; i < count; ++i) {
    const T mine = own[i], theirs = other[i];
    to[i] = (mine + theirs) * T(0.5);
    sum += (mine - theirs) * (mine - theirs);
  }
  for (const auto& vector : lanes)
    for (int k = 0; k < kWidth; ++k) sum += vector[k];
  return sum;
}

// Overwrites elements `start` .. `start + count` of the tensor, at most kBlock of them, with their means, and returns
// their squared distance from those received.
template <typename T>
double mean_block(const Gradient& place, int64_t start, const T* received, int64_t count) {
  T buffer[kBlock];
  void* address = reinterpret_cast<void*>(place.address);
  const T* own = widened(address, place.type, start, count, buffer);
  T* means = place.type == gradient_type<T> ? static_cast<T*>(address) + start : buffer;
  const double distance = average(own, received, means, count);
  if (place.type == GradientType::bfloat16)
    write_span(means, count, plain<BFloat16>(address, start));
  else if (place.type == GradientType::float16)
    write_span(means, count, plain<Half>(address, start));
  return distance;
}

template <typename T>
double pair_mean(const Packing& work, int64_t measured) {
  const auto* received = static_cast<const T*>(work.staging);
  std::vector<double> sums(work.chunk_count);
  torch::stable::parallel_for(0, work.chunk_count, kChunksPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto& [offset, start, count, slot] = work.chunks[i];
      for (int64_t done = 0, size; done < count; done += size) {
        // A block ends where the measured elements do.
        const int64_t left = measured - offset - done;
        size = std::min({kBlock, count - done, left > 0 ? left : kBlock});
        const double distance = mean_block(work.places[slot], start + done, received + offset + done, size);
        if (left > 0) sums[i] += distance;
      }
    }
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

void pair_mean_cpu(Tensor chunks, Tensor places, Tensor strides, int64_t measured, Tensor received, Tensor result) {
  const Packing work = checked_packing(chunks, places, strides, received);
  auto* written = checked<double>(result, "result", ScalarType::Double, 2, received);
  written[1] = work.wide ? pair_mean<double>(work, measured) : pair_mean<float>(work, measured);
  written[0] = 1;
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CPU, m) {
  m.impl("pair_mean_", TORCH_BOX(&hdet::pair_mean_cpu));
}
