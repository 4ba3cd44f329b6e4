"""torch.distributed.checkpoint of sharded replicas: on the same mesh, unsharded, and what cannot be resharded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdet_kernels as hk
from tests.ranks import run_ranks
from tests.schedule.checkpoints import entries, loaded
from tests.schedule.undo_runs import Scripted
from tests.training import batch, loss_of, network, same, with_averaging

pytestmark = [
    pytest.mark.full,  # make test resumes HSDP in tests/converge/test_topologies.py
    # DCP warns that there is one process only, and about its own use of torch.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


class Sharded:
    """One of four ranks of two HSDP replicas, or a plain replica with the same settings."""

    def __init__(
        self, rank: int, *, shards: int = 2, total_steps: int = 16, make_optimizer: Any = hk.FusedAdamW, **options: Any
    ) -> None:
        self.rank, self.module = rank, network()
        if shards > 1:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            fully_shard(self.module, mesh=mesh)
            options["ensemble"] = hk.ProcessEnsemble(mesh)
        self.optimizer = make_optimizer(self.module.parameters(), lr=0.01)
        self.scheduler = hk.HDETOneCycleLR(self.optimizer, 0.01, total_steps, sync_every=4, **with_averaging(options))

    def train(self, until: int) -> Sharded:
        for step in range(self.scheduler.last_epoch, until):
            self.optimizer.zero_grad()
            loss = loss_of(self.module, *batch(self.rank, step))
            loss.backward()
            self.optimizer.step()
            self.scheduler.step(loss.detach())
        return self

    def shards(self) -> list[torch.Tensor]:
        state = [value for entry in self.optimizer.state.values() for value in entry.values()]
        tensors = [tensor.detach() for tensor in (*self.module.parameters(), *state)]
        return [getattr(tensor, "to_local", lambda tensor=tensor: tensor)().clone() for tensor in tensors]

    def whole(self) -> dict[str, Any]:
        """Return model and moments in full. All ranks of a replica must ask."""
        options = StateDictOptions(full_state_dict=True)
        return dict(
            zip(("model", "optimizer"), get_state_dict(self.module, self.optimizer, options=options), strict=True)
        )


FAN_OUT: dict[str, Any] = {"auto_lr": False}
UNDOES: dict[str, Any] = {"auto_lr": Scripted((8,)), "spread": 0.5}


MOVES: dict[str, Any] = {
    "auto_lr": hk.RegressionController(start_at=0.0, stop_at=1.0, trust=None),
    "total_steps": 32,
}


def _sharded(rank: int, folder: Path) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    run = Sharded(rank, **FAN_OUT).train(8)
    dcp.save(entries(run), checkpoint_id=folder / "sync")
    found["saved"] = run.whole()
    resumed = loaded(Sharded(rank, **FAN_OUT), folder / "sync")
    run.train(10)
    with run.scheduler.consensus():
        dcp.save(entries(run), checkpoint_id=folder / "consensus")
        found["average"] = run.whole()["model"]
    found["same"] = same(resumed.train(16).shards(), run.train(16).shards())
    found["restarted"] = loaded(Sharded(rank, **FAN_OUT), folder / "consensus").train(16).shards()
    keeps = Sharded(rank, **UNDOES).train(4)
    dcp.save(entries(keeps), checkpoint_id=folder / "undo")
    again = loaded(Sharded(rank, **UNDOES), folder / "undo")
    found["kept"] = [each.scheduler.cycle.undoing.kept for each in (keeps, again)]
    found["undone"] = [record.undone for record in again.train(16).scheduler.history]
    moves = Sharded(rank, **MOVES).train(8)
    dcp.save(entries(moves), checkpoint_id=folder / "controller")
    moves = loaded(Sharded(rank, **MOVES), folder / "controller")
    scheduler = moves.train(24).scheduler
    found["controller"] = [scheduler.cycle.spread.controller_state, scheduler.get_base_lr()]
    outer = Sharded(rank, auto_lr=False, outer=hk.Outer()).train(4)
    dcp.save({"scheduler": outer.scheduler}, checkpoint_id=folder / "outer")
    try:
        dcp.load(
            {"scheduler": Sharded(rank, auto_lr=False, outer=hk.Outer()).scheduler}, checkpoint_id=folder / "outer"
        )
    except ValueError as error:
        found["refused"] = str(error)
    return found


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("sharded")
    return folder, run_ranks(4, _sharded, folder)


def test_hsdp_resumes_on_the_same_mesh(sharded: Any) -> None:
    assert all(found["same"] for found in sharded[1])
    first, second = ([found["restarted"] for found in sharded[1]][part::2] for part in (0, 1))
    assert same(*first)
    assert same(*second)


def test_the_controllers_of_all_shards_go_on_alike(sharded: Any) -> None:
    """Only the shards whose state was written know the displacement, so that no shard has slopes for two cycles."""
    first, *others = [found["controller"] for found in sharded[1]]
    assert first[0]["observations"][0] > 0
    assert all(same(other, first) for other in others)


def test_hsdp_resumes_unsharded(sharded: Any) -> None:
    folder, results = sharded
    for name, of in (("sync", results[0]["saved"]["model"]), ("consensus", results[0]["average"])):
        plain = loaded(Sharded(0, shards=1, **FAN_OUT), folder / name)
        assert same(dict(plain.module.state_dict()), dict(of))
        assert plain.train(16).scheduler.last_epoch == 16


def test_the_start_of_another_shard_is_left_out(sharded: Any) -> None:
    """One rank's state is written. Those of its part keep the copy, and nobody returns to a copy that others lack."""
    results = sharded[1]
    assert [found["kept"][0] for found in results] == [0] * 4
    assert sorted(str(found["kept"][1]) for found in results) == ["0", "0", "None", "None"]
    assert all(undone is None for found in results for undone in found["undone"])


def test_the_outer_optimizer_of_another_shard_is_refused(sharded: Any) -> None:
    texts = [found["refused"] for found in sharded[1] if "refused" in found]
    assert len(texts) == 2
    assert all("load the file of a process that held the same part" in text for text in texts)
