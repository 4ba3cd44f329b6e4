"""Malformed calls of the fused optimizers: parameters, hyperparameters, options, groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import hdet_kernels as hk
from tests.bad_input.rows import BEYOND, BOTH, INF, NAN, NOT_NUMBERS, Entry, Row, method, named, refused

#: Numbers of the optimizers, and values that they do not take.
NUMBERS: dict[str, tuple[type[torch.optim.Optimizer], tuple[Any, ...]]] = {
    "lr": (hk.FusedAdamW, (-1e-3, NAN, INF, -INF)),
    "eps": (hk.FusedAdamW, (-1e-8, NAN, INF)),
    "weight_decay": (hk.FusedLion, (-0.1, NAN, INF)),
    "momentum": (hk.FusedSGD, (-0.9, NAN, INF)),
    "dampening": (hk.FusedSGD, (NAN, INF)),
    "lr_decay": (hk.FusedAdagrad, (-0.1, NAN, INF)),
    "initial_accumulator_value": (hk.FusedAdagrad, (-0.1, NAN, INF, 1e300)),
    "max_grad_norm": (hk.FusedAdamW, (0, -1.0, NAN, -INF)),
}
#: None is no limit.
KINDS = [value for kind, value in NOT_NUMBERS.items() if kind != "None"]
NO_BETAS = (
    *(None, 0.9, (), (0.9,), (0.9, 0.99, 0.999), (-0.1, 0.9), (0.9, 1.0), (NAN, 0.9), ("a", "b"), (True, 0.9), "ab"),
    *({0.9, 0.99}, {0: 0.9, 1: 0.99}, torch.ones(2, device="meta"), torch.tensor([0.9, 1.5]), bytearray(2)),
    *((0.9, torch.tensor(0.99)), (torch.tensor(0.9), 0.99)),
)
#: Keywords of torch's optimizers that choose one of its implementations.
SWITCHES = ("foreach", "fused", "capturable", "differentiable")


def built(kind: Callable[..., object] = hk.FusedAdamW) -> Entry:
    """Return an entry that builds an optimizer over the parameters of the untouched model."""
    return lambda world, **keywords: kind(**{"params": world.bare_model.parameters(), **keywords})


def group(world: Any, **entries: Any) -> object:
    """Add a parameter group to the trained optimizer."""
    return world.optimizer.add_param_group({"params": list(world.bare_model.parameters()), **entries})


def muon_vectors(world: Any, **entries: Any) -> object:
    """Build FusedMuon with a group that AdamW trains."""
    return hk.FusedMuon([{"params": [world.bare_model[0].bias], **entries}])


def limit(world: Any, max_grad_norm: Any) -> None:
    world.optimizer.max_grad_norm = max_grad_norm


def stepped(world: Any, **entries: Any) -> None:
    """Make a step with other entries in the first parameter group, which come back afterwards."""
    group = world.optimizer.param_groups[0]
    before = {name: group[name] for name in entries}
    group.update(entries)
    try:
        world.optimizer.step()
    finally:
        group.update(before)


def parameter(*shape: int, **options: Any) -> nn.Parameter:
    grad = options.pop("grad", True)
    return nn.Parameter(torch.ones(shape, **options), requires_grad=grad)


MEMORY = torch.ones(6)
HALF_SHARED = [nn.Parameter(MEMORY[:4]), nn.Parameter(MEMORY[2:])]
COMPLEX, META = parameter(2, dtype=torch.complex64), parameter(2, device="meta")
WHOLE, HALF = parameter(2, dtype=torch.int32, grad=False), parameter(2, dtype=torch.float16)
EXPANDED, TWICE = nn.Parameter(torch.ones(1).expand(4)), parameter(2)
CLIPPED = [{"params": [parameter(3, 2)], "max_grad_norm": 1.0}]

KEYWORDS: list[Row] = [
    *(
        row
        for name, (kind, values) in NUMBERS.items()
        for row in refused(
            built(kind), name, BOTH, *KINDS, *values, *BEYOND, *(() if name == "max_grad_norm" else (None,))
        )
    ),
    *named("Adam", refused(built(hk.FusedAdam), "betas", BOTH, *NO_BETAS)),
    *named("Lion", refused(built(hk.FusedLion), "betas", BOTH, *NO_BETAS)),
    *refused(built(hk.FusedMuon), "adamw_betas", BOTH, *NO_BETAS),
    *(
        row
        for name in ("adamw_lr", "adamw_eps", "adamw_weight_decay")
        for row in refused(built(hk.FusedMuon), name, BOTH, -1.0, NAN, "x")
    ),
    *named("Muon", refused(built(hk.FusedMuon), "eps", BOTH, -1.0, 1e300, 2**200, torch.tensor(0.5))),
    *refused(built(hk.FusedMuon), "ns_coefficients", BOTH, (1.0, 2.0, NAN), (1.0, 2.0, 10**400), "abc", {1, 2, 3}),
    *(
        row
        for name in ("amsgrad", "maximize", "stochastic_rounding", "master_weights")
        for row in refused(built(), name, BOTH, "no", 2, [], 0.5)
    ),
    *refused(built(hk.FusedSGD), "nesterov", BOTH, "no", None, 2, True),
    *refused(built(), "gradients", ValueError, "shared", None, True, 3),
    *refused(built(), "state_dtype", BOTH, torch.float16, torch.uint8, None, "bf16", "uint8", float),
    *refused(built(), "stochastic_rounding", ValueError, True, master_weights=True),
    *refused(built(), "backend", BOTH, "cudnn", "", 3, ["torch"]),
    *(
        row
        for kind in (hk.FusedAdamW, hk.FusedRowWiseAdagrad)
        for name in SWITCHES
        for row in named(kind.__name__, refused(built(kind), name, TypeError, True, argument=f"{kind.__name__}() got"))
    ),
    *named("switch", refused(built(), "foreach", TypeError, None, argument="torch's implementations: leave them out")),
    *named("SGD", refused(built(hk.FusedSGD), "momentun", TypeError, 0.9, argument="did you mean 'momentum'?")),
    *refused(built(hk.FusedRowWiseAdagrad), "max_grad_norm", TypeError, 1.0),
    *(
        row
        for kind in (hk.FusedAdamW, hk.FusedRowWiseAdagrad)
        for row in named(kind.__name__, refused(built(kind), "params", ValueError, CLIPPED, argument="max_grad_norm"))
    ),
]

PARAMETERS: list[Row] = [
    *refused(built(), "params", TypeError, None, torch.ones(3), argument="param"),
    *refused(built(), "params", TypeError, [1.0, 2.0], argument="Tensors"),
    *refused(built(), "params", TypeError, "ab", "", {}, {TWICE}, np.array(0.5), argument="parameters"),
    *refused(built(), "params", (KeyError, *BOTH), [], iter([]), [{"lr": 0.1}], argument="param"),
    *refused(built(), "params", ValueError, [{"params": [TWICE]}, {"params": [TWICE]}], argument="parameter group"),
    *refused(built(), "params", ValueError, [TWICE * 2], argument="non-leaf"),
    *refused(built(), "params", ValueError, [COMPLEX], argument="complex64"),
    *refused(built(), "params", ValueError, [WHOLE], argument="int32"),
    *refused(built(), "params", ValueError, [META], argument="meta device"),
    *refused(built(), "params", ValueError, [EXPANDED], argument="overlaps"),
    *refused(built(), "params", ValueError, HALF_SHARED, argument="share"),
    *refused(built(), "params", ValueError, [HALF], stochastic_rounding=True, argument="bfloat16"),
    Row("a stack's and others", lambda w: hk.FusedAdamW([*w.stack.parameters(), TWICE]), ValueError, "stack", "stack"),
    Row("fixed", lambda w: hk.FusedSGD(w.stack.parameters(), gradients="fixed"), ValueError, "gradients", "stack"),
]

GROUPS: list[Row] = [
    *refused(group, "lr", BOTH, -1.0, "x"),
    *refused(group, "betas", ValueError, (0.9, 2.0)),
    *refused(group, "eps", ValueError, NAN),
    *refused(group, "max_grad_norm", ValueError, 1.0),
    *refused(group, "master_weights", ValueError, True),
    *refused(group, "backend", ValueError, "torch"),
    *refused(group, "maximize", BOTH, "yes"),
    *refused(group, "params", TypeError, "", {}, {TWICE}, np.array(0.5), argument="parameters"),
    *refused(group, "stochastic_rounding", ValueError, 0, np.zeros(1)),
    *(
        row
        for name in ("adamw_lr", "adamw_eps", "adamw_weight_decay")
        for row in named("group", refused(muon_vectors, name, BOTH, -1.0, NAN, "x", None))
    ),
    *refused(muon_vectors, "ns_steps", BOTH, None, -1, 1.5, "x"),
    *refused(muon_vectors, "ns_coefficients", BOTH, None, (1.0, 2.0), "abc"),
    *refused(muon_vectors, "normuon_beta2", BOTH, None, -1, 1.5, "x"),
    *refused(muon_vectors, "adjust_lr_fn", BOTH, "spectral", 3),
    *refused(group, "params", ValueError, [META], argument="meta"),
    *refused(group, "params", ValueError, [COMPLEX], argument="complex64"),
    Row("params twice", lambda w: group(w, params=[w.model[0].weight]), ValueError, "parameter group"),
    Row("no dict", lambda w: w.optimizer.add_param_group([]), TypeError, "dict"),
    *refused(stepped, "lr", ValueError, NAN, -1.0, INF, 10**400, np.ones(2), torch.ones((), device="meta")),
    *refused(stepped, "betas", ValueError, (NAN, 0.9), (0.9, 1.5)),
    *refused(limit, "max_grad_norm", BOTH, 0, -1, NAN, "x", True, []),
    *refused(method("optimizer.step"), "closure", TypeError, 3, "loss", torch.ones(()), lambda model: 0.0),
]

AREAS = {"optimizer keywords": KEYWORDS, "optimizer parameters": PARAMETERS, "optimizer groups": GROUPS}
