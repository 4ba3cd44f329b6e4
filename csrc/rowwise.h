// Shared parts of row-wise Adagrad on the CPU and CUDA: the checked arguments as plain pointers, and the numbers that all
// rows of an embedding table share. hdet_kernels/ops/rowwise.py has the equations.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>

#include "check.h"
#include "rounding.h"
#include "table.h"

namespace hdet {

struct RowWise {
  void* param;  // [height, width]
  void* sums;   // [height], of the type of the arithmetic
  const float* steps;
  const Row* numbers;
  const void* values;    // [count, width]
  const int64_t* rows;   // [count], sorted; null for a dense gradient
  const int64_t* order;  // [count]; null if the values are in order
  const float* grad_scale;
  const float* found_inf;
  int64_t count, width;
  ScalarType param_type, value_type;
  bool decoupled, stochastic_rounding;

  // Whether the first of a run of equal rows is at `entry`. It does the work for all of them.
  HDET_BOTH bool begins_row(int64_t entry) const {
    return rows == nullptr || entry == 0 || rows[entry] != rows[entry - 1];
  }
  // Whether the entry after `entry` belongs to the same row.
  HDET_BOTH bool goes_on(int64_t entry) const {
    return rows != nullptr && entry + 1 < count && rows[entry + 1] == rows[entry];
  }
  HDET_BOTH bool skipped() const { return found_inf != nullptr && *found_inf > 0; }
};

// The numbers that all rows share at one step. T is the type of the arithmetic.
template <typename T>
struct RowWiseNumbers {
  T factor, decay, kept, rate, eps;
  Noise noise;

  static HDET_BOTH RowWiseNumbers of(const RowWise& work) {
    const Row& h = *work.numbers;
    const double t = static_cast<double>(*work.steps) + 1;
    const double rate = h.lr / (1 + (t - 1) * h.lr_decay);
    double factor = 1 - 2 * h.maximize;
    if (work.grad_scale != nullptr) factor = factor / static_cast<double>(*work.grad_scale);
    return {static_cast<T>(factor), static_cast<T>(h.weight_decay), static_cast<T>(1 - rate * h.weight_decay),
            static_cast<T>(rate), static_cast<T>(h.eps), Noise::of(h.seed, t)};
  }
};

inline RowWise checked_rowwise(const Tensor& param, const Tensor& sums, const Tensor& steps, const Tensor& table,
                               int64_t table_row, const Tensor& values, const std::optional<Tensor>& rows,
                               const std::optional<Tensor>& order, const std::optional<Tensor>& grad_scale,
                               const std::optional<Tensor>& found_inf, bool decoupled, bool stochastic_rounding) {
  HDET_CHECK(param.dim() == 2 && values.dim() == 2 && values.size(1) == param.size(1),
             "param and values must be matrices of one width");
  HDET_CHECK(table.dim() == 2 && table.size(1) == kColumns && table_row >= 0 && table_row < table.size(0),
             "the hyperparameter table must have ", kColumns, " columns and row ", table_row);
  RowWise work{};
  work.count = values.size(0);
  work.width = param.size(1);
  HDET_CHECK(rows || work.count == param.size(0), "a dense gradient must have ", param.size(0), " rows, got ",
             work.count);
  work.param_type = param.scalar_type();
  work.value_type = values.scalar_type();
  const bool wide = work.param_type == ScalarType::Double;
  const ScalarType arithmetic = wide ? ScalarType::Double : ScalarType::Float;
  HDET_CHECK(wide || work.param_type == ScalarType::Float || work.param_type == ScalarType::BFloat16 ||
                 work.param_type == ScalarType::Half,
             "parameters must be float32, float64, bfloat16 or float16");
  HDET_CHECK(work.value_type == work.param_type || work.value_type == arithmetic,
             "values have another dtype than expected");
  work.param = checked<void>(param, "param", work.param_type, param.numel(), param);
  work.sums = checked<void>(sums, "sums", arithmetic, param.size(0), param);
  work.steps = checked<const float>(steps, "steps", ScalarType::Float, 1, param);
  work.numbers = checked<const Row>(table, "table", ScalarType::Double, table.numel(), param) + table_row;
  work.values = checked<const void>(values, "values", work.value_type, values.numel(), param);
  if (rows) work.rows = checked<const int64_t>(*rows, "rows", ScalarType::Long, work.count, param);
  if (order) work.order = checked<const int64_t>(*order, "order", ScalarType::Long, work.count, param);
  if (grad_scale) work.grad_scale = checked<const float>(*grad_scale, "grad_scale", ScalarType::Float, 1, param);
  if (found_inf) work.found_inf = checked<const float>(*found_inf, "found_inf", ScalarType::Float, 1, param);
  work.decoupled = decoupled;
  work.stochastic_rounding = stochastic_rounding && work.param_type == ScalarType::BFloat16;
  return work;
}

// Calls run.operator()<P, V, T>() with the types of parameters, values and arithmetic.
template <typename Run>
void with_row_types(const RowWise& work, Run&& run) {
  const bool same = work.value_type == work.param_type;
  switch (work.param_type) {
    case ScalarType::Double:
      return run.template operator()<double, double, double>();
    case ScalarType::Float:
      return run.template operator()<float, float, float>();
    case ScalarType::BFloat16:
      return same ? run.template operator()<BFloat16, BFloat16, float>()
                  : run.template operator()<BFloat16, float, float>();
    default:
      return same ? run.template operator()<Half, Half, float>() : run.template operator()<Half, float, float>();
  }
}

// Rounds the new value of a parameter to its stored type; `at` is its position in the embedding table.
template <typename P, typename T>
HDET_BOTH P stored_as(T value, const RowWise& work, const Noise& noise, int64_t at) {
  if constexpr (std::is_same_v<P, BFloat16>) {
    if (work.stochastic_rounding)
      return round_stochastically(value, Noise::half(Noise::word(noise.drawn(kParamStream, at), at), at));
  }
  return static_cast<P>(value);
}

}  // namespace hdet
