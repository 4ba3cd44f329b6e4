"""Malformed calls: explored scalars, multipliers, permutations, the controllers' constants and parts for frontends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import hdet_kernels as hk
from hdet_kernels.controller import RegressionSettings, SlopeSettings, SoftmaxSettings
from hdet_kernels.ensemble import SingleReplica
from tests.bad_input.rows import BOTH, INF, NAN, Row, built, named, number, optional, refused


def explored(*arguments: Any, world: str = "run", **keywords: Any) -> Callable[[Any], object]:
    """Return a call that explores one scalar of the trained optimizer."""
    return lambda w: hk.HDETOneCycleLR(
        w.optimizer,
        0.1,
        20,
        explore=[hk.Explore(*arguments, **keywords)],
        ensemble=w.stack.ensemble if world == "stack" else None,
    )


explore = built(hk.Explore, name="eps")
NO_BOUNDS = ((), (0.1,), (0.1, 0.2, 0.3), (0.2, 0.1), (0.1, 0.1), (-2, -1), (-1, 1), (NAN, 1.0), (0.1, NAN))
SCHEDULED = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "rounding_seed")

EXPLORE: list[Row] = [
    *refused(explore, "name", TypeError, None, 3, ["lr"]),
    *refused(explore, "name", ValueError, ""),
    *number(explore, "spread", -0.3, NAN, INF, 1.0),
    *optional(explore, "base", 0, -1.0, NAN, INF),
    *refused(explore, "bounds", TypeError, 1.0, "ab", {0: 1}, {0.1, 0.2}, (0.1, "a"), (None, 1.0)),
    *refused(explore, "bounds", ValueError, *NO_BOUNDS),
    *refused(explore, "bounds", ValueError, (-2, -1), name="lr"),
    *refused(explore, "spacing", ValueError, "cubic", None, 3, True),
    *refused(explore, "bounds", TypeError, torch.ones(2).to_sparse(), (0.1, np.ones(2)), bytearray(2)),
    *refused(explore, "groups", TypeError, 0, "0", {0}, ["0"], [None], [True], bytearray(1)),
    *refused(explore, "groups", ValueError, [], [0.5]),
    *refused(explore, "apply", TypeError, 3, lambda: None, lambda value, step: None, base=1.0),
    *refused(explore, "apply", ValueError, print, argument="base="),
    *refused(explore, "apply", ValueError, print, base=1.0, groups=[0], argument="groups="),
]

IN_A_RUN: list[Row] = [
    Row("an unknown key", explored("wieght_decay"), ValueError, "wieght_decay"),
    Row("a key of a stack", explored("smoothing", base=0.1), ValueError, "smoothing"),
    Row("the parameters", explored("params"), ValueError, "params"),
    Row("the parameters with a base", explored("params", base=1.0), ValueError, "params"),
    Row("a flag", explored("amsgrad", base=1.0), ValueError, "amsgrad"),
    Row("a tuple", explored("betas", base=0.5), ValueError, "betas"),
    Row("beyond a tuple", explored("betas[5]", base=0.5), ValueError, "betas[5]"),
    *(Row(f"{key}, the schedule's", explored(key), ValueError, key) for key in SCHEDULED),
    Row("a base for lr", explored("lr", base=0.1), ValueError, "learning rate"),
    Row("a group too many", explored("lr", groups=[2]), ValueError, "parameter group 2"),
    Row("a negative group", explored("lr", groups=[-1]), ValueError, "parameter group -1"),
    Row("lr of one group twice", explored("lr", groups=[0, 0]), ValueError, "parameter group 0"),
    Row("cycled momentum", explored("betas[0]", bounds=(0.5, 0.99)), ValueError, "cycle_momentum=False"),
    Row("betas without bounds", explored("betas[1]"), ValueError, "bounds="),
    Row("base outside of bounds", explored("eps", base=2.0, bounds=(0.1, 1.0)), ValueError, "bounds"),
    Row("a misspelt scalar of a stack", explored("scale", world="stack"), ValueError, "scale", "stack"),
]


multipliers = built(hk.multipliers, n=4, spread=0.3)
permutation = built(hk.permutation, n=4, seed=0, cycle=0, hyperparameter="lr/0")

FAN_OUT: list[Row] = [
    *number(multipliers, "n", 0, -1, 2.5, NAN, 10**9, argument="replicas"),
    *number(multipliers, "spread", -1, NAN, INF),
    *refused(multipliers, "spacing", ValueError, "cubic"),
    *named("permutation", number(permutation, "n", 0, 2.5, argument="replicas")),
    *number(permutation, "seed", 0.5, NAN),
    *number(permutation, "cycle", 0.5),
    *refused(permutation, "hyperparameter", TypeError, None, 0, ["lr"]),
    *number(built(hk.paper_settings), "total_steps", 1, 0, 10.5),
]


regression, softmax = built(hk.RegressionController), built(hk.SoftmaxController)
slopes, constants = built(hk.HypergradientController), built(RegressionSettings)

CONTROLLERS: list[Row] = [
    *number(regression, "beta", -0.1, 1.0, NAN),
    *optional(regression, "start_at", -0.1, 1.5, NAN),
    *optional(regression, "rate", 0, -1.0, NAN, INF),
    *number(regression, "limit", 0, -1.0, NAN, INF),
    *number(regression, "ridge", 0, -1.0, NAN, INF),
    *refused(regression, "stop_at", ValueError, 0.4, start_at=0.5),
    *refused(regression, "trust", BOTH, 0.5, -3.0, NAN, INF, "3", True, [3.0]),
    *refused(regression, "undo", BOTH, -1, 1.5, NAN, None, True),
    *refused(regression, "undo_on", BOTH, "gpu", None, 0, True),
    *refused(regression, "settings", TypeError, None, SlopeSettings(), {}),
    *refused(constants, "quantile", BOTH, None, "x", True, -0.1, 1.1, NAN),
    *refused(constants, "turned_count", BOTH, 0, -1, 2.5, None, "x"),
    *refused(constants, "turning_length", BOTH, 0, -1.0, NAN, INF, None),
    *refused(constants, "cut", BOTH, 0, -2.0, NAN, INF, None),
    *refused(constants, "turned_from", BOTH, -0.1, 1.1, NAN, None, "x"),
    *refused(constants, "fall_share", BOTH, -0.1, NAN, INF, None, "x"),
    *optional(slopes, "stop_at", -0.1, 1.5, NAN),
    *named("slopes", refused(slopes, "settings", TypeError, None, SoftmaxSettings())),
    *refused(built(SlopeSettings), "total_travel", BOTH, -1.0, NAN, INF, None, "far"),
    *named("softmax", number(softmax, "beta", -0.1, 1.0, NAN)),
    *number(softmax, "scale", 0, -1.0, NAN, INF),
    *number(softmax, "div_factor", 0, -1.0, NAN, INF),
    *number(softmax, "warmup_steps", -1, 0.5, INF),
    *refused(softmax, "decay", BOTH, "x", None, 1.0, NAN, True),
    *named("softmax", refused(softmax, "settings", TypeError, None, 3, {}, RegressionSettings())),
    *refused(built(SoftmaxSettings), "smallest_step", BOTH, -0.1, 2.0, NAN, None),
]


def spread(world: Any, **keywords: Any) -> object:
    given = {"run": hk.frontend.Run(9, 3, 0.3, ()), "spread": 0.3, **keywords}
    return hk.frontend.Spread.of(world.bare.param_groups, SingleReplica(), **given)


def converger(world: Any, **keywords: Any) -> object:
    return hk.frontend.converger_of(world.bare, SingleReplica(), **keywords)


run = built(hk.frontend.Run, total_steps=100, sync_every=10, peak=0.3, floors=())

FRONTENDS: list[Row] = [
    *optional(run, "total_steps", 0, 2.5),
    *number(run, "sync_every", 0, 2.5),
    *number(run, "peak", -0.1, 1.5, NAN),
    *refused(run, "gradients", ValueError, "both", None, 3),
    *refused(spread, "run", ValueError, hk.frontend.Run(9, 3, 0.3, (None,) * 9), argument="run.floors"),
    *refused(spread, "spread", ValueError, 1.0),
    *refused(converger, "compression", TypeError, "bf16"),
]

AREAS = {
    "Explore": EXPLORE,
    "exploring": IN_A_RUN,
    "fan-out": FAN_OUT,
    "controllers": CONTROLLERS,
    "frontends": FRONTENDS,
}
