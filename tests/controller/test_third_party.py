"""A controller from outside the package, written from the protocol alone, with everything that the default one has."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

import hdet_kernels as hk
from hdet_kernels.controller import Controller, Observation, Run
from tests.training import batch, loss_of, network, same

TOTAL, SYNC, REPLICAS = 48, 4, 4


@dataclass(frozen=True)
class Gains:
    """Constants of the controller below: the step of μ at a sync, and its bound where there is a peak."""

    step: float = 0.1
    limit: float = 1.0


@dataclass(frozen=True)
class SignController:
    """Moves every log base value by a fixed step against the sign of its slope, in the first part of the run."""

    reads: ClassVar[Literal["losses"]] = "losses"
    until: float = 0.5
    gains: Gains = field(default_factory=Gains)

    def prepare(self, run: Run) -> Run:
        if run.total_steps is None:
            raise ValueError("SignController needs total_steps=")
        last = int(self.until * run.total_steps) // run.sync_every * run.sync_every
        departs = tuple((run.sync_every, last) if peak is None else (0, last) for peak in run.peaks)
        return replace(run, early=(run.sync_every // 2,) if run.probed else (), in_pairs=run.probed, departs=departs)

    def active(self, run: Run, step: int) -> bool:
        return step <= self.until * (run.total_steps or 0)

    def start(self, count: int, run: Run | None = None) -> dict[str, Any]:
        return {"mu": [0.0] * count, "peaks": [] if run is None else list(run.peaks)}

    def update(self, run: Run, state: dict[str, Any], seen: Observation) -> dict[str, Any]:
        logs, losses = np.log(seen.multipliers), np.nan_to_num(seen.losses - np.nanmean(seen.losses), nan=1.0)
        moves = -self.gains.step * np.sign(logs @ losses)
        bounds = np.array([math.inf if peak is None else self.gains.limit for peak in run.peaks])
        return {**state, "mu": np.clip(np.array(state["mu"]) + moves, -bounds, bounds).tolist()}

    def base(self, state: dict[str, Any], index: int, scheduled: Any) -> Any:
        return scheduled * math.exp(state["mu"][index])


class Trained:
    """A stack whose schedule the controller moves, with weight decay explored beside the learning rate."""

    def __init__(self, kind: str, controller: Any) -> None:
        self.stack = hk.ReplicaStack(network(), REPLICAS, gradients="shared")
        self.optimizer = hk.FusedAdamW(self.stack.parameters(), lr=0.001, backend="torch")
        options: dict[str, Any] = {
            "sync_every": SYNC,
            "auto_lr": controller,
            "ensemble": self.stack.ensemble,
            "explore": [hk.Explore("weight_decay", spread=0.5)],
            "probe": lambda: self.stack.losses(loss_of, *batch(0, 999), same_batch=True),
        }
        if kind == "onecycle":
            self.scheduler: Any = hk.HDETOneCycleLR(self.optimizer, 0.001, TOTAL, **options)
        else:
            self.scheduler = hk.HDETScheduler(CosineAnnealingLR(self.optimizer, TOTAL), **options)

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.stack, self.optimizer, self.scheduler

    def train(self, until: int) -> Trained:
        while self.scheduler.last_epoch < until:
            losses = self.stack.backward(loss_of, *batch(0, self.scheduler.last_epoch))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step(losses)
        return self

    def saved(self) -> bytes:
        file = io.BytesIO()
        torch.save([part.state_dict() for part in self.parts], file)
        return file.getvalue()

    def load(self, saved: bytes) -> Trained:
        for part, state in zip(self.parts, torch.load(io.BytesIO(saved), weights_only=True), strict=True):
            part.load_state_dict(state)
        return self

    def result(self) -> list[Any]:
        history = [{**record.to_dict(), "seconds": 0.0} for record in self.scheduler.history]
        parameters = [param.detach().clone() for param in self.stack.parameters()]
        return [parameters, history, self.scheduler.get_base_lr(), self.scheduler.cycle.spread.controller_state]


@pytest.fixture(scope="module", params=["onecycle", "cosine"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def finished(kind: str) -> tuple[bytes, Trained]:
    """A checkpoint within a cycle, and the run to its end."""
    trained = Trained(kind, SignController()).train(10)
    return trained.saved(), trained.train(TOTAL)


def test_it_implements_the_protocol() -> None:
    assert isinstance(SignController(), Controller)


def test_it_gets_the_peaks_of_learning_rates(finished: tuple[bytes, Trained]) -> None:
    state = finished[1].scheduler.cycle.spread.controller_state
    assert state["peaks"] == [pytest.approx(0.001), None]


def test_its_early_sync_happens(finished: tuple[bytes, Trained]) -> None:
    kinds = [(record.step, record.kind) for record in finished[1].scheduler.history]
    assert kinds == [(2, "early"), *((step, "sync") for step in range(SYNC, TOTAL + 1, SYNC))]


def test_replicas_come_in_pairs_between_the_steps_that_it_wants(finished: tuple[bytes, Trained]) -> None:
    """The learning rate differs from the start and weight decay from the first sync, both until half of the run."""
    seen = set()
    for record in finished[1].scheduler.history:
        differs = {name: np.array(values) != record.base[name] for name, values in record.values.items()}
        rates, decay = differs["lr/0"], differs["weight_decay/0"]
        assert not (rates & decay).any(), "a replica departs in at most one hyperparameter"
        assert not decay.any() or SYNC < record.step <= TOTAL // 2
        assert not rates.any() or record.step <= TOTAL // 2
        assert rates.any() or decay.any() or record.step > TOTAL // 2
        seen |= {("lr", bool(rates.any())), ("weight_decay", bool(decay.any()))}
    assert len(seen) == 4, "each hyperparameter is explored in some cycles and not in others"


def test_it_moves_both_schedules(finished: tuple[bytes, Trained]) -> None:
    """The learning rate rides on the schedule: base = schedule · exp(μ)."""
    scheduler = finished[1].scheduler
    mu = scheduler.cycle.spread.controller_state["mu"]
    assert mu[0] > 0.1
    assert abs(mu[1]) > 0
    assert scheduler.get_base_lr() == [scheduler.cycle.spread.scheduled[0] * math.exp(mu[0])]
    assert scheduler.history[-1].probes is None, "the probe runs only where the controller acts"
    assert scheduler.history[0].probes is not None


def test_its_constants_are_in_the_checkpoint_and_a_resumed_run_is_bit_equal(
    kind: str, finished: tuple[bytes, Trained]
) -> None:
    saved, whole = finished
    config = torch.load(io.BytesIO(saved), weights_only=True)[2]["hdet"][0]["config"]
    assert config["controller"] == "SignController"
    assert config["controller_constants"] == {"until": 0.5, "gains": {"step": 0.1, "limit": 1.0}}
    resumed = Trained(kind, SignController()).load(saved).train(TOTAL)
    assert same(resumed.result(), whole.result())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (SignController(gains=Gains(step=0.3)), r"controller_constants.gains.step=0.1, this scheduler has 0.3"),
        (SignController(until=0.25), r"controller_constants.until=0.5, this scheduler has 0.25"),
        (hk.RegressionController(), r"controller='SignController', this scheduler has 'RegressionController'"),
    ],
    ids=["nested", "field", "controller"],
)
def test_a_resume_under_another_constant_raises_and_names_it(
    other: Any, message: str, kind: str, finished: tuple[bytes, Trained]
) -> None:
    trained = Trained(kind, other)
    before = trained.scheduler.state_dict()
    with pytest.raises(ValueError, match=f"the checkpoint was made with {message}"):
        trained.scheduler.load_state_dict(torch.load(io.BytesIO(finished[0]), weights_only=True)[2])
    assert same(trained.scheduler.state_dict(), before)


def one_cycle(optimizer: Any, controller: Any) -> Any:
    return hk.HDETOneCycleLR(optimizer, 0.1, 20, auto_lr=controller)


def wrapped(optimizer: Any, controller: Any) -> Any:
    return hk.HDETScheduler(CosineAnnealingLR(optimizer, 20), auto_lr=controller)


@pytest.mark.parametrize("make", [one_cycle, wrapped])
@pytest.mark.parametrize("missing", ["reads", "prepare", "active", "start", "update", "base"])
def test_a_controller_without_a_member_is_refused_by_its_name(make: Callable[..., Any], missing: str) -> None:
    members = {name: value for name, value in vars(SignController).items() if not name.startswith("__")}
    incomplete = type("Incomplete", (), {name: value for name, value in members.items() if name != missing})
    optimizer = torch.optim.Adam(network().parameters(), lr=0.1)
    with pytest.raises(TypeError, match=rf"auto_lr must be .* a controller .* which has no {missing}$"):
        make(optimizer, incomplete())


@pytest.mark.parametrize("make", [one_cycle, wrapped])
def test_a_class_instead_of_an_instance_is_refused(make: Callable[..., Any]) -> None:
    optimizer = torch.optim.Adam(network().parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"auto_lr is the class SignController: pass an instance, SignController\(\)"):
        make(optimizer, SignController)


def test_its_own_refusal_reaches_the_user() -> None:
    optimizer = torch.optim.Adam(network().parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.raises(ValueError, match="SignController needs total_steps="):
        hk.HDETScheduler(schedule, sync_every=5, auto_lr=SignController())
