"""Malformed calls: explored scalars, multipliers, permutations and the controllers' constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hdet_kernels as hk
from hdet_kernels.controller import RegressionSettings, SlopeSettings, SoftmaxSettings
from tests.bad_input.rows import INF, NAN, NO_TRUST, Row, named, out_of_range, wrong_kinds


def explore(**arguments: Any) -> Callable[[Any], object]:
    """Return a call of Explore alone."""
    return lambda world: hk.Explore(**{"name": "eps", **arguments})


def explored(*arguments: Any, world: str = "run", **keywords: Any) -> Callable[[Any], object]:
    """Return a scheduler on the trained optimizer that explores one scalar."""

    def call(given: Any) -> object:
        ensemble = given.stack.ensemble if world == "stack" else None
        return hk.HDETOneCycleLR(
            given.optimizer, 0.1, 20, explore=[hk.Explore(*arguments, **keywords)], ensemble=ensemble
        )

    return call


def field(name: str) -> Callable[[Any, Any], object]:
    return lambda world, value: hk.Explore(**{"name": "eps", name: value})


BASE = "the base value of eps must be a positive number"

EXPLORE: list[Row] = [
    *(
        Row(f"name={name!r}", explore(name=name), TypeError, "the name of an Explore must be a key")
        for name in (None, 3, ["lr"])
    ),
    Row("no name", explore(name=""), ValueError, "the name of an Explore must be a key .* got ''"),
    *wrong_kinds("spread", field("spread"), "a finite number of at least 0"),
    *out_of_range("spread", field("spread"), "a finite number of at least 0", -0.3, NAN, INF),
    Row("spread of 1", explore(spread=1.0), ValueError, "spread of 'eps' must be below 1 with linear spacing"),
    *wrong_kinds("base value of eps", field("base"), "a positive number", leave_out=["None"]),
    *out_of_range("base value of eps", field("base"), "a positive number", 0, -1.0, NAN, INF),
    *(
        Row(
            f"bounds={bounds!r}"[:40], explore(bounds=bounds), TypeError, r"bounds of 'eps' must be \(lowest, highest\)"
        )
        for bounds in (1.0, "ab", {0: 1}, {0.1, 0.2})
    ),
    *(
        Row(f"bounds={bounds!r}", explore(bounds=bounds), ValueError, "bounds of 'eps' must be .* got ")
        for bounds in ((), (0.1,), (0.1, 0.2, 0.3), (0.2, 0.1), (0.1, 0.1), (-2, -1), (-1, 1), (NAN, 1.0), (0.1, NAN))
    ),
    Row("bounds with text", explore(bounds=(0.1, "a")), TypeError, "highest of the bounds of 'eps' must be .* got 'a'"),
    Row(
        "bounds with None", explore(bounds=(None, 1.0)), TypeError, "lowest of the bounds of 'eps' must be .* got None"
    ),
    Row("lr between −2 and −1", lambda w: hk.Explore("lr", bounds=(-2, -1)), ValueError, "of at least 0, got -2"),
    *(
        Row(
            f"spacing={spacing!r}", explore(spacing=spacing), ValueError, "spacing must be one of 'linear', 'log', got "
        )
        for spacing in ("cubic", None, 3, True)
    ),
    *(
        Row(f"groups={groups!r}"[:40], explore(groups=groups), TypeError, "groups of 'eps'.* must be .* got ")
        for groups in (0, "0", {0}, ["0"], [None], [True])
    ),
    Row("no groups", explore(groups=[]), ValueError, "explores nothing: leave out groups="),
    Row("half a group", explore(groups=[0.5]), ValueError, "groups of 'eps' must be a whole number, got 0.5"),
    Row(
        "apply is no function",
        explore(apply=3, base=1.0),
        TypeError,
        r"apply of 'eps' must be callable as apply\(value\)",
    ),
    Row("apply without base", explore(apply=print), ValueError, "needs base="),
    Row("apply in a group", explore(apply=print, base=1.0, groups=[0]), ValueError, "leave out groups="),
]

IN_A_RUN: list[Row] = [
    Row("an unknown key", explored("wieght_decay"), ValueError, "'wieght_decay' is not a key .* apply= and base="),
    Row(
        "a key of a stack",
        explored("smoothing", base=0.1),
        ValueError,
        "'smoothing' is not a key .* ensemble=stack.ensemble",
    ),
    Row("the parameters", explored("params"), ValueError, "'params' must be a number"),
    Row("the parameters with a base", explored("params", base=1.0), ValueError, "'params' must be a number"),
    Row("a flag", explored("amsgrad", base=1.0), ValueError, "'amsgrad' must be a number, the group holds False"),
    Row("a tuple", explored("betas", base=0.5), ValueError, "'betas' must be a number"),
    Row("beyond a tuple", explored("betas[5]", base=0.5), ValueError, r"'betas\[5\]' does not exist"),
    *(
        Row(f"{key}, the schedule's", explored(key), ValueError, f"'{key}' is an entry of the schedule")
        for key in ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "rounding_seed")
    ),
    Row("a base for lr", explored("lr", base=0.1), ValueError, "the schedule gives the learning rate"),
    Row("a group too many", explored("lr", groups=[2]), ValueError, "names parameter group 2; the optimizer has 2"),
    Row("a negative group", explored("lr", groups=[-1]), ValueError, "names parameter group -1"),
    Row("lr of one group twice", explored("lr", groups=[0, 0]), ValueError, "parameter group 0 is explored twice"),
    Row("cycled momentum", explored("betas[0]", bounds=(0.5, 0.99)), ValueError, "pass cycle_momentum=False"),
    Row("betas without bounds", explored("betas[1]"), ValueError, "needs bounds= that end below 1"),
    Row("base outside of bounds", explored("eps", base=2.0, bounds=(0.1, 1.0)), ValueError, "lies outside its bounds"),
    Row("a misspelt scalar of a stack", explored("scale", world="stack"), ValueError, "'scale' is not a key", "stack"),
]

PURE: list[Row] = [
    *wrong_kinds("replicas", lambda w, n: hk.multipliers(n, 0.3), "a whole number of at least 1"),
    *out_of_range("replicas", lambda w, n: hk.multipliers(n, 0.3), "a whole number of at least 1", 0, -1, 2.5, NAN),
    Row(
        "10⁹ replicas", lambda w: hk.multipliers(10**9, 0.3), ValueError, "number of replicas must be at most 16777216"
    ),
    *wrong_kinds("spread", lambda w, spread: hk.multipliers(4, spread), "a finite number of at least 0"),
    *out_of_range("spread", lambda w, spread: hk.multipliers(4, spread), "a finite number", -1, NAN, INF),
    Row("spacing", lambda w: hk.multipliers(4, 0.3, "cubic"), ValueError, "spacing must be one of"),  # type: ignore[arg-type]
    *named("permutation", wrong_kinds("seed", lambda w, seed: permutation(seed=seed), "a whole number")),
    *named("permutation", out_of_range("seed", lambda w, seed: permutation(seed=seed), "a whole number", 0.5, NAN)),
    *named("permutation", wrong_kinds("cycle", lambda w, cycle: permutation(cycle=cycle), "a whole number")),
    *named("permutation", out_of_range("replicas", lambda w, n: permutation(n=n), "a whole number", 0, 2.5, -3)),
    *(
        Row(
            f"permutation of {name!r}",
            lambda w, name=name: permutation(hyperparameter=name),
            TypeError,
            "hyperparameter must be",
        )
        for name in (None, 0, ["lr"])
    ),
]


def permutation(**arguments: Any) -> object:
    given: dict[str, Any] = {"n": 4, "seed": 0, "cycle": 0, "hyperparameter": "lr/0", **arguments}
    return hk.permutation(given.pop("n"), **given)


def constant(kind: Any, name: str) -> Callable[[Any, Any], object]:
    return lambda world, value: kind(**{name: value})


def positive(kind: Any, name: str) -> list[Row]:
    call = constant(kind, name)
    optional = ["None"] if name == "rate" and kind is not hk.SoftmaxController else []
    return named(
        kind.__name__,
        [
            *wrong_kinds(name, call, "a positive number", leave_out=optional),
            *out_of_range(name, call, "a positive number", 0, -1.0, NAN, INF),
        ],
    )


def share(kind: Any, name: str, *values: float) -> list[Row]:
    call = constant(kind, name)
    optional = ["None"] if name in ("start_at", "stop_at") else []
    rows = [
        *wrong_kinds(name, call, "a number between 0 and 1", leave_out=optional),
        *out_of_range(name, call, "between 0 and 1", -0.1, 1.5, NAN, *values),
    ]
    return named(kind.__name__, rows)


def settings(kind: Any, name: str, message: str, *values: Any) -> list[Row]:
    return [
        Row(
            f"{kind.__name__}({name}={value!r})",
            lambda w, value=value: kind(**{name: value}),
            (TypeError, ValueError),
            message,
        )
        for value in values
    ]


CONTROLLERS: list[Row] = [
    *share(hk.RegressionController, "beta", 1.0),
    *share(hk.RegressionController, "start_at"),
    *share(hk.HypergradientController, "stop_at"),
    *positive(hk.RegressionController, "rate"),
    *positive(hk.RegressionController, "limit"),
    *positive(hk.RegressionController, "ridge"),
    *positive(hk.SoftmaxController, "scale"),
    *positive(hk.SoftmaxController, "div_factor"),
    *share(hk.SoftmaxController, "beta", 1.0),
    *wrong_kinds("warmup_steps", constant(hk.SoftmaxController, "warmup_steps"), "a whole number of at least 0"),
    *out_of_range("warmup_steps", constant(hk.SoftmaxController, "warmup_steps"), "a whole number", -1, 0.5, INF),
    *settings(
        hk.SoftmaxController, "decay", "decay must be 'floor', 'published' or a number", "x", None, 1.0, NAN, True
    ),
    *settings(
        hk.SoftmaxController, "settings", "settings must be a SoftmaxSettings", None, 3, {}, RegressionSettings()
    ),
    *settings(hk.RegressionController, "settings", "settings must be a RegressionSettings", None, SlopeSettings(), {}),
    *settings(hk.HypergradientController, "settings", "settings must be a SlopeSettings", None, SoftmaxSettings()),
    Row(
        "stop before start",
        lambda w: hk.RegressionController(start_at=0.5, stop_at=0.4),
        ValueError,
        "stop_at=0.4 must be",
    ),
    *settings(RegressionSettings, "quantile", "quantile must (be|lie)", None, "x", True, -0.1, 1.1, NAN),
    *settings(RegressionSettings, "edge_cycles", "edge_cycles must be a whole number", 0, -1, 2.5, None, "x"),
    *settings(RegressionSettings, "turning_length", "turning_length must be", 0, -1.0, NAN, INF, None),
    *settings(RegressionSettings, "edge_cut", "edge_cut must be", 0, -2.0, NAN, INF, None),
    *settings(RegressionSettings, "break_share", "break_share must be", -0.1, NAN, INF, None, "x"),
    *settings(hk.RegressionController, "trust", "trust must be a .*number of at least 1", *NO_TRUST),
    *settings(hk.RegressionController, "undo", "undo must be a whole number of at least 0", -1, 1.5, NAN, None, True),
    *settings(SlopeSettings, "total_travel", "total_travel must be", -1.0, NAN, INF, None, "far"),
    *settings(SoftmaxSettings, "smallest_step", "smallest_step must (be|lie)", -0.1, 2.0, NAN, None),
    *wrong_kinds("total_steps", lambda w, n: hk.paper_settings(n), "a whole number of at least 2"),
    *out_of_range("total_steps", lambda w, n: hk.paper_settings(n), "a whole number of at least 2", 1, 0, -5, 10.5),
]

AREAS = {"Explore": EXPLORE, "exploring": IN_A_RUN, "fan-out": PURE, "controllers": CONTROLLERS}
