"""Optimizers and schedules of other packages, where they are installed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.quality.optimizers import OPTIMIZERS
from bench.quality.peers import PEERS, Peer, Setup, packages, peers_for
from bench.quality.spec import Spec
from bench.quality.train import refresh_norms, train, validation_loss

CPU = torch.device("cpu")

# DoWG's first steps are a hundredth of the way from zero, and overshoot.
STEPS = {"DoWG": 100}


def installed(name: str) -> Peer:
    """Return a peer, or skip the test with the command that installs it."""
    peer = PEERS[name]
    if (why := peer.missing()) is not None:
        pytest.skip(why)
    return peer


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_lowers_the_loss(digits: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(type(digits), "optimizer", installed(name).stands_for[0])
    torch.manual_seed(0)
    untrained = validation_loss(digits, digits.model())
    lr = 5e-2 if digits.optimizer == "sgd" else 4e-3
    assert train(digits, Spec("digits", name, lr, 0, steps=STEPS.get(name, 20)), CPU)["val"] < untrained


# D-Adaptation for SGD diverges on this small task, with the defaults of its authors.
LEARN = [
    (name, optimizer) for name, peer in PEERS.items() if name != "D-Adaptation SGD" for optimizer in peer.stands_for
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "optimizer"), LEARN)
def test_every_peer_learns_in_place_of_every_optimizer(
    digits: Any, monkeypatch: pytest.MonkeyPatch, name: str, optimizer: str
) -> None:
    installed(name)
    monkeypatch.setattr(type(digits), "optimizer", optimizer)
    lr = {"sgd": 5e-2, "adagrad": 5e-2, "lion": 1e-3}.get(optimizer, 4e-3)
    torch.manual_seed(0)
    untrained = validation_loss(digits, digits.model())
    assert train(digits, Spec("digits", name, lr, 0, steps=200), CPU)["val"] < 0.9 * untrained


@pytest.mark.gpu
@pytest.mark.parametrize("name", PEERS)
def test_every_peer_trains_on_a_gpu_as_on_a_cpu(name: str) -> None:
    peer = installed(name)
    torch.testing.assert_close(_trained(peer, 0.1, "cuda").cpu(), _trained(peer, 0.1), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", PEERS)
def test_the_result_depends_on_the_given_learning_rate_or_not(name: str) -> None:
    """A peer that finds its learning rate takes the same steps from any given one."""
    peer = installed(name)
    ends = [_trained(peer, lr) for lr in (1e-2, 1e-1)]
    assert torch.equal(*ends) != peer.from_lr


@pytest.mark.parametrize("name", PEERS)
def test_a_diverged_run_goes_on(name: str) -> None:
    """Otherwise it would be left out of the tables as a run that failed, instead of counting as lost."""
    peer = installed(name)
    model = _model()
    running = peer.build(Setup(model, [{"params": list(model.parameters()), "lr": 0.1}], 0.1, 9, peer.stands_for[0]))
    for scale in (1.0, 1.0, math.inf, math.nan, 1.0):
        list(_steps(model, running, 1, scale))
    running.finish()
    assert not math.isfinite(model(torch.ones(1, 4)).item())


def test_a_peer_of_another_unit_does_not_stand_in() -> None:
    """The best learning rate of SGD says nothing about Adam's: only peers without one replace all optimizers."""
    for peer in PEERS.values():
        assert peer.stands_for == tuple(OPTIMIZERS) or peer.from_lr or peer.stands_for == ("sgd",)
    assert not {"MoMo-Adam", "Schedule-Free AdamW"} & set(peers_for("sgd"))
    assert not {"MoMo", "Schedule-Free SGD"} & set(peers_for("adamw"))


def test_missing_peer_says_how_to_install_it() -> None:
    peer = replace(PEERS["Prodigy"], requirement="no-such-package>=1.0")
    assert peer.missing() == "pip install 'no-such-package>=1.0'"


def test_packages_are_those_that_need_only_torch() -> None:
    assert "momo-opt>=0.1" in packages()
    assert not [requirement for requirement in packages() if requirement.startswith("transformers")]


def test_dog_ends_with_the_average_of_parameters() -> None:
    peer = installed("DoG")
    model = _model()
    running = peer.build(Setup(model, [{"params": list(model.parameters()), "lr": 1.0}], 1.0, 20, "sgd"))
    path = [model[0].weight.detach().clone() for _ in _steps(model, running, 20)]
    running.finish()
    end = model[0].weight.detach()
    assert not torch.equal(end, path[-1])
    assert (torch.stack(path).amin(0) <= end).all()
    assert (end <= torch.stack(path).amax(0)).all()


def test_norms_have_the_statistics_of_the_evaluated_parameters() -> None:
    task = _Norms()
    model = task.model()
    with torch.no_grad():
        model[0].weight.fill_(3.0)
        model[0].bias.fill_(1.0)
    refresh_norms(task, model, seed=0)
    # The inputs have mean 2 and variance 1: the linear layer makes them 7 and 9.
    assert model[1].running_mean.item() == pytest.approx(7.0, abs=0.3)
    assert model[1].running_var.item() == pytest.approx(9.0, rel=0.1)


def test_norms_are_refreshed_after_schedule_free() -> None:
    """At the end the mean of the norm is that of its input at the parameters that are evaluated."""
    installed("Schedule-Free AdamW")
    task = _Norms()
    train(task, Spec("norms", "Schedule-Free AdamW", 0.1, 0, steps=30), CPU)  # type: ignore[arg-type]
    weight, bias, mean = (value.item() for value in (task.made[0].weight, task.made[0].bias, task.made[1].running_mean))
    assert mean == pytest.approx(2 * weight + bias, abs=0.1 * abs(weight))


class _Norms:
    """Regression of a normal input through a batch norm; keeps its last model."""

    batch, replicas, steps, optimizer = 64, 8, 30, "adamw"

    def model(self) -> nn.Sequential:
        self.made = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
        return self.made

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (2 + torch.randn(count, 1, generator=generator),)

    def validation(self) -> tuple[Tensor, ...]:
        return self.draw(1024, torch.Generator().manual_seed(5))

    @staticmethod
    def loss(model: Any, *batch: Tensor) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[0])


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def _steps(model: nn.Module, running: Any, count: int, scale: float = 1.0) -> Any:
    inputs = scale * torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    inputs = inputs.to(next(model.parameters()).device)
    for step in range(count):
        running.optimizer.zero_grad()
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        running.step(loss.detach())
        yield step


def _trained(peer: Peer, lr: float, device: str = "cpu") -> Tensor:
    """Return the parameters after thirty steps."""
    model = _model().to(device)
    groups = [{"params": list(model.parameters()), "lr": lr}]
    running = peer.build(Setup(model, groups, lr, 30, peer.stands_for[0]))
    list(_steps(model, running, 30))
    running.finish()
    return torch.cat([param.detach().flatten() for param in model.parameters()])
