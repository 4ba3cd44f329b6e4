"""The arguments of the schedulers: what is accepted, and exceptions as torch's. ``tests/bad_input`` has the others."""

from __future__ import annotations

import inspect
import io
import re
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import hdet_kernels as hk
from hdet_kernels.schedule.arguments import Options, check_no_epoch

DEFAULTS = {field.name: field.default for field in fields(Options)}


def optimizer(groups: int = 1) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(groups)], lr=0.1, momentum=0.9)


def rates(scheduler: Any, of: torch.optim.Optimizer) -> list[Any]:
    found = [(float(group["lr"]), float(group["momentum"])) for group in of.param_groups]
    for _ in range(5):
        of.step()
        scheduler.step()
        found += [(float(group["lr"]), float(group["momentum"])) for group in of.param_groups]
    return found


ACCEPTED: dict[str, dict[str, Any]] = {
    "numpy": {"max_lr": np.float64(0.1), "total_steps": np.int64(9), "pct_start": np.float32(0.25)},
    "whole numbers": {"max_lr": 1, "total_steps": 9, "div_factor": 10, "final_div_factor": 100},
    "lists": {"max_lr": [0.1, 0.2], "total_steps": 9, "max_momentum": [0.9, 0.95]},
    "tuples": {"max_lr": (0.1, 0.2), "total_steps": 9, "base_momentum": (0.8, 0.85)},
    "a tensor": {"max_lr": torch.tensor(0.1), "total_steps": 9},
    "epochs": {"max_lr": 0.1, "epochs": 3, "steps_per_epoch": np.int32(3)},
    "a frozen group": {"max_lr": [0.1, 0.0], "total_steps": 9},
    "no momentum": {"max_lr": 0.1, "total_steps": 9, "cycle_momentum": np.bool_(False), "max_momentum": None},
    "three phases": {"max_lr": 0.1, "total_steps": 9, "three_phase": True, "anneal_strategy": "linear"},
    "no warm-up": {"max_lr": 0.1, "total_steps": 9, "pct_start": 0.0},
}


@pytest.mark.parametrize("given", ACCEPTED.values(), ids=list(ACCEPTED))
def test_what_torch_takes_gives_the_same_schedule(given: dict[str, Any]) -> None:
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in given.items()}
    ours, theirs = optimizer(2), optimizer(2)
    here = hk.HDETOneCycleLR(ours, **given, spread=0.0, auto_lr=False, sync_every=100)
    assert rates(here, ours) == rates(OneCycleLR(theirs, **plain), theirs)


def test_plain_numbers_are_kept() -> None:
    """Numbers of numpy in a state_dict would not load under ``weights_only=True``."""
    given: dict[str, Any] = {"spread": np.float32(0.5), "seed": np.int64(3), "sync_every": np.uint8(2)}
    options = Options(**given)
    assert [(type(value), value) for value in map(vars(options).get, given)] == [(float, 0.5), (int, 3), (int, 2)]
    scheduler = hk.HDETOneCycleLR(
        optimizer(), np.array([0.5]), np.int64(7), pct_start=np.float64(0.25), base_momentum=np.float32(0.5), **given
    )
    file = io.BytesIO()
    torch.save(scheduler.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["total_steps"] == 7


def keywords(scheduler: Any) -> dict[str, Any]:
    parameters = inspect.signature(scheduler).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}


def test_both_schedulers_have_the_same_keywords_documented_in_order() -> None:
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(hk.HDETOneCycleLR) or "", re.M)
    assert [name for name in documented if name[0] != "_"] == list(DEFAULTS)
    assert list(DEFAULTS)[:5] == ["spread", "sync_every", "auto_lr", "trust", "probe"]
    assert list(keywords(hk.HDETOneCycleLR).items()) == list(DEFAULTS.items())
    assert keywords(hk.HDETScheduler) == {"total_steps": None} | DEFAULTS


def test_arguments_begin_with_torchs_in_torchs_order() -> None:
    theirs = list(inspect.signature(OneCycleLR).parameters.values())
    ours = list(inspect.signature(hk.HDETOneCycleLR).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]


def one_cycle(optimizer: Any, **options: Any) -> Any:
    return hk.HDETOneCycleLR(optimizer, 0.1, 10, **options)


def wrapped(optimizer: Any, **options: Any) -> Any:
    return hk.HDETScheduler(CosineAnnealingLR(optimizer, 10), **options)


@pytest.mark.parametrize(("make", "name"), [(one_cycle, "HDETOneCycleLR"), (wrapped, "HDETScheduler")])
def test_a_keyword_that_does_not_exist_raises_with_the_one_that_was_meant(make: Any, name: str) -> None:
    given = optimizer()
    for typo, meant in {"sync_evry": "'sync_every'", "autolr": "'auto_lr'", "xyzzy": ", ".join(DEFAULTS)}.items():
        with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected .* '{typo}'; .* {meant}\??$"):
            make(given, **{typo: 3})
    for old, field in {"compress": "compress", "average_state": "state", "average_buffers": "buffers"}.items():
        with pytest.raises(TypeError, match=rf"'{old}'; pass averaging=hk.Averaging\({field}=…\)$"):
            make(given, **{old: None})
    if make is one_cycle:
        assert set(given.param_groups[0]) == set(optimizer().param_groups[0])


@pytest.mark.parametrize("name", ["momentum", "betas[0]"])
def test_a_momentum_that_the_schedule_sets_cannot_be_explored(name: str) -> None:
    given = Options(explore=iter([hk.Explore(name, spread=0.01, bounds=(0.5, 0.99))]))
    with pytest.raises(ValueError, match="cycle_momentum=False"):
        given.explored(cycle_momentum=True)
    assert len(given.explored(cycle_momentum=False)) == 1
    assert len(Options(explore=[hk.Explore(name, base=0.9, apply=print)]).explored(cycle_momentum=True)) == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"total_steps": 10.5},
        {"total_steps": 0},
        {"total_steps": "9"},
        {"total_steps": None},
        {"total_steps": 9, "pct_start": 1.5},
        {"total_steps": 9, "anneal_strategy": "exp"},
        {"total_steps": 9, "max_lr": [0.1]},
        {"total_steps": 9, "max_lr": "a"},
        {"total_steps": 9, "last_epoch": 3},
    ],
    ids=str,
)
def test_exceptions_are_of_torchs_kind(bad: dict[str, Any]) -> None:
    given = {"max_lr": 0.1, **bad}
    with pytest.raises(Exception, match=r"\w") as theirs:
        OneCycleLR(optimizer(2), **given)
    with pytest.raises(type(theirs.value)):
        hk.HDETOneCycleLR(optimizer(2), **given)


def test_a_refused_constructor_leaves_tensors_and_step_alone() -> None:
    given = optimizer()
    rate = given.param_groups[0]["lr"] = torch.tensor(0.1)

    def broken(value: float) -> None:
        raise OSError("no such layer")

    with pytest.raises(OSError, match="no such layer"):
        hk.HDETOneCycleLR(given, 0.5, 20, explore=[hk.Explore("p", base=0.1, apply=broken)])
    assert given.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.1)
    assert "step" not in vars(given)
    assert not given._optimizer_step_pre_hooks
    assert set(given.param_groups[0]) == set(optimizer().param_groups[0])


def test_an_epoch_is_no_loss() -> None:
    for loss in (None, 1.0, torch.tensor(1), np.float64(1)):
        check_no_epoch(loss)
    with pytest.raises(TypeError, match=r"step\(3\) looks like torch's step\(epoch\)"):
        check_no_epoch(3)
