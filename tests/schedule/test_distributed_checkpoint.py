"""torch.distributed.checkpoint: into a scheduler that is built anew, and into another number of processes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LambdaLR, MultiStepLR, SequentialLR

import hdet_kernels as hk
from hdet_kernels.optim import FusedAdamW
from tests.ranks import run_ranks
from tests.schedule.checkpoints import SETTINGS, SYNC, TOTAL, Logged, entries, loaded, result
from tests.schedule.scout_runs import PHASE, ROUNDS, RankRun, StackRun
from tests.schedule.undo_runs import SYNC as UNDO_SYNC
from tests.schedule.undo_runs import Trying, Undoable
from tests.training import Trainer, same, with_averaging

# DCP warns that there is one process only, and about its own use of torch.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

AT = 2 * SYNC


def trainer(rank: int, **options: Any) -> Trainer:
    warnings.simplefilter("ignore")
    return Trainer(rank, **{**SETTINGS, "make_optimizer": FusedAdamW, **options})


def finished(run: Trainer) -> dict[str, Any]:
    run.train(TOTAL - run.step)
    return result(run)


def in_place(run: Any, folder: Path) -> Any:
    """Load plain state dicts, the optimizer's by the conversion that torch offers."""
    state = {"scheduler": run.scheduler.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    file = folder.parent / f"{folder.name}-{run.rank}.pt"
    dcp_to_torch_save(folder, file)
    whole = torch.load(file, weights_only=True)
    run.module.load_state_dict(whole["model"])
    run.optimizer.load_state_dict(whole["optimizer"])
    run.scheduler.load_state_dict(state["scheduler"])
    return run


def plain_entries(run: Any) -> dict[str, Any]:
    return {**entries(run), "scheduler": run.scheduler.state_dict()}


def of_its_own(run: Any, folder: Path) -> Any:
    """Load what this rank saved under a key of its own."""
    state = {f"replica {run.rank}": plain_entries(run)}
    dcp.load(state, checkpoint_id=folder)
    (own,) = state.values()
    set_state_dict(run.module, run.optimizer, model_state_dict=own["model"], optim_state_dict=own["optimizer"])
    run.scheduler.load_state_dict(own["scheduler"])
    return run


def _two_ranks(rank: int, folder: Path) -> dict[str, Any]:
    """Save at a sync, in the middle of a cycle, and there inside consensus(); resume all in runs built anew."""
    found: dict[str, Any] = {}
    run = trainer(rank).train(AT)
    dcp.save(entries(run), checkpoint_id=folder / "sync")
    parts = {"model": run.module, "optimizer": run.optimizer, "scheduler": run.scheduler}
    dcp.save({name: part.state_dict() for name, part in parts.items()}, checkpoint_id=folder / "plain")
    run.train(2)
    dcp.save(entries(run), checkpoint_id=folder / "diverged")
    dcp.save({f"replica {rank}": plain_entries(run)}, checkpoint_id=folder / "own")
    with run.scheduler.consensus():
        dcp.save(entries(run), checkpoint_id=folder / "consensus")
        found["average"] = run.parameters()
    found["whole"] = finished(run)
    with Logged() as silent:
        found["stateful"] = finished(loaded(trainer(rank), folder / "sync"))
        found["plain"] = finished(in_place(trainer(rank), folder / "plain"))
        resumed = loaded(trainer(rank), folder / "consensus")
        found["resumed"] = (resumed.parameters(), resumed.scheduler.in_sync, resumed.scheduler.cycle.window.count)
        found["consensus"] = finished(resumed)
        found["own"] = finished(of_its_own(trainer(rank), folder / "own"))
    found["silent"] = list(silent)
    with Logged() as texts:
        loaded(trainer(rank), folder / "diverged")
    found["diverged"] = list(texts)
    with Logged() as texts:
        without = trainer(rank)
        state = {"optimizer": without.optimizer.state_dict(), "scheduler": without.scheduler}
        dcp.load(state, checkpoint_id=folder / "plain")
        without.optimizer.load_state_dict(state["optimizer"])
        without.train(2)
    found["without moments"] = list(texts)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("dcp")
    return folder, run_ranks(2, _two_ranks, folder)


@pytest.mark.parametrize("way", ["stateful", "plain"])
def test_a_run_that_was_saved_at_a_sync_is_the_uninterrupted_one(way: str, saved: Any) -> None:
    for found in saved[1]:
        assert same({**found["whole"], "rates": found["whole"]["rates"][AT:]}, found[way])
        assert not found["silent"]


def test_in_the_middle_of_a_cycle_every_rank_resumes_what_it_saved_under_a_key_of_its_own(saved: Any) -> None:
    for found in saved[1]:
        assert same({**found["whole"], "rates": found["whole"]["rates"][AT + 2 :]}, found["own"])


def test_a_diverged_model_is_named_when_it_is_loaded(saved: Any) -> None:
    """DCP takes some tensors from one rank and some from another, and the scheduler's state from one of them."""
    texts = [text for found in saved[1] for text in found["diverged"]]
    assert len(texts) == 1, "the rank whose state was taken cannot tell"
    assert "at step 12, when the replicas differed, and replica" in texts[0]
    assert "inside scheduler.consensus()" in texts[0]


def test_what_was_saved_inside_consensus_begins_at_the_average(saved: Any) -> None:
    """Later parameters are those of another run: the replicas begin anew from one point."""
    first, second = saved[1]
    for found in (first, second):
        parameters, in_sync, losses = found["resumed"]
        assert torch.equal(parameters, first["average"])
        assert in_sync
        assert losses == 0
        resumed, whole = found["consensus"], found["whole"]
        assert len(resumed["history"]) == len(whole["history"])
        assert resumed["rates"][:3] == whole["rates"][AT + 2 : AT + 5], "the same place in the spread"
        torch.testing.assert_close(resumed["parameters"], whole["parameters"], rtol=0.1, atol=0.1)
    assert torch.equal(first["consensus"]["parameters"], second["consensus"]["parameters"])


def test_moments_that_did_not_arrive_are_named(saved: Any) -> None:
    """A plain state_dict of an optimizer that is built anew has no entries that DCP could load into."""
    for found in saved[1]:
        (text,) = found["without moments"]
        assert "resumed at step 10, and the optimizer has no state" in text
        assert "get_state_dict" in text


def _other_ranks(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with Logged() as texts:
        for name in ("sync", "consensus"):
            found[name] = finished(loaded(trainer(rank), folder / name))
    found["texts"] = list(texts)
    refused = trainer(rank)
    with pytest.raises(Exception, match="has 2 replicas and was saved 2 steps into a cycle, this run has") as caught:
        loaded(refused, folder / "diverged")
    return {**found, "refused": str(caught.value), "untouched": refused.step}


@pytest.mark.parametrize("n", [1, 4])
def test_another_number_of_processes(n: int, saved: Any) -> None:
    folder, whole = saved
    results = run_ranks(n, _other_ranks, folder)
    for name, at in (("sync", AT), ("consensus", AT + 2)):
        rates = np.array([found[name]["rates"] for found in results])  # [rank, step, group]
        before = np.mean([found["whole"]["rates"][at] for found in whole], axis=0)
        np.testing.assert_allclose(rates[:, 0].mean(axis=0), before, rtol=1e-12, err_msg="the base schedule goes on")
        for group in range(2):
            np.testing.assert_allclose(np.sort(rates[:, 0, group]) / before[group], hk.multipliers(n, 0.5))
        assert all(len(found[name]["history"][-1]["losses"]) == n for found in results)
        assert all(torch.equal(found[name]["parameters"], results[0][name]["parameters"]) for found in results)
    for found in results:
        assert not any("checkpoint" in text for text in found["texts"])
        assert found["untouched"] == 0


# Schedulers of other kinds


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)


def around(make: Callable[[torch.optim.Optimizer], Any], **options: Any) -> hk.HDETScheduler:
    return hk.HDETScheduler(make(optimizer()), total_steps=20, sync_every=4, auto_lr=False, **with_averaging(options))


def sequence(optimizer: torch.optim.Optimizer) -> SequentialLR:
    return SequentialLR(optimizer, [ConstantLR(optimizer), CosineAnnealingLR(optimizer, 15)], [5])


SCHEDULERS: dict[str, Callable[[], Any]] = {
    "one-cycle": lambda: hk.HDETOneCycleLR(optimizer(), 0.1, 20, auto_lr=False),
    "hypergradient": lambda: hk.HDETOneCycleLR(optimizer(), 0.1, 20, auto_lr=hk.HypergradientController()),
    "milestones": lambda: around(lambda opt: MultiStepLR(opt, [3, 6])),
    "sequence": lambda: around(sequence),
    "function": lambda: around(lambda opt: LambdaLR(opt, lambda step: 0.9**step)),
    "outer": lambda: around(lambda opt: CosineAnnealingLR(opt, 20), outer=hk.Outer()),
    "published": lambda: hk.compat.OneCycleAutoLR(
        optimizer(), 0.1, 20, model_sync_interval=4, auto_lr_warmup_steps=4, rank=0, world_size=1
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("stateful", [True, False], ids=["object", "state dict"])
def test_a_scheduler_of_any_kind_loads_into_a_new_one(kind: str, stateful: bool, tmp_path: Path) -> None:
    scheduler = SCHEDULERS[kind]()
    for _ in range(9):
        scheduler.optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
        scheduler.optimizer.step()
        scheduler.step(1.0)
    dcp.save({"scheduler": scheduler if stateful else scheduler.state_dict()}, checkpoint_id=tmp_path)
    other = SCHEDULERS[kind]()
    state = {"scheduler": other if stateful else other.state_dict()}
    before = copy.deepcopy(other.state_dict())
    dcp.load(state, checkpoint_id=tmp_path)
    if not stateful:
        assert same(other.state_dict(), before), "loading into a state_dict leaves the scheduler as it is"
        other.load_state_dict(state["scheduler"])
    assert same(other.state_dict(), scheduler.state_dict())


@pytest.mark.parametrize("at", [3, ROUNDS[0], PHASE + 2], ids=["in a round", "between rounds", "after the search"])
def test_a_run_without_a_learning_rate(at: int, tmp_path: Path) -> None:
    run = StackRun()
    run.train(at)
    dcp.save(run.saved(), checkpoint_id=tmp_path)
    state: dict[str, Any] = {"scheduler": StackRun().scheduler.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    other = StackRun()
    other.load({**run.saved(), **state})
    assert same(other.train(10), run.train(10))
    assert same(other.tensors(), run.tensors())


def _scouts(rank: int, folder: Path) -> dict[str, Any]:
    """Load the one state that DCP keeps of two ranks, saved in a round and between two rounds."""
    run = RankRun(rank)
    found: dict[str, Any] = {"synced": [run.scheduler.in_sync]}
    for name, steps in (("in a round", 3), ("between", ROUNDS[0] - 3)):
        run.train(steps)
        found["synced"].append(run.scheduler.in_sync)
        dcp.save({"scheduler": run.scheduler}, checkpoint_id=folder / name)
    other = RankRun(rank)
    other.load(run.saved())
    dcp.load({"scheduler": other.scheduler}, checkpoint_id=folder / "between")
    for each in (run, other):
        each.train(PHASE)
    found["ends"] = same(run.tensors(), other.tensors())
    try:
        dcp.load({"scheduler": RankRun(rank).scheduler}, checkpoint_id=folder / "in a round")
    except ValueError as error:
        found["refused"] = str(error)
    return found


def test_ranks_that_look_for_a_learning_rate(tmp_path: Path) -> None:
    results = run_ranks(2, _scouts, tmp_path)
    assert [found["synced"] for found in results] == [[True, False, True]] * 2
    assert all(found["ends"] for found in results)
    (text,) = [found["refused"] for found in results if "refused" in found]
    assert "was saved while a learning rate was looked for" in text
    assert "load on every process its own file, or one that was saved later" in text


def test_the_copies_of_a_run_that_tried_a_lower_learning_rate(tmp_path: Path) -> None:
    def run() -> Undoable:
        return Undoable("stack shared", "FusedAdamW", auto_lr=Trying(no_better=(2 * UNDO_SYNC,)))

    first = run()
    # Before the trial, in it, and after the run went back: the copy to return to, returns and steps before the run.
    for number, expected in enumerate([(0, 0, 0), (UNDO_SYNC, 1, UNDO_SYNC), (0, 1, UNDO_SYNC)]):
        first.train(UNDO_SYNC - 1)
        dcp.save({"scheduler": first.scheduler}, checkpoint_id=tmp_path / str(number))
        other = run()
        dcp.load({"scheduler": other.scheduler}, checkpoint_id=tmp_path / str(number))
        assert same(other.scheduler.state_dict(), first.scheduler.state_dict())
        cycle = other.scheduler.cycle
        assert cycle.undoing is not None
        assert (cycle.undoing.kept, cycle.undoing.returns, cycle.origin) == expected
        first.train(1)
