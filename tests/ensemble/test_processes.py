"""Ensembles of processes, which process holds which replica, and their collectives over real gloo groups."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import hdet_kernels as hk
from hdet_kernels import lent
from hdet_kernels.ensemble import (
    ProcessEnsemble,
    RowEnsemble,
    SingleReplica,
    announced_size,
    default_ensemble,
    held,
)
from tests.ensemble.places import ALONE, place
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def test_without_a_group_there_is_none() -> None:
    with pytest.raises(RuntimeError, match=r"start the script with torchrun.*init_process_group"):
        ProcessEnsemble()


def _collectives(ensemble: Any, rank: int) -> dict[str, Any]:
    def reduced(operation: str) -> list[float]:
        tensor = torch.tensor([float(rank), 10.0 - rank])
        ensemble.all_reduce(tensor, operation).wait()
        return tensor.tolist()

    copied, received, gathered = torch.tensor([float(rank)]), torch.zeros(2, 1), torch.zeros(2, 1)
    ensemble.broadcast(copied, ensemble.size - 1).wait()
    ensemble.exchange(received, torch.tensor([[10.0 * rank], [10.0 * rank + 1]])).wait()
    ensemble.collect(gathered, torch.tensor([float(rank)])).wait()
    return {
        "sum": reduced("sum"), "max": reduced("max"), "copied": copied.item(), "received": received.view(-1).tolist(),
        "gathered": gathered.view(-1).tolist(),
    }  # fmt: skip


def _two(rank: int) -> dict[str, Any]:
    processes = ProcessEnsemble()
    rows = RowEnsemble(3, processes)
    gathered = processes.gather(torch.tensor([[1.0 + rank, 5.0]]))
    of_rows = rows.gather(torch.arange(3.0).view(3, 1) + 10 * rank)
    twin = processes.twin()
    messages = []
    for make in (
        lambda: ProcessEnsemble(dist.GroupMember.NON_GROUP_MEMBER),
        lambda: ProcessEnsemble(init_device_mesh("cpu", (2,)), shard_group=dist.group.WORLD),
        lambda: ProcessEnsemble(init_device_mesh("cpu", (2, 1, 1))),
        lambda: RowEnsemble(2, ProcessEnsemble(init_device_mesh("cpu", (1, 2)))),
    ):
        with pytest.raises((ValueError, RuntimeError)) as error:
            make()
        messages.append(str(error.value))
    return {
        "default": isinstance(default_ensemble(), ProcessEnsemble),
        "place": place(processes), "rows": place(rows), "held": held(rows),
        "gathered": gathered.tolist(), "of rows": of_rows.view(-1).tolist(), "shape": tuple(of_rows.shape),
        "serves": (processes.serves(CPU), processes.serves(torch.device("meta")), processes.averages(CPU)),
        "collectives": [_collectives(each, rank) for each in (processes, rows, twin, rows.twin())],
        "twin": (twin.ranks(), twin.group is not None, place(twin) == place(processes)),
        "repr": repr(rows), "messages": messages,
    }  # fmt: skip


def test_two_processes() -> None:
    for rank, found in enumerate(run_ranks(2, _two)):
        assert found["default"]
        own = {"size": 2, "replica": rank, "processes": 2, "process": rank, "rank": rank, "talks": True}
        assert found["place"] == {**ALONE, **own}
        assert found["rows"] == {**ALONE, **own, "size": 6, "rows": 3, "replica": 3 * rank}
        assert found["held"] == slice(3 * rank, 3 * rank + 3)
        assert found["gathered"] == [[[1.0, 5.0]], [[2.0, 5.0]]]
        assert found["of rows"] == [0, 1, 2, 10, 11, 12]
        assert found["shape"] == (6, 1, 1)
        assert found["serves"] == (True, False, False), "gloo cannot divide"
        expected = {
            "sum": [1.0, 19.0], "max": [1.0, 10.0], "copied": 1.0, "received": [float(rank), 10.0 + rank],
            "gathered": [0.0, 1.0],
        }  # fmt: skip
        assert found["collectives"] == [expected] * 4
        assert found["twin"] == ([0, 1], True, True)
        assert found["repr"].startswith(f"RowEnsemble(3 rows, ProcessEnsemble(replica {rank} of 2, ")
        member, both, dimensions, sharded = found["messages"]
        assert "this process is not a member of the given process group" in member
        assert both == "pass a mesh or two groups, not both: a 2-D mesh (replicate, shard) defines both groups"
        assert "the mesh must have one dimension, or two (replicate, shard), got 3" in dimensions
        assert "among must be processes that hold one whole replica each, got ProcessEnsemble" in sharded


def _lent_after_a_collective(_rank: int) -> dict[str, tuple[int, bool]]:
    """Return, for every collective, the tensors that threads of gloo hold while it runs, and whether all are freed."""
    ensemble, found = ProcessEnsemble(), {}
    for name, start in {
        "all_reduce": lambda: ensemble.all_reduce(torch.ones(2), "sum"),
        "broadcast": lambda: ensemble.broadcast(torch.ones(2), 0),
        "exchange": lambda: ensemble.exchange(torch.ones(2, 1), torch.ones(2, 1)),
        "collect": lambda: ensemble.collect(torch.ones(2, 1), torch.ones(1)),
    }.items():
        work = start()
        count = len(lent._LENT)
        work.wait()
        del work
        until = time.monotonic() + 60
        while lent._LENT and time.monotonic() < until:
            time.sleep(0.001)
        found[name] = count, not lent._LENT
    return found


def test_tensors_of_a_collective_are_known_until_the_threads_that_sent_them_free_them() -> None:
    for found in run_ranks(2, _lent_after_a_collective):
        assert found == {"all_reduce": (1, True), "broadcast": (1, True), "exchange": (2, True), "collect": (2, True)}


def test_a_process_that_ends_waits_for_those_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [torch.ones(1)]
    lent.freed_before_exit(held[0])
    monkeypatch.setattr(lent, "EXIT_SECONDS", 0.01)
    lent._wait_until_freed()  # not for long
    assert lent._LENT
    monkeypatch.setattr(lent, "EXIT_SECONDS", 60.0)
    timer = threading.Timer(0.05, held.clear)
    timer.start()
    lent._wait_until_freed()
    assert not held
    timer.join()


ENDS_AFTER_A_COLLECTIVE = """
import sys, torch, torch.distributed as dist
from hdet_kernels.ensemble import ProcessEnsemble
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
held = dist.group.WORLD, ProcessEnsemble()  # as a wrapper and a scheduler hold the group: its threads run on
held[1].collect(torch.empty(2, 3), torch.ones(3)).wait()
dist.destroy_process_group()
"""


ENDS_AFTER_A_BACKWARD_PASS = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import hdet_kernels as hk
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
model = DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = hk.FusedAdamW(model.parameters(), in_backward=hk.InBackward(model=model))
for _ in range(3):
    loss = model(torch.ones(2, 3)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
sys.setswitchinterval(1000)  # a thread gets the interpreter only when this one waits
loss = model(torch.ones(2, 3)).sum()
loss.backward()
"""


@pytest.mark.full
@pytest.mark.parametrize("script", [ENDS_AFTER_A_COLLECTIVE, ENDS_AFTER_A_BACKWARD_PASS], ids=["gather", "backward"])
def test_a_process_may_end_right_after_a_collective(script: str, tmp_path: Path) -> None:
    """One of six processes aborted after an all-gather, one of fifteen after a backward pass."""
    for attempt in range(5):
        command = [sys.executable, "-c", script]
        both = [
            subprocess.Popen([*command, str(rank), str(tmp_path / str(attempt))], stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        errors = [process.communicate()[1] for process in both]
        assert [process.returncode for process in both] == [0, 0], errors


def _four(rank: int) -> tuple[dict[str, Any], list[list[list[float]]], list[int], str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ensemble = ProcessEnsemble(mesh)
    gathered: Tensor = ensemble.gather(torch.tensor([[float(rank)]]))
    with pytest.raises(ValueError, match="overlap_group has ranks") as error:
        ProcessEnsemble(mesh["replicate"], overlap_group=dist.group.WORLD).twin()
    return place(ensemble), gathered.tolist(), ensemble.ranks(), str(error.value)


def test_shards_of_two_replicas() -> None:
    for rank, (found, gathered, ranks, message) in enumerate(run_ranks(4, _four)):
        replica, part = divmod(rank, 2)
        own = {"replica": replica, "process": replica, "part": part, "rank": rank}
        assert found == {**ALONE, **own, "size": 2, "parts": 2, "processes": 2, "talks": True}
        assert gathered == [[[0.0], [1.0]], [[2.0], [3.0]]], "by replica and part"
        assert ranks == [part, 2 + part]
        assert f"overlap_group has ranks [0, 1, 2, 3], process_group has [{part}, {2 + part}]: pass" in message


# The ensemble where none is given


def test_one_replica_without_a_process_group() -> None:
    assert isinstance(default_ensemble(), SingleReplica)


@pytest.mark.parametrize(("text", "size"), [("", 1), ("1", 1), ("8", 8), ("many", 1), ("-2", 1)])
def test_the_announced_size(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    assert announced_size() == size


@pytest.mark.parametrize("build", [lambda m: hk.ReplicaStack(m, 2), lambda m: hk.warm_noisy_init_(m.parameters())])
def test_what_needs_the_processes_at_once_raises_before_they_have_a_group(
    build: Callable[[nn.Module], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE is 4 .* call torch.distributed.init_process_group\(\) before"):
        build(model)
    assert torch.equal(model.weight, before)


def test_a_process_that_trains_for_itself_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert hk.ReplicaStack(nn.Linear(2, 1), 2, ensemble=SingleReplica()).ensemble.size == 2
