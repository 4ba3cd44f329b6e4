// Normal noise on the CPU: threads share the chunks. 16-bit tensors are widened, changed and rounded in blocks that
// stay in the first-level cache.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "convert_cpu.h"
#include "noise.h"
#include "typed.h"

namespace hdet {
namespace {

// The fewest elements that torch gives to one thread, in chunks of 2048.
constexpr int64_t kChunksPerThread = 16;

// Adds the noise of pairs of positions from `first` on to `values`, two for each pair.
template <typename T>
HDET_WIDEST void add_pairs(const Normals normals, T scale, uint64_t first, int64_t pairs, T* __restrict values) {
  for (int64_t i = 0; i < pairs; ++i) {
    const uint64_t pair = first + static_cast<uint64_t>(i);
    const TwoNormals both = normals.of_pair(static_cast<uint32_t>(pair), static_cast<uint32_t>(pair >> 32));
    values[2 * i] += scale * static_cast<T>(both.even);
    values[2 * i + 1] += scale * static_cast<T>(both.odd);
  }
}

// Adds the noise of positions from `start` on to `values`. The first or last position may lack its other half.
template <typename T>
void add(const Normals& normals, T scale, int64_t start, int64_t count, T* values) {
  const int64_t lead = std::min(start & 1, count), pairs = (count - lead) / 2;
  if (lead != 0) values[0] += scale * static_cast<T>(normals.at(start));
  add_pairs(normals, scale, static_cast<uint64_t>(start + lead) / 2, pairs, values + lead);
  const int64_t done = lead + 2 * pairs;
  if (done < count) values[done] += scale * static_cast<T>(normals.at(start + done));
}

template <typename S>
void add_to_chunk(const Chunk& chunk, int64_t address, int64_t key, double scale) {
  using T = Arithmetic<S>;
  const Normals normals(key);
  void* stored = reinterpret_cast<void*>(address);
  const auto factor = static_cast<T>(scale);
  if constexpr (std::is_same_v<S, T>) {
    add(normals, factor, chunk.start, chunk.count, static_cast<T*>(stored) + chunk.start);
  } else {
    T buffer[kBlock];
    for (int64_t done = 0; done < chunk.count; done += kBlock) {
      const int64_t start = chunk.start + done, count = std::min(kBlock, chunk.count - done);
      read_span(plain<S>(stored, start), count, buffer);
      add(normals, factor, start, count, buffer);
      write_span(buffer, count, plain<S>(stored, start));
    }
  }
}

void add_noise_cpu(Tensor chunks, Tensor tensors, Tensor keys, Tensor scales) {
  const Noising work = checked_noising(chunks, tensors, keys, scales);
  torch::stable::parallel_for(0, work.chunk_count, kChunksPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Chunk& chunk = work.chunks[i];
      const Gradient& tensor = work.tensors[chunk.slot];
      if (tensor.address == kNoGradient) continue;
      const int64_t key = work.keys[chunk.slot];
      const double scale = work.scales[chunk.slot];
      with_type(tensor.type,
                [&](auto type) { add_to_chunk<decltype(type)>(chunk, tensor.address, key, scale); });
    }
  });
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CPU, m) { m.impl("add_noise_", TORCH_BOX(&hdet::add_noise_cpu)); }
