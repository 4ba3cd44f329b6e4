// Writing a small table to a CUDA device as arguments of a launch. The launch copies them, so the caller's memory may
// change at once, and neither pinned memory nor an event that guards it is needed.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>

#include "check.h"
#include "launch_cuda.h"

namespace hdet {
namespace {

// All arguments of a launch have 4096 bytes together.
constexpr int kWords = 496;
constexpr int kWriteThreads = 256;

struct Words {
  uint64_t values[kWords];
};

__global__ void __launch_bounds__(kWriteThreads)
    write(const __grid_constant__ Words words, int count, uint64_t* __restrict__ to) {
  for (int i = threadIdx.x; i < count; i += kWriteThreads) to[i] = words.values[i];
}

void write_cuda(Tensor target, Tensor values) {
  const int64_t count = values.numel();
  const auto* from = checked<const uint64_t>(values, "values", target.scalar_type(), target.numel(), values);
  auto* to = checked<uint64_t>(target, "target", target.scalar_type(), count, target);
  HDET_CHECK(values.is_cpu() && target.element_size() == sizeof(uint64_t), "values must be words of 8 bytes on the host");
  const Launch launch(target);
  for (int64_t done = 0; done < count; done += kWords) {
    Words words;
    const auto now = static_cast<int>(std::min<int64_t>(count - done, kWords));
    std::memcpy(words.values, from + done, now * sizeof(uint64_t));
    write<<<1, kWriteThreads, 0, launch.stream()>>>(words, now, to + done);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CUDA, m) { m.impl("write_", TORCH_BOX(&hdet::write_cuda)); }
