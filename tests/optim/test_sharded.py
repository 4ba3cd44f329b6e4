"""Distributed parameters: the fused optimizers under ``fully_shard``, with several groups of parameters and meshes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hdet_kernels as hk
from tests.optim.cases import FUSED, PAIRS
from tests.optim.sharded_net import backward, meshes, network, numbers, shard, train, whole
from tests.ranks import run_ranks
from tests.training import same

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def homed(optimizer: Any) -> bool:
    """Return whether all parts lie in the flat buffers, and FSDP and the parameters agree on them."""
    spans = [(flat.data_ptr(), flat.data_ptr() + flat.nbytes) for flat in optimizer.buckets.flats]
    parts = [param._local_tensor for group in optimizer.param_groups for param in group["params"]]
    inside = all(any(low <= part.data_ptr() < high for low, high in spans) for part in parts if part.numel())
    return inside and not optimizer.buckets.moved()


# The same numbers as torch.optim's fused AdamW under fully_shard


def _beside_torch(rank: int, mesh: DeviceMesh, late: bool, **options: Any) -> dict[str, Any]:
    """Train with torch.optim and with ours. ``late``: the optimizer is built after the first forward pass."""
    runs = []
    for make, settings in ((torch.optim.AdamW, {"fused": True}), (hk.FusedAdamW, {"max_grad_norm": 0.5})):
        module = shard(network(), mesh, **options)
        if late:
            backward(module, rank, 0)
            module.zero_grad()
        optimizer = make(module.parameters(), lr=0.05, weight_decay=0.1, **settings)
        losses = train(module, optimizer, rank, range(4), clip=0.5 if make is torch.optim.AdamW else None)
        runs.append((torch.tensor(losses), *numbers(module, optimizer)))
    placed = [value.placements for entry in optimizer.state.values() for value in entry.values() if value.dim()]
    expected = [param.placements for param in module.parameters() for _ in range(2)]
    return {"runs": runs, "homed": homed(optimizer), "placed": placed == expected}


# Every rule equals the plain optimizer on the same gradients, bit for bit


def _twins(rank: int, mesh: DeviceMesh, rule: str, dtype: torch.dtype, **options: Any) -> bool:
    make, settings = FUSED[rule]
    module, plain = shard(network(dtype), mesh), network(dtype)
    pair = [make(each.parameters(), **settings, **options) for each in (module, plain)]
    for step in range(3):
        for optimizer in pair:
            optimizer.zero_grad()
        backward(module, rank, step)
        for own, param in zip(module.parameters(), plain.parameters(), strict=True):
            grad = whole(own.grad)
            param.grad = grad if param.grad is None else param.grad.copy_(grad)
        for optimizer in pair:
            optimizer.step()
    return homed(pair[0]) and same(*(numbers(each, own) for each, own in zip((module, plain), pair, strict=True)))


# Norms over several meshes, and parameters that are not distributed


def _all_reduced(call: Callable[[], Any]) -> list[tuple[int, int]]:
    """Return the address and the bytes of every tensor that is all-reduced during ``call``."""
    noted: list[tuple[int, int]] = []
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **keywords: Any) -> Any:
        noted.append((tensor.data_ptr(), tensor.nbytes))
        return original(tensor, *args, **keywords)

    dist.all_reduce = all_reduce
    try:
        call()
    finally:
        dist.all_reduce = original
    return noted


def _mixed(rank: int, mesh: dict[str, DeviceMesh]) -> dict[str, Any]:
    torch.manual_seed(1)
    values = [torch.randn(shape) for shape in ((5, 3), (3, 4), (6,), (2, 2), (8, 4))]
    placements: list[Any] = [
        (mesh["fsdp"], [Shard(0)]),
        (mesh["hsdp"], [Replicate(), Shard(0)]),
        (mesh["fsdp"], [Replicate()]),
        None,
        (mesh["hsdp"], [Shard(1), Shard(0)]),
    ]
    params = [nn.Parameter(v.clone() if at is None else distribute_tensor(v, *at)) for v, at in zip(values, placements, strict=True)]  # fmt: skip  # noqa: E501
    plain = [nn.Parameter(value.clone()) for value in values]
    optimizer = hk.FusedAdamW(params, lr=0.1, max_grad_norm=0.1)
    reference = hk.FusedAdamW(plain, lr=0.1, max_grad_norm=0.1)
    for param, twin, at in zip(params, plain, placements, strict=True):
        twin.grad = torch.randn(twin.shape)
        param.grad = twin.grad.clone() if at is None else distribute_tensor(twin.grad, *at)
    # A gradient that is divided in another way than its parameter, as tensor parallelism leaves it.
    params[2].grad = distribute_tensor(plain[2].grad, mesh["fsdp"], [Shard(0)])
    # One for [Shard(0)] of one mesh, one for the shard dimension of the other, two for what is divided along both.
    collectives = len(_all_reduced(optimizer.step))
    reference.step()
    unequal = [(whole(a) - b).abs().max().item() for a, b in zip(params, plain, strict=True)]
    return {"collectives": collectives, "unequal": max(unequal), "flats": len(optimizer.buckets.flats)}


# A scaler, moved and converted models, accumulation


def _scaled(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    module = shard(network(), mesh)
    optimizer = hk.FusedAdamW(module.parameters(), lr=0.05, max_grad_norm=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found: dict[str, Any] = {}
    for step, broken in enumerate((False, True)):
        before = numbers(module, optimizer)
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randint(11, (8,), generator=generator)
        scaler.scale(module(inputs).square().mean()).backward()
        if broken and rank == 0:  # in the part of one process only
            module[0].weight.grad._local_tensor[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        found[str(broken)] = (same(before, numbers(module, optimizer)), scaler.get_scale())
    return found


def _changed(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Convert before the first step, move and load between steps, accumulate, and add a group."""
    module = shard(network(), mesh)
    optimizer = hk.FusedAdamW(module[1].parameters(), lr=0.05)
    module.double()
    train(module, optimizer, rank, range(1))
    optimizer.add_param_group({"params": [*module[0].parameters(), *module[2].parameters(), *module[4].parameters()]})
    twin = shard(network(torch.float64), mesh)
    other = torch.optim.AdamW(twin[1].parameters(), lr=0.05)
    train(twin, other, rank, range(1))
    other.add_param_group({"params": [*twin[0].parameters(), *twin[2].parameters(), *twin[4].parameters()]})
    found = {"dtype": optimizer.buckets.flats[0].dtype}
    module._apply(torch.clone)  # as a move to another device and back: FSDP gets other memory
    found["moved"] = bool(optimizer.buckets.moved())
    module.load_state_dict({name: value.clone() for name, value in twin.state_dict().items()})
    for each, own in ((module, optimizer), (twin, other)):
        for step in range(1, 3):
            own.zero_grad()
            backward(each, rank, step)
            backward(each, rank, step + 10)  # accumulated
            own.step()
    found["losses"] = [backward(each, rank, 5) for each in (module, twin)]
    found["homed"] = homed(optimizer)
    loss = module(torch.arange(8)).sum()
    version = next(module.parameters())._version
    loss.backward()
    optimizer.step()
    found["versions"] = next(module.parameters())._version > version
    return found


# Replicas that are averaged


def _averaged_codes(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Train two replicas with state in 8 bits and gradients of their own to a sync."""
    module = shard(network(), mesh["shard"])
    optimizer = hk.FusedAdamW(module.parameters(), lr=0.05, state_dtype="int8")
    scheduler = hk.HDETOneCycleLR(
        optimizer, 0.05, 8, ensemble=hk.ProcessEnsemble(mesh), sync_every=2, gradients="local", auto_lr=False
    )
    for step in range(2):
        optimizer.zero_grad()
        backward(module, rank, step)
        optimizer.step()
        before = torch.cat(list(optimizer.state_flats().values()))
        scheduler.step()
    both = [torch.empty_like(before) for _ in range(4)]
    dist.all_gather(both, before)
    mean = (both[rank % 2] + both[rank % 2 + 2]) / 2
    after = torch.cat(list(optimizer.state_flats().values()))
    dist.all_gather(both, after)
    return {"same": torch.equal(both[rank % 2], both[rank % 2 + 2]), "mean": mean, "after": after, "before": before}


def _averaged(rank: int, mesh: DeviceMesh, gradients: str) -> dict[str, Any]:
    """Train two replicas of two processes to a sync, and note what is averaged there."""
    module = shard(network(), mesh if gradients == "shared" else mesh["shard"])
    optimizer = hk.FusedAdamW(module.parameters(), lr=0.05, max_grad_norm=0.5)
    settings = {"sync_every": 2, "gradients": gradients, "auto_lr": False}
    scheduler = hk.HDETOneCycleLR(optimizer, 0.05, 8, ensemble=hk.ProcessEnsemble(mesh), **settings)
    calls: list[tuple[int, int]] = []
    inputs = torch.arange(8)
    for step in range(2):
        optimizer.zero_grad()
        for micro_batch in (step, step + 10):  # accumulated
            scheduler.record_loss(backward(module, rank, micro_batch))
        optimizer.step()
        before = [flat.clone() for flat in optimizer.buckets.flats]
        with torch.no_grad():
            module(inputs)  # an evaluation, as of a probe, leaves parameters gathered that are about to be averaged
        calls = _all_reduced(scheduler.step)
    (flat,) = optimizer.buckets.flats
    others = [torch.empty_like(flat) for _ in range(4)]
    dist.all_gather(others, before[0])
    mean = (others[rank % 2] + others[rank % 2 + 2]) / 2
    averaged = flat.clone()

    def gathers() -> bool:
        """Return whether a forward pass is that of the whole parameters as they are in the shards."""
        plain = network()
        values = [module(inputs), *map(whole, optimizer.param_groups[0]["params"])]
        for param, value in zip(plain.parameters(), values[1:], strict=True):
            param.data = value
        return torch.equal(values[0], plain(inputs))

    gathered = [gathers()]
    optimizer.zero_grad()
    backward(module, rank, 2)
    optimizer.step()
    own = flat.clone()
    with scheduler.consensus():
        gathered.append(gathers())
        consensus = not torch.equal(flat, own)
    gathered.append(gathers())
    return {
        "bytes": [nbytes / flat.nbytes for _, nbytes in calls],
        "mean": torch.equal(averaged, mean),
        "moved": not torch.equal(averaged, before[0]),
        "consensus": consensus and torch.equal(flat, own),
        "gathered": gathered,
    }


QUICK_TWINS = (("adam-amsgrad", torch.bfloat16, "fixed"), ("lion", torch.float32, "autograd"))
TWINS = [
    (rule, dtype, gradients)
    for rule in FUSED
    for dtype in (torch.float32, torch.bfloat16)
    for gradients in ("autograd", "fixed")
    if (rule, dtype, gradients) not in QUICK_TWINS
]


def _quick(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    mesh = meshes()
    return {
        "hsdp": _beside_torch(rank, mesh["hsdp"], late=False),
        "fsdp": _beside_torch(rank, mesh["fsdp"], late=True, mp_policy=MIXED, reshard_after_forward=False),
        "twins": [_twins(rank, mesh["fsdp"], rule, dtype, gradients=kept) for rule, dtype, kept in QUICK_TWINS],
        "mixed": _mixed(rank, mesh),
        "scaled": _scaled(rank, mesh["fsdp"]),
        "changed": _changed(rank, mesh["fsdp"]),
        "averaged codes": _averaged_codes(rank, mesh["hsdp"]),
        "averaged": {gradients: _averaged(rank, mesh["hsdp"], gradients) for gradients in ("shared", "local")},
    }


@pytest.fixture(scope="module")
def quick() -> list[dict[str, Any]]:
    return run_ranks(4, _quick)


@pytest.mark.parametrize("case", ["hsdp", "fsdp"])
def test_training_equals_torchs_fused_adamw_with_clipping(quick: Any, case: str) -> None:
    for found in quick:
        expected, got = found[case]["runs"]
        for a, b in zip(expected, got, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
        assert found[case]["homed"]
        assert found[case]["placed"], "the state is divided like its parameters"


def test_a_rule_equals_the_plain_optimizer_bit_for_bit(quick: Any) -> None:
    assert all(all(found["twins"]) for found in quick)


def test_the_norm_of_several_meshes_takes_a_collective_for_each_and_counts_replicas_once(quick: Any) -> None:
    for found in quick:
        assert found["mixed"]["unequal"] < 1e-6
        assert found["mixed"]["collectives"] == 4
        assert found["mixed"]["flats"] == 5


def test_a_scaler_skips_the_step_on_all_processes_if_one_overflows(quick: Any) -> None:
    for found in quick:
        assert found["scaled"] == {"False": (False, 1024.0), "True": (True, 512.0)}


def test_models_that_are_converted_moved_and_loaded_train_on(quick: Any) -> None:
    for found in quick:
        changed = found["changed"]
        assert changed["dtype"] == torch.float64
        assert [changed[name] for name in ("moved", "homed", "versions")] == [True] * 3
        assert changed["losses"][0] == pytest.approx(changed["losses"][1], rel=1e-9)


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_replicas_are_averaged_in_their_flat_buffers(quick: Any, gradients: str) -> None:
    for found in quick:
        averaged = found["averaged"][gradients]
        assert averaged["bytes"] == ([1] if gradients == "shared" else [1, 2]), "the whole, and both moments"
        assert [averaged[name] for name in ("mean", "moved", "consensus")] == [True] * 3


def test_codes_of_replicas_are_averaged_as_numbers(quick: Any) -> None:
    for found in (each["averaged codes"] for each in quick):
        assert found["same"], "on both replicas"
        # Rounded to nearest: half of the widest distance of levels is less than a hundredth of the largest number.
        assert (found["after"] - found["mean"]).abs().max() <= 0.01 * found["mean"].abs().max()
        assert not torch.equal(found["after"], found["before"])


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_fsdp_gathers_what_an_average_wrote(quick: Any, gradients: str) -> None:
    for found in quick:
        assert found["averaged"][gradients]["gathered"] == [True, True, True], "after a sync, in consensus, after it"


def _two_dimensional(rank: int, mesh: DeviceMesh) -> list[Any]:
    """Shard a model that is tensor parallel already, along the other dimension of the mesh."""
    runs = []
    for make, settings in ((torch.optim.AdamW, {}), (hk.FusedAdamW, {"max_grad_norm": 0.5})):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        fully_shard(parallelize_module(module, mesh["shard"], plan), mesh=mesh["replicate"])
        optimizer = make(module.parameters(), lr=0.05, **settings)
        losses = []
        for step in range(4):
            optimizer.zero_grad()
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step + 100 * (rank // 2)))
            loss = module(inputs).square().mean()
            loss.backward()
            if make is torch.optim.AdamW:
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        runs.append((torch.tensor(losses), *numbers(module, optimizer)))
    return runs


def _full(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    mesh = meshes()
    rules = {}
    for rule, (theirs, _, options) in PAIRS.items():
        module, twin = shard(network(), mesh["hsdp"]), shard(network(), mesh["hsdp"])
        make = FUSED[rule][0]
        pair = [(module, make(module.parameters(), **options)), (twin, theirs(twin.parameters(), **options))]
        rules[rule] = [(torch.tensor(train(each, own, rank, range(4))), *numbers(each, own)) for each, own in pair]
    return {
        "twins": {case: _twins(rank, mesh["fsdp"], *case[:2], gradients=case[2]) for case in TWINS},
        "rules": rules,
        "late": _beside_torch(rank, mesh["hsdp"], late=True, reshard_after_forward=False),
        "mixed": _beside_torch(rank, mesh["hsdp"], late=False, mp_policy=MIXED),
        "again": _beside_torch(rank, mesh["fsdp"], late=False, reshard_after_forward=2),
        "two-dimensional": {"runs": _two_dimensional(rank, mesh["hsdp"])},
    }


@pytest.mark.full
def test_every_rule_precision_and_kind_of_gradients() -> None:
    for found in run_ranks(4, _full):
        assert all(found["twins"].values()), found["twins"]
        cases = [found[case]["runs"] for case in ("late", "mixed", "again", "two-dimensional")]
        for expected, got in (*found["rules"].values(), *cases):
            for a, b in zip(expected, got, strict=True):
                torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
