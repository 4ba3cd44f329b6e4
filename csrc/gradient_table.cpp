// The gradient table of a step, filled from the gradients that autograd left: their addresses and types. It runs on the
// host, whatever the device of the gradients.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <iterator>
#include <optional>

#include "check.h"
#include "table.h"

namespace hdet {
namespace {

// Bits of the result. hdet_kernels/ops/chunks.py has the same.
constexpr int64_t kPresent = 1;
constexpr int64_t kAbsent = 2;
constexpr int64_t kMoved = 4;
constexpr int64_t kUnfit = -1;

// The elements of a list of tensors. std::vector<Tensor> would be the usual argument, and takes twice as long to make.
class TensorList {
 public:
  explicit TensorList(StableIValue list) : list_(torch::stable::detail::to<StableListHandle>(list)) {
    TORCH_ERROR_CODE_CHECK(torch_list_size(list_, &size_));
  }
  TensorList(const TensorList&) = delete;
  ~TensorList() { torch_delete_list(list_); }

  int64_t size() const { return static_cast<int64_t>(size_); }

  // Calls look(handle) with an element.
  template <typename Look>
  void at(int64_t i, Look&& look) const {
    StableIValue element;
    TORCH_ERROR_CODE_CHECK(torch_list_get_item(list_, i, &element));
    const auto handle = torch::stable::detail::to<AtenTensorHandle>(element);
    look(handle);
    aoti_torch_delete_tensor_object(handle);
  }

 private:
  StableListHandle list_;
  size_t size_ = 0;
};

// What a slot's gradient must be like: its elements, and the strides to compare; contiguous where there are none.
struct Layout {
  int64_t numel;
  const int64_t* strides;
  int64_t dims;
};

bool in_order(AtenTensorHandle gradient, const Layout& expected) {
  static const int32_t strided = aoti_torch_layout_strided();
  int32_t layout = -1;
  if (aoti_torch_get_layout(gradient, &layout) != AOTI_TORCH_SUCCESS || layout != strided) return false;
  if (expected.dims == 0) {
    bool contiguous = false;
    return aoti_torch_is_contiguous(gradient, &contiguous) == AOTI_TORCH_SUCCESS && contiguous;
  }
  int64_t dims = 0;
  int64_t* strides = nullptr;
  return aoti_torch_get_dim(gradient, &dims) == AOTI_TORCH_SUCCESS && dims == expected.dims &&
         aoti_torch_get_strides(gradient, &strides) == AOTI_TORCH_SUCCESS &&
         std::equal(strides, strides + dims, expected.strides);
}

// Returns the entry of a gradient, or nothing if it is not as expected.
std::optional<Gradient> entry_of(AtenTensorHandle gradient, const Layout& expected, bool wide) {
  // The dtypes of gradients that kernels read, by torch's numbers, in the order of GradientType.
  static const int32_t known[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_float64(), aoti_torch_dtype_bfloat16(),
                                  aoti_torch_dtype_float16()};
  static const int32_t absent = aoti_torch_dtype_uint8();
  int32_t dtype = -1;
  if (aoti_torch_get_dtype(gradient, &dtype) != AOTI_TORCH_SUCCESS) return std::nullopt;
  if (dtype == absent) return Gradient{kNoGradient, GradientType::float32};
  const auto* found = std::find(std::begin(known), std::end(known), dtype);
  const auto type = static_cast<GradientType>(found - std::begin(known));
  int64_t numel = -1;
  void* data = nullptr;
  const bool fits = found != std::end(known) && (type == GradientType::float64) == wide &&
                    aoti_torch_get_numel(gradient, &numel) == AOTI_TORCH_SUCCESS && numel == expected.numel &&
                    in_order(gradient, expected) && aoti_torch_get_data_ptr(gradient, &data) == AOTI_TORCH_SUCCESS &&
                    (data != nullptr || numel == 0);
  if (!fits) return std::nullopt;
  return Gradient{numel == 0 ? kEmptyGradient : reinterpret_cast<int64_t>(data), type};
}

int64_t fill(const TensorList& gradients, const Tensor& layouts, bool wide, const Tensor& table) {
  const int64_t count = gradients.size();
  HDET_CHECK(table.is_cpu(), "table must be in host memory");
  auto* entries = checked<Gradient>(table, "table", ScalarType::Long, 2 * count, table);
  const auto* next = checked<const int64_t>(layouts, "layouts", ScalarType::Long, layouts.numel(), table);
  const int64_t* const end = next + layouts.numel();
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    HDET_CHECK(end - next >= 2 && next[1] >= 0 && end - next - 2 >= next[1], "layouts end before gradient ", i);
    const Layout expected{next[0], next + 2, next[1]};
    next = expected.strides + expected.dims;
    std::optional<Gradient> entry;
    gradients.at(i, [&](AtenTensorHandle gradient) { entry = entry_of(gradient, expected, wide); });
    if (!entry) return kUnfit;
    const bool moved = entry->address != entries[i].address || entry->type != entries[i].type;
    found |= (entry->address == kNoGradient ? kAbsent : kPresent) | (moved ? kMoved : 0);
    entries[i] = *entry;
  }
  return found;
}

// The operator as torch calls it: arguments and result are on the stack.
void fill_gradient_table(StableIValue* stack, uint64_t, uint64_t) {
  using torch::stable::detail::from, torch::stable::detail::to;
  const TensorList gradients(stack[0]);
  const auto layouts = to<Tensor>(stack[1]);
  const auto wide = to<bool>(stack[2]);
  const auto table = to<Tensor>(stack[3]);
  stack[0] = from(fill(gradients, layouts, wide, table));
}

}  // namespace
}  // namespace hdet

// Composite: nothing here is differentiated, and no device has a kernel of its own.
STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CompositeImplicitAutograd, m) {
  m.impl("fill_gradient_table", &hdet::fill_gradient_table);
}
