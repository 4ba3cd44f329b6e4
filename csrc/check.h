// Checks of the arguments of the operators: a kernel reads and writes raw memory, so what does not fit is refused first,
// with a message that says what was given and what was expected.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <stdexcept>
#include <string>

namespace hdet {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Messages are formatted without streams. A toolchain that links the C++ library statically puts a second copy of it
// beside torch's into the process, and formatting a number through the wrong copy's locale crashes (torch's own
// STD_TORCH_CHECK did).
inline std::string text(const char* part) { return part; }
inline std::string text(int64_t part) { return std::to_string(part); }

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::runtime_error((std::string("hdet_kernels: ") + ... + text(parts)));
}

#define HDET_CHECK(condition, ...) \
  if (!(condition)) ::hdet::fail(__VA_ARGS__)

// Returns the memory of a contiguous tensor of `numel` elements of `type` on the device of `like`.
template <typename T>
T* checked(const Tensor& tensor, const char* name, ScalarType type, int64_t numel, const Tensor& like) {
  HDET_CHECK(tensor.scalar_type() == type, name, " has another dtype than expected");
  HDET_CHECK(tensor.is_contiguous(), name, " must be contiguous");
  HDET_CHECK(tensor.numel() == numel, name, " must have ", numel, " elements, got ", tensor.numel());
  HDET_CHECK(tensor.device() == like.device(), name, " must be on the device of the other tensors");
  return static_cast<T*>(tensor.data_ptr());
}

// Returns the entries of an int64 table of `columns` columns.
template <typename T>
const T* checked_rows(const Tensor& table, const char* name, int64_t columns, const Tensor& like) {
  HDET_CHECK(table.dim() == 2 && table.size(1) == columns, name, " must have ", columns, " columns");
  return checked<const T>(table, name, ScalarType::Long, table.numel(), like);
}

// Returns the number of chunks of each of `rows` replicas, whose chunks come one after the other.
inline int64_t chunks_per_row(const Tensor& chunks, int64_t rows) {
  HDET_CHECK(rows > 0 && chunks.size(0) % rows == 0, "chunks must be equally many for each of ", rows, " rows, got ",
             chunks.size(0));
  return chunks.size(0) / rows;
}

}  // namespace hdet
