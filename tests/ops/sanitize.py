"""A program that runs every kernel once, on odd and unaligned sizes, for compute-sanitizer (see test_sanitizer.py).

compute-sanitizer --tool memcheck python tests/ops/sanitize.py cuda
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from hdet_kernels import ops
from hdet_kernels.ops.wire import FORMATS, Wire
from tests.ops import pack_cases
from tests.ops.cases import PRECISIONS, RULES, case_of, make_table, replicas_of, rows_for, stacked

SIZES = (2049, 33, 0, 1, 5000)

# Triton compiles every kernel when it is first called, so it runs only the precisions that differ most.
COMPILED_FIRST = ("fp32", "fp32-grad-mixed", "bf16-state-bf16", "bf16-master")


def main(backend: str, device: str = "cuda", names: Sequence[str] = tuple(RULES)) -> None:
    """Run the kernels of a backend, the step with each of the rules ``names``."""
    steps = 0
    for name in names:
        row = RULES[name][1]
        table = make_table(device, row | {"max_grad_norm": 1.0})
        for precision in [PRECISIONS[kind] for kind in COMPILED_FIRST] if backend == "triton" else PRECISIONS.values():
            bf16 = torch.bfloat16 in (precision.param, precision.state) and not precision.master
            for stochastic in (False, True) if bf16 else (False,):
                case = case_of(name, SIZES, precision, device)
                grads = case.chunks.match(case.grads)
                norm = ops.grad_norm(case.chunks, grads, backend=backend)
                scalars = ops.Scalars(torch.ones(1, device=device), norm, torch.zeros(1, device=device))
                case.step(table, backend, scalars, stochastic_rounding=stochastic)
                case.assert_neighbours_untouched()
                steps += 1
                for rows, extra in ((2, 3), (5, 0)):
                    stack = stacked(replicas_of(name, precision, device, rows, extra, SIZES))
                    stack.case.step(make_table(device, *rows_for(name, rows)), backend, stochastic_rounding=stochastic)
                    steps += 1
    for rows in (1, 3):
        case = case_of("sgd", SIZES * rows, PRECISIONS["fp32-grad-mixed"], device)
        grads = case.chunks.match(case.grads)
        ops.grad_norm(case.chunks, grads, rows=rows, backend=backend)
    averages(backend, device)
    for wide, kinds in pack_cases.DTYPES.values():
        for rows, included, divisor in ((1, None, 3.0), (3, (True, False, True), 2.0)):
            case = pack_cases.make_case(pack_cases.SIZES, kinds, wide, device, rows=rows)
            pack_cases.round_trip(case, backend, included, divisor)
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"{steps} steps")


def averages(backend: str, device: str) -> None:
    """Run compressed averages of buckets at addresses that allow packs and at others."""
    for format in FORMATS:
        for numel, shards, offset in ((5003, 2, 0), (5003, 9, 1), (1, 3, 0), (40_000, 1, 4)):
            wire = Wire(format, numel, shards, device, backend=backend)
            x, consensus, error, target = (torch.randn(offset + numel, device=device)[offset:] for _ in range(4))
            lost = torch.zeros(offset + wire.shard, device=device)[offset:]
            for feedback in (True, False):
                sent, merged = wire.empty(), wire.empty()
                wire.encode(x, consensus, error if feedback else None, sent)
                for row in merged:
                    wire.merge(sent, shards, lost if feedback else None, row)
                wire.decode(merged, consensus, target if feedback else None)


if __name__ == "__main__":
    main(sys.argv[1])
