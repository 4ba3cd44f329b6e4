"""Compare losses and gradients of a stack with those of separate modules.

Both are compared with separate modules in fp64. A stack is as precise as separate modules if no loss and no gradient is
off by more than twice what theirs is off, and a rounding of the precision. Theirs is the largest error of several
runs: as they are, and with parameters that are changed by a rounding. So an operation that reacts strongly to a
rounding, such as a maximum of values that are almost the same, has its due allowance.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import hdet_kernels as hk

LossFunction = Callable[..., Tensor]

# Precisions, each with its relative rounding. A sum of many terms in fp32 has several roundings.
ROUNDING = {"fp32": 2**-20, "fp16": 2**-11, "bf16": 2**-8}
AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}

# How many runs of separate modules have parameters that are changed by a rounding.
CHANGED_RUNS = 6

# How far gradients are off that should cancel: a rounding of their terms, which are as large as other gradients.
CANCELLED = 0.1


class SeparateModulesFail(Exception):
    """Separate modules cannot compute the loss either."""


@dataclass
class Comparison:
    """How a stack differs from separate modules.

    Attributes:
        excess: the largest error of a loss or gradient over what is allowed; at most 1 if the stack is as precise.
        where: the loss or parameter with this error.
        loops: operations that vmap computes in a loop over the replicas.
        one_by_one: why the whole loss is computed one replica after another; empty if it is computed together.
    """

    excess: float = 0.0
    where: str = ""
    loops: list[str] = field(default_factory=list)
    one_by_one: str = ""


def compare(
    module: nn.Module,
    loss_fn: LossFunction,
    batch: Sequence[Tensor],
    precision: str,
    replicas: int = 3,
    passes: int = 1,
    **options: Any,
) -> Comparison:
    """Compare a stack of ``module`` with separate modules.

    Args:
        module: the template, on the device of the comparison.
        loss_fn: called as ``loss_fn(module, *batch)``.
        batch: tensors that are cut into one slice per replica.
        precision: ``"fp32"``, or the precision of autocast, ``"bf16"`` or ``"fp16"``.
        replicas: the number of replicas.
        passes: how often the stack computes the loss; the last is compared. The third is replayed from a CUDA graph if
            ``cuda_graphs`` is set.
        **options: options of the stack.

    Raises:
        SeparateModulesFail: separate modules cannot compute the loss in this precision.
    """
    stack = hk.ReplicaStack(module, replicas, gradients="local", **options)
    diverge(stack)
    slices = list(zip(*(tensor.chunk(replicas) for tensor in batch), strict=True))
    modules = [stack.replica(r) for r in range(replicas)]
    wide = [copy.deepcopy(each).double() for each in modules]
    try:
        exact = _separate(wide, loss_fn, [_double(part) for part in slices])
        with autocast(stack.device.type, precision):
            theirs = [_separate(modules, loss_fn, slices)]
            generator = torch.Generator().manual_seed(3)
            for _ in range(CHANGED_RUNS):
                changed = [_changed(each, ROUNDING[precision], generator) for each in modules]
                theirs.append(_separate(changed, loss_fn, slices))
    except RuntimeError as error:
        raise SeparateModulesFail(str(error)) from error
    found = Comparison()
    with autocast(stack.device.type, precision), watch_loops(found):
        for _ in range(passes):
            stack.zero_grad()
            losses = stack.backward(loss_fn, *batch)
    gradients = {name: p.grad for name, p in stack.named_parameters() if p.grad is not None}
    ours = {"loss": losses.double(), **{name: grad.double() for name, grad in gradients.items()}}
    if ours.keys() != exact.keys():
        found.excess, found.where = float("inf"), ", ".join(sorted(ours.keys() ^ exact.keys()))
        return found
    largest = max((float(value.norm()) for name, value in exact.items() if name != "loss"), default=0.0)
    for name, value in exact.items():
        scale = float(value.norm()) + (CANCELLED * largest if name != "loss" else 0.0)
        allowed = 2 * max(float((run[name] - value).norm()) for run in theirs) + ROUNDING[precision] * scale
        error = float((ours[name] - value).norm())
        excess = error / allowed if allowed > 0 else (float("inf") if error > 0 else 0.0)
        if not excess <= found.excess:  # NaN too
            found.excess, found.where = excess, name
    return found


def diverge(stack: hk.ReplicaStack) -> None:
    """Add different noise to each replica."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)


def _changed(module: nn.Module, rounding: float, generator: torch.Generator) -> nn.Module:
    """Return a copy of ``module`` whose parameters are changed by a rounding, without gradients."""
    copied = copy.deepcopy(module)
    copied.zero_grad()
    with torch.no_grad():
        for parameter in copied.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.mul_(1 + rounding * noise)
    return copied


@contextlib.contextmanager
def autocast(device: str, precision: str) -> Iterator[None]:
    """Compute in ``precision`` inside the block."""
    if precision == "fp32":
        yield
        return
    with torch.autocast(device, dtype=AUTOCAST[precision]):
        yield


def _separate(modules: Sequence[nn.Module], loss_fn: LossFunction, slices: Sequence[Any]) -> dict[str, Tensor]:
    """Return losses [R] and gradients [R, *shape] in fp64."""
    losses = []
    for module, part in zip(modules, slices, strict=True):
        loss = loss_fn(module, *part)
        with torch.autocast(loss.device.type, enabled=False):
            loss.backward()
        losses.append(loss.detach().double().reshape(()))
    found = {"loss": torch.stack(losses)}
    for name, parameter in modules[0].named_parameters():
        if parameter.grad is not None:
            gradients = [dict(module.named_parameters())[name].grad for module in modules]
            found[name] = torch.stack([gradient.to_dense() for gradient in gradients]).double()  # type: ignore[union-attr]
    return found


def _double(part: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.double() if tensor.is_floating_point() else tensor for tensor in part]


@contextlib.contextmanager
def watch_loops(found: Comparison) -> Iterator[None]:
    """Note in ``found`` what is computed in a loop inside the block."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "one after the other" in record.getMessage() and isinstance(record.args, tuple):
                found.one_by_one = str(record.args[1])

    log, handler = logging.getLogger("hdet_kernels"), Handler()
    propagates = log.propagate
    log.addHandler(handler)
    log.propagate = False
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagates
    marker = "batching rule for "
    names = [str(w.message).split(marker)[1].split(".")[0] for w in caught if marker in str(w.message)]
    found.loops = sorted(set(names))
