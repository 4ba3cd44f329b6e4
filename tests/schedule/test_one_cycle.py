"""torch's schedule in a run without a learning rate."""

from __future__ import annotations

import pytest
import torch

import hdet_kernels as hk
from tests.schedule.scout_runs import PHASE, QUICK, REPLICAS, RUN, STEPS, StackRun
from tests.training import same


def test_the_schedule_is_that_of_the_run_which_begins_after_the_phase() -> None:
    run = StackRun()
    seen = [(run.scheduler.last_epoch, run.scheduler.total_steps)]
    for _ in range(STEPS):
        run.train(1)
        seen.append((run.scheduler.last_epoch, run.scheduler.total_steps))
    assert seen == [*[(0, RUN)] * PHASE, *((step, RUN) for step in range(RUN + 1))]


def test_learning_rates_that_are_tensors_stay_the_same_objects() -> None:
    stack = hk.ReplicaStack(torch.nn.Linear(2, 1), REPLICAS)
    rate = torch.tensor(0.01)
    optimizer = hk.FusedAdamW(stack.parameters(), lr=rate)
    scheduler = hk.HDETOneCycleLR(optimizer, None, STEPS, ensemble=stack.ensemble, scout=QUICK)
    for step in range(PHASE + 1):
        x = torch.randn(4 * REPLICAS, 2, generator=torch.Generator().manual_seed(step))
        losses = stack.backward(lambda model, x: (model(x) - x.sum(1, keepdim=True)).square().mean(), x)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(losses)
    assert optimizer.param_groups[0]["lr"] is rate
    assert scheduler.scouted is not None


def test_epochs_count_for_the_length_of_a_run() -> None:
    stack = hk.ReplicaStack(torch.nn.Linear(2, 1), REPLICAS)
    optimizer = hk.FusedAdamW(stack.parameters())
    scheduler = hk.HDETOneCycleLR(optimizer, None, epochs=5, steps_per_epoch=10, ensemble=stack.ensemble, scout=QUICK)
    assert scheduler.cycle.run.total_steps == RUN
    assert scheduler.cycle.before == PHASE


@pytest.mark.parametrize(
    ("here", "there"),
    [
        pytest.param(3, PHASE + 2, id="phase to run", marks=pytest.mark.full),
        pytest.param(3, 8, id="phase to phase"),
        pytest.param(PHASE + 2, 3, id="run to phase", marks=pytest.mark.full),
        pytest.param(PHASE + 2, PHASE + 5, id="run to run", marks=pytest.mark.full),
    ],
)
def test_a_refused_setter_leaves_the_scheduler_as_it_was(here: int, there: int) -> None:
    """Loading raises in the middle, in a setter of the user: everything is as before, and goes on."""
    refuses = False

    def setter(values: object) -> None:
        if refuses:
            raise OSError("no")

    def made(steps: int) -> StackRun:
        explore = [hk.Explore("dropout", spread=0.1, base=0.1, apply=setter)]
        run = StackRun(gradients="local", explore=explore)
        run.train(steps)
        return run

    state = made(there).saved()["scheduler"]
    run, whole = made(here), made(here)
    refuses = True
    with pytest.raises(OSError, match="no"):
        run.scheduler.load_state_dict(state)
    refuses = False
    assert same(run.saved(), whole.saved())
    run.train(STEPS - here)
    whole.train(STEPS - here)
    assert same(run.tensors(), whole.tensors())
    assert run.scheduler.scouted == whole.scheduler.scouted
