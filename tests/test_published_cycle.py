"""The cycle of the published class: by public names alone the same as the scheduler, and its checkpoints."""

from __future__ import annotations

import ast
import copy
import io
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import hdet_kernels as hk
from hdet_kernels import compat, frontend, published_cycle
from tests.ranks import Cases, run_ranks
from tests.training import Trainer, same

TOTAL, SYNC, WARM = 22, 4, 8
PUBLISHED = {
    "total_steps": TOTAL,
    "model_sync_interval": SYNC,
    "ensemble_lr_spread_ratio": 0.25,
    "auto_lr_warmup_steps": WARM,
    "loss_scale": 0.05,
}


def published(rank: int, ddp: bool, enable_auto_lr: bool) -> Trainer:
    options = {"max_lr": [0.01, 0.02], "enable_auto_lr": enable_auto_lr, **PUBLISHED}
    return Trainer(rank, ddp=ddp, groups=True, make_scheduler=compat.OneCycleAutoLR, **options)


def scheduler_of_ours(rank: int, ddp: bool, enable_auto_lr: bool) -> Trainer:
    controller = hk.SoftmaxController(WARM, scale=0.05, rate=0.5, beta=0.9)
    options = {"total_steps": TOTAL, "max_lr": [0.01, 0.02], "sync_every": SYNC, "spread": 0.25}
    return Trainer(rank, ddp=ddp, groups=True, auto_lr=controller if enable_auto_lr else False, **options)


def ended(trainer: Trainer) -> dict[str, Any]:
    records = [record.to_dict() for record in trainer.scheduler.history]
    kept = ("step", "cycle", "kind", "losses", "base", "values", "gradients", "bytes", "collectives")
    return {
        "parameters": trainer.parameters(),
        "moments": trainer.moments(),
        "rates": trainer.rates,
        "last": trainer.scheduler.get_last_lr(),
        "base": trainer.scheduler.get_base_lr(),
        "history": [{name: record[name] for name in kept} for record in records],
    }


def saved(trainer: Trainer) -> dict[str, Any]:
    """Return the checkpoint of a rank as a file has it."""
    file = io.BytesIO()
    parts = {"model": trainer.module, "optimizer": trainer.optimizer, "scheduler": trainer.scheduler}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def resumed(rank: int, ddp: bool, state: dict[str, Any], *, scheduler_first: bool = False) -> Trainer:
    trainer = published(rank, ddp, True)
    trainer.module.load_state_dict(state["model"])
    order = ("scheduler", "optimizer") if scheduler_first else ("optimizer", "scheduler")
    for part in order:
        getattr(trainer, part).load_state_dict(copy.deepcopy(state[part]))
    return trainer


def _with_closures(trainer: Trainer) -> torch.Tensor:
    """Train by ``optimizer.step(closure)``, which computes the gradients itself."""
    for _ in range(TOTAL):

        def closure() -> torch.Tensor:
            trainer.optimizer.zero_grad()
            loss = trainer.loss()
            loss.backward()
            return loss

        trainer.scheduler.step(trainer.optimizer.step(closure).detach())
    return trainer.parameters()


def _compared(rank: int, ddp: bool, enable_auto_lr: bool) -> dict[str, bool]:
    ours = ended(scheduler_of_ours(rank, ddp, enable_auto_lr).train(TOTAL))
    theirs = ended(published(rank, ddp, enable_auto_lr).train(TOTAL))
    found = {name: same(ours[name], theirs[name]) for name in ours}
    assert ours["history"][-1]["kind"] == "last"
    if not enable_auto_lr:
        return found
    first = published(rank, ddp, True).train(10)
    middle = saved(first)
    rest = {**theirs, "rates": theirs["rates"][10:]}
    for scheduler_first in (False, True):
        again = resumed(rank, ddp, middle, scheduler_first=scheduler_first)
        found[f"resumed {scheduler_first}"] = same(ended(again.train(TOTAL - 10)), rest)
    # The file of the first rank, saved at a sync, on both.
    at_sync = published(rank, ddp, True).train(12)
    state: list[Any] = [saved(at_sync)]
    dist.broadcast_object_list(state)
    again = resumed(rank, ddp, state[0]).train(TOTAL - 12)
    found["one file"] = torch.equal(again.parameters(), theirs["parameters"])
    by_closures = published(rank, ddp, True)
    found["closure"] = same(_with_closures(by_closures), theirs["parameters"])
    found["closure, gradients"] = ended(by_closures)["history"] == theirs["history"]
    # The average, for a while and for good.
    apart = published(rank, ddp, True)
    synced = [apart.scheduler.in_sync] + [apart.train(1).scheduler.in_sync for _ in range(5)]
    found["in sync"] = synced == [True, False, False, False, True, False]
    own = apart.parameters()
    with apart.scheduler.consensus():
        average = apart.parameters()
        found["in sync inside"] = apart.scheduler.in_sync
        with pytest.raises(RuntimeError, match=r"inside scheduler\.consensus"):
            apart.scheduler.step(1.0)
    found["own again"] = torch.equal(apart.parameters(), own) and not torch.equal(own, average)
    apart.scheduler.converge()
    found["in sync again"] = apart.scheduler.in_sync
    found["converged"] = torch.equal(apart.parameters(), average)
    found["manual"] = [record.kind for record in apart.scheduler.history] == ["sync", "manual"]
    return found


CASES = Cases(2, _compared, [(True, True)], full=[(False, True), (True, False)])


@pytest.mark.parametrize(("ddp", "enable_auto_lr"), CASES.params())
def test_it_is_the_scheduler_with_the_papers_controller_and_resumes_exactly(ddp: bool, enable_auto_lr: bool) -> None:
    for found in CASES[ddp, enable_auto_lr]:
        assert [name for name, equal in found.items() if not equal] == []


def _late_group(rank: int, folder: Path) -> dict[str, bool]:
    """A process group that is initialised after the scheduler was built, and after its first step."""

    def begin(number: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder / str(number)}", rank=rank, world_size=2)

    def end() -> None:
        dist.barrier()  # a rank that leaves while another still connects would look dead to it
        dist.destroy_process_group()

    end()
    ends = []
    for late in (False, True):
        if not late:
            begin(1)
        trainer = published(rank, False, True)
        assert trainer.scheduler.world_size == (1 if late else 2)
        if late:
            begin(2)
        ends.append(ended(trainer.train(TOTAL)) | {"place": (trainer.scheduler.rank, trainer.scheduler.world_size)})
        end()
    found = {name: same(*(end[name] for end in ends)) for name in ends[0] if name != "rates"}
    # The learning rates that the first step was made with are those before the group was there.
    found["rates"] = same(ends[0]["rates"][1:], ends[1]["rates"][1:])
    optimizer, scheduler = alone()
    optimizer.step()
    begin(3)
    with pytest.raises(RuntimeError, match="a process group of 2 processes was initialised after the first step"):
        scheduler.step(1.0)
    end()
    os.environ["WORLD_SIZE"] = "2"
    optimizer, scheduler = alone()
    with pytest.raises(RuntimeError, match="WORLD_SIZE is 2 in the environment, but no process group is initialised"):
        optimizer.step()
    return found


def test_a_process_group_may_come_until_the_first_step(tmp_path: Path) -> None:
    for found in run_ranks(2, _late_group, tmp_path):
        assert [name for name, equal in found.items() if not equal] == []


@pytest.mark.parametrize("stateful", [True, False], ids=["object", "state dict"])
def test_it_goes_through_a_distributed_checkpoint_into_a_new_one(stateful: bool, tmp_path: Path) -> None:
    optimizer, scheduler = alone(enable_auto_lr=True, auto_lr_warmup_steps=4)
    for _ in range(9):
        optimizer.step()
        scheduler.step(1.0)
    other = alone(enable_auto_lr=True, auto_lr_warmup_steps=4)[1]
    state = {"scheduler": other if stateful else other.state_dict()}
    before = copy.deepcopy(other.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process
        dcp.save({"scheduler": scheduler if stateful else scheduler.state_dict()}, checkpoint_id=tmp_path)
        dcp.load(state, checkpoint_id=tmp_path)
    if not stateful:
        assert same(other.state_dict(), before), "loading into a state_dict leaves the scheduler as it is"
        other.load_state_dict(state["scheduler"])
    assert same(other.state_dict(), scheduler.state_dict())
    assert [record.step for record in other.history] == [4, 8]


def test_callbacks_hear_of_every_sync_until_they_are_removed() -> None:
    optimizer, scheduler = alone()
    told: list[tuple[int, int]] = []
    handle = scheduler.on_sync(lambda record: told.append((record.step, scheduler.last_epoch)))
    for _ in range(9):
        optimizer.step()
        scheduler.step()
    scheduler.converge()
    assert told == [(4, 4), (8, 8), (9, 9)], "the schedule has moved on by then"
    assert scheduler.metrics()["hdet/base/lr"] == scheduler.history[-1].base["lr/0"]
    scheduler.record_loss(3.0, divided_by=2)
    assert (scheduler.cycle.window.sum, scheduler.cycle.window.count) == (3.0, 0.5)
    handle.remove()
    scheduler.converge()
    assert len(told) == 3


def alone(**options: Any) -> tuple[torch.optim.Optimizer, compat.OneCycleAutoLR]:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.1)
    return optimizer, compat.OneCycleAutoLR(optimizer, 0.01, **{**PUBLISHED, **options})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.pop("hdet"), "it has no 'hdet' entry"),
        (lambda state: state["hdet"][0].pop("window"), "its 'hdet' has no window"),
        (
            lambda state: state["hdet"][0]["config"].update(sync_every=7),
            "the checkpoint has sync_every=7, this scheduler 4",
        ),
        (lambda state: state["hdet"][0].update(size=3), "of 3 replicas in the middle of a cycle, and there are 1 here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(damage: Any, message: str) -> None:
    optimizer, scheduler = alone(enable_auto_lr=True)
    for _ in range(5):
        optimizer.step()
        scheduler.step(1.0)
    state = copy.deepcopy(scheduler.state_dict())
    damage(state)
    fresh_optimizer, fresh = alone(enable_auto_lr=True)
    before = copy.deepcopy(fresh.state_dict()), copy.deepcopy(fresh_optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        fresh.load_state_dict(state)
    assert same(before, (fresh.state_dict(), fresh_optimizer.state_dict()))


def test_a_step_too_many_or_without_a_loss_raises_and_changes_nothing() -> None:
    optimizer, scheduler = alone(enable_auto_lr=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="none was recorded"):
        scheduler.step()
    with pytest.raises(TypeError, match=r"step\(3\) looks like"):
        scheduler.step(3)
    scheduler.record_loss(1.0)
    for _ in range(TOTAL):
        scheduler.step(torch.tensor(1.0))
    before = scheduler.get_last_lr()
    with pytest.raises(ValueError, match="step 23 is past the end: total_steps is 22"):
        scheduler.step(1.0)
    assert scheduler.get_last_lr() == before
    assert scheduler.last_epoch == TOTAL


def test_it_takes_the_place_of_a_scheduler_that_the_optimizer_had() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.1)
    old = hk.HDETOneCycleLR(optimizer, 0.3, 50, auto_lr=False)
    optimizer.step()
    compat.OneCycleAutoLR(optimizer, 0.01, **PUBLISHED)
    with pytest.raises(RuntimeError, match="released"):
        old.step(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 25)


@pytest.mark.parametrize("module", [compat, published_cycle])
def test_the_published_class_imports_public_names_only(module: Any) -> None:
    """Of this package only names of the contract; and it reaches for no private ones."""
    tree = ast.parse(Path(module.__file__).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hdet_kernels"):
            assert node.module in ("hdet_kernels.frontend", "hdet_kernels.published_cycle")
            if node.module == "hdet_kernels.frontend":
                assert {alias.name for alias in node.names} <= set(frontend.__all__)
        elif isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.startswith("hdet_kernels")]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            assert isinstance(node.value, ast.Name), ast.unparse(node)
            assert node.value.id == "self", ast.unparse(node)
