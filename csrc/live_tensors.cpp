// What an optimizer looks at before and after every step, for many tensors in one call: the addresses of parameters and
// of their gradients, and the version counters. hdet_kernels/ops/live_tensors.py calls these functions by ctypes.
//
// A tensor is given as the address of the at::Tensor in its Python object, which is what a handle of the stable ABI is.
// The caller keeps the Python objects alive and holds the GIL.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstdint>

#include "export.h"
#include "table.h"

extern "C" {
// Two functions of Python's limited API.
intptr_t PyList_Size(void* list) __attribute__((weak, visibility("default")));
void* PyList_GetItem(void* list, intptr_t index) __attribute__((weak, visibility("default")));

// Two functions that the stable ABI lacks, by their symbols: c10::TensorImpl::grad() const, which returns a reference to
// an at::Tensor, and torch::autograd::impl::bump_version(const at::Tensor&). They are weak: where torch does not have
// them, hdet_can_look says so, and everything else works.
const void* hdet_grad_of(const void* tensor_impl) __asm__("_ZNK3c1010TensorImpl4gradEv")
    __attribute__((weak, visibility("default")));
void hdet_bump_version(const void* tensor) __asm__("_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE")
    __attribute__((weak, visibility("default")));
}

namespace {

using hdet::Gradient;
using hdet::GradientType;

// Bits of what hdet_gradients returns. hdet_kernels/ops/live_tensors.py has the same.
constexpr int64_t kPresent = 1;
constexpr int64_t kAbsent = 2;
constexpr int64_t kMoved = 4;

AtenTensorHandle handle_of(int64_t tensor) { return reinterpret_cast<AtenTensorHandle>(tensor); }

// What the gradients of `count` tensors must be like. Gradient i has counts[i] elements and the strides from
// strides[starts[i]] to strides[starts[i + 1]]; it is contiguous where there are none. `wide` is 1 for float64 gradients
// and 0 for all others.
struct Expected {
  const int64_t* tensors;
  int64_t count;
  const int64_t* counts;
  const int64_t* starts;
  const int64_t* strides;
  int64_t wide;
};
static_assert(sizeof(Expected) == 6 * sizeof(int64_t), "Python writes it as six numbers");

// Returns the gradient of a tensor, which is owned by it and may be undefined. An at::Tensor is a pointer to its
// TensorImpl and nothing else.
AtenTensorHandle gradient_of(int64_t tensor) {
  const void* impl = *reinterpret_cast<const void* const*>(tensor);
  return static_cast<AtenTensorHandle>(const_cast<void*>(hdet_grad_of(impl)));
}

bool data_address(AtenTensorHandle tensor, int64_t& address) {
  void* data = nullptr;
  const bool ok = aoti_torch_get_data_ptr(tensor, &data) == AOTI_TORCH_SUCCESS;
  address = reinterpret_cast<int64_t>(data);
  return ok;
}

// The dtypes of gradients that kernels read, by torch's numbers, in the order of GradientType.
bool gradient_type(AtenTensorHandle gradient, bool wide, GradientType& type) {
  static const int32_t known[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_float64(), aoti_torch_dtype_bfloat16(),
                                  aoti_torch_dtype_float16()};
  int32_t dtype = -1;
  if (aoti_torch_get_dtype(gradient, &dtype) != AOTI_TORCH_SUCCESS) return false;
  const auto* found = std::find(std::begin(known), std::end(known), dtype);
  type = static_cast<GradientType>(found - std::begin(known));
  return found != std::end(known) && (type == GradientType::float64) == wide;
}

bool is_strided(AtenTensorHandle gradient) {
  static const int32_t strided = aoti_torch_layout_strided();
  int32_t layout = -1;
  return aoti_torch_get_layout(gradient, &layout) == AOTI_TORCH_SUCCESS && layout == strided;
}

// Whether the elements lie in the expected order: by `strides` if the slot has any to compare with, else contiguous.
bool in_order(AtenTensorHandle gradient, const int64_t* strides, int64_t dims) {
  if (dims == 0) {
    bool contiguous = false;
    return aoti_torch_is_contiguous(gradient, &contiguous) == AOTI_TORCH_SUCCESS && contiguous;
  }
  int64_t own_dims = 0;
  int64_t* own = nullptr;
  return aoti_torch_get_dim(gradient, &own_dims) == AOTI_TORCH_SUCCESS && own_dims == dims &&
         aoti_torch_get_strides(gradient, &own) == AOTI_TORCH_SUCCESS && std::equal(own, own + dims, strides);
}

}  // namespace

// Returns 1 if the functions below can be called, else 0.
HDET_EXPORT int64_t hdet_can_look() {
  return hdet_grad_of != nullptr && hdet_bump_version != nullptr && PyList_Size != nullptr && PyList_GetItem != nullptr;
}

// Returns 1 if a Python list has the objects of the tensors and no others, in this order, else 0. The at::Tensor of a
// Python object begins `offset` bytes after it.
HDET_EXPORT int64_t hdet_has_members(void* list, const int64_t* tensors, int64_t count, int64_t offset) {
  if (PyList_Size(list) != count) return 0;
  for (int64_t i = 0; i < count; ++i)
    if (reinterpret_cast<int64_t>(PyList_GetItem(list, i)) + offset != tensors[i]) return 0;
  return 1;
}

// Returns 1 if every tensor lies at its address in `addresses`, 0 if one does not, -1 if one has no address.
HDET_EXPORT int64_t hdet_lie_at(const int64_t* tensors, int64_t count, const int64_t* addresses) {
  for (int64_t i = 0; i < count; ++i) {
    int64_t address = 0;
    if (!data_address(handle_of(tensors[i]), address)) return -1;
    if (address != addresses[i]) return 0;
  }
  return 1;
}

// Writes the gradient table of tensors, for the slots of which `expected` has the sizes and strides. Returns -1 if a
// gradient is not as expected, else the sum of kPresent if a parameter has a gradient, kAbsent if one has none, and
// kMoved if the table differs from `before`.
HDET_EXPORT int64_t hdet_gradients(const Expected* expected, const Gradient* before, Gradient* table) {
  const auto& [tensors, count, counts, starts, strides, wide] = *expected;
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const AtenTensorHandle gradient = gradient_of(tensors[i]);
    Gradient entry{hdet::kNoGradient, GradientType::float32};
    bool defined = false;
    if (aoti_torch_is_defined(gradient, &defined) != AOTI_TORCH_SUCCESS) return -1;
    if (defined) {
      int64_t numel = -1;
      const bool fits = is_strided(gradient) && aoti_torch_get_numel(gradient, &numel) == AOTI_TORCH_SUCCESS &&
                        numel == counts[i] && gradient_type(gradient, wide != 0, entry.type) &&
                        in_order(gradient, strides + starts[i], starts[i + 1] - starts[i]) &&
                        data_address(gradient, entry.address) && (entry.address != 0 || numel == 0);
      if (!fits) return -1;
      if (numel == 0) entry.address = hdet::kEmptyGradient;
    }
    const bool moved = entry.address != before[i].address || entry.type != before[i].type;
    found |= (defined ? kPresent : kAbsent) | (moved ? kMoved : 0);
    table[i] = entry;
  }
  return found;
}

// Advances the version counters of tensors, as autograd does for a write in place. Returns the number of those that were
// advanced: fewer than `count` if the next one has no version.
HDET_EXPORT int64_t hdet_advance_versions(const int64_t* tensors, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    try {
      hdet_bump_version(reinterpret_cast<const void*>(tensors[i]));
    } catch (...) {
      return i;
    }
  }
  return count;
}
