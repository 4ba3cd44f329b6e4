"""The runs whose checkpoints are kept: schedulers, controllers, ways of averaging, optimizers and precisions.

All arithmetic outside the package is exact or rounded alike everywhere: a linear model, and batches of small fractions.
The ``torch`` backend runs on any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet_kernels as hk
from hdet_kernels.compat import OneCycleAutoLR
from tests.training import with_averaging

TOTAL, SYNC, SAVED_AT, RANKS = 24, 4, 9, 2

Kind = Literal["single", "stack-shared", "stack-local", "ranks-shared", "ranks-local"]


@dataclass(frozen=True)
class Case:
    """A run.

    Args:
        kind: who the replicas are.
        optimizer: its class.
        optimizer_options: its options, beside the learning rate.
        scheduler: which one.
        options: of the scheduler.
        dtype: of the model.
        probed: whether the scheduler has a probe.
        replicas: rows of a stack.
        apart: whether every parameter has a group of its own, with the same options.
    """

    kind: Kind = "stack-shared"
    optimizer: Callable[..., Any] = hk.FusedAdamW
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    scheduler: Literal["one-cycle", "cosine", "compat"] = "one-cycle"
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    probed: bool = False
    replicas: int = 3
    apart: bool = False

    @property
    def ranks(self) -> int:
        return RANKS if self.kind.startswith("ranks") else 1


_OFF = {"auto_lr": False}
_REGRESSION = {"spread": 0.5, "auto_lr": hk.RegressionController(start_at=0.1, stop_at=0.8)}
_BF16 = torch.bfloat16

CASES: dict[str, Case] = {
    # Controllers and schedulers.
    "regression-probe": Case(
        probed=True, replicas=4, options={**_REGRESSION, "explore": [hk.Explore("weight_decay", base=0.1, spread=0.5)]}
    ),
    "regression-losses": Case("stack-local", hk.FusedSGD, {"momentum": 0.9}, options=_REGRESSION),
    "softmax": Case(optimizer=hk.FusedAdam, options={"auto_lr": hk.SoftmaxController(warmup_steps=4)}),
    "hypergradient": Case("single", options={"auto_lr": hk.HypergradientController()}),
    "fan-out": Case(optimizer=hk.FusedLion, optimizer_options={"weight_decay": 0.1}, options=_OFF),
    "cosine": Case("stack-local", hk.FusedAdagrad, {"lr_decay": 0.01}, scheduler="cosine", options=_REGRESSION),
    "published": Case("single", scheduler="compat"),
    "groups-apart": Case(apart=True, options=_REGRESSION),  # of a version that tied no groups
    # Averages in one process.
    "outer": Case("stack-local", options={**_OFF, "outer": hk.Outer(lr=0.7, momentum=0.9)}),
    "best": Case("stack-local", options={**_OFF, "merge": "best"}),
    # Optimizers and precisions.
    "torch-adamw": Case("single", torch.optim.AdamW, options=_OFF),
    "amsgrad": Case("single", hk.FusedAdam, {"amsgrad": True, "weight_decay": 0.1, "maximize": False}, options=_OFF),
    "nesterov-fp64": Case(
        "single", hk.FusedSGD, {"momentum": 0.9, "nesterov": True}, options=_OFF, dtype=torch.float64
    ),
    "masters": Case("single", options=_OFF, dtype=_BF16),
    "masters-stack": Case(dtype=_BF16, options=_OFF),
    "stochastic-rounding": Case("single", optimizer_options={"stochastic_rounding": True}, options=_OFF, dtype=_BF16),
    "state-bf16": Case("single", optimizer_options={"state_dtype": _BF16, "max_grad_norm": 0.5}, options=_OFF),
    "state-int8": Case("single", optimizer_options={"state_dtype": "int8"}, options=_OFF),
    "fixed-gradients": Case("single", hk.FusedLion, {"gradients": "fixed"}, options=_OFF),
    # Averages over processes.
    "ranks-shared": Case("ranks-shared", options=_REGRESSION),
    "ranks-overlap": Case("ranks-local", options={**_OFF, "overlap_steps": 2}),
    "ranks-bf16": Case("ranks-local", options={**_OFF, "compress": "bf16"}),
    "ranks-int8": Case("ranks-local", options={**_OFF, "compress": "int8"}),
    "ranks-outer": Case("ranks-local", options={**_OFF, "outer": hk.Outer(lr=0.7, momentum=0.9, nesterov=True)}),
    "ranks-masters": Case("ranks-local", options={**_OFF, "compress": "bf16"}, dtype=_BF16),
}


def batch(step: int, replica: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a step: sixteenths, which are exact in bf16."""
    numbers = torch.arange(18) * 7 + step * 5 + replica * 3
    x = ((numbers % 13) - 6).reshape(6, 3) / 16
    return x, (x[:, :2] * 4).round() / 16


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def model(dtype: torch.dtype) -> nn.Module:
    """Return a small linear model with values that are exact in bf16."""
    made = nn.Linear(3, 2).to(dtype)
    with torch.no_grad():
        for number, param in enumerate(made.parameters()):
            param.copy_((torch.arange(param.numel()) * 5 % 7 - 3).reshape(param.shape) / 8 + number / 16)
    return made


class Run:
    """Model, optimizer and scheduler of a case, in this process."""

    def __init__(self, name: str, rank: int = 0) -> None:
        self.case, self.rank = CASES[name], rank
        case = self.case
        self.module, self.stack = model(case.dtype), None
        options: dict[str, Any] = dict(case.options)
        if case.kind.startswith("stack"):
            self.stack = hk.ReplicaStack(self.module, case.replicas, gradients=case.kind.removeprefix("stack-"))  # type: ignore[arg-type]
            options["ensemble"] = self.stack.ensemble
        self.model = DistributedDataParallel(self.module) if case.kind == "ranks-shared" else self.module
        if case.probed:
            options["probe"] = self.probe
        own = {} if case.optimizer is torch.optim.AdamW else {"backend": "torch"}
        params: Any = (self.stack or self.module).parameters()
        params = [{"params": [param]} for param in params] if case.apart else params
        self.optimizer = case.optimizer(params, lr=0.01, **own, **case.optimizer_options)
        self.scheduler = self._scheduler(options)

    def _scheduler(self, options: dict[str, Any]) -> Any:
        if self.case.scheduler == "compat":
            return OneCycleAutoLR(self.optimizer, 0.02, TOTAL, model_sync_interval=SYNC, auto_lr_warmup_steps=4)
        if self.case.scheduler == "cosine":
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, TOTAL)
            return hk.HDETScheduler(cosine, sync_every=SYNC, **with_averaging(options))
        # Adagrad has no momentum to cycle, and Lion's betas are tuned to each other.
        cycled = self.case.optimizer in (hk.FusedAdamW, torch.optim.AdamW, hk.FusedAdam)
        return hk.HDETOneCycleLR(
            self.optimizer, 0.02, TOTAL, cycle_momentum=cycled, sync_every=SYNC, **with_averaging(options)
        )

    def probe(self) -> Tensor:
        assert self.stack is not None
        return self.stack.losses(loss_of, *batch(1000), same_batch=True)

    def parts(self) -> dict[str, Any]:
        return {"model": self.stack or self.module, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self, until: int) -> list[list[float]]:
        """Train until a step and return the learning rates after each."""
        rates = []
        for step in range(self.scheduler.last_epoch, until):
            self.optimizer.zero_grad()
            if self.stack is None:
                x, y = (part.to(self.case.dtype) for part in batch(step, self.rank))
                loss = loss_of(self.model, x, y)
                loss.backward()
            else:
                each = [batch(step, r) for r in range(self.case.replicas)]
                x, y = (torch.cat(parts).to(self.case.dtype) for parts in zip(*each, strict=True))
                loss = self.stack.backward(loss_of, x, y)
            self.optimizer.step()
            self.scheduler.step(loss.detach())
            rates.append([float(rate) for rate in self.scheduler.get_last_lr()])
        return rates

    def saved(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts().items()}

    def continued(self) -> dict[str, Any]:
        """Train to the end, and return what a resumed run is compared with."""
        rates = self.train(TOTAL)
        record = self.scheduler.history[-1].to_dict()
        return {
            "rates": rates,
            "base": [float(rate) for rate in self.scheduler.get_base_lr()],
            "parameters": [p.detach().float().clone() for p in (self.stack or self.module).parameters()],
            "last sync": {key: record[key] for key in ("step", "losses", "base", "values", "gradients")},
        }


def made(rank: int, name: str) -> dict[str, Any]:
    """Return the checkpoint of a case in this process, and its continuation."""
    run = Run(name, rank)
    run.train(SAVED_AT)
    parts = {name: _copied(part) for name, part in run.saved().items()}
    return {**parts, "end": run.continued()}


def resumed(rank: int, name: str, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the continuation of a checkpoint that was saved by this rank, in a run that is built anew."""
    run = Run(name, rank)
    for part, target in run.parts().items():
        target.load_state_dict(saved[part])
    assert run.scheduler.last_epoch == SAVED_AT
    return run.continued()


def _copied(state: Any) -> Any:
    """Return a state with tensors of their own: it refers to those that the run trains, and to larger storages."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return type(state)(map(_copied, state)) if isinstance(state, list | tuple) else state
