// The fused optimizer step: one operator updates all parameters of a flat buffer and their state. Here are the parts that
// the CPU and CUDA share: the checked arguments as plain pointers, and the choice of the rule.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>

#include "check.h"
#include "companding.h"
#include "rules.h"
#include "table.h"

namespace hdet {

inline constexpr int kMaxStates = 3;
// Of these, how many can be codes of 8 bits: not the third one, the largest second moment of amsgrad.
inline constexpr int kMaxCoded = 2;
// The bytes of the caller's scratch for each slot of each replica.
inline constexpr int64_t kScratchBytes = 128;

// The numbers that all elements of a slot of one replica share at one step.
template <typename R>
struct alignas(16) Prepared {
  R rule;
  Noise noise;
};

// `rows` replicas share the gradients and the states. Slots and chunks are those of one replica.
struct Work {
  Rule rule;
  void* param;               // [rows, row_size]
  void* master;              // [rows, row_size] float, or int16_t if split; null: there is no master
  void* states[kMaxStates];  // [row_size], or null where a state is not in use
  float* scales[kMaxCoded];  // of states that are codes of 8 bits: kBlocksPerChunk for each chunk; null for all others
  float* steps;
  const Row* table;
  const Slot* slots;
  const Chunk* chunks;
  const Gradient* gradients;
  void* scratch;
  const float* grad_scale;  // null for a scale of 1
  const double* norm;       // null for no clipping; one for every rows_per_norm rows of the table
  const float* found_inf;   // null if the step is never skipped
  int64_t slot_count;
  int64_t chunk_count;
  int64_t rows;
  int64_t row_size;
  int64_t group_count;  // rows of the table for each replica
  int64_t rows_per_norm;
  int state_count;  // the number of states that are given; they are the first ones
  bool stochastic_rounding;
  bool split_master;
  ScalarType param_type, state_type;  // without a state, state_type is that of the arithmetic
};

inline Work checked_work(int64_t rule, const Tensor& param, const std::optional<Tensor>& master,
                         const std::optional<Tensor> (&states)[kMaxStates],
                         const std::optional<Tensor> (&scales)[kMaxCoded], const Tensor& steps, const Tensor& table,
                         const Tensor& slots, const Tensor& chunks, const Tensor& gradients, const Tensor& scratch,
                         const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& norm,
                         const std::optional<Tensor>& found_inf, bool stochastic_rounding, int64_t rows) {
  HDET_CHECK(rule >= 0 && rule <= static_cast<int64_t>(Rule::muon), "unknown rule ", rule);
  HDET_CHECK(table.dim() == 2 && table.size(1) == kColumns, "the hyperparameter table must have ", kColumns,
             " columns");
  HDET_CHECK(rows > 0 && param.numel() % rows == 0, "param has ", param.numel(), " elements, which are not ", rows,
             " rows");
  HDET_CHECK(table.size(0) % rows == 0, "the hyperparameter table must have equally many rows for each of ", rows,
             " replicas, got ", table.size(0));
  Work work{};
  work.rule = static_cast<Rule>(rule);
  work.slots = checked_rows<Slot>(slots, "slots", 3, param);
  work.chunks = checked_rows<Chunk>(chunks, "chunks", 4, param);
  work.gradients = checked_rows<Gradient>(gradients, "gradients", 2, param);
  work.slot_count = slots.size(0);
  work.chunk_count = chunks.size(0);
  work.rows = rows;
  work.row_size = param.numel() / rows;
  work.group_count = table.size(0) / rows;
  HDET_CHECK(gradients.size(0) == work.slot_count, "gradients must have ", work.slot_count, " rows, got ",
             gradients.size(0));
  work.param_type = param.scalar_type();
  work.state_type = work.param_type == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  work.param = checked<void>(param, "param", work.param_type, param.numel(), param);
  for (int i = 0; i < kMaxStates; ++i) {
    const bool coded = states[i].has_value() && states[i]->scalar_type() == ScalarType::Byte;
    HDET_CHECK(i < kMaxCoded || !coded, "the largest second moment of amsgrad cannot be uint8 codes");
    HDET_CHECK(i >= kMaxCoded || scales[i].has_value() == coded, "state ", i,
               " must have scales if it is uint8 codes, and else none");
    if (!states[i].has_value()) continue;
    HDET_CHECK(work.state_count == i, "state ", i, " is given and one before it is not");
    if (i == 0) work.state_type = states[i]->scalar_type();
    work.states[i] = checked<void>(*states[i], "state", work.state_type, work.row_size, param);
    if (coded)
      work.scales[i] =
          checked<float>(*scales[i], "scales", ScalarType::Float, kBlocksPerChunk * work.chunk_count, param);
    work.state_count = i + 1;
  }
  if (master) {
    work.split_master = master->scalar_type() == ScalarType::Short;
    const ScalarType type = work.split_master ? ScalarType::Short : ScalarType::Float;
    work.master = checked<void>(*master, "master", type, param.numel(), param);
  }
  work.scratch = checked<void>(scratch, "scratch", ScalarType::Byte, kScratchBytes * rows * work.slot_count, param);
  work.steps = checked<float>(steps, "steps", ScalarType::Float, work.slot_count, param);
  work.table = checked<const Row>(table, "table", ScalarType::Double, table.numel(), param);
  if (grad_scale) work.grad_scale = checked<const float>(*grad_scale, "grad_scale", ScalarType::Float, 1, param);
  if (norm) {
    const int64_t norms = norm->numel();
    work.norm = checked<const double>(*norm, "norm", ScalarType::Double, norms, param);
    HDET_CHECK(norms == 1 || (norms > 0 && rows == 1 && table.size(0) % norms == 0), "norm must have one element, or ",
               "without replicas one for equally many rows each of the hyperparameter table; got ", norms, " for ",
               table.size(0), " rows and ", rows, " replicas");
    work.rows_per_norm = table.size(0) / norms;
  }
  if (found_inf) work.found_inf = checked<const float>(*found_inf, "found_inf", ScalarType::Float, 1, param);
  work.stochastic_rounding = stochastic_rounding;

  const bool wide = work.param_type == ScalarType::Double;
  const bool narrow = work.param_type == ScalarType::BFloat16 || work.param_type == ScalarType::Half;
  HDET_CHECK(wide || narrow || work.param_type == ScalarType::Float,
             "parameters must be float32, float64, bfloat16 or float16");
  HDET_CHECK(work.state_type == (wide ? ScalarType::Double : ScalarType::Float) ||
                 ((work.state_type == ScalarType::BFloat16 || work.state_type == ScalarType::Byte) && !wide &&
                  work.param_type != ScalarType::Half),
             "state has another dtype than expected");
  HDET_CHECK(work.master == nullptr || narrow, "only bfloat16 and float16 parameters have a master");
  HDET_CHECK(!work.split_master || work.param_type == ScalarType::BFloat16,
             "only bfloat16 parameters have a split master");
  HDET_CHECK(!stochastic_rounding || (work.master == nullptr && work.param_type != ScalarType::Half),
             "stochastic rounding is for bfloat16 parameters without master");
  return work;
}

// Derives the numbers of one slot of one replica and advances the step count. Hyperparameters that act on the gradient
// are replica 0's, for all replicas.
template <typename R>
HDET_BOTH Prepared<R> prepare(const Work& work, int64_t replica, int64_t slot, float& steps) {
  const int64_t group = work.slots[slot].row;
  const Row first = work.table[group];
  const Row own = work.table[replica * work.group_count + group];
  const double* norm = work.norm == nullptr ? nullptr : work.norm + group / work.rows_per_norm;
  const Moment now = advanced(work.rule, first, steps, work.grad_scale, norm);
  return {R::derive(own, now), Noise::of(own.seed, now.t)};
}

// Calls run.operator()<R<T>>() with the rule.
template <typename T, typename Run>
void with_rule(const Work& work, Run&& run) {
  const auto checked_run = [&]<typename R>() {
    HDET_CHECK(work.state_count >= R::kFewestStates, "this rule needs ", R::kFewestStates, " state buffers, got ",
               work.state_count);
    static_assert(sizeof(Prepared<R>) <= kScratchBytes);
    run.template operator()<R>();
  };
  switch (work.rule) {
    case Rule::sgd:
      return checked_run.template operator()<Sgd<T>>();
    case Rule::adam:
    case Rule::adamw:
      return checked_run.template operator()<Adam<T>>();
    case Rule::adagrad:
      return checked_run.template operator()<Adagrad<T>>();
    case Rule::lion:
      return checked_run.template operator()<Lion<T>>();
    case Rule::muon:
      return checked_run.template operator()<Muon<T>>();
  }
}

// Whether a rule uses its optional state. That state must also be given: a flag in the table may ask for one whose
// pointer is null.
template <typename R>
HDET_BOTH bool uses_most_states(const R& rule, const Work& work) {
  return R::kMostStates > R::kFewestStates && rule.states == R::kMostStates && work.state_count >= R::kMostStates;
}

}  // namespace hdet
