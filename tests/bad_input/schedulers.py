"""Malformed calls of the schedulers: constructors, keywords, and the methods that take a loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau

import hdet_kernels as hk
from hdet_kernels.ensemble import RowEnsemble
from tests.bad_input.rows import BEYOND, BOTH, INF, NAN, Row, built, flags, method, named, number, optional, refused
from tests.schedule.undo_runs import Scripted

NESTED = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
#: Made here, because the generator that it is initialised with must not change during a call.
LINEAR = nn.Linear(3, 2)


def one_cycle(world: Any, **keywords: Any) -> object:
    """Build a scheduler on the untouched optimizer."""
    return hk.HDETOneCycleLR(world.bare, **{"max_lr": 0.1, "total_steps": 20, **keywords})


def by_epochs(world: Any, **keywords: Any) -> object:
    return hk.HDETOneCycleLR(world.bare, 0.1, **{"epochs": 4, "steps_per_epoch": 5, **keywords})


of_optimizer = built(hk.HDETOneCycleLR, max_lr=0.1, total_steps=20)
averaging = built(hk.Averaging)


def on_stack(world: Any, **keywords: Any) -> object:
    """Build a scheduler on the optimizer of a stack."""
    given = {"max_lr": 0.1, "total_steps": 20, "ensemble": world.stack.ensemble, **keywords}
    return hk.HDETOneCycleLR(world.optimizer, **given)


def plain_sgd(lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=lr)


def wrapped(world: Any, **keywords: Any) -> object:
    given = {"base_scheduler": CosineAnnealingLR(plain_sgd(), 10), **keywords}
    return hk.HDETScheduler(given.pop("base_scheduler"), **given)


ARGUMENTS: list[Row] = [
    *optional(one_cycle, "max_lr", -1, NAN, INF, 10**400, [0.1], []),
    *refused(one_cycle, "max_lr", TypeError, [0.1, None], ["a", 0.1]),
    *refused(one_cycle, "max_lr", ValueError, [0.1, NAN], argument="max_lr[1]"),
    *refused(one_cycle, "max_lr", ValueError, None, argument="several replicas"),
    Row("no lr, resumed", lambda w: hk.HDETOneCycleLR(w.optimizer, None, 8, last_epoch=3), ValueError, "last_epoch"),
    *optional(one_cycle, "total_steps", 0, 10.5, NAN, INF, 2**53 + 1),
    *optional(by_epochs, "epochs", 0, 2.5),
    *optional(by_epochs, "steps_per_epoch", 0, 2.5),
    *refused(by_epochs, "epochs", ValueError, 2**40, steps_per_epoch=2**40),
    *refused(by_epochs, "epochs", ValueError, 3, steps_per_epoch=None, argument="steps_per_epoch=None"),
    Row("no length", lambda w: hk.HDETOneCycleLR(w.bare, 0.1), ValueError, "total_steps="),
    *number(one_cycle, "pct_start", -0.1, 1.1, NAN, 0.05),
    *refused(one_cycle, "anneal_strategy", ValueError, "cosine", None, 3, True, ["cos"]),
    *(row for name in ("cycle_momentum", "three_phase") for row in refused(one_cycle, name, ValueError, "no", 2, None)),
    *number(one_cycle, "base_momentum", -0.1, 1.0, NAN),
    *number(one_cycle, "max_momentum", -0.1, 1.0, NAN),
    *number(one_cycle, "div_factor", 0, -25.0, NAN, INF),
    *number(one_cycle, "final_div_factor", 0, -25.0, NAN, INF),
    *number(one_cycle, "last_epoch", -2, 1.5),
    *refused(one_cycle, "last_epoch", KeyError, 3),
    *refused(of_optimizer, "optimizer", TypeError, None, [], "sgd", torch.optim.SGD),
    *refused(of_optimizer, "optimizer", ValueError, torch.optim.Adagrad(LINEAR.parameters()), argument="momentum"),
    *refused(one_cycle, "spred", TypeError, 0.1, argument="spread"),
    *refused(wrapped, "base_scheduler", TypeError, None, CosineAnnealingLR, argument="LRScheduler"),
    Row("an optimizer", lambda w: wrapped(w, base_scheduler=w.bare), TypeError, "LRScheduler"),
    Row("a metric", lambda w: hk.HDETScheduler(ReduceLROnPlateau(plain_sgd())), TypeError, "metric"),  # type: ignore[arg-type]
    Row("a cycle in a cycle", lambda w: hk.HDETScheduler(w.scheduler), TypeError, "cycle"),
    *refused(wrapped, "base_scheduler", ValueError, CosineAnnealingLR(plain_sgd(), 10**400), argument="total_steps"),
    *refused(wrapped, "base_scheduler", ValueError, CosineAnnealingLR(plain_sgd(), INF), argument="total_steps="),  # type: ignore[arg-type]
    *refused(wrapped, "base_scheduler", ValueError, CosineAnnealingLR(plain_sgd(10**400), 10), argument="lr"),
    Row("no end", lambda w: hk.HDETScheduler(LambdaLR(plain_sgd(), float)), ValueError, "total_steps="),
    *named("HDETScheduler", optional(wrapped, "total_steps", 0, 10.5)),
    *named("HDETScheduler", refused(wrapped, "spread", ValueError, -1)),
]


class Half:
    """A controller that lacks most of its methods."""

    reads = "losses"


def stack_of_others(world: Any) -> object:
    return on_stack(world, ensemble=hk.ReplicaStack(LINEAR, 2, gradients="local").ensemble)


def torch_on_stack(world: Any) -> object:
    optimizer = torch.optim.SGD(list(world.stack.parameters()), lr=0.1, momentum=0.9)
    return of_optimizer(world, optimizer=optimizer, ensemble=world.stack.ensemble)


TIES = ("all", None, 1, [0], ["01"], [{}], [["0"]], [[-1]], [[0.5]], [[0, 0]], [[0], [0]], [[0, 7]])
EXPLORES = (
    None,
    5,
    np.array(0.5),
    NESTED,
    {hk.Explore("lr")},
    (each for each in ["lr"]),
    "lr",
    {"lr": 0.1},
    len,
    hk.Explore("lr"),
    ["lr"],
    [None],
    [0.3],
    [("lr", 1)],
)

OPTIONS: list[Row] = [
    *number(one_cycle, "spread", -0.1, NAN, INF, 1),
    *optional(one_cycle, "sync_every", 0, 2.5, NAN, INF, 10**400),
    *refused(one_cycle, "auto_lr", TypeError, 1, None, "softmax", Half(), hk.RegressionController),
    *refused(one_cycle, "auto_lr", ValueError, Scripted(undo=-1), Scripted(undo=True), argument="undo"),
    *refused(one_cycle, "trust", BOTH, 0.5, -3.0, NAN, INF, "3", True, [3.0]),
    *refused(one_cycle, "trust", ValueError, 10.0, auto_lr=hk.RegressionController()),
    *refused(one_cycle, "trust", ValueError, 1, None, 10.0, auto_lr=False),
    *refused(one_cycle, "undo", TypeError, 0, argument="auto_lr=hk.RegressionController(undo=…)"),
    *refused(one_cycle, "probe", TypeError, 1.0, "loss", [len], torch.ones(()), lambda batch: 1.0),
    *refused(one_cycle, "explore", TypeError, *EXPLORES),
    *refused(one_cycle, "tie_groups", BOTH, *TIES),
    *refused(one_cycle, "tie_groups", ValueError, True, explore=[hk.Explore("lr", 0.1, groups=[0])]),
    *refused(one_cycle, "gradients", ValueError, "all", None, True, 0),
    *refused(one_cycle, "ensemble", TypeError, 4, "gloo", [], hk.ProcessEnsemble, object()),
    *refused(one_cycle, "ensemble", ValueError, RowEnsemble(2), argument="2 replicas"),
    *refused(one_cycle, "averaging", TypeError, "bf16", {"compress": "bf16"}, hk.Averaging),
    *refused(one_cycle, "compress", TypeError, "bf16", argument="averaging=hk.Averaging(compress=…)"),
    *refused(one_cycle, "average_state", TypeError, True, argument="averaging=hk.Averaging(state=…)"),
    *refused(wrapped, "outer", TypeError, hk.Outer(), argument="averaging=hk.Averaging(outer=…)"),
    *refused(averaging, "state", ValueError, "yes", 1, None),
    *flags(averaging, "buffers", "backup"),
    *refused(one_cycle, "model", TypeError, 3, "model", [], nn.Linear, object()),
    *optional(averaging, "bucket_bytes", 0, 1.5),
    *refused(averaging, "compress", ValueError, "int4", True, 8, ["bf16"]),
    *number(averaging, "overlap_steps", -1, 1.5, NAN),
    *refused(one_cycle, "averaging", ValueError, hk.Averaging(overlap_steps=5), sync_every=5, argument="overlap_steps"),
    *refused(averaging, "outer", TypeError, 0.7, True, {"lr": 0.7}, hk.Outer),
    *refused(one_cycle, "scout", TypeError, 0.2, True, {"share": 0.2}, hk.ScoutSettings),
    *refused(one_cycle, "scout", ValueError, hk.ScoutSettings()),
    *refused(averaging, "merge", ValueError, "median", None, True, 1),
    *refused(averaging, "merge", ValueError, "best", outer=hk.Outer()),
    *refused(averaging, "merge", ValueError, "best", compress="int8"),
    *number(one_cycle, "seed", 1.5, NAN),
    *refused(one_cycle, "seed", TypeError, "x", spread=0.2),
    *refused(one_cycle, "gradients", ValueError, "local", auto_lr=hk.HypergradientController()),
    *refused(
        one_cycle, "explore", ZeroDivisionError, [hk.Explore("p", base=0.1, apply=lambda p: 1 / 0)], argument="division"
    ),
    *refused(on_stack, "max_lr", ValueError, None, argument="total_steps", world="stack"),
    *refused(on_stack, "ensemble", ValueError, None, argument="stack.ensemble", world="stack"),
    *refused(on_stack, "gradients", ValueError, "shared", world="stack"),
    *refused(on_stack, "model", ValueError, LINEAR, world="stack"),
    Row("a stack", lambda w: on_stack(w, ensemble=w.stack), TypeError, "stack.ensemble", "stack"),
    Row("another stack", stack_of_others, ValueError, "stack", "stack"),
    Row("torch's optimizer", torch_on_stack, TypeError, "SGD", "stack"),
]


#: No loss of one replica, and no losses of a stack of two.
NO_LOSS: dict[type[Exception], tuple[Any, ...]] = {
    TypeError: (
        *("2.5", b"2.5", bytearray(b"2.5"), True, [1.0], {}, 1j, (loss for loss in [1.0]), torch.tensor(1j), LINEAR),
        *(np.ones(2), np.bool_(True), np.complex64(1), np.array("2.5"), np.ma.masked),
    ),
    ValueError: (torch.ones(2), torch.ones(0), torch.ones((), device="meta"), torch.ones(1).to_sparse(), NESTED),
}
NO_LOSSES: dict[type[Exception], tuple[Any, ...]] = {
    TypeError: (1.0, "ab", ["a", "b"], [1.0, 10**400], [None, None], torch.ones(2) * 1j, (loss for loss in [1.0, 1.0])),
    ValueError: (torch.tensor(1.0), [1.0, 2.0, 3.0], torch.ones(2, 1), torch.ones(2, device="meta"), NESTED),
}


step, use_probe = method("scheduler.step"), method("scheduler.use_probe")


def record(world: Any, **keywords: Any) -> object:
    return world.scheduler.record_loss(**{"loss": 1.0, **keywords})


METHODS: list[Row] = [
    *(
        row
        for name, call in (("step", step), ("record", record))
        for error in (TypeError, ValueError)
        for row in (
            *named(name, refused(call, "loss", error, *NO_LOSS[error])),
            *named(name, refused(call, "loss", error, *NO_LOSSES[error]), "stack"),
        )
    ),
    *refused(record, "loss", TypeError, None),
    *refused(record, "loss", ValueError, *BEYOND),
    *number(record, "divided_by", *BEYOND, 0, -2, NAN, INF),
    *refused(use_probe, "probe", TypeError, None, 1.0, "loss", lambda batch: 1.0),
    *refused(method("scheduler.on_sync"), "callback", TypeError, None, "log", lambda: None, lambda record, step: None),
    *refused(use_probe, "probe", RuntimeError, lambda: 1.0),
    *refused(lambda world, **keywords: world.scheduler.metrics(**keywords), "replicas", ValueError, "no", None, 3),
    *refused(built(hk.release), "optimizer", TypeError, None, 3, "sgd", LINEAR, torch.optim.SGD),
    *refused(step, "loss", TypeError, 0, 4, -1, 10**9, argument="step(epoch)"),
    Row("step(epoch=)", lambda w: w.scheduler.step(epoch=3), TypeError, "epoch"),
]

AREAS = {"scheduler arguments": ARGUMENTS, "scheduler keywords": OPTIONS, "scheduler methods": METHODS}
