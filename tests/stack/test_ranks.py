"""A stack of R replicas and R processes under DDP take the same steps on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet_kernels as hk
from tests.ranks import Cases, run_ranks
from tests.training import batch, loss_of, network

REPLICAS = 4
STEPS = 20

# For parameters and losses in float64, after 20 steps that each sum in another order. An error of one rounding (1e-16)
# may grow in every step; a wrong gradient, moment or learning rate shows in the second digit.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}

# For each name: the optimizer of the processes, that of the stack, their options, and the norm for gradient clipping.
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
    """Return two parameter groups: the first layer, and everything after it."""
    params = list(params)
    return [{"params": params[:2]}, {"params": params[2:]}]


def schedule(optimizer: Any, **options: Any) -> hk.HDETOneCycleLR:
    """Return a scheduler whose controller acts at the syncs after steps 2, 4 and 6."""
    cycles = "momentum" in optimizer.defaults or "betas" in optimizer.defaults
    options |= {"sync_every": 2, "cycle_momentum": cycles, "tie_groups": False}
    return hk.HDETOneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS, **options)


def probe_batch() -> list[Tensor]:
    """Return the batch of the probe."""
    return [part.double() for part in batch(0, 999)]


class Outcome:
    """The parameters and buffers of one replica after every step, and the history of its syncs."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []
        self.history: list[dict[str, Any]] = []

    def record(self, tensors: Any) -> None:
        self.steps.append(torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors]).clone())


def _train_process(rank: int, name: str, gradients: str, options: dict[str, Any]) -> Outcome:
    """Train one replica in a process of its own."""
    model = network(options.get("batch_norm", False)).double()
    ddp = DistributedDataParallel(model, broadcast_buffers=False) if gradients == "shared" else model
    make, _, arguments, clip = OPTIMIZERS[name]
    optimizer = make(groups_of(model.parameters()), lr=0.01, **arguments)
    probe = (lambda: loss_of(model, *probe_batch())) if options.get("probe") else None
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
        outcome.record([*model.parameters(), *model.buffers()])
    outcome.history = [record.to_dict() for record in scheduler.history]
    return outcome


def train_stack(first: int, rows: int, name: str, gradients: str, options: dict[str, Any]) -> list[Outcome]:
    """Train ``rows`` replicas, from number ``first`` on, as a stack."""
    model = network(options.get("batch_norm", False)).double()
    stack = hk.ReplicaStack(model, replicas=rows, gradients=gradients)
    _, make, arguments, clip = OPTIMIZERS[name]
    optimizer = make(groups_of(stack.parameters()), lr=0.01, max_grad_norm=clip, **arguments)
    probe = (lambda: stack.losses(loss_of, *probe_batch(), same_batch=True)) if options.get("probe") else None
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
            outcome.record(tensor[row] for tensor in (*stack.parameters(), *stack.buffers()))
    for outcome in outcomes:
        outcome.history = [record.to_dict() for record in scheduler.history]
    return outcomes


def _train_rows(rank: int, rows: int, *args: Any) -> list[Outcome]:
    return train_stack(rank * rows, rows, *args)


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
    """Check that replicas differ between syncs and agree after them, so that the comparison means something."""
    apart = [torch.equal(a, b) for a, b in zip(outcomes[0].steps, outcomes[1].steps, strict=True)]
    assert apart[0] is apart[2] is False
    close = torch.stack([outcome.steps[1] for outcome in outcomes])
    torch.testing.assert_close(close, close[:1].expand_as(close), rtol=1e-12, atol=1e-14)


#: With local gradients each row takes a step by itself.
QUICK = [("adamw-clip", "shared"), ("sgd-momentum-decay", "local")]
MORE = [*((name, "shared") for name in OPTIMIZERS if name != "adamw-clip"), ("adamw", "local"), ("adamw-clip", "local")]
PROCESSES = Cases(REPLICAS, _train_process, {case: (*case, {}) for case in QUICK}, {case: (*case, {}) for case in MORE})


@pytest.mark.parametrize(("name", "gradients"), PROCESSES.params())
def test_a_stack_takes_the_steps_of_separate_processes(name: str, gradients: str) -> None:
    processes = PROCESSES[name, gradients]
    check_spread(processes)
    check_same(train_stack(0, REPLICAS, name, gradients, {}), processes)


@pytest.mark.parametrize(
    ("name", "gradients", "options", "replicas"),
    [
        ("adamw", "shared", {"probe": True}, REPLICAS),
        pytest.param("adamw", "local", {"probe": True}, REPLICAS, marks=pytest.mark.full),
        # With SGD: the gradient of a bias before a norm is zero up to rounding, which Adam would scale to full steps.
        ("sgd-momentum-decay", "shared", {"batch_norm": True}, 2),
        pytest.param("sgd-momentum-decay", "local", {"batch_norm": True}, REPLICAS, marks=pytest.mark.full),
        ("adamw", "shared", {"auto_lr": hk.HypergradientController()}, 2),
    ],
    ids=["probe", "probe-local", "batch norm", "batch norm-local", "hypergradient"],
)
def test_with_options(name: str, gradients: str, options: dict[str, Any], replicas: int) -> None:
    processes = run_ranks(replicas, _train_process, name, gradients, options)
    check_same(train_stack(0, replicas, name, gradients, options), processes)


def test_the_controller_moved_the_base() -> None:
    controller = hk.RegressionController(trust=None)
    on = train_stack(0, REPLICAS, "adamw", "shared", {"probe": True, "auto_lr": controller})[0].history
    scheduled = train_stack(0, REPLICAS, "adamw", "shared", {"auto_lr": False})[0].history
    off = {sync["step"]: sync["base"] for sync in scheduled}
    both = [(sync["base"], off[sync["step"]]) for sync in on if sync["step"] in off]
    for name in on[0]["base"]:
        assert max(abs(moved[name] / base[name] - 1) for moved, base in both) > 0.05


@pytest.mark.parametrize(
    ("name", "gradients"),
    [
        ("adamw-clip", "shared"),
        *(pytest.param(n, "local", marks=pytest.mark.full) for n in ("adamw-clip", "adam-decay")),
    ],
)
def test_stacks_in_several_processes_are_one_ensemble(name: str, gradients: str) -> None:
    """Two processes with two replicas each take the steps of one with four."""
    both = run_ranks(2, _train_rows, 2, name, gradients, {})
    check_same([outcome for rows in both for outcome in rows], train_stack(0, REPLICAS, name, gradients, {}))


def _syncs_of_stack(rank: int) -> list[tuple[int, int]]:
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


def test_stacks_in_several_processes_are_averaged_by_one_collective() -> None:
    for syncs in run_ranks(2, _syncs_of_stack):
        assert syncs == [(2, 4)] * 2, "one for the control rows, and one for the bucket with the mean of the rows"
