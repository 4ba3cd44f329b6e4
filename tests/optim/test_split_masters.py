"""``master_weights="split"``: the numbers are those of float32 copies, in checkpoints, stacks, shards and with Muon."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import hdet_kernels as hk
from hdet_kernels.split_master import joined, split
from hdet_kernels.stack import StackedParameter
from hdet_kernels.tensors import local
from tests.ops.cases import QUICK
from tests.optim.cases import FUSED, fused_optimizer, parameters, run, saved_and_loaded, torch_optimizer, with_backends
from tests.optim.sharded_net import meshes, network, shard, train
from tests.ranks import run_ranks
from tests.schedule.undo_runs import OPTIMIZERS, SYNC, Scripted, Undoable
from tests.training import same

BF16 = torch.bfloat16
STATES: dict[str, Any] = {"fp32": torch.float32, "bf16": BF16, "int8": "int8"}


def master_of(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    entry = optimizer.state[param]
    return entry["master"] if "master" in entry else joined(param.detach(), entry["master_low"])


def others_of(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
    return {name: value for name, value in optimizer.state[param].items() if not name.startswith("master")}


def check_same_numbers(copies: torch.optim.Optimizer, ours: torch.optim.Optimizer) -> None:
    """Assert that the masters are equal bit for bit, and the parameters where a master is no tie; and all state."""
    pairs = zip(*([p for group in each.param_groups for p in group["params"]] for each in (copies, ours)), strict=True)
    for theirs, mine in pairs:
        assert "master" not in ours.state[mine]
        assert ours.state[mine]["master_low"].dtype == torch.int16
        master = copies.state[theirs]["master"]
        assert torch.equal(master_of(ours, mine), master)
        assert torch.equal(mine.detach(), split(master)[0])
        assert same(others_of(ours, mine), others_of(copies, theirs))


@pytest.mark.parametrize(
    ("backend", "name"), with_backends(QUICK, FUSED, [("cpp-cpu", "adamw"), ("torch-cpu", "adagrad")])
)
def test_training_is_that_with_copies(backend: tuple[str, str], name: str) -> None:
    where, device = backend
    for state in STATES.values():
        if state == "int8" and "amsgrad" in name:  # refused
            continue
        theirs, ours = parameters(BF16, device), parameters(BF16, device)
        options = {"backend": where, "state_dtype": state}
        copies = fused_optimizer(name, theirs, master_weights=True, **options)
        fused = fused_optimizer(name, ours, master_weights="split", **options)
        for optimizer, params in ((copies, theirs), (fused, ours)):
            run(optimizer, params, range(5))
        if where == "triton" and device == "cuda":  # its compiler fuses other products and sums in each kernel
            for mine, master in zip(ours, (copies.state[param]["master"] for param in theirs), strict=True):
                torch.testing.assert_close(master_of(fused, mine), master, rtol=1e-2, atol=1e-2)
        else:
            check_same_numbers(copies, fused)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("model_first", [True, False], ids=["model first", "optimizer first"])
def test_a_resumed_run_is_the_same_bit_for_bit(state: str, model_first: bool) -> None:
    def begin(seed: int) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        params = parameters(BF16, seed=seed)
        return params, fused_optimizer("adamw", params, master_weights="split", state_dtype=STATES[state])

    params, optimizer = begin(0)
    run(optimizer, params, range(3))
    saved, model = saved_and_loaded(optimizer.state_dict()), [param.detach().clone() for param in params]
    fresh, resumed = begin(1)
    run(resumed, fresh, range(1))  # what it has is overwritten
    for part in (0, 1) if model_first else (1, 0):
        if part == 0:
            with torch.no_grad():
                for param, value in zip(fresh, model, strict=True):
                    param.copy_(value)
        else:
            resumed.load_state_dict(saved)
    for each, own in ((optimizer, params), (resumed, fresh)):
        run(each, own, range(3, 5))
    assert same([param.detach() for param in fresh], [param.detach() for param in params])
    assert same([resumed.state[p] for p in fresh], [optimizer.state[p] for p in params])


def test_checkpoints_are_exchanged_with_copies() -> None:
    """The masters are the same, but for the last bit of those that lie exactly between two bf16 numbers."""
    params = {kind: parameters(BF16) for kind in (True, "split")}
    optimizers = {kind: fused_optimizer("adamw", own, master_weights=kind) for kind, own in params.items()}
    for kind, own in params.items():
        run(optimizers[kind], own, range(3))
    long = params[True][2]
    tie = torch.tensor([1 + 2.0**-8, -1 - 2.0**-8, 1 + 2.0**-7 + 2.0**-8])
    for kind, own in params.items():  # as a step that ended there would leave them
        with torch.no_grad():
            own[2][:3] = tie.to(BF16) if kind is True else split(tie)[0]
            if kind is True:
                optimizers[kind].state[own[2]]["master"][:3] = tie
            else:
                optimizers[kind].state[own[2]]["master_low"][:3] = split(tie)[1]
    assert torch.equal(master_of(optimizers["split"], params["split"][2])[:3], tie)
    for source, target in ((True, "split"), ("split", True)):
        own = [nn.Parameter(param.detach().clone()) for param in params[source]]
        loaded = fused_optimizer("adamw", own, master_weights=target)
        loaded.load_state_dict(saved_and_loaded(optimizers[source].state_dict()))
        for mine, theirs in zip(own, params[source], strict=True):
            assert torch.equal(mine, theirs), "loading an optimizer leaves the parameters"
            assert set(loaded.state[mine]) == {*others_of(loaded, mine), "master" if target is True else "master_low"}
            master, before = master_of(loaded, mine), master_of(optimizers[source], theirs)
            if mine.shape == long.shape:
                apart = (master[:3].view(torch.int32) - before[:3].view(torch.int32)).abs()
                assert apart.max() <= 1
                master, before = master[3:], before[3:]
            assert torch.equal(master, before)
        run(loaded, own, range(3, 4))  # the copy must not take its parameters for overwritten
        if target is True:
            ahead = optimizers["split"]
            run(ahead, params["split"], range(3, 4))
            assert torch.equal(master_of(loaded, own[2])[3:], master_of(ahead, params["split"][2])[3:])
            torch.testing.assert_close(
                master_of(loaded, own[2]), master_of(ahead, params["split"][2]), rtol=1e-6, atol=0
            )


def test_state_that_torch_has_trained_on_starts_with_its_parameters() -> None:
    params = parameters(BF16)
    optimizer = fused_optimizer("adamw", params, master_weights="split")
    run(optimizer, params, range(2))
    torchs = torch_optimizer("adamw", params)
    torchs.load_state_dict(optimizer.state_dict())
    run(torchs, params, range(2, 4))
    optimizer.load_state_dict(torchs.state_dict())
    for param in params:
        assert torch.equal(master_of(optimizer, param), param.detach().float())
        assert torch.equal(optimizer.state[param]["exp_avg"].to(BF16), torchs.state[param]["exp_avg"])


def test_masters_stay_within_half_a_step_of_what_the_user_writes() -> None:
    model = nn.Linear(5, 3).to(BF16)
    optimizer = hk.FusedAdamW(model.parameters(), lr=1e-3, weight_decay=0.0, master_weights="split")
    run(optimizer, list(model.parameters()), range(2))
    kept = master_of(optimizer, model.bias).clone()
    model.load_state_dict({"weight": torch.full((3, 5), 2.0), "bias": model.bias.detach()})
    with torch.no_grad():
        model.weight[0] = 0.0
    optimizer.param_groups[0]["lr"] = 0.0
    run(optimizer, list(model.parameters()), range(1))
    assert torch.equal(model.weight[1:], torch.full((2, 5), 2.0, dtype=BF16))
    assert (master_of(optimizer, model.weight)[0].abs() < 1e-40).all()
    assert ((master_of(optimizer, model.weight)[1:] - 2).abs() <= 2.0**-7).all()
    assert torch.equal(master_of(optimizer, model.bias), kept)


def test_state_that_is_given_otherwise() -> None:
    """A damaged entry is refused with nothing changed; state without masters starts with the parameters."""
    params = parameters(BF16)
    optimizer = fused_optimizer("adamw", params, master_weights="split")
    run(optimizer, params, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    for value, told in (
        (torch.zeros(3, 5, dtype=torch.int64), "int16 numbers"),
        (torch.zeros(2, dtype=torch.int16), r"shape \(2,\)"),
    ):
        damaged = copy.deepcopy(before)
        damaged["state"][0]["master_low"] = value
        with pytest.raises(ValueError, match=told):
            optimizer.load_state_dict(damaged)
        assert same(optimizer.state_dict()["state"], before["state"])
    for entry in (bare := copy.deepcopy(before))["state"].values():
        del entry["master_low"]
    optimizer.load_state_dict(bare)
    for param in params:
        assert torch.equal(master_of(optimizer, param), param.detach().float())
    plain = fused_optimizer("adamw", params, master_weights=False)
    plain.load_state_dict(before)
    assert not any(name.startswith("master") for entry in plain.state.values() for name in entry)


def test_float16_has_copies_and_float32_nothing() -> None:
    params = [nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (BF16, torch.float16, torch.float32)]
    optimizer = hk.FusedSGD(params, lr=0.1, master_weights="split")
    masters = [None if each is None else each.dtype for each in optimizer.buckets.masters]
    assert masters == [torch.int16, torch.float32, None]
    assert [flat.dtype for flat in optimizer.buckets.full] == [torch.float32] * 3


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "local"])
def test_a_stack_has_the_same_numbers(shared: bool) -> None:
    made = []
    for kind in (True, "split"):
        params = [StackedParameter(p.detach().expand(3, *p.shape).clone(), shared) for p in parameters(BF16)]
        made.append(hk.FusedAdamW(params, lr=0.01, master_weights=kind))
        made[-1].param_groups[0]["per_replica"] = {"lr": (0.01, 0.02, 0.03)}
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for param in params:
                rows = torch.randn(1 if shared else 3, *param.shape[1:], generator=generator).to(BF16)
                param.grad = rows.expand_as(param) if shared else rows
            made[-1].step()
    check_same_numbers(*made)


def test_muon_has_the_same_numbers() -> None:
    made = []
    for kind in (True, "split"):
        params = [
            nn.Parameter(torch.randn(s, generator=torch.Generator().manual_seed(3)).to(BF16)) for s in [(8, 12), (5,)]
        ]
        groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "use_muon": False}]
        made.append(hk.FusedMuon(groups, lr=0.02, master_weights=kind))
        run(made[-1], params, range(3))
    check_same_numbers(*made)


def test_a_return_to_the_start_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "split", partial(hk.FusedAdamW, master_weights="split"))
    broken = Undoable("stack local", "split", dtype=BF16, auto_lr=Scripted((SYNC,)), warm=True).train(SYNC - 1)
    assert "master_low" in broken.start["state"][0]
    assert not same(broken.everything(), broken.start)
    assert same(broken.train(1).everything(), broken.start)


def _sharded(rank: int) -> dict[str, Any]:
    """Train with copies and with split masters, and load the state as it is divided and as a whole."""
    mesh = meshes()["fsdp"]
    found: dict[str, Any] = {}
    for kind in (True, "split"):
        module = shard(network(BF16), mesh)
        optimizer, resumed = (hk.FusedAdamW(module.parameters(), lr=0.05, master_weights=kind) for _ in range(2))
        train(module, optimizer, rank, range(3))
        own = [{name: local(value).clone() for name, value in optimizer.state[p].items()} for p in module.parameters()]
        options = StateDictOptions(full_state_dict=True)
        whole = get_optimizer_state_dict(module, optimizer, options=options)
        resumed.load_state_dict(optimizer.state_dict())
        for step in range(2):
            if step == 1:
                set_optimizer_state_dict(module, resumed, whole, options=options)
            again = [{name: local(value) for name, value in resumed.state[p].items()} for p in module.parameters()]
            assert same(again, own)
        found[str(kind)] = [{**entry, "param": local(p)} for p, entry in zip(module.parameters(), own, strict=True)]
    return found


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_distributed_parameters_have_the_same_numbers() -> None:
    for found in run_ranks(4, _sharded):
        assert found["split"]
        for ours, theirs in zip(found["split"], found["True"], strict=True):
            assert torch.equal(joined(ours["param"], ours["master_low"]), theirs["master"])
            assert torch.equal(ours["exp_avg"], theirs["exp_avg"])
