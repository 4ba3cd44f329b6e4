// The operators, declared once. The implementations register themselves in the files of their device; the Python
// wrappers and the fake kernels are in hdet_kernels/ops/native.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(hdet_kernels, m) {
  // One step of a rule for all slots that have a gradient, in each of the `rows` replicas that share gradients and
  // states. The gradients are reached through their addresses and are not arguments: the caller keeps them alive, on
  // the device of the parameters. The scratch has 128 bytes for each slot of each replica; what is in it does not
  // matter.
  m.def(
      "step_(int rule, Tensor(a!) param, Tensor(b!)? master, Tensor(c!)? state0, Tensor(d!)? state1, "
      "Tensor(e!)? state2, Tensor(f!) steps, Tensor table, Tensor slots, Tensor chunks, Tensor gradients, "
      "Tensor(g!) scratch, Tensor? grad_scale, Tensor? norm, Tensor? found_inf, bool stochastic_rounding, "
      "int rows) -> ()");
  // √(Σ g²) over the gradients of each row, float64, and whether all their elements are finite; one pass over them
  // each. The chunks come row by row, equally many for each.
  m.def("grad_norm(Tensor chunks, Tensor gradients, int rows) -> Tensor");
  m.def("all_finite(Tensor chunks, Tensor gradients, int rows) -> Tensor");
  // Pieces of tensors to the staging buffer, summed over the rows whose bit in `included` is set and divided; and from
  // the staging buffer, divided, to all rows. The tensors are reached through their addresses (`places`) and are not
  // arguments: the caller keeps them alive, on the device of the staging buffer. What unpack changes lies behind the
  // addresses; these are declared as changed in its stead, so that no compiler takes the call for one without effect.
  m.def(
      "pack(Tensor chunks, Tensor places, Tensor strides, int included, float divisor, Tensor(a!) staging) -> ()");
  m.def(
      "unpack(Tensor chunks, Tensor(a!) places, Tensor strides, int rows, float divisor, Tensor staging) -> ()");
  // A compressed average: x - consensus + error as it travels, the mean of what was received, and what was agreed on
  // added to the consensus. hdet_kernels/ops/wire.py says more.
  m.def("encode(int format, Tensor x, Tensor consensus, Tensor(a!)? error, Tensor(b!) wire) -> ()");
  m.def("merge(int format, Tensor wires, float divisor, Tensor(a!)? error, Tensor(b!) wire) -> ()");
  m.def("decode(int format, Tensor wire, Tensor(a!) consensus, Tensor(b!)? target) -> ()");
  // Normal noise, scaled and keyed slot by slot, added to tensors that are reached through their addresses, as unpack
  // reaches its. hdet_kernels/ops/noise.py says more.
  m.def("add_noise_(Tensor chunks, Tensor(a!) tensors, Tensor keys, Tensor scales) -> ()");
}
