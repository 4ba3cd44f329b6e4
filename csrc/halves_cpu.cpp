// Split masters on the CPU, from their two halves to float32 and back; hdet_kernels/split_master.py has the equations.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "convert_cpu.h"

namespace hdet {
namespace {

// The fewest elements that torch gives to one thread.
constexpr int64_t kElementsPerThread = 32768;

struct Halves {
  SplitMastered numbers;
  float* master;
  int64_t count;
};

Halves checked_halves(const Tensor& param, const Tensor& low, const Tensor& master) {
  const int64_t count = param.numel();
  return {{checked<uint16_t>(param, "param", ScalarType::BFloat16, count, param),
           checked<int16_t>(low, "low", ScalarType::Short, count, param)},
          checked<float>(master, "master", ScalarType::Float, count, param),
          count};
}

void join_halves_cpu(Tensor param, Tensor low, Tensor master) {
  const Halves work = checked_halves(param, low, master);
  torch::stable::parallel_for(0, work.count, kElementsPerThread, [&](int64_t begin, int64_t end) {
    read_span(work.numbers.from(begin), end - begin, work.master + begin);
  });
}

void split_into_halves_cpu(Tensor master, Tensor param, Tensor low) {
  const Halves work = checked_halves(param, low, master);
  torch::stable::parallel_for(0, work.count, kElementsPerThread, [&](int64_t begin, int64_t end) {
    write_span(work.master + begin, end - begin, work.numbers.from(begin));
  });
}

}  // namespace
}  // namespace hdet

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CPU, m) {
  m.impl("join_halves", TORCH_BOX(&hdet::join_halves_cpu));
  m.impl("split_into_halves", TORCH_BOX(&hdet::split_into_halves_cpu));
}
