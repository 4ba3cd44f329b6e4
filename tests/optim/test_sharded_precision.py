"""8-bit state and split masters of distributed parameters, through ``torch.distributed.checkpoint``."""

from __future__ import annotations

import copy
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
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hdet_kernels as hk
from hdet_kernels.optim import decoded_state_dict
from tests.optim.sharded_net import network, shard, train
from tests.ranks import run_ranks
from tests.training import same

# DCP warns that there is one process only, and about its own use of torch.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

BF16 = torch.bfloat16

MAKERS: dict[str, tuple[torch.dtype, Any]] = {
    "split, int8": (BF16, partial(hk.FusedAdamW, lr=0.05, master_weights="split", state_dtype="int8")),
    "int8": (torch.float32, partial(hk.FusedAdamW, lr=0.05, state_dtype="int8")),
    "split": (BF16, partial(hk.FusedAdamW, lr=0.05, master_weights="split")),
    "rounded, int8": (BF16, partial(hk.FusedAdamW, lr=0.05, stochastic_rounding=True, state_dtype="int8")),
    "momentum, int8": (torch.float32, partial(hk.FusedSGD, lr=0.05, momentum=0.9, state_dtype="int8")),
}

FORMS: dict[str, dict[str, bool]] = {
    "nested": {},
    "flat": {"flatten_optimizer_state_dict": True},
    "offloaded": {"cpu_offload": True},
    "full": {"full_state_dict": True},
    "full, of the first": {"full_state_dict": True, "cpu_offload": True},
}

QUICK = [("split, int8", "nested"), ("split, int8", "flat"), ("momentum, int8", "nested")]

Run = tuple[nn.Sequential, Any]


def begin(kind: str, mesh: DeviceMesh | None) -> Run:
    dtype, make = MAKERS[kind]
    module = network(dtype) if mesh is None else shard(network(dtype), mesh)
    return module, make(module.parameters())


def parts(run: Run) -> list[Tensor]:
    """Return what this process has of parameters and state."""
    module, optimizer = run
    tensors = [*module.parameters(), *(entry[name] for entry in optimizer.state.values() for name in sorted(entry))]
    return [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in tensors]


def through(form: str, source: Run, target: Run, folder: Path) -> None:
    """Save ``source`` in one of :data:`FORMS`, and load ``target``."""
    options = StateDictOptions(**FORMS[form])
    model, optimizer = get_state_dict(*source, options=options)
    if "full" in form:
        if form != "full":  # the others have nothing
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(target[0], model, options=options)
        set_optimizer_state_dict(*target, optimizer, options=options)
        return
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    model, optimizer = get_state_dict(*target, options=options)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    set_state_dict(*target, model_state_dict=model, optim_state_dict=optimizer, options=options)


def _resumed(rank: int, folder: Path, cases: list[tuple[str, str]]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    found: dict[str, Any] = {}
    for kind, form in cases:
        whole, saved, loaded = (begin(kind, mesh) for _ in range(3))
        train(*whole, rank, range(5))
        train(*saved, rank, range(3))
        through(form, saved, loaded, folder / f"{kind} {form}")
        train(*loaded, rank, range(3, 5))
        found[f"{kind} {form}"] = same(parts(loaded), parts(whole))
    try:
        hk.FusedRowWiseAdagrad(whole[0][0].parameters(), lr=0.1)
    except ValueError as error:
        found["row-wise"] = str(error)
    dist.barrier()
    return found


def _with_divided_state(rank: int) -> bool:
    """Return whether a run with ZeroRedundancyOptimizer, which loads state by itself, goes on as it was."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # the import takes seconds

    def begin() -> tuple[nn.Module, Any]:
        dtype, make = MAKERS["split, int8"]
        module = DistributedDataParallel(network(dtype))
        return module, ZeroRedundancyOptimizer(module.parameters(), make.func, **make.keywords)

    whole, loaded = begin(), begin()
    train(*whole, rank, range(3))
    whole[1].consolidate_state_dict()
    state = [copy.deepcopy(whole[1].state_dict()) if rank == 0 else None]
    dist.broadcast_object_list(state)
    loaded[0].load_state_dict(whole[0].state_dict())
    loaded[1].load_state_dict(state[0])
    for run in (whole, loaded):
        train(*run, rank, range(3, 5))
    return same(whole[0].state_dict(), loaded[0].state_dict())


def check_resumed(folder: Path, cases: list[tuple[str, str]]) -> None:
    for found in run_ranks(2, _resumed, folder, cases):
        assert "leave the table out of fully_shard" in found.pop("row-wise")
        assert len(found) == len(cases)
        assert [case for case, exact in found.items() if exact is not True] == []


@pytest.mark.full
def test_split_masters_with_8_bit_state_are_resumed_exactly_and_loaded_by_one_process(tmp_path: Path) -> None:
    check_resumed(tmp_path, QUICK)
    module, optimizer = begin("split, int8", None)
    for decode in (False, True):
        model, state = get_state_dict(module, optimizer)
        if decode:
            state = decoded_state_dict(state)
        given = {"model": model, "optimizer": state}
        if not decode:  # blocks of the whole tensor are others than those of its parts
            with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
                dcp.load(given, checkpoint_id=tmp_path / "split, int8 nested")
            continue
        dcp.load(given, checkpoint_id=tmp_path / "split, int8 nested")
        set_state_dict(module, optimizer, model_state_dict=model, optim_state_dict=state)
    for param in module.parameters():
        entry = optimizer.state[param]
        assert entry["step"] == 3
        assert (entry["exp_avg"].dtype, entry["master_low"].dtype) == (torch.uint8, torch.int16)
        assert entry["exp_avg_scale"].abs().max() > 0
        assert entry["master_low"].any()


@pytest.mark.full
def test_every_precision_is_resumed_exactly_in_every_form(tmp_path: Path) -> None:
    check_resumed(tmp_path, [(kind, form) for kind in MAKERS for form in FORMS if (kind, form) not in QUICK])
    assert run_ranks(2, _with_divided_state) == [True, True]


def test_codes_are_not_loaded_as_numbers(tmp_path: Path) -> None:
    """DCP compares shapes and no dtypes, and so does torch.optim."""

    def begin(make: Any) -> Run:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 5), nn.Flatten(0))
        return module, make(module.parameters(), lr=0.01)

    coded, numbers = begin(partial(hk.FusedAdamW, state_dtype="int8")), begin(hk.FusedAdamW)
    for run in (coded, numbers):
        run[0](torch.ones(2, 6)).sum().backward()
        run[1].step()
    options = {"flat": {"flatten_optimizer_state_dict": True}, "nested": {}}
    for form, option in options.items():
        for source, target in ((coded, numbers), (numbers, coded)):
            folder = tmp_path / f"{form} {source is coded}"
            saved, own = (get_state_dict(*run, options=StateDictOptions(**option))[1] for run in (source, target))
            dcp.save({"optimizer": saved}, checkpoint_id=folder)
            planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
            with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
                dcp.load({"optimizer": own}, checkpoint_id=folder, planner=planner)
    module, torchs = begin(torch.optim.AdamW)
    torchs.load_state_dict(coded[1].state_dict())
    module(torch.ones(2, 6)).sum().backward()
    with pytest.raises(RuntimeError, match=r"shape|size"):
        torchs.step()


def test_a_flattened_state_is_not_decoded() -> None:
    with pytest.raises(ValueError, match="leave flatten_optimizer_state_dict out"):
        decoded_state_dict({"state.0.weight.exp_avg": torch.zeros(1, 3, dtype=torch.uint8)})
