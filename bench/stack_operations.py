"""Compare operations in a stack with separate modules, in fp32 and under autocast.

    python -m bench.stack_operations [--device cuda] [--out FILE]

Every operation of ``stack_operations_of_layers.py`` and ``stack_operations_of_functions.py`` is computed in a stack of
three replicas and in three separate modules, forward and backward (``stack_comparison.py``). The table says whether the
stack is as precise, and what it computes in a loop over the replicas. The exit code is 1 if a result is wrong. Without
--out the record is written to ``bench/results/<device>_stack_operations.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cpuinfo
import torch
from torch import Tensor, nn

import hdet_kernels as hk
from bench.provenance import provenance
from bench.stack_comparison import Comparison, SeparateModulesFail, autocast, compare, watch_loops
from bench.stack_operations_of_functions import FUNCTIONS, RANDOM, PureFunction
from bench.stack_operations_of_layers import CHANNELS, LAYERS, WIDTH, Operation

RESULTS = Path(__file__).parent / "results"
REPLICAS, SLICE = 3, 4
PRECISIONS = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "bf16", "fp16")}

# All operations: those that are compared, and those that draw random numbers.
OPERATIONS = [*LAYERS, *FUNCTIONS]
RANDOM_OPERATIONS = list(RANDOM)


def outcome(name: str, precision: str, device: str) -> dict[str, Any]:
    """Return the entry of one operation in one precision.

    Its ``result`` is ``"equal"`` or ``"wrong"``; ``"refused"`` if the stack raises; ``"unknown"`` if torch itself
    cannot compute the operation in this precision.
    """
    torch.manual_seed(0)
    entry: dict[str, Any] = {"operation": name, "precision": precision}
    try:
        found = _random(name, precision, device) if name in RANDOM else _compared(name, precision, device)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        return entry | {"result": "unknown" if isinstance(error, SeparateModulesFail) else "refused", "reason": reason}
    entry |= {
        "result": "equal" if found.excess <= 1 else "wrong",
        "excess": round(found.excess, 4),
        "where": found.where,
    }
    return entry | {"loops": found.loops, "one by one": found.one_by_one}


def _compared(name: str, precision: str, device: str) -> Comparison:
    build, function = LAYERS.get(name) or (nn.Identity, _with_layers(FUNCTIONS[name]))
    return compare(Operation(build(), function).to(device), _loss, [_input(device)], precision, REPLICAS)


def _random(name: str, precision: str, device: str) -> Comparison:
    """Compare nothing, but find out whether replicas that are equal draw different random numbers."""
    module = Operation(nn.Identity(), _with_layers(RANDOM[name])).to(device)
    with autocast(device, precision):
        try:
            _loss(module, _input(device)[:SLICE])
        except RuntimeError as error:
            raise SeparateModulesFail(str(error)) from error
    stack = hk.ReplicaStack(module, REPLICAS, gradients="local")
    found = Comparison()
    with autocast(device, precision), watch_loops(found):
        stack.backward(_loss, _input(device)[:SLICE], same_batch=True)
    gradient = stack._parameters[("first.weight",)].grad
    rows = [] if gradient is None else [tuple(row.flatten().tolist()) for row in gradient]
    finite = gradient is not None and bool(gradient.isfinite().all())
    found.excess, found.where = 0.0 if finite and len(set(rows)) == REPLICAS else float("inf"), "random numbers"
    return found


def _with_layers(function: PureFunction) -> Any:
    return lambda layers, h, x: function(h, x)


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    return loss


def _input(device: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(REPLICAS * SLICE, CHANNELS, WIDTH, generator=generator).to(device)


def measured(device: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the entries of the named operations in all precisions of the device."""
    if device == "cuda":  # else convolutions in fp32 are rounded to 10 bits
        torch.backends.cudnn.allow_tf32 = False
    return [outcome(name, precision, device) for name in names for precision in PRECISIONS[device]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=PRECISIONS, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    arguments = parser.parse_args()
    device: str = arguments.device
    machine = torch.cuda.get_device_name() if device == "cuda" else cpuinfo.get_cpu_info()["brand_raw"]
    short_name = machine.split()[-1] if device == "cuda" else "CPU"
    record = {
        **provenance(f"python -m bench.stack_operations --device {device}"),
        "device": short_name,
        "machine": machine,
        "replicas": REPLICAS,
        "operations": measured(device, [*OPERATIONS, *RANDOM_OPERATIONS]),
    }
    out = arguments.out or RESULTS / f"{short_name.lower()}_stack_operations.json"
    out.write_text(json.dumps(record, indent=1) + "\n")
    for entry in record["operations"]:
        if entry["result"] != "equal" or entry["one by one"] or entry["loops"]:
            print(f"{entry['operation']}, {entry['precision']}: {entry}")
    print(f"\nrecord: {out}", file=sys.stderr)
    return 1 if any(entry["result"] == "wrong" for entry in record["operations"]) else 0  # type: ignore[union-attr]


if __name__ == "__main__":
    sys.exit(main())
