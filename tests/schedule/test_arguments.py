"""The arguments of the schedulers: what is accepted, and defaults. ``tests/bad_input`` has what is refused."""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Adam
from torch.optim import lr_scheduler as schedules
from torch.optim.lr_scheduler import OneCycleLR

import hdet_kernels as hk
from hdet_kernels.ensemble import RowEnsemble, SingleReplica
from hdet_kernels.schedule.arguments import Options
from hdet_kernels.schedule.build import ensemble_of, gradients_of
from tests.schedule.cases import Place, adam, parameters
from tests.training import network, same, with_averaging

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
    explored = hk.Explore(
        "weight_decay", base=np.float32(0.1), spread=np.float64(0.5), bounds=(np.float32(0), np.int64(1))
    )
    options = Options(**given)
    assert [(type(value), value) for value in map(vars(options).get, given)] == [(float, 0.5), (int, 3), (int, 2)]
    scheduler = hk.HDETOneCycleLR(
        optimizer(),
        np.array([0.5]),
        np.int64(7),
        pct_start=np.float64(0.25),
        base_momentum=np.float32(0.5),
        **given,
        explore=[explored],
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


@pytest.mark.parametrize(
    ("total", "expected"), [(1, 1), (10, 1), (100, 2), (1000, 25), (40_000, 1000), (10**6, 1000)], ids=str
)
def test_default_sync_interval_is_a_fortieth_of_the_run_with_local_gradients(total: int, expected: int) -> None:
    """Training losses of replicas that see other examples are compared."""
    assert hk.HDETOneCycleLR(adam(), 0.1, total, gradients="local").sync_every == expected


@pytest.mark.parametrize(("total", "expected"), [(1, 1), (100, 1), (1000, 12), (80_000, 1000), (10**6, 1000)], ids=str)
@pytest.mark.parametrize(
    "more", [{}, {"gradients": "local", "probe": lambda: torch.tensor(1.0)}], ids=["auto", "probe"]
)
def test_half_of_that_if_no_training_losses_compare_learning_rates(
    total: int, expected: int, more: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"cycle_momentum": False, **more}
    rates = hk.Explore("lr", spread=0.5)
    assert hk.HDETOneCycleLR(adam(), 0.1, total, **options).sync_every == expected
    assert hk.HDETOneCycleLR(adam(), 0.1, total, explore=[rates], **options).sync_every == expected


@pytest.mark.parametrize(
    ("total", "expected"), [(1, 1), (9, 1), (100, 10), (300, 30), (1000, 30), (1600, 40), (10**6, 1000)], ids=str
)
def test_other_scalars_need_30_steps_or_a_tenth_of_the_run(total: int, expected: int) -> None:
    rates, decay = hk.Explore("lr", spread=0.5), hk.Explore("weight_decay", base=0.1)
    for probe in (None, lambda: torch.tensor(1.0)):
        assert hk.HDETOneCycleLR(adam(), 0.1, total, explore=[rates, decay], probe=probe).sync_every == expected


@pytest.mark.parametrize("pct_start", [0.1, 0.3, 0.55])
def test_the_peak_of_a_wrapped_onecycle_is_known(pct_start: float) -> None:
    base = schedules.OneCycleLR(adam(), 0.1, total_steps=200, pct_start=pct_start)
    assert hk.HDETScheduler(base).cycle.run.peak == pytest.approx(pct_start)


def test_a_softmax_controller_warns_if_the_floor_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    controller = hk.SoftmaxController(warmup_steps=10)
    hk.HDETScheduler(schedules.CosineAnnealingLR(adam(), 40), auto_lr=controller)
    assert "the learning rate will not decay; pass decay= as a number" in caplog.text
    caplog.clear()
    hk.HDETOneCycleLR(adam(), 0.1, 40, auto_lr=controller)
    assert "decay" not in caplog.text


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"sync_every": 20}, 8),
        ({"sync_every": 9}, 8),
        ({"sync_every": 8}, None),
        ({"sync_every": 400}, 8),
        ({}, None),
        ({"gradients": "local"}, None),  # its default has 12 syncs, which is what was found to be best
        ({"sync_every": 20, "pct_start": 0.75}, None),
        ({"sync_every": 20, "pct_start": 0.1}, 8),  # the controller acts for 30 % of the run at least
        ({"sync_every": 20, "total_steps": 40}, 1),
        ({"sync_every": 1, "total_steps": 40}, None),  # nothing shorter is possible
        ({"sync_every": 30, "auto_lr": hk.RegressionController(start_at=0.1, stop_at=0.2)}, 2),
        ({"sync_every": 20, "explore": [hk.Explore("lr", spread=0.3), hk.Explore("weight_decay", base=0.1)]}, 8),
        ({"sync_every": 20, "trust": 1}, None),
        ({"sync_every": 20, "auto_lr": False}, None),
        ({"sync_every": 20, "spread": 0.0}, None),
        ({"sync_every": 20, "replicas": 1}, None),
        ({"sync_every": 20, "replica": 1}, None),  # the first process says it
        ({"sync_every": 20, "max_lr": None}, None),
    ],
    ids=str,
)
def test_too_few_syncs_before_the_controller_stops_are_said_once(
    options: dict[str, Any], remedy: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"max_lr": 0.1, "total_steps": 400, "replicas": 4, "replica": 0, **options}
    place = Place(given.pop("replicas"), given.pop("replica"))
    scheduler = hk.HDETOneCycleLR(adam(), ensemble=place, **given)
    scheduler.use_probe(lambda: torch.tensor(1.0))  # builds the cycle again
    said = re.findall(r"pass sync_every=(\d+) or less", caplog.text)
    assert said == ([] if remedy is None else [str(remedy)])


def test_the_run_of_the_controller_has_facts_and_wishes() -> None:
    optimizer = Adam([{"params": [p]} for p in parameters()], lr=1.0)
    optimizer.param_groups[1]["weight_decay"] = 0.1
    scheduler = hk.HDETOneCycleLR(
        optimizer,
        [0.3, 0.0],
        200,
        sync_every=16,
        probe=lambda: 1.0,
        explore=[hk.Explore("weight_decay", groups=[1], bounds=(0.05, 0.4))],
        ensemble=Place(4, 1),
    )
    run = scheduler.cycle.run
    assert (run.total_steps, run.sync_every, run.peak, run.end) == (200, 16, 0.3, 0.0)
    assert run.peaks == (0.3, None, None), "a frozen group and weight decay have no peak"
    assert run.floors == (pytest.approx(0.3 / 25 / 1e4), 0.0, None)
    assert run.reach[2] == (pytest.approx(math.log(0.5)), pytest.approx(math.log(4.0)))
    assert (run.probed, run.others, run.early, run.in_pairs) == (True, True, (), True)
    assert run.departs == ((0, 48), (48, 176), (48, 176))


class Counting(hk.SoftmaxController):
    """A controller that counts how often it is asked."""

    asked = 0

    def active(self, run: Any, step: int) -> bool:
        type(self).asked += 1
        return super().active(run, step)


@pytest.mark.parametrize("warmup", [10**9, 9_999_000], ids=["never active", "active at the end"])
def test_a_run_of_ten_million_syncs_is_not_walked_through(warmup: int, caplog: pytest.LogCaptureFixture) -> None:
    Counting.asked = 0
    hk.HDETOneCycleLR(adam(), 0.1, 10**7, sync_every=1, ensemble=Place(4), auto_lr=Counting(warmup_steps=warmup))
    assert Counting.asked <= 10_002
    assert ("no sync falls into the part of the run" in caplog.text) is (warmup == 10**9)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("options", [{}, {"outer": hk.Outer()}, {"auto_lr": hk.HypergradientController()}], ids=str)
def test_default_devices_and_dtypes_do_not_reach_inside(context: str, options: dict[str, Any]) -> None:
    def train(around: Callable[[], Any]) -> list[Any]:
        param = torch.nn.Parameter(torch.ones(5))
        optimizer = hk.FusedAdamW([param], lr=0.1)
        with around():
            scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 8, sync_every=2, ensemble=Place(2), **with_averaging(options))
        for _ in range(4):
            param.grad = torch.full((5,), 0.5)
            optimizer.step()
            with around():
                scheduler.step(1.0)
        with around():
            with scheduler.consensus():
                pass
            scheduler.converge()
            scheduler.load_state_dict(scheduler.state_dict())
        return [param.detach().clone(), scheduler.get_last_lr(), scheduler.cycle.window.state_dict()]

    assert same(train(CONTEXTS[context]), train(contextlib.nullcontext))


@pytest.mark.parametrize(("trust", "told"), [(3.0, False), (10, False), (11, True), (None, True)])
def test_who_hardly_trusts_the_learning_rate_is_told_of_scouting(
    trust: float | None, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stack = hk.ReplicaStack(torch.nn.Linear(2, 1), 2)
    with caplog.at_level("INFO", logger="hdet_kernels"):
        hk.HDETOneCycleLR(hk.FusedAdamW(stack.parameters()), 0.1, 1000, ensemble=stack.ensemble, trust=trust)
    assert ("max_lr=None" in caplog.text) is told


def test_one_replica_where_none_are_given_and_otherwise_those() -> None:
    """Parameters that are sharded over a mesh are in ``tests/converge/test_topologies.py``."""
    groups, given = adam().param_groups, RowEnsemble(2)
    assert isinstance(ensemble_of(groups, None), SingleReplica)
    assert ensemble_of(groups, given) is given


def test_a_stack_knows_its_gradients() -> None:
    assert gradients_of(adam(), SingleReplica(), "auto") == "auto"
    for gradients in ("shared", "local"):
        stack = hk.ReplicaStack(network(), 2, gradients=gradients)
        optimizer = hk.FusedAdamW(stack.parameters())
        assert gradients_of(optimizer, stack.ensemble, "auto") == gradients
        hk.HDETOneCycleLR(optimizer, 0.01, 24, ensemble=stack.ensemble, model=stack, gradients=gradients)


@pytest.mark.parametrize(
    "given",
    [
        {"cycle_momentum": 1, "three_phase": 0},
        {"max_lr": torch.tensor([0.1]), "div_factor": torch.tensor([25.0])},
        {"max_lr": np.array(0.1), "base_momentum": np.array(0.8)},
        {"max_lr": (0.1,), "base_momentum": [0.8]},
    ],
    ids=str,
)
def test_what_one_cycle_takes_is_taken(given: dict[str, Any]) -> None:
    """A spread of 0 is torch's OneCycleLR, bit for bit."""
    rates = []
    for kind, options in ((OneCycleLR, {}), (hk.HDETOneCycleLR, {"spread": 0})):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
        scheduler = kind(optimizer, **{"max_lr": 0.1, "total_steps": 10, **given, **options})
        rates.append([])
        for _ in range(6):
            optimizer.step()
            scheduler.step()
            rates[-1].append((float(optimizer.param_groups[0]["lr"]), float(optimizer.param_groups[0]["momentum"])))
    assert rates[0] == rates[1]
