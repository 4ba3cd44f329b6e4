"""A stack of R replicas and R processes under DDP are the same run: on the same batches they take the same steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet_kernels as hk
from tests.ranks import run_ranks
from tests.training import batch, loss_of, network

REPLICAS = 4
STEPS = 40

#: Of parameters and losses in float64, after 40 steps that each sum in another order. An error of one rounding
#: (1e-16) may grow in every step; a wrong gradient, moment or learning rate shows in the second digit.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}

#: Torch's optimizer, for the processes, and ours, for the stack; their options, and the norm that gradients are cut to.
OPTIMIZERS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any], float | None]] = {
    "sgd": (torch.optim.SGD, hk.FusedSGD, {}, None),
    "sgd-momentum-decay": (torch.optim.SGD, hk.FusedSGD, {"momentum": 0.9, "weight_decay": 0.05}, None),
    "adam": (torch.optim.Adam, hk.FusedAdam, {}, None),
    "adam-decay": (torch.optim.Adam, hk.FusedAdam, {"weight_decay": 0.05}, None),
    "adamw": (torch.optim.AdamW, hk.FusedAdamW, {}, None),
    "adamw-clip": (torch.optim.AdamW, hk.FusedAdamW, {}, 0.05),
    "adagrad": (torch.optim.Adagrad, hk.FusedAdagrad, {}, None),
    "lion": (hk.FusedLion, hk.FusedLion, {}, None),
}


def groups_of(params: Any) -> list[dict[str, Any]]:
    """The weights and biases of two layers (and of a norm between) as two parameter groups."""
    params = list(params)
    return [{"params": params[:2]}, {"params": params[2:]}]


def schedule(optimizer: Any, **options: Any) -> hk.HDETOneCycleLR:
    """With the controller active at the syncs after steps 2, 4, … 12."""
    cycles = "momentum" in optimizer.defaults or "betas" in optimizer.defaults
    return hk.HDETOneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS, sync_every=2, cycle_momentum=cycles, **options)


def probed() -> list[Tensor]:
    """The examples of the probe."""
    return [part.double() for part in batch(0, 999)]


class Outcome:
    """What a run shows of one replica: its parameters and buffers after every step, and the history of its syncs."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []
        self.history: list[dict[str, Any]] = []

    def note(self, tensors: Any) -> None:
        self.steps.append(torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors]).clone())


def _process(rank: int, name: str, gradients: str, options: dict[str, Any]) -> Outcome:
    """One replica in a process of its own."""
    model = network(options.get("batch_norm", False)).double()
    ddp = DistributedDataParallel(model, broadcast_buffers=False) if gradients == "shared" else model
    make, _, arguments, clip = OPTIMIZERS[name]
    optimizer = make(groups_of(model.parameters()), lr=0.01, **arguments)
    probe = (lambda: loss_of(model, *probed())) if options.get("probe") else None
    auto_lr = options.get("auto_lr", True)
    scheduler = schedule(optimizer, gradients=gradients, model=model, auto_lr=auto_lr, probe=probe)
    outcome = Outcome()
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = loss_of(ddp, x.double(), y.double())
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step(loss)
        outcome.note([*model.parameters(), *model.buffers()])
    outcome.history = [record.to_dict() for record in scheduler.history]
    return outcome


def stacked(first: int, rows: int, name: str, gradients: str, options: dict[str, Any]) -> list[Outcome]:
    """Replicas ``first`` and on, ``rows`` of them, as a stack."""
    model = network(options.get("batch_norm", False)).double()
    stack = hk.ReplicaStack(model, replicas=rows, gradients=gradients)
    _, make, arguments, clip = OPTIMIZERS[name]
    optimizer = make(groups_of(stack.parameters()), lr=0.01, max_grad_norm=clip, **arguments)
    probe = (lambda: stack.losses(loss_of, *probed(), same_batch=True)) if options.get("probe") else None
    scheduler = schedule(optimizer, ensemble=stack.ensemble, auto_lr=options.get("auto_lr", True), probe=probe)
    outcomes = [Outcome() for _ in range(rows)]
    for step in range(STEPS):
        own = [batch(replica, step) for replica in range(first, first + rows)]
        x, y = (torch.cat(parts).double() for parts in zip(*own, strict=True))
        optimizer.zero_grad()
        losses = stack.backward(loss_of, x, y)
        optimizer.step()
        scheduler.step(losses)
        for row, outcome in enumerate(outcomes):
            outcome.note(tensor[row] for tensor in (*stack.parameters(), *stack.buffers()))
    for outcome in outcomes:
        outcome.history = [record.to_dict() for record in scheduler.history]
    return outcomes


def _stacked_process(rank: int, rows: int, *args: Any) -> list[Outcome]:
    return stacked(rank * rows, rows, *args)


def check_same(stack: list[Outcome], processes: list[Outcome]) -> None:
    for replica, (mine, theirs) in enumerate(zip(stack, processes, strict=True)):
        for step, (a, b) in enumerate(zip(mine.steps, theirs.steps, strict=True), start=1):
            torch.testing.assert_close(a, b, **CLOSE, msg=lambda m, at=(replica, step): f"replica, step {at}: {m}")
        assert len(mine.history) == len(theirs.history)
        for a, b in zip(mine.history, theirs.history, strict=True):
            assert {key: a[key] for key in ("step", "cycle", "kind", "excluded", "gradients")} == {
                key: b[key] for key in ("step", "cycle", "kind", "excluded", "gradients")
            }
            assert a["losses"] == pytest.approx(b["losses"], rel=1e-9)
            assert a["base"] == pytest.approx(b["base"], rel=1e-9)
            for key in a["values"]:
                assert a["values"][key] == pytest.approx(b["values"][key], rel=1e-9)


def check_spread(outcomes: list[Outcome]) -> None:
    """That there was something to compare: replicas apart between syncs and together after them."""
    apart = [torch.equal(a, b) for a, b in zip(outcomes[0].steps, outcomes[1].steps, strict=True)]
    assert apart[0] is apart[2] is False
    close = torch.stack([outcome.steps[1] for outcome in outcomes])
    torch.testing.assert_close(close, close[:1].expand_as(close), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "gradients"),
    [
        *((name, "shared") for name in OPTIMIZERS),
        *((name, "local") for name in ("sgd-momentum-decay", "adamw", "adamw-clip")),  # a step of each row by itself
    ],
)
def test_a_stack_is_the_processes(name: str, gradients: str) -> None:
    processes = run_ranks(REPLICAS, _process, name, gradients, {})
    check_spread(processes)
    check_same(stacked(0, REPLICAS, name, gradients, {}), processes)


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_with_a_probe(gradients: str) -> None:
    """There are early syncs and, with shared gradients, replicas that depart in one group each."""
    processes = run_ranks(REPLICAS, _process, "adamw", gradients, {"probe": True})
    check_same(stacked(0, REPLICAS, "adamw", gradients, {"probe": True}), processes)
    first = processes[0].history[0]
    departing = sum(np.array(values) != first["base"][name] for name, values in first["values"].items())
    assert sorted(departing.tolist()) == ([0, 0, 1, 1] if gradients == "shared" else [2, 2, 2, 2])


def test_the_controller_moved_the_base() -> None:
    on = stacked(0, REPLICAS, "adamw", "shared", {"probe": True})[0].history
    off = {
        sync["step"]: sync["base"] for sync in stacked(0, REPLICAS, "adamw", "shared", {"auto_lr": False})[0].history
    }
    both = [(sync["base"], off[sync["step"]]) for sync in on if sync["step"] in off]
    for name in on[0]["base"]:
        assert max(abs(moved[name] / scheduled[name] - 1) for moved, scheduled in both) > 0.05


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_batch_norm_statistics_are_each_replicas_own(gradients: str) -> None:
    """Not with Adam: the bias before a norm has a gradient of zero, of which Adam would make steps out of roundings."""
    name, options = "sgd-momentum-decay", {"batch_norm": True}
    check_same(stacked(0, REPLICAS, name, gradients, options), run_ranks(REPLICAS, _process, name, gradients, options))


def test_the_hypergradient_controller() -> None:
    options = {"auto_lr": hk.HypergradientController()}
    check_same(
        stacked(0, REPLICAS, "adamw", "shared", options), run_ranks(REPLICAS, _process, "adamw", "shared", options)
    )


@pytest.mark.parametrize("gradients", ["shared", "local"])
@pytest.mark.parametrize("name", ["adamw-clip", "adam-decay"])
def test_rows_in_several_processes_are_one_ensemble(name: str, gradients: str) -> None:
    """Two processes of two rows, and one of four."""
    both = run_ranks(2, _stacked_process, 2, name, gradients, {})
    check_same([outcome for rows in both for outcome in rows], stacked(0, REPLICAS, name, gradients, {}))


def _syncs_of_rows(rank: int) -> list[tuple[int, int]]:
    stack = hk.ReplicaStack(network(), replicas=2)
    optimizer = hk.FusedAdamW(stack.parameters(), lr=0.01)
    scheduler = schedule(optimizer, ensemble=stack.ensemble)
    for step in range(4):
        own = [batch(2 * rank + row, step) for row in range(2)]
        losses = stack.backward(loss_of, *(torch.cat(parts) for parts in zip(*own, strict=True)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(losses)
    return [(record.collectives, len(record.losses)) for record in scheduler.history]


def test_rows_in_several_processes_are_averaged_by_one_collective() -> None:
    for syncs in run_ranks(2, _syncs_of_rows):
        assert syncs == [(2, 4)] * 2, "the control rows, and one bucket with the mean of the rows"


def _accumulated(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of three batches, with every one averaged, and with all averaged at the end."""
    found = []
    for waits in (False, True):
        stack = hk.ReplicaStack(network().double(), replicas=2)
        for step in range(3):
            own = [batch(2 * rank + row, step) for row in range(2)]
            parts = [torch.cat(part).double() for part in zip(*own, strict=True)]
            with stack.no_sync() if waits and step < 2 else contextlib.nullcontext():
                stack.backward(loss_of, *parts)
            if waits and step == 0:
                alone = [param.grad[0].clone() for param in stack.parameters()]
        found.append([param.grad[0].clone() for param in stack.parameters()])
    assert any(not torch.equal(a, b) for a, b in zip(alone, found[0], strict=True))
    return found[0], found[1]


def test_gradients_that_are_accumulated_can_be_averaged_once() -> None:
    results = run_ranks(2, _accumulated)
    for every, once in results:
        for a, b in zip(every, once, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(a, b)


def _survivor(rank: int) -> tuple[str, bool]:
    """What the last rank sees when the other dies before a gradient is averaged, and whether it still has its own."""
    stack = hk.ReplicaStack(network().double(), replicas=2)
    parts = [torch.cat([part, part]).double() for part in batch(rank, 0)]
    with stack.no_sync():
        stack.backward(loss_of, *parts)
    before = [(param.detach().clone(), param.grad[0].clone()) for param in stack.parameters()]
    if rank == 0:
        os._exit(0)
    try:
        stack.backward(loss_of, *parts)
    except RuntimeError as error:
        kept = zip(stack.parameters(), before, strict=True)
        return str(error), all(torch.equal(p, own) and torch.equal(p.grad[0], grad) for p, (own, grad) in kept)
    return "nothing", False


def test_a_process_that_dies_leaves_parameters_and_gradients_of_the_others() -> None:
    message, kept = run_ranks(2, _survivor, expect_dead=1)[1]
    assert message != "nothing"
    assert kept
