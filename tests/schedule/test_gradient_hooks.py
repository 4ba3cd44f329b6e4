"""Gradients before a step: whether replicas share them, and the hypergradient's slopes."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdet_kernels as hk
from hdet_kernels.controller.protocol import MeasuredSlopes
from hdet_kernels.schedule.gradients import Displacement, fingerprint, look_at_gradients
from tests.ranks import Cases, run_ranks
from tests.schedule.cases import Place
from tests.schedule.scout_runs import PHASE, QUICK, STEPS
from tests.training import Trainer, batch, loss_of, network, same, with_averaging


def group(*gradients: torch.Tensor | None) -> dict[str, list[nn.Parameter]]:
    params = []
    for gradient in gradients:
        param = nn.Parameter(torch.zeros_like(gradient) if gradient is not None else torch.zeros(2))
        param.grad = gradient
        params.append(param)
    return {"params": params}


def test_equal_gradients_have_equal_fingerprints_and_no_gradient_has_none() -> None:
    gradient = torch.randn(3, 4)
    assert fingerprint([group(gradient)]) == fingerprint([group(gradient.clone())])
    assert fingerprint([group(None)]) is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.tensor([0.6, 0.8]), torch.tensor([0.8, -0.6])),  # clipping each tensor gives equal norms
        (torch.ones(1000).bfloat16(), torch.ones(1000).index_fill(0, torch.tensor(500), 1.0078125).bfloat16()),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 2j])),
    ],
    ids=["equal norms", "one bit of bf16", "complex"],
)
def test_gradients_are_told_apart(first: torch.Tensor, second: torch.Tensor) -> None:
    assert fingerprint([group(first)]) != fingerprint([group(second)])


def test_sparse_gradients_have_fingerprints() -> None:
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 3.0], (4,), check_invariants=True)
    param = nn.Parameter(torch.zeros(4))
    param.grad = sparse
    assert fingerprint([{"params": [param]}]) is not None


def displaced(*, steps: int = 1, apart: bool = False) -> tuple[nn.Parameter, Displacement]:
    """Return a parameter that moved by 0.5 in the cycle before, and its displacement."""
    param = nn.Parameter(torch.tensor([1.0]))
    displacement = Displacement(torch.optim.SGD([param], lr=0.1), apart=apart, steps=steps)
    with torch.no_grad():
        param.add_(0.5)
    assert displacement.turn() is None
    return param, displacement


def measure(param: nn.Parameter, displacement: Displacement, *gradients: float) -> None:
    for gradient in gradients:
        param.grad = torch.tensor([gradient])
        displacement.measure()


def only_value(slopes: MeasuredSlopes | None) -> float:
    """Return the slope of one group that was measured once: it has no error."""
    assert slopes is not None
    assert math.isnan(slopes.errors[0])
    return slopes.values[0]


def test_slopes_are_gradient_times_displacement_per_group() -> None:
    params = [nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([3.0]))]
    optimizer = torch.optim.SGD([{"params": []}, {"params": params[:1]}, {"params": params[1:]}], lr=0.1)
    displacement = Displacement(optimizer)
    with torch.no_grad():
        params[0].add_(torch.tensor([0.5, -0.25]))
        params[1].add_(2.0)
    assert displacement.turn() is None
    params[0].grad, params[1].grad = torch.tensor([2.0, 4.0]), torch.tensor([-1.0])
    displacement.measure()
    params[0].grad = torch.tensor([99.0, 99.0])
    displacement.measure()  # only the first gradient after a sync counts
    slopes = displacement.turn()
    assert slopes is not None
    assert slopes.values == [0.0, 0.0, -2.0]
    assert np.isnan(slopes.errors).all(), "one gradient tells nothing of the error"


def test_several_gradients_give_a_mean_and_its_error() -> None:
    param, displacement = displaced(steps=4)
    gradients = [2.0, 6.0, 1.0, 3.0]
    measure(param, displacement, *gradients, 1e6)  # the fifth does not count
    slopes = displacement.turn()
    assert slopes is not None
    assert slopes.values == pytest.approx([0.5 * np.mean(gradients)])
    assert slopes.errors == pytest.approx([0.5 * np.std(gradients, ddof=1) / 2])


def test_a_cycle_shorter_than_that_gives_the_mean_of_its_gradients() -> None:
    param, displacement = displaced(steps=8)
    measure(param, displacement, 2.0, 4.0)
    assert displacement.turn() == MeasuredSlopes([1.5], [0.5])
    assert displacement.turn() is None, "nothing was measured in a cycle without steps"


def test_equal_gradients_have_an_error_of_zero_and_bad_ones_no_slope() -> None:
    param, displacement = displaced(steps=3)
    measure(param, displacement, 2.0, 2.0, 2.0)
    assert displacement.turn() == MeasuredSlopes([1.0], [0.0])
    param, displacement = displaced(steps=3)
    measure(param, displacement, 2.0, math.nan, 2.0)
    slopes = displacement.turn()
    assert slopes is not None
    assert np.isnan([slopes.values, slopes.errors]).all()


def test_a_gradient_scale_of_the_optimizer_is_divided_out() -> None:
    param, displacement = displaced()
    displacement.optimizer.grad_scale = torch.tensor(16.0)  # type: ignore[attr-defined]
    measure(param, displacement, 64.0)
    assert only_value(displacement.turn()) == 2.0


def test_replicas_that_start_apart_do_not_know_the_first_displacement() -> None:
    param = nn.Parameter(torch.tensor([1.0]))
    displacement = Displacement(torch.optim.SGD([param], lr=0.1), apart=True)
    param.grad = torch.tensor([2.0])
    for move in (0.5, 0.25):
        with torch.no_grad():
            param.add_(move)
        assert displacement.turn() is None
        displacement.measure()
    assert only_value(displacement.turn()) == 0.5


def test_nothing_is_measured_after_the_end() -> None:
    param, displacement = displaced(steps=2)
    displacement.end()
    measure(param, displacement, 2.0)
    assert displacement.ended
    assert displacement.turn() is None
    assert not any(displacement.state_dict()["last"])
    displacement.begin_anew()
    assert not displacement.ended, "the run that begins anew is measured"


def test_after_a_return_the_cycle_before_is_forgotten() -> None:
    param, displacement = displaced(steps=2)
    measure(param, displacement, 2.0)
    with torch.no_grad():
        param.fill_(7.0)
    displacement.begin_anew()
    measure(param, displacement, 2.0)
    with torch.no_grad():
        param.add_(1.0)
    assert displacement.turn() is None
    measure(param, displacement, 3.0)
    assert only_value(displacement.turn()) == 3.0


@pytest.mark.parametrize("before", [0, 1, 2, 3], ids=lambda count: f"after {count}")
def test_a_saved_state_goes_on(before: int) -> None:
    gradients = [2.0, 5.0, -1.0]
    param, straight = displaced(steps=3)
    measure(param, straight, *gradients[:before])
    saved = io.BytesIO()
    torch.save(straight.state_dict(), saved)
    resumed = Displacement(straight.optimizer, steps=3)
    resumed.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    assert len(resumed.slopes) == before
    for each in (straight, resumed):
        measure(param, each, *gradients[before:])
    assert resumed.turn() == straight.turn() is not None


def test_without_a_saved_state_the_first_displacement_is_not_known() -> None:
    param, displacement = displaced()
    displacement.load_state_dict(None)
    for _ in range(2):
        measure(param, displacement, 2.0)
        with torch.no_grad():
            param.add_(1.0)
        assert displacement.turn() is None
    measure(param, displacement, 2.0)
    assert only_value(displacement.turn()) == 2.0


def test_the_parts_of_a_replica_measure_what_the_whole_does() -> None:
    moves, gradients = torch.tensor([0.5, -0.25]), [[2.0, 4.0], [1.0, -3.0], [0.5, 8.0]]

    def moved(chosen: list[int], count: int = 3) -> Displacement:
        param = nn.Parameter(torch.zeros(len(chosen)))
        displacement = Displacement(torch.optim.SGD([param], lr=0.1), steps=4)
        with torch.no_grad():
            param.add_(moves[chosen])
        displacement.turn()
        for gradient in gradients[:count]:
            param.grad = torch.tensor(gradient)[chosen]
            displacement.measure()
        return displacement

    other = moved([1]).row()
    for count, expected in ((3, moved([0, 1]).turn()), (2, None)):  # a part has missed one
        part = moved([0], count=count)
        assert part.turn(torch.stack([part.row(), other])) == expected
    nothing = moved([0], count=0)
    assert nothing.turn(torch.stack([nothing.row(), nothing.row()])) is None


def _shards(rank: int) -> dict[str, Any]:
    """Ranks 0 and 1 hold replica 0, ranks 2 and 3 replica 1."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    fully_shard(model, mesh=mesh)
    optimizer = hk.FusedAdamW(model.parameters(), lr=0.01)
    controller = hk.RegressionController(start_at=0.0, stop_at=1.0, trust=None)
    ensemble = hk.ProcessEnsemble(mesh)
    scheduler = hk.HDETOneCycleLR(optimizer, 0.01, 64, sync_every=4, auto_lr=controller, ensemble=ensemble)
    for step in range(24):
        optimizer.zero_grad()
        loss = loss_of(model, *batch(rank, step))
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
    return dict(scheduler.cycle.spread.controller_state)


def test_all_shards_come_to_the_same_learning_rate() -> None:
    first, *others = run_ranks(4, _shards)
    assert first["observations"][0] > 3
    assert all(other == first for other in others)


def test_slopes_of_tied_groups_add_up_and_their_error_is_that_of_the_sum() -> None:
    params = [nn.Parameter(torch.tensor([1.0])) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": [param]} for param in params], lr=0.1)
    displacement = Displacement(optimizer, steps=2, tied=[(0, 2), (1,)])
    with torch.no_grad():
        for param in params:
            param.add_(0.5)
    assert displacement.turn() is None
    for gradients in ((1.0, 3.0, 4.0), (3.0, 5.0, 2.0)):  # groups 0 and 2 scatter against each other
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = torch.tensor([gradient])
        displacement.measure()
    assert displacement.turn() == MeasuredSlopes([2.5, 2.0], [0.0, 0.5])


def test_a_step_that_failed_and_is_made_again_is_measured_once() -> None:
    """Here a hook fails that came after the scheduler's, and then a part of the model has no gradient any more."""

    def slopes(fails: bool) -> list[torch.Tensor]:
        stack = hk.ReplicaStack(network(), 2)
        optimizer = hk.FusedAdamW(stack.parameters(), lr=0.01)
        scheduler = hk.HDETOneCycleLR(optimizer, 0.01, 400, sync_every=5, ensemble=stack.ensemble)
        for step in range(14):
            losses = stack.backward(loss_of, *batch(0, step))
            if step == 12:
                if fails:
                    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
                    with pytest.raises(ZeroDivisionError):
                        optimizer.step()
                    handle.remove()
                next(iter(stack.parameters())).grad = None
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(losses)
        displacement = scheduler.cycle.displacement
        assert displacement is not None
        return displacement.slopes

    expected = slopes(fails=False)
    assert len(expected) > 1
    assert same(slopes(fails=True), expected)


# Closures


def test_a_closure_that_raises_is_not_looked_at() -> None:
    def closure() -> float:
        raise OSError("no batch")

    changed = look_at_gradients(lambda: pytest.fail("there are no gradients"), ("self", closure), {})
    assert changed is not None
    with pytest.raises(OSError, match="no batch"):
        changed[0][1]()


OPTIMIZERS: dict[str, Callable[..., Any]] = {"AdamW": torch.optim.AdamW, "FusedAdamW": hk.FusedAdamW}


def _with_closure(rank: int, name: str, closure: bool, ddp: bool) -> dict[str, Any]:
    """Gradients are gone after every step, so that only a closure's are there to be looked at."""
    options: dict[str, Any] = {} if ddp else {"max_lr": None, "total_steps": STEPS, "scout": QUICK}
    trainer = Trainer(rank, ddp=ddp, make_optimizer=OPTIMIZERS[name], sync_every=3, **options)
    for _ in range(12 if ddp else PHASE + 6):

        def compute() -> Any:
            loss = trainer.loss()
            loss.backward()
            return loss

        if not closure:
            loss = compute()
            trainer.optimizer.step()
        else:  # by its place, and by its name
            loss = trainer.optimizer.step(compute) if ddp else trainer.optimizer.step(closure=compute)
        trainer.optimizer.zero_grad()
        trainer.scheduler.step(loss)
    history = [{**record.to_dict(), "seconds": 0} for record in trainer.scheduler.history]
    return {"parameters": trainer.parameters(), "history": history, "scouted": trainer.scheduler.scouted}


CLOSURES = Cases(
    2,
    _with_closure,
    [(name, closure, ddp) for name in OPTIMIZERS for closure in (False, True) for ddp in (True, False)],
)


@pytest.mark.parametrize("ddp", [True, False], ids=["shared", "scouting"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_closures_is_that_without(name: str, ddp: bool) -> None:
    for without, with_closure in zip(CLOSURES[(name, False, ddp)], CLOSURES[(name, True, ddp)], strict=True):
        assert same(without, with_closure)
        assert [record["gradients"] for record in with_closure["history"]].count("shared") == (4 if ddp else 0)


def test_lbfgs_which_calls_its_closure_many_times() -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
    options: dict[str, Any] = {"cycle_momentum": False, "average_state": False, "ensemble": Place(2)}
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 12, sync_every=3, **with_averaging(options))
    calls, losses = 0, []

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = loss_of(model, *batch(0, 0))
        loss.backward()
        return loss

    for _ in range(12):
        losses.append(optimizer.step(closure).detach())  # type: ignore[arg-type, union-attr]
        scheduler.step(losses[-1])
    assert calls > 24
    assert losses[-1] < losses[0]
    assert {record.gradients for record in scheduler.history} == {"shared"}
