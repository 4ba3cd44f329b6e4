// Packing gathers pieces of tensors that lie anywhere into one contiguous buffer, and unpacking scatters it back; rows of
// several replicas are summed and divided on the way. Here are their checked arguments, for the CPU and CUDA.
// hdet_kernels/ops/pack.py has the operation.
#pragma once

#include "check.h"
#include "table.h"

namespace hdet {

// The most rows of a tensor: `included` has a bit for each.
inline constexpr int kMostRows = 64;

// The rows that are summed, in ascending order.
struct Rows {
  int count;
  uint8_t index[kMostRows];

  static Rows of(int64_t included) {
    Rows rows{};
    for (int row = 0; row < kMostRows; ++row)
      if ((static_cast<uint64_t>(included) >> row) & 1) rows.index[rows.count++] = static_cast<uint8_t>(row);
    return rows;
  }
};

struct Packing {
  const Chunk* chunks;  // `offset` in the staging buffer, `start` in a row of the tensor
  int64_t chunk_count;
  const Gradient* places;  // addresses and types of the tensors, as in the gradient table
  const int64_t* strides;  // elements from one row of a tensor to the next
  void* staging;
  bool wide;  // staging buffer and tensors are double
};

inline Packing checked_packing(const Tensor& chunks, const Tensor& places, const Tensor& strides,
                               const Tensor& staging) {
  const bool wide = staging.scalar_type() == ScalarType::Double;
  HDET_CHECK(wide || staging.scalar_type() == ScalarType::Float, "the staging buffer must be float32 or float64");
  HDET_CHECK(staging.is_contiguous(), "the staging buffer must be contiguous");
  return {checked_rows<Chunk>(chunks, "chunks", 4, staging),
          chunks.size(0),
          checked_rows<Gradient>(places, "places", 2, staging),
          checked<const int64_t>(strides, "strides", ScalarType::Long, places.size(0), staging),
          staging.data_ptr(),
          wide};
}

inline int64_t checked_row_count(int64_t rows) {
  HDET_CHECK(rows >= 1 && rows <= kMostRows, "rows must be 1 to ", static_cast<int64_t>(kMostRows), ", got ", rows);
  return rows;
}

}  // namespace hdet
