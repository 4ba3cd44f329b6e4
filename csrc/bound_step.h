// A step whose arguments were checked once. Handing twenty arguments to an operator takes longer on the host than
// everything else in a step of a small model, and only the scalars change from step to step.
#pragma once

#include "export.h"
#include "step.h"

namespace hdet {

// param, master, three states, three scales, steps, table, slots, chunks, gradients, scratch.
inline constexpr int kStepTensors = 14;

// Python owns the memory, keeps the tensors alive, and writes the first four numbers: addresses on the device of the
// parameters, 0 for a scalar that is absent. hdet_kernels/ops/bound_step.py has the same order.
struct BoundStep {
  int64_t grad_scale;
  int64_t norm;
  int64_t norms;  // the elements of `norm`
  int64_t found_inf;
  int64_t table_rows;
  int64_t tensors[kStepTensors];    // addresses of the at::Tensor in their Python objects; 0 for one that is absent
  int64_t addresses[kStepTensors];  // of their memory when they were checked
  Work work;
};

// What a bound step returns.
inline constexpr int64_t kDone = 0;
inline constexpr int64_t kMoved = 1;   // nothing was done: a tensor has other memory than when it was checked
inline constexpr int64_t kFailed = 2;  // hdet_step_error has the reason

void keep_step_error(const char* reason);

// A tensor that its Python object keeps.
inline Tensor tensor_at(int64_t tensor) {
  AtenTensorHandle own = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(reinterpret_cast<AtenTensorHandle>(tensor), &own));
  return Tensor(own);
}

inline int64_t address_at(int64_t tensor) {
  void* data = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(reinterpret_cast<AtenTensorHandle>(tensor), &data));
  return reinterpret_cast<int64_t>(data);
}

// Calls run(work, param) with the scalars that Python wrote.
template <typename Run>
int64_t run_bound(const BoundStep& bound, Run&& run) noexcept {
  try {
    for (int i = 0; i < kStepTensors; ++i)
      if (bound.tensors[i] != 0 && address_at(bound.tensors[i]) != bound.addresses[i]) return kMoved;
    Work work = bound.work;
    work.grad_scale = reinterpret_cast<const float*>(bound.grad_scale);
    work.norm = reinterpret_cast<const double*>(bound.norm);
    if (work.norm != nullptr) work.rows_per_norm = bound.table_rows / bound.norms;
    work.found_inf = reinterpret_cast<const float*>(bound.found_inf);
    run(work, tensor_at(bound.tensors[0]));
    return kDone;
  } catch (const std::exception& error) {
    keep_step_error(error.what());
  } catch (...) {
    keep_step_error("hdet_kernels: the step failed without a reason");
  }
  return kFailed;
}

}  // namespace hdet
