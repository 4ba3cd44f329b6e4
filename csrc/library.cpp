// The operators, declared once. The implementations register themselves in step_cpu.cpp and step_cuda.cu; the Python
// wrapper and the fake kernel are in hdet_kernels/ops/native.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(hdet_kernels, m) {
  // One step of a rule for all slots that have a gradient. The gradients are reached through their addresses and are
  // not arguments: the caller keeps them alive, on the device of the parameters and in their dtype.
  m.def(
      "step_(int rule, Tensor(a!) param, Tensor(b!)? state0, Tensor(c!)? state1, Tensor(d!)? state2, "
      "Tensor(e!) steps, Tensor table, Tensor slots, Tensor chunks, Tensor addresses, "
      "Tensor? multiplier, Tensor? found_inf) -> ()");
}
