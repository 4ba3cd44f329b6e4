// What the CPU and the CUDA step share: the arguments, checked and as plain pointers, and the choice of rule and type.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "rules.h"
#include "table.h"

namespace hdet {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Errors are put together without streams: a toolchain that links the C++ library statically has two copies of it in
// the process then, torch's and ours, and formatting a number through the wrong one's locale crashes (torch's own
// STD_TORCH_CHECK did).
inline std::string text(const char* part) { return part; }
inline std::string text(int64_t part) { return std::to_string(part); }

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::runtime_error((std::string("step_: ") + ... + text(parts)));
}

#define HDET_CHECK(condition, ...) \
  if (!(condition)) ::hdet::fail(__VA_ARGS__)

inline constexpr int kMaxStates = 3;

struct Work {
  void* param;
  void* states[kMaxStates];  // null where a state is not in use
  float* steps;
  const Row* table;
  const Slot* slots;
  const Chunk* chunks;
  const int64_t* addresses;
  const double* multiplier;  // may be null: 1
  const float* found_inf;    // may be null: finite
  int64_t slot_count;
  int64_t chunk_count;
  int state_count;  // how many of the states, from the first on, are there
};

template <typename T>
T* checked(const Tensor& tensor, const char* name, ScalarType type, int64_t numel, const Tensor& like) {
  HDET_CHECK(tensor.scalar_type() == type, name, " has another dtype than expected");
  HDET_CHECK(tensor.is_contiguous(), name, " must be contiguous");
  HDET_CHECK(tensor.numel() == numel, name, " must have ", numel, " elements, got ", tensor.numel());
  HDET_CHECK(tensor.device() == like.device(), name, " must be on the device of the parameters");
  return static_cast<T*>(tensor.data_ptr());
}

inline Work checked_work(const Tensor& param, const std::optional<Tensor> (&states)[kMaxStates], const Tensor& steps,
                         const Tensor& table, const Tensor& slots, const Tensor& chunks, const Tensor& addresses,
                         const std::optional<Tensor>& multiplier, const std::optional<Tensor>& found_inf) {
  HDET_CHECK(table.dim() == 2 && table.size(1) == kColumns, "the hyperparameter table must have ", kColumns,
                  " columns");
  Work work{};
  work.slot_count = addresses.numel();
  work.chunk_count = chunks.numel() / 2;
  work.param = checked<void>(param, "param", param.scalar_type(), param.numel(), param);
  for (int i = 0; i < kMaxStates; ++i) {
    if (!states[i].has_value()) continue;
    HDET_CHECK(work.state_count == i, "state ", i, " is given and one before it is not");
    work.states[i] = checked<void>(*states[i], "state", param.scalar_type(), param.numel(), param);
    work.state_count = i + 1;
  }
  work.steps = checked<float>(steps, "steps", ScalarType::Float, work.slot_count, param);
  work.table = checked<const Row>(table, "table", ScalarType::Double, table.numel(), param);
  work.slots = checked<const Slot>(slots, "slots", ScalarType::Long, work.slot_count * 3, param);
  work.chunks = checked<const Chunk>(chunks, "chunks", ScalarType::Int, work.chunk_count * 2, param);
  work.addresses = checked<const int64_t>(addresses, "addresses", ScalarType::Long, work.slot_count, param);
  if (multiplier) work.multiplier = checked<const double>(*multiplier, "multiplier", ScalarType::Double, 1, param);
  if (found_inf) work.found_inf = checked<const float>(*found_inf, "found_inf", ScalarType::Float, 1, param);
  return work;
}

// Half-precision values are computed with as float and rounded once, when they are stored.
template <typename S>
using Arithmetic = std::conditional_t<std::is_same_v<S, double>, double, float>;

// Calls run.operator()<S, R>() with the stored type S and the rule R<Arithmetic<S>>.
template <template <typename> typename R, typename Run>
void with_type(ScalarType type, const Work& work, Run&& run) {
  HDET_CHECK(work.state_count >= R<float>::kFewestStates, "this rule needs ", R<float>::kFewestStates,
                  " state buffers, got ", work.state_count);
  switch (type) {
    case ScalarType::Float:
      return run.template operator()<float, R<float>>();
    case ScalarType::Double:
      return run.template operator()<double, R<double>>();
    case ScalarType::BFloat16:
      return run.template operator()<torch::headeronly::BFloat16, R<float>>();
    case ScalarType::Half:
      return run.template operator()<torch::headeronly::Half, R<float>>();
    default:
      fail("parameters must be float32, float64, bfloat16 or float16");
  }
}

template <typename Run>
void with_rule_and_type(int64_t rule, ScalarType type, const Work& work, Run&& run) {
  switch (static_cast<Rule>(rule)) {
    case Rule::sgd:
      return with_type<Sgd>(type, work, run);
    case Rule::adam:
      return with_type<Adam>(type, work, run);
    case Rule::adamw:
      return with_type<AdamW>(type, work, run);
    case Rule::adagrad:
      return with_type<Adagrad>(type, work, run);
    case Rule::lion:
      return with_type<Lion>(type, work, run);
    default:
      fail("unknown rule ", rule);
  }
}

// The state buffers that a parameter asks for but that are not there (a flag that is set in the table only) would be
// null pointers; then the rule works with those that are.
template <typename R>
HDET_BOTH bool uses_most_states(const R& rule, const Work& work) {
  return R::kMostStates > R::kFewestStates && rule.states == R::kMostStates && work.state_count >= R::kMostStates;
}

}  // namespace hdet
