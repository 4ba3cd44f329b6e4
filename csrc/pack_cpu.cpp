// Packing and unpacking on the CPU: threads share the chunks. Sums and quotients are formed in blocks that stay in the
// first-level cache.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "convert_cpu.h"
#include "pack.h"

namespace hdet {
namespace {

// The fewest elements that torch gives to one thread, in chunks of 2048.
constexpr int64_t kChunksPerThread = 16;

template <typename T>
void add(const T* __restrict from, T* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

template <typename T>
void divide(const T* __restrict from, T divisor, T* __restrict to, int64_t count) {
  int exponent;
  if (std::frexp(divisor, &exponent) == T(0.5)) {  // a power of two: a product has the same bits and takes less time
    const T factor = T(1) / divisor;
    for (int64_t i = 0; i < count; ++i) to[i] = from[i] * factor;
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = from[i] / divisor;
  }
}

int64_t size_of(GradientType type) {
  return type == GradientType::float64 ? 8 : type == GradientType::float32 ? 4 : 2;
}

// Sums elements `start` .. `start + count` of the rows, at most kBlock of them, into `to`.
template <typename T>
void pack_block(const Gradient& place, int64_t stride, const Rows& rows, int64_t start, T divisor, T* to,
                int64_t count) {
  const void* address = reinterpret_cast<const void*>(place.address);
  T buffer[kBlock];
  if (rows.count == 0) std::fill_n(to, count, T(0));
  for (int k = 0; k < rows.count; ++k) {
    const int64_t at = rows.index[k] * stride + start;
    if (k > 0) {
      add(widened(address, place.type, at, count, buffer), to, count);
    } else if (const T* row = widened(address, place.type, at, count, to); row != to) {
      std::copy_n(row, count, to);
    }
  }
  if (divisor == 1) return;
  std::copy_n(to, count, buffer);
  divide(buffer, divisor, to, count);
}

template <typename T>
void unpack_block(const T* from, T divisor, const Gradient& place, int64_t stride, int64_t rows, int64_t start,
                  int64_t count) {
  T buffer[kBlock];
  if (divisor != 1) {
    divide(from, divisor, buffer, count);
    from = buffer;
  }
  void* address = reinterpret_cast<void*>(place.address);
  const int64_t size = size_of(place.type);
  char* first = static_cast<char*>(address) + start * size;
  if (size == sizeof(T)) {
    std::memcpy(first, from, count * size);
  } else if (place.type == GradientType::bfloat16) {
    write_span(from, count, plain<BFloat16>(address, start));
  } else {
    write_span(from, count, plain<Half>(address, start));
  }
  for (int64_t row = 1; row < rows; ++row) std::memcpy(first + row * stride * size, first, count * size);
}

// Calls run(chunk, done, count) for every block of every chunk.
template <typename Run>
void in_blocks(const Packing& work, Run&& run) {
  torch::stable::parallel_for(0, work.chunk_count, kChunksPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Chunk& chunk = work.chunks[i];
      for (int64_t done = 0; done < chunk.count; done += kBlock) run(chunk, done, std::min(kBlock, chunk.count - done));
    }
  });
}

template <typename T>
void pack(const Packing& work, const Rows& rows, T divisor) {
  auto* staging = static_cast<T*>(work.staging);
  in_blocks(work, [&](const Chunk& chunk, int64_t done, int64_t count) {
    pack_block(work.places[chunk.slot], work.strides[chunk.slot], rows, chunk.start + done, divisor,
               staging + chunk.offset + done, count);
  });
}

template <typename T>
void unpack(const Packing& work, int64_t rows, T divisor) {
  const auto* staging = static_cast<const T*>(work.staging);
  in_blocks(work, [&](const Chunk& chunk, int64_t done, int64_t count) {
    unpack_block(staging + chunk.offset + done, divisor, work.places[chunk.slot], work.strides[chunk.slot], rows,
                 chunk.start + done, count);
  });
}

void pack_cpu(Tensor chunks, Tensor places, Tensor strides, int64_t included, double divisor, Tensor staging) {
  const Packing work = checked_packing(chunks, places, strides, staging);
  const Rows rows = Rows::of(included);
  work.wide ? pack<double>(work, rows, divisor) : pack<float>(work, rows, static_cast<float>(divisor));
}

void unpack_cpu(Tensor chunks, Tensor places, Tensor strides, int64_t rows, double divisor, Tensor staging) {
  const Packing work = checked_packing(chunks, places, strides, staging);
  const int64_t count = checked_row_count(rows);
  work.wide ? unpack<double>(work, count, divisor) : unpack<float>(work, count, static_cast<float>(divisor));
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CPU, m) {
  m.impl("pack", TORCH_BOX(&hdet::pack_cpu));
  m.impl("unpack", TORCH_BOX(&hdet::unpack_cpu));
}
