"""merge="best": at a sync all replicas become a copy of the healthy one with the lowest loss."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hdet_kernels as hk
from hdet_kernels import Converger
from hdet_kernels.converge import Report
from hdet_kernels.ensemble import RowEnsemble
from tests.ranks import Cases, run_ranks
from tests.training import Trainer, batch, loss_of, network, same, with_averaging

SYNC, TOTAL = 4, 8
OPTIMIZERS: dict[str, Callable[..., Any]] = {"loose": torch.optim.AdamW, "homed": hk.FusedAdamW}


def everything(trainer: Trainer) -> dict[str, Tensor]:
    """Parameters, buffers and optimizer state with its step counts, by name."""
    named = dict(trainer.module.named_parameters())
    found: dict[str, Tensor] = {**named, **dict(trainer.module.named_buffers())}
    for name, param in named.items():
        found |= {f"{key} of {name}": torch.as_tensor(value) for key, value in trainer.optimizer.state[param].items()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


class Local(Trainer):
    """A replica on local gradients, with BatchNorm."""

    def __init__(self, rank: int, kind: str = "homed", **options: Any) -> None:
        options = {"auto_lr": False, "total_steps": TOTAL, "sync_every": SYNC, "gradients": "local", **options}
        modes = {"ddp": False, "batch_norm": True, "average_buffers": True, "merge": "best"}
        super().__init__(rank, make_optimizer=OPTIMIZERS[kind], **modes, **options)

    def sync(self, loss: float | None, spoil: Callable[[Trainer], None] | None = None) -> dict[str, Any]:
        """A cycle in which every step has this loss; what there was before and after the sync that ends it."""
        found: dict[str, Any] = {}
        for step in range(SYNC):
            self.optimizer.zero_grad()
            self.loss().backward()
            self.optimizer.step()
            if step == SYNC - 1:
                if spoil is not None:
                    spoil(self)
                found["before"] = everything(self)
            self.scheduler.step(loss)
        return {**found, "after": everything(self), "record": self.scheduler.history[-1].to_dict()}


#: By name: losses, the replica with non-finite parameters, and the best.
BEST: dict[str, tuple[tuple[float, ...], int | None, int]] = {
    "lowest": ((0.7, 0.4, 0.3, 0.4), None, 2),
    "not finite": ((0.7, 0.4, 0.3, 0.4), 2, 1),
    "loss not finite": ((0.7, 0.4, math.nan, 0.5), None, 1),
    "tie": ((0.7, 0.3, 0.3, 0.3), None, 1),
}


def _best(rank: int, name: str, kind: str) -> dict[str, Any]:
    losses, sick, _ = BEST[name]
    replica = Local(rank, kind)

    def spoil(trainer: Trainer) -> None:
        trainer.module.norm.num_batches_tracked += rank  # an integer, which has no mean
        if rank == 2:  # a count of its own
            counts = trainer.scheduler.cycle.converger.tensors.counts
            counts.write(counts.read() + 3)
        if rank == sick:
            trainer.module.inner.weight.data[1, 1] = math.nan

    return replica.sync(losses[rank], spoil)


def check_taken(results: list[dict[str, Any]], best: int, excluded: list[int]) -> None:
    chosen = results[best]["before"]
    for result in results:
        assert result["record"]["taken"] == best
        assert result["record"]["excluded"] == excluded
        assert [name for name, tensor in result["after"].items() if not torch.equal(tensor, chosen[name])] == []
    others = [result["before"] for rank, result in enumerate(results) if rank != best]
    assert all(not torch.equal(other["inner.weight"], chosen["inner.weight"]) for other in others)
    assert all(not torch.equal(other["norm.running_mean"], chosen["norm.running_mean"]) for other in others)
    assert all(not torch.equal(o["exp_avg of inner.weight"], chosen["exp_avg of inner.weight"]) for o in others)


MERGED = Cases(4, _best, [(name, kind) for name in BEST for kind in OPTIMIZERS])


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", BEST)
def test_all_replicas_become_the_best(name: str, kind: str) -> None:
    losses, sick, best = BEST[name]
    results = MERGED[name, kind]
    bad = sick if sick is not None else next((rank for rank, loss in enumerate(losses) if math.isnan(loss)), None)
    check_taken(results, best, [] if bad is None else [bad])


def _probed(rank: int) -> list[dict[str, Any]]:
    """The controller acts at no sync; without a probe rank 0 would be the best."""
    probes = iter((0.5 - 0.1 * rank, 0.2 + 0.1 * rank))
    replica = Local(rank, "loose", probe=lambda: next(probes))
    return [replica.sync(float(rank)), replica.sync(None)]


def test_the_probe_decides_at_every_sync() -> None:
    first, second = zip(*run_ranks(3, _probed), strict=True)
    check_taken(list(first), 2, [])
    check_taken(list(second), 0, [])
    np.testing.assert_allclose(second[1]["record"]["probes"], [0.2, 0.3, 0.4])


def _failing(rank: int) -> str:
    def probe() -> float:
        if rank == 1:
            raise ValueError("no batch left")
        return 1.0

    replica = Local(rank, probe=probe)
    with pytest.raises(RuntimeError, match=r"probe\(\) raised on rank 1") as error:
        replica.scheduler.converge()
    with pytest.raises(RuntimeError, match=r"probe\(\) raised on rank 1"), replica.scheduler.consensus():
        pass
    return str(error.value.__cause__)


def test_a_probe_that_raises_is_an_error_by_hand_too() -> None:
    assert run_ranks(2, _failing) == ["None", "no batch left"]


# Stacks

REPLICAS = 4


class Stack:
    def __init__(self, **options: Any) -> None:
        self.stack = hk.ReplicaStack(network(batch_norm=True), REPLICAS, gradients="local")
        self.optimizer = hk.FusedAdamW(self.stack.parameters(), lr=0.01)
        options = {"sync_every": SYNC, "auto_lr": False, "merge": "best", **options}
        self.scheduler = hk.HDETOneCycleLR(
            self.optimizer, 0.01, TOTAL, ensemble=self.stack.ensemble, **with_averaging(options)
        )

    def optimize(self) -> Tensor:
        step = self.scheduler.last_epoch
        x, y = (torch.cat(part) for part in zip(*(batch(r, step) for r in range(REPLICAS)), strict=True))
        self.optimizer.zero_grad()
        losses = self.stack.backward(loss_of, x, y)
        self.optimizer.step()
        return losses.detach()

    def train(self, steps: int) -> Stack:
        for _ in range(steps):
            self.scheduler.step(self.optimize())
        return self

    def rows(self) -> list[Tensor]:
        """[R, …]: parameters, buffers and moments."""
        moments = [self.optimizer.state[p][name] for p in self.stack.parameters() for name in ("exp_avg", "exp_avg_sq")]
        return [t.detach().clone() for t in (*self.stack.parameters(), *self.stack.buffers(), *moments)]

    def sync(self, losses: list[float], sick: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """One loss for all steps of a cycle."""
        for _ in range(SYNC - 1):
            self.optimize()
            self.scheduler.step(losses)
        self.optimize()
        if sick is not None:
            next(iter(self.stack.parameters())).data[sick].view(-1)[0] = math.inf
        before = self.rows()
        self.scheduler.step(losses)
        return before, self.rows()


@pytest.mark.parametrize(
    ("losses", "sick", "best"),
    [([3.0, 2.0, 1.0, 2.0], None, 2), ([3.0, 2.0, 1.0, 2.0], 2, 1), ([1.0, 1.0, 1.0, 1.0], None, 0)],
    ids=["lowest", "not finite", "tie"],
)
def test_the_rows_of_a_stack_become_the_best(losses: list[float], sick: int | None, best: int) -> None:
    stack = Stack()
    before, after = stack.sync(losses, sick)
    for was, now in zip(before, after, strict=True):
        assert torch.equal(now, was[best].expand_as(now))
    assert any(not torch.equal(was[best], was[(best + 1) % REPLICAS]) for was in before)
    record = stack.scheduler.history[-1]
    assert (record.taken, record.excluded) == (best, [] if sick is None else [sick])


def test_by_hand_the_losses_so_far_decide_and_without_any_it_is_the_mean() -> None:
    stack = Stack().train(SYNC)
    stack.scheduler.converge()
    assert stack.scheduler.history[-1].taken is None, "just after a sync"
    stack.optimize()
    apart = stack.rows()
    stack.scheduler.converge()
    assert stack.scheduler.history[-1].taken is None
    torch.testing.assert_close(stack.rows()[0], apart[0].mean(dim=0).expand_as(apart[0]))
    stack.optimize()
    stack.scheduler.step([4.0, 3.0, 2.0, 1.0])
    apart = stack.rows()
    with stack.scheduler.consensus():
        assert torch.equal(stack.rows()[0], apart[0][3].expand_as(apart[0])), "the best of the replicas"
    assert same(stack.rows(), apart)
    stack.scheduler.converge()
    assert stack.scheduler.history[-1].taken == 3
    assert torch.equal(stack.rows()[0], apart[0][3].expand_as(apart[0]))


def test_the_consensus_without_a_loss_is_the_mean() -> None:
    stack = Stack()
    stack.optimize()
    apart = stack.rows()[0]
    with stack.scheduler.consensus():
        torch.testing.assert_close(stack.rows()[0], apart.mean(dim=0).expand_as(apart))


def test_the_controller_goes_on_beside_it() -> None:
    """It reads the losses of all, whoever is copied."""
    results = [Stack(auto_lr=hk.RegressionController(start_at=0.0, stop_at=1.0), merge=m) for m in ("best", "mean")]
    for stack in results:
        stack.sync([4.0, 3.0, 2.0, 1.0])
    best, mean = (stack.scheduler for stack in results)
    assert best.get_base_lr() == mean.get_base_lr()
    assert best.history[0].losses == mean.history[0].losses
    assert (best.history[0].taken, mean.history[0].taken) == (3, None)


def test_a_resumed_run_knows_who_was_taken() -> None:
    whole = Stack().train(SYNC + 1)
    file = io.BytesIO()
    parts = (whole.stack, whole.optimizer, whole.scheduler)
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    second = Stack()
    for part, state in zip(
        (second.stack, second.optimizer, second.scheduler), torch.load(file, weights_only=True), strict=True
    ):
        part.load_state_dict(state)
    for stack in (whole, second):
        stack.train(SYNC - 1)
    assert same(whole.rows(), second.rows())
    takens = [[record.taken for record in stack.scheduler.history] for stack in (whole, second)]
    assert takens[0] == takens[1]
    assert None not in takens[0]


# What is refused


def test_a_loss_is_needed() -> None:
    stack = Stack()
    stack.optimize()
    with pytest.raises(
        RuntimeError, match="merge='best' copies the replica whose loss is lowest, but none was recorded"
    ):
        stack.scheduler.step()
    stack.train(SYNC)
    for _ in range(SYNC - 1):
        stack.optimize()
        stack.scheduler.step()
    stack.optimize()
    with pytest.raises(RuntimeError, match="no loss was recorded since the last sync on replicas 0, 1, 2, 3: call"):
        stack.scheduler.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"merge": "worst"}, "merge must be one of 'mean', 'best', got 'worst'"),
        ({"outer": hk.Outer()}, r"merge='best' copies one replica as it is, got outer=Outer\(.*\) with it"),
        ({"compress": "int8"}, "merge='best' copies one replica as it is, got compress='int8' with it"),
        ({"overlap_steps": 1}, "merge='best' needs all replicas at one place .*: pass overlap_steps=0"),
    ],
    ids=["merge", "outer", "compress", "overlap_steps"],
)
def test_what_does_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Stack(**options)


def _differently(rank: int) -> None:
    converger = Converger([torch.zeros(3)], hk.ProcessEnsemble(), merge="best" if rank else "mean")
    with pytest.raises(RuntimeError, match=r"disagree on the settings \(rank 0: merge mean; rank 1: merge best\)"):
        converger.converge(Report(step=1))


def test_replicas_that_merge_differently_are_told() -> None:
    run_ranks(2, _differently)


def _close(rank: int) -> int | None:
    converger = Converger([torch.full((3,), float(rank))], hk.ProcessEnsemble(), merge="best")
    return converger.converge(Report(step=1, loss_sum=1.0 - 1e-12 * rank, loss_count=1)).taken


def test_losses_are_compared_with_all_their_digits() -> None:
    assert run_ranks(2, _close) == [1, 1]


def test_of_a_process_and_its_rows_the_probe_is_what_counts() -> None:
    params = torch.arange(6.0).reshape(3, 2)
    converger = Converger([params], RowEnsemble(3), merge="best")
    losses = {"loss_sum": torch.tensor([1.0, 2.0, 3.0]), "loss_count": 1}
    outcome = converger.converge(Report(step=1, probe=torch.tensor([3.0, 1.0, 2.0]), **losses))
    assert outcome.taken == 1
    assert outcome.healthy.all()
    assert torch.equal(params, torch.tensor([2.0, 3.0]).expand(3, 2))
