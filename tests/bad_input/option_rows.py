"""Malformed calls: the schedulers' keywords, and the methods that take a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import hdet_kernels as hk
from hdet_kernels.ensemble import RowEnsemble
from tests.bad_input.rows import INF, NAN, NO_TRUST, Row, out_of_range, wrong_kinds
from tests.schedule.undo_runs import Scripted

#: Made here, because the generator that it is initialised with must not change during a call.
LINEAR = nn.Linear(3, 2)

WHOLE = r"a whole number of at least 1"


def option(name: str, **others: Any) -> Callable[[Any, Any], object]:
    """Return a call of HDETOneCycleLR on the untouched optimizer with one keyword."""
    return lambda world, value: hk.HDETOneCycleLR(world.bare, 0.1, 20, **{**others, name: value})


def refused(
    name: str, error: type[Exception] | tuple[type[Exception], ...], message: str, *values: Any, **others: Any
) -> list[Row]:
    """Return a row for each value of one keyword."""
    return [
        Row(
            f"{name}={value!r}"[:60] + f" ({index})",
            lambda world, value=value: option(name, **others)(world, value),
            error,
            message,
        )
        for index, value in enumerate(values)
    ]


def flag(name: str) -> list[Row]:
    return refused(name, ValueError, f"{name} must be True or False, got ", "no", 1, None, [], 0.0)


def second_stack(world: Any) -> object:
    other = hk.ReplicaStack(LINEAR, 2, gradients="local")
    return hk.HDETOneCycleLR(world.optimizer, 0.1, 20, ensemble=other.ensemble)


class Half:
    """A controller that lacks most of its methods."""

    reads = "losses"


OPTIONS: list[Row] = [
    *wrong_kinds("spread", option("spread"), "a finite number of at least 0"),
    *out_of_range("spread", option("spread"), "a finite number of at least 0", -0.1, NAN, INF),
    *refused("spread", ValueError, "spread must be below 1 with linear spacing, got ", 1, 1.5, 1e300),
    *wrong_kinds("sync_every", option("sync_every"), WHOLE, leave_out=["None"]),
    *out_of_range("sync_every", option("sync_every"), WHOLE, 0, -1, 2.5, NAN, INF, 10**400),
    *refused("auto_lr", TypeError, "auto_lr must be True, False or a controller", 1, None, "softmax", 0.5, Half()),
    *refused("auto_lr", ValueError, "undo of Scripted must be a whole number", Scripted(undo=-1), Scripted(undo=True)),
    *refused("auto_lr", TypeError, r"auto_lr is the class .*: pass an instance", hk.RegressionController),
    *refused("trust", (TypeError, ValueError), "trust must be a .*number of at least 1", *NO_TRUST),
    Row(
        "trust= beside a controller",
        lambda w: hk.HDETOneCycleLR(w.bare, 0.1, 20, auto_lr=hk.RegressionController(), trust=10.0),
        ValueError,
        r"trust=10.0 is for auto_lr=True, got .*: pass auto_lr=RegressionController\(trust=…\) instead",
    ),
    *refused("probe", TypeError, r"probe must be callable as probe\(\), got ", 1.0, "loss", [len], torch.ones(())),
    *refused("explore", TypeError, "explore must be a list of hdet_kernels.Explore", None, 5, "lr", {"lr": 0.1}, len),
    *refused("explore", TypeError, r"explore= takes several: pass \[Explore", hk.Explore("lr")),
    *refused(
        "explore", TypeError, "explore= takes hdet_kernels.Explore objects, got ", ["lr"], [None], [0.3], [("lr", 1)]
    ),
    *refused("tie_groups", (TypeError, ValueError), "tie_groups must be 'auto', True, False or a list", "all", None, 1),
    *refused("tie_groups", TypeError, r"tie_groups\[0\] must be a list of parameter groups", [0], ["01"], [{}]),
    *refused("tie_groups", TypeError, "a parameter group in tie_groups must be a whole number", [["0"]], [[True]]),
    *refused("tie_groups", ValueError, "a parameter group in tie_groups must be a whole number", [[-1]], [[0.5]]),
    *refused("tie_groups", ValueError, "names parameter group 0 twice: tie a group once", [[0, 0]], [[0], [0]]),
    *refused("tie_groups", ValueError, "names parameter group 7; the optimizer has 2, counted from 0", [[0, 7]]),
    Row(
        "tied groups with different Explores",
        lambda w: option("tie_groups", explore=[hk.Explore("lr", 0.1, groups=[0])])(w, True),
        ValueError,
        r"tie_groups gives parameter groups \[0, 1\] one multiplier, but explore= has different Explore\('lr'",
    ),
    *refused("gradients", ValueError, "gradients must be one of 'auto', 'shared', 'local', got ", "all", None, True, 0),
    *refused(
        "ensemble", TypeError, "ensemble must be an ensemble, .* got ", 4, "gloo", [], hk.ProcessEnsemble, object()
    ),
    *refused("average_state", ValueError, "average_state must be one of 'auto', True, False", "yes", 1, None),
    *flag("average_buffers"),
    *flag("backup"),
    *refused("model", TypeError, "model must be a torch.nn.Module, .* got ", 3, "model", [], nn.Linear, object()),
    *wrong_kinds("bucket_bytes", option("bucket_bytes"), WHOLE, leave_out=["None"]),
    *out_of_range("bucket_bytes", option("bucket_bytes"), WHOLE, 0, -1, 1.5),
    *refused("compress", ValueError, "compress must be one of None, 'bf16', 'int8', got ", "int4", True, 8, ["bf16"]),
    *wrong_kinds("overlap_steps", option("overlap_steps"), "a whole number of at least 0"),
    *out_of_range("overlap_steps", option("overlap_steps"), "a whole number of at least 0", -1, 1.5, NAN),
    *refused("overlap_steps", ValueError, "overlap_steps must be .* sync_every - 1 = 4, got ", 5, 10**6, sync_every=5),
    *refused("outer", TypeError, "outer must be None or an hdet_kernels.Outer", 0.7, True, {"lr": 0.7}),
    *refused(
        "scout", TypeError, "scout must be a hdet_kernels.ScoutSettings", 0.2, True, {"share": 0.2}, hk.ScoutSettings
    ),
    *refused("scout", ValueError, "scout=.* is for HDETOneCycleLR with max_lr=None", hk.ScoutSettings()),
    *refused("outer", TypeError, "outer must be .* got the class Outer itself", hk.Outer),
    *refused("merge", ValueError, "merge must be one of 'mean', 'best', got ", "median", None, True, 1),
    Row(
        "merge best with outer",
        lambda w: option("merge", outer=hk.Outer())(w, "best"),
        ValueError,
        "merge='best' copies one",
    ),
    *refused("merge", ValueError, "merge='best' copies one replica", "best", compress="int8"),
    *wrong_kinds("seed", option("seed"), "a whole number"),
    *out_of_range("seed", option("seed"), "a whole number", 1.5, NAN, INF),
    Row(
        "replicas that the optimizer does not have",
        lambda w: hk.HDETOneCycleLR(w.bare, 0.1, 20, ensemble=RowEnsemble(2)),
        ValueError,
        "holds 2 replicas in this process, but the optimizer's parameters are those of one",
    ),
    Row(
        "two keywords, the second one bad",
        lambda w: hk.HDETOneCycleLR(w.optimizer, 0.1, 20, spread=0.2, seed="x"),  # type: ignore[arg-type]
        TypeError,
        "seed must be a whole number, got 'x'",
    ),
    Row(
        "a setter that raises",
        lambda w: hk.HDETOneCycleLR(w.bare, 0.1, 20, explore=[hk.Explore("p", base=0.1, apply=lambda p: 1 / 0)]),
        ZeroDivisionError,
        "division",
    ),
    Row(
        "a controller without the length of the run",
        lambda w: hk.HDETOneCycleLR(w.bare, 0.1, 20, auto_lr=hk.HypergradientController(), gradients="local"),
        ValueError,
        "needs shared gradients, got gradients='local'",
    ),
    Row("ensemble is a stack", lambda w: stack_option(w, w.stack), TypeError, "pass ensemble=stack.ensemble", "stack"),
    Row("ensemble of another stack", second_stack, ValueError, "parameters of another stack", "stack"),
    Row(
        "no ensemble for a stack", lambda w: stack_option(w, None), ValueError, "pass ensemble=stack.ensemble", "stack"
    ),
    Row(
        "a model beside a stack",
        lambda w: hk.HDETOneCycleLR(w.optimizer, 0.1, 20, ensemble=w.stack.ensemble, model=w.module),
        ValueError,
        "model= is a Sequential, but the buffers .* are those of the stack",
        "stack",
    ),
    Row(
        "gradients that the stack has not",
        lambda w: hk.HDETOneCycleLR(w.optimizer, 0.1, 20, ensemble=w.stack.ensemble, gradients="shared"),
        ValueError,
        "gradients='shared', but the stack has local ones",
        "stack",
    ),
    Row(
        "torch's optimizer on a stack",
        lambda w: hk.HDETOneCycleLR(
            torch.optim.SGD(list(w.stack.parameters()), lr=0.1),
            0.1,
            20,
            ensemble=w.stack.ensemble,
            cycle_momentum=False,
        ),
        TypeError,
        "SGD has one learning rate for all replicas",
        "stack",
    ),
]


def stack_option(world: Any, ensemble: Any) -> object:
    return hk.HDETOneCycleLR(world.optimizer, 0.1, 20, ensemble=ensemble)


#: No loss of one replica: the value, the exception and its message.
LOSSES: dict[str, tuple[Any, type[Exception], str]] = {
    "text": ("2.5", TypeError, "the loss must be a number or a scalar tensor, got '2.5'"),
    "bytes": (b"2.5", TypeError, "the loss must be a number"),
    "a flag": (True, TypeError, "the loss must be a number or a scalar tensor, got True"),
    "a list": ([1.0], TypeError, "the loss must be a number or a scalar tensor, got list"),
    "a dict": ({}, TypeError, "the loss must be a number or a scalar tensor, got dict"),
    "complex": (1j, TypeError, "the loss must be a number or a scalar tensor, got complex"),
    "a generator": ((loss for loss in [1.0]), TypeError, "the loss must be a number .* got generator"),
    "two losses": (torch.ones(2), ValueError, r"the loss must be a scalar, got a tensor of shape \(2,\)"),
    "no losses": (torch.ones(0), ValueError, r"the loss must be a scalar, got a tensor of shape \(0,\)"),
    "an array": (np.ones(2), TypeError, "the loss must be a number or a scalar tensor, got ndarray"),
    "a complex tensor": (torch.tensor(1j), TypeError, "the loss must be real, got torch.complex64"),
    "a tensor of flags": (torch.tensor(True), TypeError, "the loss must be real, got torch.bool"),
    "a meta tensor": (torch.ones((), device="meta"), ValueError, "the loss must be a dense tensor with values"),
    "a sparse tensor": (torch.ones(1).to_sparse(), ValueError, "the loss must be a dense tensor with values"),
    "a module": (nn.Linear(1, 1), TypeError, "the loss must be a number or a scalar tensor, got Linear"),
}

#: No losses of a stack of two replicas.
STACK_LOSSES: dict[str, tuple[Any, type[Exception], str]] = {
    "one number": (1.0, TypeError, r"the loss of a stack must be \[2\] numbers, got 1.0"),
    "text": ("ab", TypeError, r"the loss of a stack must be \[2\] numbers, got 'ab'"),
    "a scalar": (torch.tensor(1.0), ValueError, r"the loss of a stack must have shape \[2\], got \[\]"),
    "three": ([1.0, 2.0, 3.0], ValueError, r"the loss of a stack must have shape \[2\], got \[3\]"),
    "texts": (["a", "b"], TypeError, r"the loss of a stack must be \[2\] numbers, got \['a', 'b'\]"),
    "None twice": ([None, None], TypeError, r"the loss of a stack must be \[2\] numbers, got \[None, None\]"),
    "a column": (torch.ones(2, 1), ValueError, r"the loss of a stack must have shape \[2\], got \[2, 1\]"),
    "complex": (torch.ones(2) * 1j, TypeError, "the loss must be real"),
    "a generator": ((loss for loss in [1.0, 1.0]), TypeError, r"the loss of a stack must be \[2\] numbers"),
    "meta": (torch.ones(2, device="meta"), ValueError, "the loss must be a dense tensor with values"),
}


def _step(value: Any) -> Callable[[Any], object]:
    return lambda world: world.scheduler.step(value)


def _record(value: Any) -> Callable[[Any], object]:
    return lambda world: world.scheduler.record_loss(value)


def _divided(world: Any, value: Any) -> object:
    return world.scheduler.record_loss(1.0, divided_by=value)


def _use_probe(probe: Any) -> Callable[[Any], object]:
    return lambda world: world.scheduler.use_probe(probe)


METHODS: list[Row] = [
    *(Row(f"step with {kind}", _step(value), error, message) for kind, (value, error, message) in LOSSES.items()),
    *(Row(f"record {kind}", _record(value), error, message) for kind, (value, error, message) in LOSSES.items()),
    *wrong_kinds("divided_by", _divided, "a positive number"),
    *out_of_range("divided_by", _divided, "a positive number", 0, -2, NAN, INF),
    *(
        Row(f"use_probe({probe!r})", _use_probe(probe), TypeError, r"probe must be callable as probe\(\), got ")
        for probe in (None, 1.0, "loss")
    ),
    Row("a probe after the first step", _use_probe(lambda: 1.0), RuntimeError, r"use_probe\(\) after the first step"),
    Row("record None", _record(None), TypeError, "the loss must be a number or a scalar tensor, got None"),
    *(
        Row(f"step({epoch}), an epoch", _step(epoch), TypeError, rf"step\({epoch}\) looks like torch's step\(epoch\)")
        for epoch in (0, 4, -1, 10**9)
    ),
    Row("step(epoch=)", lambda w: w.scheduler.step(epoch=3), TypeError, "unexpected keyword argument 'epoch'"),
    *(
        Row(f"step with {kind}", _step(value), error, message, "stack")
        for kind, (value, error, message) in STACK_LOSSES.items()
    ),
    *(
        Row(f"record {kind}", _record(value), error, message, "stack")
        for kind, (value, error, message) in STACK_LOSSES.items()
    ),
]

AREAS = {"scheduler keywords": OPTIONS, "scheduler methods": METHODS}
