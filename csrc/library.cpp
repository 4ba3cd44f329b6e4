// Schemas of the operators, declared once. Each implementation registers itself in the file of its device. The fake
// kernels are in hdet_kernels/ops/operators.py and the Python wrappers in hdet_kernels/ops/compiled.py.
#include <torch/csrc/stable/library.h>

namespace {

#ifdef HDET_WITH_CUDA
bool has_cuda() { return true; }
#else
bool has_cuda() { return false; }
#endif

}  // namespace

STABLE_TORCH_LIBRARY(hdet_kernels, m) {
  // Whether the kernels for CUDA are in this build.
  m.def("has_cuda() -> bool");
  // Writes the addresses and types of gradients, one for each slot, to `table`, int64 [slots, 2] in host memory. A uint8
  // tensor stands for no gradient. `layouts` has for each slot the number of elements, the number of strides to compare
  // (0: it must be contiguous) and these strides; `wide` is for float64. The result is -1 if a gradient is not as
  // expected, else the sum of 1 if one is there, 2 if one is missing, and 4 if the table has changed.
  m.def("fill_gradient_table(Tensor[] gradients, Tensor layouts, bool wide, Tensor(a!) table) -> int");
  // Writes a small contiguous tensor of host memory to one on a CUDA device as arguments of launches.
  m.def("write_(Tensor(a!) target, Tensor values) -> ()");
  // One step of a rule for all slots that have a gradient, in each of the `rows` replicas that share gradients and
  // states. Gradients are read through their addresses and are not arguments: the caller keeps them alive, on the
  // device of the parameters. The scratch has 128 bytes for each slot of each replica; its contents do not matter.
  m.def(
      "step_(int rule, Tensor(a!) param, Tensor(b!)? master, Tensor(c!)? state0, Tensor(d!)? state1, "
      "Tensor(e!)? state2, Tensor(f!)? scales0, Tensor(g!)? scales1, Tensor(h!) steps, Tensor table, Tensor slots, "
      "Tensor chunks, Tensor gradients, Tensor(i!) scratch, Tensor? grad_scale, Tensor? norm, Tensor? found_inf, "
      "bool stochastic_rounding, int rows) -> ()");
  // √(Σ g²) over the gradients of each replica, float64 [rows], in one pass. The chunks come replica by replica,
  // equally many for each.
  m.def("grad_norm(Tensor chunks, Tensor gradients, int rows) -> Tensor");
  // Sets `out`, which may be `values`, to their quotients and returns the sum of its squares, in one pass on the CPU.
  m.def("divide(Tensor values, float divisor, Tensor(a!) out) -> float");
  // pack writes pieces of tensors to the staging buffer, summed over the rows whose bit in `included` is set, and
  // divided. unpack writes the staging buffer, divided, to all rows. The tensors are accessed through their addresses
  // (`places`) and are not arguments: the caller keeps them alive, on the device of the staging buffer. unpack changes
  // only memory behind the addresses; `places` is declared as changed instead, so that no compiler removes the call.
  m.def(
      "pack(Tensor chunks, Tensor places, Tensor strides, int included, float divisor, Tensor(a!) staging) -> ()");
  m.def(
      "unpack(Tensor chunks, Tensor(a!) places, Tensor strides, int rows, float divisor, Tensor staging) -> ()");
  // Float32 masters from a bf16 parameter and int16 lower halves, and these from masters. On the CPU alone.
  m.def("join_halves(Tensor param, Tensor low, Tensor(a!) master) -> ()");
  m.def("split_into_halves(Tensor master, Tensor(a!) param, Tensor(b!) low) -> ()");
  // The parts of a compressed average: encode x - consensus + error, encode the mean of received shards, and add the
  // decoded mean to the consensus. hdet_kernels/ops/wire.py has the equations.
  m.def("encode(int format, Tensor x, Tensor consensus, Tensor(a!)? error, Tensor(b!) wire) -> ()");
  m.def("merge(int format, Tensor wires, float divisor, Tensor(a!)? error, Tensor(b!) wire) -> ()");
  m.def("decode(int format, Tensor wire, Tensor(a!) consensus, Tensor(b!)? target) -> ()");
  // One step of row-wise Adagrad on an embedding table, for the rows that have a gradient. The caller counts the step.
  // hdet_kernels/ops/rowwise.py has the equations.
  m.def(
      "rowwise_adagrad_(Tensor(a!) param, Tensor(b!) sums, Tensor steps, Tensor table, int table_row, Tensor values, "
      "Tensor? rows, Tensor? order, Tensor? grad_scale, Tensor? found_inf, bool decoupled, "
      "bool stochastic_rounding) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hdet_kernels, CompositeImplicitAutograd, m) { m.impl("has_cuda", TORCH_BOX(&has_cuda)); }
