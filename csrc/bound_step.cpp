// Checking the arguments of a step once, for the calls of hdet_step_cpu and hdet_step_cuda that follow.
#include "bound_step.h"

#include <string>

namespace hdet {
namespace {

// The caller may be any thread, and asks for the reason before its next step.
thread_local std::string step_error;

std::optional<Tensor> optional_at(int64_t tensor) {
  return tensor == 0 ? std::nullopt : std::optional<Tensor>(tensor_at(tensor));
}

}  // namespace

void keep_step_error(const char* reason) { step_error = reason; }

}  // namespace hdet

HDET_EXPORT int64_t hdet_bound_step_bytes() { return sizeof(hdet::BoundStep); }

HDET_EXPORT const char* hdet_step_error() { return hdet::step_error.c_str(); }

// Checks the tensors that Python wrote to `bound`, and fills in the rest. Returns 1, or 0 if the arguments are wrong: the
// operator says why.
HDET_EXPORT int64_t hdet_bind_step(int64_t rule, int64_t stochastic_rounding, int64_t rows, hdet::BoundStep* bound) {
  using hdet::optional_at, hdet::tensor_at;
  try {
    const int64_t* at = bound->tensors;
    const hdet::Tensor table = tensor_at(at[9]);
    bound->work = hdet::checked_work(rule, tensor_at(at[0]), optional_at(at[1]),
                                     {optional_at(at[2]), optional_at(at[3]), optional_at(at[4])},
                                     {optional_at(at[5]), optional_at(at[6]), optional_at(at[7])}, tensor_at(at[8]),
                                     table, tensor_at(at[10]), tensor_at(at[11]), tensor_at(at[12]),
                                     tensor_at(at[13]), std::nullopt, std::nullopt, std::nullopt,
                                     stochastic_rounding != 0, rows);
    bound->table_rows = table.size(0);
    for (int i = 0; i < hdet::kStepTensors; ++i) bound->addresses[i] = at[i] == 0 ? 0 : hdet::address_at(at[i]);
    return 1;
  } catch (...) {
    return 0;
  }
}
