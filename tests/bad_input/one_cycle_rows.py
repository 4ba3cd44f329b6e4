"""Malformed calls of the schedulers' constructors: torch's own arguments, and the base scheduler that is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau

import hdet_kernels as hk
from tests.bad_input.rows import INF, NAN, Row, named, out_of_range, wrong_kinds

WHOLE = r"a whole number of at least 1"


def one_cycle(name: str) -> Callable[[Any, Any], object]:
    """Return a call of HDETOneCycleLR on the untouched optimizer with one argument replaced."""

    def call(world: Any, value: Any) -> object:
        arguments: dict[str, Any] = {"max_lr": 0.1, "total_steps": 20, name: value}
        return hk.HDETOneCycleLR(world.bare, **arguments)

    return call


def by_epochs(name: str) -> Callable[[Any, Any], object]:
    def call(world: Any, value: Any) -> object:
        return hk.HDETOneCycleLR(world.bare, 0.1, **{"epochs": 4, "steps_per_epoch": 5, name: value})

    return call


def momentum(name: str) -> list[Row]:
    expected = "a finite number of at least 0 and below 1"
    return [
        *wrong_kinds(name, one_cycle(name), expected),
        *out_of_range(name, one_cycle(name), expected, -0.1, 1.0, 1.5, NAN, INF),
    ]


def factor(name: str) -> list[Row]:
    return [
        *wrong_kinds(name, one_cycle(name), "a positive number"),
        *out_of_range(name, one_cycle(name), "a positive number", 0, -25.0, NAN, INF, -INF),
    ]


def wrapped(base: Callable[[Any], Any], **options: Any) -> Callable[[Any], object]:
    return lambda world: hk.HDETScheduler(base(world), **options)


ROWS: list[Row] = [
    *wrong_kinds("max_lr", one_cycle("max_lr"), "a finite number of at least 0", leave_out=["None"]),
    Row(
        "max_lr is None on one replica",
        lambda w: one_cycle("max_lr")(w, None),
        ValueError,
        "several replicas, and .* one",
    ),
    Row("max_lr has None", lambda w: one_cycle("max_lr")(w, [0.1, None]), TypeError, r"or None for all of them, got"),
    Row(
        "max_lr is None and last_epoch is given",
        lambda w: hk.HDETOneCycleLR(w.optimizer, None, 8, last_epoch=3),
        ValueError,
        "max_lr=None begins a run, got last_epoch=3: leave last_epoch= out",
    ),
    Row(
        "max_lr is None in a short run",
        lambda w: hk.HDETOneCycleLR(w.optimizer, None, 66, ensemble=w.stack.ensemble),
        ValueError,
        "got total_steps=66: pass total_steps of at least 67",
        world="stack",
    ),
    *out_of_range("max_lr", one_cycle("max_lr"), "a finite number of at least 0", -1, -1e-9, NAN, INF, -INF, 10**400),
    Row("max_lr has too few", lambda w: one_cycle("max_lr")(w, [0.1]), ValueError, "max_lr must be .* list of 2.*got"),
    Row("max_lr is empty", lambda w: one_cycle("max_lr")(w, []), ValueError, r"max_lr must be .* got \[\]"),
    Row("max_lr has nan", lambda w: one_cycle("max_lr")(w, [0.1, NAN]), ValueError, r"max_lr\[1\] must be .* got nan"),
    Row("max_lr has text", lambda w: one_cycle("max_lr")(w, ["a", 0.1]), TypeError, r"max_lr\[0\] must be .* got 'a'"),
    *wrong_kinds("total_steps", one_cycle("total_steps"), WHOLE, leave_out=["None"]),
    *out_of_range("total_steps", one_cycle("total_steps"), WHOLE, 0, -5, 10.5, 10.0, NAN, INF, 2**53 + 1),
    Row("no length", lambda w: hk.HDETOneCycleLR(w.bare, 0.1), ValueError, "length of the run .* pass total_steps="),
    Row(
        "epochs alone", lambda w: hk.HDETOneCycleLR(w.bare, 0.1, epochs=3), ValueError, "epochs=3, steps_per_epoch=None"
    ),
    *wrong_kinds("epochs", by_epochs("epochs"), WHOLE, leave_out=["None"]),
    *out_of_range("epochs", by_epochs("epochs"), WHOLE, 0, -1, 2.5),
    *wrong_kinds("steps_per_epoch", by_epochs("steps_per_epoch"), WHOLE, leave_out=["None"]),
    *out_of_range("steps_per_epoch", by_epochs("steps_per_epoch"), WHOLE, 0, -1, 2.5),
    Row(
        "too many epochs",
        lambda w: hk.HDETOneCycleLR(w.bare, 0.1, epochs=2**40, steps_per_epoch=2**40),
        ValueError,
        r"epochs \* steps_per_epoch must be a whole number",
    ),
    *wrong_kinds("pct_start", one_cycle("pct_start"), "a number between 0 and 1"),
    *out_of_range("pct_start", one_cycle("pct_start"), "between 0 and 1", -0.1, 1.1, NAN, INF),
    Row(
        "a warm-up of one step",
        lambda w: one_cycle("pct_start")(w, 0.05),
        ValueError,
        "pct_start=0.05 of total_steps=20",
    ),
    *(
        Row(
            f"anneal_strategy={value!r}",
            lambda w, value=value: one_cycle("anneal_strategy")(w, value),
            ValueError,
            "anneal_strategy must be one of 'cos', 'linear', got ",
        )
        for value in ("cosine", None, 3, True, ["cos"])
    ),
    *(
        Row(
            f"{name}={value!r}",
            lambda w, name=name, value=value: one_cycle(name)(w, value),
            ValueError,
            f"{name} must be True or False, got ",
        )
        for name in ("cycle_momentum", "three_phase")
        for value in ("no", 1, None, 0.0)
    ),
    *momentum("base_momentum"),
    *momentum("max_momentum"),
    *factor("div_factor"),
    *factor("final_div_factor"),
    *wrong_kinds("last_epoch", one_cycle("last_epoch"), "a whole number of at least -1"),
    *out_of_range("last_epoch", one_cycle("last_epoch"), "a whole number of at least -1", -2, 1.5),
    Row(
        "resuming a fresh optimizer", lambda w: one_cycle("last_epoch")(w, 3), KeyError, "last_epoch=3 .* no initial_lr"
    ),
    *(
        Row(
            f"optimizer={spelled}",
            lambda w, value=value: hk.HDETOneCycleLR(value, 0.1, 20),  # type: ignore[misc]
            TypeError,
            f"optimizer must be a torch.optim.Optimizer, got {spelled}",
        )
        for value, spelled in ((None, "None"), ([], r"\[\]"), ("sgd", "'sgd'"), (torch.optim.SGD, "the class SGD"))
    ),
    Row(
        "momentum is cycled where there is none",
        lambda w: hk.HDETOneCycleLR(torch.optim.Adagrad(w.bare_model.parameters()), 0.1, 20),
        ValueError,
        "momentum",
    ),
    Row("an unknown keyword", lambda w: one_cycle("spred")(w, 0.1), TypeError, "'spred'; did you mean 'spread'"),
    *named(
        "HDETScheduler",
        [
            Row("no scheduler", wrapped(lambda w: None), TypeError, "wraps a torch LRScheduler, got None"),
            Row("an optimizer", wrapped(lambda w: w.bare), TypeError, "wraps a torch LRScheduler, got a SGD"),
            Row("a class", wrapped(lambda w: CosineAnnealingLR), TypeError, "got the class CosineAnnealingLR"),
            Row("a metric", wrapped(lambda w: ReduceLROnPlateau(Stand().optimizer)), TypeError, "decides by a metric"),
            Row("a cycle in a cycle", wrapped(lambda w: w.scheduler), TypeError, "has a cycle of its own"),
            Row("no length", wrapped(lambda w: LambdaLR(Stand().optimizer, float)), ValueError, "length of the run"),
            *wrong_kinds(
                "total_steps",
                lambda w, value: hk.HDETScheduler(Stand().scheduler, total_steps=value),
                WHOLE,
                leave_out=["None"],
            ),
            *out_of_range(
                "total_steps",
                lambda w, value: hk.HDETScheduler(Stand().scheduler, total_steps=value),
                WHOLE,
                0,
                -1,
                10.5,
            ),
            Row(
                "a bad option", wrapped(lambda w: Stand().scheduler, spread=-1), ValueError, "spread must be .* got -1"
            ),
        ],
    ),
]


class Stand:
    """An optimizer with a plain schedule, made where it is needed: building a schedule changes its optimizer."""

    def __init__(self) -> None:
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        self.scheduler = CosineAnnealingLR(self.optimizer, 10)
