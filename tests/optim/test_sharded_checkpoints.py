"""Checkpoints of distributed parameters: to another mesh, to one process, to and from torch.optim, and in full."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

import hdet_kernels as hk
from tests.optim.sharded_net import meshes, network, numbers, shard, train, whole
from tests.ranks import run_ranks
from tests.training import same

# DCP warns that there is one process only, and about its own use of torch.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

Run = tuple[nn.Sequential, torch.optim.Optimizer]


def begin(mesh: DeviceMesh | None, make: Any = hk.FusedAdamW, dtype: torch.dtype = torch.float32) -> Run:
    module = network(dtype) if mesh is None else shard(network(dtype), mesh)
    return module, make(module.parameters(), lr=0.05)


coded_adamw = partial(hk.FusedAdamW, state_dtype="int8")


def decoded_moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the moments of a state_dict in full."""
    state = optimizer.state_dict()["state"]
    return [whole(entry[name]) for entry in state.values() for name in ("exp_avg", "exp_avg_sq")]


def save(run: Run, folder: Path) -> None:
    model, optimizer = get_state_dict(*run)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


def load(run: Run, folder: Path, **options: Any) -> Run:
    model, optimizer = get_state_dict(*run)
    # torch's groups have options that only choose an implementation (foreach); ours do not, nor do our checkpoints.
    planner = dcp.DefaultLoadPlanner(allow_partial_load=type(run[1]) is torch.optim.AdamW)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder, planner=planner, **options)
    set_state_dict(*run, model_state_dict=model, optim_state_dict=optimizer)
    return run


def _checkpoints(rank: int, folder: Path) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    mesh, two = meshes(), DeviceMesh("cpu", [0, 1], mesh_dim_names=("shard",))
    run = begin(mesh["fsdp"])
    train(*run, rank, range(3))
    save(run, folder / "ours")
    found: dict[str, Any] = {"saved": numbers(*run)}

    again, other, torchs = begin(mesh["fsdp"]), begin(mesh["hsdp"]), begin(mesh["fsdp"], torch.optim.AdamW)
    found["loaded"] = [numbers(*load(each, folder / "ours")) for each in (again, other, torchs)]
    for each in (run, again, other, torchs):
        train(*each, rank, range(3, 5))
    found["went on"] = [numbers(*each) for each in (run, again, other, torchs)]

    save(torchs, folder / "torch")
    back = load(begin(mesh["hsdp"]), folder / "torch")
    found["from torch"] = same(numbers(*back), numbers(*torchs))
    if rank < 2:
        pair = load(begin(two), folder / "ours", process_group=two.get_group())
        found["two"] = same(numbers(*pair), found["saved"])

    # Whole state on every process, and on the first only.
    for name in ("everywhere", "first"):
        full = get_optimizer_state_dict(
            *run, options=StateDictOptions(full_state_dict=True, cpu_offload=name == "first")
        )
        fresh = begin(mesh["hsdp"])
        fresh[0].load_state_dict(_copied(run[0], fresh[0]))
        spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=name == "first")
        set_optimizer_state_dict(*fresh, full, options=spread)
        found[name] = same(numbers(*fresh), numbers(*run))

    # The state_dict of the optimizer itself, with masters.
    half, target = begin(mesh["fsdp"], dtype=torch.bfloat16), begin(mesh["hsdp"], dtype=torch.bfloat16)
    train(*half, rank, range(2))
    train(*target, rank, range(1))
    dcp.save({"optimizer": half[1].state_dict()}, checkpoint_id=folder / "own")
    state = {"optimizer": target[1].state_dict()}
    dcp.load(state, checkpoint_id=folder / "own")
    target[1].load_state_dict(state["optimizer"])
    moments = [numbers(each[0], each[1])[len(list(each[0].parameters())) :] for each in (half, target)]
    found["own"] = same(*moments) and len(moments[0]) == 7 * 4
    found["memory"] = [
        value._local_tensor.untyped_storage().nbytes() - value._local_tensor.nbytes
        for entry in half[1].state_dict()["state"].values()
        for value in entry.values()
        if value.dim()
    ]

    # State in 8 bits is saved decoded.
    coded = begin(mesh["fsdp"], coded_adamw)
    train(*coded, rank, range(3))
    save(coded, folder / "coded")
    found["codes"] = {value.dtype for entry in coded[1].state.values() for value in entry.values() if value.dim()}
    found["decoded"] = decoded_moments(coded[1])
    resumed, moved = (load(begin(mesh[name], coded_adamw), folder / "coded") for name in ("fsdp", "hsdp"))
    found["decoded again"], found["decoded elsewhere"] = decoded_moments(resumed[1]), decoded_moments(moved[1])
    for each in (coded, resumed):
        train(*each, rank, range(3, 6))
    found["coded went on"] = same(numbers(*coded), numbers(*resumed))

    found["refused"] = []
    for refuses, given in ((begin(None), run), (begin(mesh["hsdp"]), run)):
        before = numbers(*refuses)
        try:
            refuses[1].load_state_dict(given[1].state_dict())
        except ValueError as error:
            found["refused"].append((str(error), same(numbers(*refuses), before)))
    dist.barrier()
    return found


def _copied(source: nn.Module, target: nn.Module) -> dict[str, Any]:
    """Return the values of a module as a state_dict that is distributed like another."""
    own = dict(target.named_parameters())
    return {
        name: distribute_tensor(value.full_tensor(), own[name].device_mesh, own[name].placements)
        for name, value in source.state_dict().items()
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_ranks(4, _checkpoints, folder)


@pytest.mark.full
class TestCheckpoints:
    def test_state_is_loaded_on_another_mesh_and_by_torch(self, results: Any) -> None:
        for found in results[1]:
            for loaded in found["loaded"]:
                assert same(loaded, found["saved"])
            run, again, *others = found["went on"]
            assert same(run, again), "a resumed run is the uninterrupted one"
            for other in others:
                for a, b in zip(run, other, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    def test_state_of_torch_is_loaded(self, results: Any) -> None:
        assert all(found["from torch"] for found in results[1])

    def test_two_processes_and_one(self, results: Any) -> None:
        folder, found = results
        assert [each.get("two") for each in found] == [True, True, None, None]
        assert same(numbers(*load(begin(None), folder / "ours")), found[0]["saved"])

    def test_whole_state(self, results: Any) -> None:
        assert all(found["everywhere"] and found["first"] for found in results[1])

    def test_the_optimizers_own_state_dict_with_masters(self, results: Any) -> None:
        for found in results[1]:
            assert found["own"]
            assert set(found["memory"]) == {0}, "a saved part has nothing of other parameters"

    def test_state_in_8_bits_goes_on_bit_for_bit_and_on_another_mesh(self, results: Any) -> None:
        for found in results[1]:
            assert found["codes"] == {torch.uint8, torch.float32}
            assert same(found["decoded"], found["decoded again"])
            assert found["coded went on"]
            for saved, loaded in zip(found["decoded"], found["decoded elsewhere"], strict=True):
                assert saved.dtype == torch.float32
                # Blocks of other elements: rounded to nearest again, by at most half of the widest distance of levels.
                assert (saved - loaded).abs().max() <= 0.01 * saved.abs().max()
                assert saved.abs().max() > 0

    def test_state_that_is_divided_in_another_way_is_refused_before_anything_changes(self, results: Any) -> None:
        for found in results[1]:
            (plain, kept), (mesh, kept_too) = found["refused"]
            assert "is distributed, and its parameter is not" in plain
            assert "load it with torch.distributed.checkpoint" in mesh
            assert (kept, kept_too) == (True, True)
