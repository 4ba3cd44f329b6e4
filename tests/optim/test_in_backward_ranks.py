"""Steps in the backward pass of several processes: after DDP's all-reduce, on FSDP2's shards, between replicas."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hdet_kernels as hk
from hdet_kernels.optim import InBackward
from tests.optim.sharded_net import whole
from tests.ranks import Group, run_ranks

#: Bytes of a part, and of a bucket of DDP.
SMALL, BUCKET = 1500, 0.02
WIDTH, LAYERS = 40, 6


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(dtype)


def wrapped(kind: str, dtype: torch.dtype) -> nn.Module:
    """Return the network as it is, in DDP, or sharded: by layers, over all processes or over half of them."""
    module = network(dtype)
    if kind.startswith("ddp"):
        return DistributedDataParallel(
            module,
            bucket_cap_mb=BUCKET,
            gradient_as_bucket_view=kind == "ddp-view",
            find_unused_parameters=kind == "ddp-unused",
        )
    if kind != "replicas":
        shape = (dist.get_world_size(),) if kind != "hsdp" else (2, dist.get_world_size() // 2)
        names = ("replicate", "shard")[-len(shape) :]
        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
        if kind == "fsdp-mixed":
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for part in (*module, module):
            fully_shard(part, **options)
    return module


def micro_batch(module: Any, kind: str, last: bool, seed: int) -> None:
    """Make a backward pass as the loop of a user makes it that accumulates."""
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).to(next(module.parameters()).dtype)
    with module.no_sync() if kind.startswith("ddp") and not last else contextlib.nullcontext():
        if kind.startswith(("fsdp", "hsdp")):
            module.set_requires_gradient_sync(last)
        (module(inputs) - inputs).float().square().mean().backward()


def train(
    rank: int, kind: str, dtype: torch.dtype, make: Callable[..., Any], micro: int, early: bool, **options: Any
) -> tuple[list[Tensor], list[int]]:
    """Return parameters and state, and how many parameters every backward pass stepped."""
    module = wrapped(kind, dtype)
    model = module if kind.startswith("ddp") else None
    clip: Any = "previous" if early and "max_grad_norm" in options else None
    settings = InBackward(clip, model, SMALL) if early else False
    optimizer = make(module.parameters(), lr=0.01, in_backward=settings, **options)
    stepped = []
    for step in range(4):
        for number in range(micro):
            micro_batch(module, kind, number == micro - 1, 1000 * rank + 10 * step + number)
        stepped.append(optimizer._early.stepped if early else 0)
        optimizer.step()
        optimizer.zero_grad()
    states = [optimizer.state[param] for param in module.parameters()]
    entries = [entry[name] for entry in states for name in sorted(entry)]
    return [whole(tensor) for tensor in (*module.parameters(), *entries)], stepped


def _both(rank: int, kind: str, dtype: torch.dtype, rule: str, micro: int, options: dict[str, Any]) -> Any:
    make = getattr(hk, rule)
    (plain, _), (early, stepped) = (train(rank, kind, dtype, make, micro, each, **options) for each in (False, True))
    return all(map(torch.equal, plain, early)), stepped


KINDS = ("replicas", "ddp", "ddp-view", "fsdp", "fsdp-mixed", "hsdp")
ALL_PRECISIONS = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "bf16-int8": (torch.bfloat16, {"stochastic_rounding": True, "state_dtype": "int8"}),
}


def _table(rank: int, kinds: tuple[str, ...], precisions: tuple[str, ...], rules: tuple[str, ...]) -> Any:
    found = {}
    for kind in kinds:
        for precision in precisions:
            for rule in rules if not kind.startswith(("fsdp", "hsdp")) else rules[:1]:  # Muon is for whole matrices
                for micro in (1, 3) if kind != "replicas" else (1,):
                    found[kind, precision, rule, micro] = _both(rank, kind, *_given(precision, rule, micro))
    return found


def _given(precision: str, rule: str, micro: int) -> tuple[torch.dtype, str, int, dict[str, Any]]:
    dtype, options = ALL_PRECISIONS[precision]
    return dtype, rule, micro, options


def check(found: dict[tuple[Any, ...], tuple[bool, list[int]]]) -> None:
    for case, (equal, stepped) in found.items():
        assert equal, case
        assert min(stepped[1:]) >= LAYERS - 1, (case, stepped)
        # In the first step of float32 a GradScaler may change gradients, and an average over replicas that are alone;
        # DDP keeps all gradients anyway.
        held = case[1] == "fp32" or case[0] == "replicas" or case[0].startswith("ddp")
        assert (stepped[0] == 0) == held, (case, stepped)


@pytest.mark.full
def test_wrapped_models_have_the_bits_of_step() -> None:
    for found in run_ranks(2, _table, ("replicas", "ddp", "fsdp"), ("fp32", "bf16-int8"), ("FusedAdamW",)):
        check(found)


@pytest.mark.full
def test_every_wrapper_precision_and_kind_of_accumulation() -> None:
    for found in run_ranks(4, _table, KINDS, ("bf16", "bf16-int8"), ("FusedLion", "FusedMuon")):
        check(found)


def _clipped(rank: int, kind: str) -> list[Tensor]:
    """Return the parameters, clipped by the norm before; and those of torch, scaled by hand by that norm."""
    early, _ = train(rank, kind, torch.float32, hk.FusedSGD, 1, True, max_grad_norm=0.01)
    module = wrapped(kind, torch.float32)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    norm = None
    for step in range(4):
        micro_batch(module, kind, True, 1000 * rank + 10 * step)
        own = nn.utils.get_total_norm([param.grad for param in module.parameters() if param.grad is not None])
        own = whole(own)
        if norm is not None:
            nn.utils.clip_grads_with_norm_(module.parameters(), 0.01, norm)
        norm = own
        optimizer.step()
        optimizer.zero_grad()
    return [*early, *(whole(param) for param in module.parameters())]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_norm_of_the_step_before_is_that_of_the_whole_gradient(kind: str) -> None:
    for found in run_ranks(2, _clipped, kind):
        half = len(found) // 2
        for mine, other in zip(found[:half], found[half:], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def _undeclared(rank: int, kind: str) -> tuple[str, bool]:
    """Return the error of an optimizer that does not know of DDP, and whether the parameters are as before."""
    module = wrapped(kind, torch.bfloat16)
    optimizer = hk.FusedAdamW(module.parameters(), in_backward=True)
    before = [param.detach().clone() for param in module.parameters()]
    micro_batch(module, kind, True, rank)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error), all(map(torch.equal, before, module.parameters()))
    return "", False


@pytest.mark.parametrize("kind", ["ddp", "ddp-view"])
def test_ddp_that_the_optimizer_does_not_know_of_raises_before_anything_is_modified(kind: str) -> None:
    for message, untouched in run_ranks(2, _undeclared, kind):
        assert "InBackward(model=model)" in message
        assert untouched


def _twice(rank: int) -> str:
    module: Any = wrapped("ddp", torch.bfloat16)
    optimizer = hk.FusedAdamW(module.parameters(), in_backward=InBackward(model=module))
    micro_batch(module, "ddp", True, rank)
    try:
        micro_batch(module, "ddp", True, rank)
    except RuntimeError as error:
        return str(error)
    finally:
        optimizer.zero_grad()
    return ""


def test_a_second_backward_pass_under_ddp_says_what_to_write() -> None:
    for message in run_ranks(2, _twice):
        assert "accumulate()" in message


def _unused(rank: int) -> tuple[bool, list[int], list[str]]:
    """DDP tells only at the end which parameters no process has used: ``step()`` takes all of them."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hdet_kernels").addHandler(handler)
    return *_both(rank, "ddp-unused", torch.bfloat16, "FusedAdamW", 1, {}), messages


def test_with_unused_parameters_step_does_what_it_always_does_and_says_so_once() -> None:
    for equal, stepped, messages in run_ranks(2, _unused):
        assert equal
        assert stepped == [0, 0, 0, 0]
        assert ["find_unused_parameters" in message for message in messages] == [True]


def _second_hook(rank: int) -> str:
    module = wrapped("ddp", torch.float32)
    module.register_comm_hook(None, default_hooks.allreduce_hook)  # type: ignore[operator]
    try:
        hk.FusedAdamW(module.parameters(), in_backward=InBackward(model=module))  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    return ""


def test_a_hook_of_the_user_is_not_replaced() -> None:
    for message in run_ranks(2, _second_hook):
        assert "register_comm_hook" in message


def _scheduled(rank: int, kind: str, max_lr: float | None, steps: int) -> Any:
    """Return parameters and history of HDET's replicas under DDP and alone, and how much was stepped early."""
    runs = []
    for early in (False, True):
        module = wrapped(kind, torch.float32)
        model: Any = module if kind == "ddp" else None
        settings = InBackward(model=model, chunk_bytes=SMALL) if early else False
        optimizer = hk.FusedAdamW(module.parameters(), lr=0.01, in_backward=settings)
        scheduler = hk.HDETOneCycleLR(optimizer, max_lr, steps, sync_every=2, model=model)
        runs.append(_run(rank, module, optimizer, scheduler, steps))
    return runs


def _run(rank: int, module: nn.Module, optimizer: Any, scheduler: Any, steps: int) -> tuple[list[Tensor], Any, int]:
    """Return parameters and history after some steps, and how many parameters were stepped early in them."""
    stepped = 0
    for step in range(steps):
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))
        inputs = inputs.to(next(module.parameters()).dtype)
        loss = (module(inputs) - inputs).float().square().mean()
        loss.backward()
        stepped += optimizer._early.stepped if optimizer.steps_in_backward else 0
        optimizer.step()
        scheduler.step(loss)
        optimizer.zero_grad()
    history = [(record.step, record.losses, record.base, record.gradients) for record in scheduler.history]
    return [param.detach().clone() for param in module.parameters()], history, stepped


@pytest.mark.parametrize("kind", ["ddp", "replicas"])
def test_replicas_under_a_scheduler_train_alike(kind: str) -> None:
    """The scheduler finds out whether gradients are shared, though it sees them in parts."""
    for (plain, history, _), (early, same, stepped) in run_ranks(2, _scheduled, kind, 0.01, 30):
        assert all(map(torch.equal, plain, early))
        assert repr(same) == repr(history)
        assert {record[-1] for record in same[1:]} == {"shared" if kind == "ddp" else "local"}
        assert stepped > 20 * LAYERS


@pytest.mark.full
def test_a_learning_rate_is_found_alike() -> None:
    """While one is looked for, replicas train on their own gradients, which DDP's hook does not see, and in teams."""
    for (plain, history, _), (early, same, stepped) in run_ranks(2, _scheduled, "ddp", None, 400):
        assert all(map(torch.equal, plain, early))
        assert repr(same) == repr(history)
        assert {"teams", "shared"} <= {record[-1] for record in same}
        assert stepped > 100 * LAYERS


# A process group that comes after optimizer and scheduler

#: Whether the replicas are in DDP, and whether the optimizer is told of it: by a trainer, because it was built before.
LATE = {"replicas": (False, False), "told of DDP": (True, True), "not told of DDP": (True, False)}


def _late_runs(rank: int, folder: Path) -> Any:
    """Return by case what ``step()`` trains in a group that was there before, and ``in_backward`` in a late one."""
    group, found = Group(rank, folder), {}
    group.end()
    for case, (ddp, told) in LATE.items():
        for dtype in (torch.float32, torch.bfloat16):
            found[case, dtype] = [_late_run(group, ddp, told, dtype, late) for late in (False, True)]
    return found


def _late_run(group: Group, ddp: bool, told: bool, dtype: torch.dtype, late: bool) -> Any:
    if not late:
        group.begin()
    module = network(dtype)
    before = [param.detach().clone() for param in module.parameters()]
    optimizer = hk.FusedAdamW(module.parameters(), lr=0.01, in_backward=late and InBackward(chunk_bytes=SMALL))
    scheduler = hk.HDETOneCycleLR(optimizer, 0.01, 12, sync_every=2)
    if late:
        group.begin()
    model: nn.Module = DistributedDataParallel(module, bucket_cap_mb=BUCKET) if ddp else module
    if told:
        optimizer.follow_trainer(model=model)
    try:
        return _run(group.rank, model, optimizer, scheduler, 12)
    except RuntimeError as error:
        return str(error), all(map(torch.equal, before, module.parameters()))
    finally:
        # DDP lets go of the group first: see tests/schedule/test_late_ensemble.py.
        del model, optimizer, scheduler
        gc.collect()
        group.end()


@pytest.mark.full
def test_a_process_group_that_comes_after_optimizer_and_scheduler(tmp_path: Path) -> None:
    """It is taken as by ``step()``; DDP that nobody told the optimizer of raises, before anything is modified."""
    for found in run_ranks(2, _late_runs, tmp_path):
        for (case, dtype), (plain, early) in found.items():
            if case == "not told of DDP":
                assert len(early) == 2, "it raises"
                message, untouched = early
                assert "for DistributedDataParallel in_backward=InBackward(model=model)" in message, dtype
                assert untouched, dtype
                continue
            assert all(map(torch.equal, plain[0], early[0])), (case, dtype)
            assert repr(plain[1]) == repr(early[1]), (case, dtype)
            assert early[2] > 10 * LAYERS, (case, dtype)
            assert {record[-1] for record in early[1][1:]} == {"shared" if case == "told of DDP" else "local"}
