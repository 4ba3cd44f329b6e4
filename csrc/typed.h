// The choice of the code for the type of a tensor's elements. The type is an entry of a table (table.h), so it is known
// only when a kernel runs.
#pragma once

#include "rounding.h"
#include "table.h"

namespace hdet {

// Returns function(S{}) with S the type of the elements.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <typename Function>
HDET_BOTH auto with_type(GradientType type, Function&& function) {
  switch (type) {
    case GradientType::float32:
      return function(float{});
    case GradientType::float64:
      return function(double{});
    case GradientType::bfloat16:
      return function(BFloat16{});
    default:
      return function(Half{});
  }
}

}  // namespace hdet
