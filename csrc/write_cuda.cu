// Writing a small table to a CUDA device as arguments of a launch. The launch copies them, so the caller's memory may
// change at once, and neither pinned memory nor an event that guards it is needed.
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>

#include "bound_step.h"
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

}  // namespace
}  // namespace hdet

// Writes `count` words of 8 bytes to a tensor, which is given as the address of its at::Tensor and has that size.
// Returns 1, or 0 if that failed.
HDET_EXPORT int64_t hdet_write_cuda(int64_t tensor, const uint64_t* from, int64_t count) {
  try {
    const hdet::Tensor target = hdet::tensor_at(tensor);
    const hdet::Launch launch(target);
    auto* to = static_cast<uint64_t*>(target.data_ptr());
    for (int64_t done = 0; done < count; done += hdet::kWords) {
      hdet::Words words;
      const auto now = static_cast<int>(std::min<int64_t>(count - done, hdet::kWords));
      std::memcpy(words.values, from + done, now * sizeof(uint64_t));
      hdet::write<<<1, hdet::kWriteThreads, 0, launch.stream()>>>(words, now, to + done);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
    return 1;
  } catch (...) {
    return 0;
  }
}
