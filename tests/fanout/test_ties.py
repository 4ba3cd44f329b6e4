"""Parameter groups that share a learning rate."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import hdet_kernels as hk
from hdet_kernels.fanout.explore import saved_ties, tied_groups
from tests.ranks import Cases
from tests.schedule.scout_runs import QUICK
from tests.training import batch, loss_of, network, same

STEPS, EVERY = 40, 2
DECAY = [{}, {"weight_decay": 0.0}]


def group(**entries: Any) -> dict[str, Any]:
    return {"params": [torch.zeros(2)], "lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1, "fused": None, **entries}


@pytest.mark.parametrize(
    ("entries", "tied"),
    [
        ([{}], [(0,)]),
        ([{}, {"weight_decay": 0.0}], [(0, 1)]),
        ([{}, {"name": "no decay", "param_names": ["b"], "initial_weight_decay": 0.2, "rounding_seed": 7}], [(0, 1)]),
        ([{}, {"lr": 0.2}], [(0,), (1,)]),
        ([{}, {"lr": torch.tensor(0.1, dtype=torch.float64)}], [(0, 1)]),
        ([{"max_lr": 0.1}, {"max_lr": 0.2}], [(0,), (1,)]),
        ([{"initial_lr": 0.1}, {"initial_lr": 0.2}], [(0,), (1,)]),
        ([{}, {"betas": (0.9, 0.95)}], [(0,), (1,)]),
        ([{}, {"fused": True}], [(0,), (1,)]),
        ([{}, {"lr": 0.2}, {"weight_decay": 0.0}, {"lr": 0.2, "weight_decay": 0.0}], [(0, 2), (1, 3)]),
        ([{"lr": 0.0}, {"lr": 0.0}, {}], [(0,), (1,), (2,)]),
    ],
)
def test_groups_that_differ_in_weight_decay_only_are_tied(
    entries: list[dict[str, Any]], tied: list[tuple[int, ...]]
) -> None:
    assert tied_groups([group(**each) for each in entries], "auto") == tied


def test_all_none_or_some_are_tied_on_request() -> None:
    groups = [group(lr=lr) for lr in (0.1, 0.2, 0.0, 0.1)]
    assert tied_groups(groups, True) == [(0, 1, 3), (2,)], "a frozen group has no ratio to others"
    assert tied_groups(groups, False) == [(0,), (1,), (2,), (3,)]
    assert tied_groups(groups, [[3, 1], []]) == [(0,), (1, 3), (2,)]
    assert tied_groups(groups, [[2]]) == [(0,), (1,), (2,), (3,)]
    assert tied_groups([], "auto") == tied_groups([], True) == []


def test_a_group_with_an_explore_of_its_own_is_not_tied_to_others() -> None:
    groups, one = [group(), group(), group()], hk.Explore("lr", groups=[1, 2])
    assert tied_groups(groups, "auto", {1: one, 2: one}) == [(0,), (1, 2)]
    with pytest.raises(ValueError, match=r"gives parameter groups \[0, 1, 2\] one multiplier, but explore= has diff"):
        tied_groups(groups, True, {1: one, 2: one})


def test_ties_of_a_checkpoint() -> None:
    saved = [{"name": "lr/0", "tied": [2]}, {"name": "lr/1"}, {"name": "weight_decay/0"}, {"name": "dropout"}]
    assert saved_ties([*saved, {"name": "lr/3", "base": 1.0}]) == [(0, 2), (1,)]
    entries = ({}, {"name": None}, {"name": "lr/0", "tied": 1}, {"name": "lr/0", "tied": ["1"]})
    for damaged in (None, 3, [3], torch.ones(2), *([entry] for entry in entries)):
        assert saved_ties(damaged) is None


class Run:
    """Two ranks, or a stack of replicas, whose parameters are divided into groups.

    Args:
        groups: options of each group; parameters are divided among them in order.
        replicas: of a stack; 0: every process is a replica.
        max_lr, options: of the scheduler.
    """

    def __init__(self, groups: list[dict[str, Any]], replicas: int = 0, *, max_lr: Any = 0.05, **options: Any) -> None:
        model, self.replicas, self.step = network(batch_norm=True), replicas, 0
        self.stack = hk.ReplicaStack(model, replicas) if replicas else None
        self.model = None if replicas else DistributedDataParallel(model)
        params = list((self.stack or model).parameters())
        cuts = np.linspace(0, len(params), len(groups) + 1).astype(int)
        divided = [{"params": params[a:b], **each} for a, b, each in zip(cuts, cuts[1:], groups, strict=False)]
        make = hk.FusedAdamW if self.stack else torch.optim.AdamW
        self.optimizer = make(divided, lr=0.01)
        if self.stack is not None:
            options["ensemble"] = self.stack.ensemble
        options = {"sync_every": EVERY, "trust": 30.0, **options}
        if options.pop("wrapped", False):
            base = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 10))
            self.scheduler: Any = hk.HDETScheduler(base, total_steps=STEPS, **options)
        else:
            self.scheduler = hk.HDETOneCycleLR(self.optimizer, max_lr, STEPS, **options)

    def rates(self) -> list[Any]:
        """Return what every replica held here trains with, by group."""
        groups = self.optimizer.param_groups
        return [each["per_replica"]["lr"] if self.replicas else float(each["lr"]) for each in groups]

    def train(self, rank: int = 0, until: int = STEPS) -> dict[str, Any]:
        rates, base = [], []
        for step in range(self.step, until):
            rates.append(self.rates())
            base.append([float(each) for each in self.scheduler.get_base_lr()])
            self.optimizer.zero_grad()
            if self.stack is not None:
                data = [torch.cat(parts) for parts in zip(*(batch(r, step) for r in range(self.replicas)), strict=True)]
                loss: Tensor = self.stack.backward(loss_of, *data)
            else:
                loss = loss_of(self.model, *batch(rank, step))  # type: ignore[arg-type]
                loss.backward()
            self.optimizer.step()
            self.scheduler.step(loss.detach())
        self.step = until
        records = [{**each.to_dict(), "seconds": 0} for each in self.scheduler.history]
        params = [p.detach().clone() for p in (self.stack or self.model).parameters()]  # type: ignore[union-attr]
        return {"rates": rates, "base": base, "history": records, "parameters": params}

    def saved(self) -> list[Any]:
        """Return the checkpoint of a stack, read from a file."""
        file = io.BytesIO()
        torch.save([part.state_dict() for part in self._parts()], file)
        file.seek(0)
        states: list[Any] = torch.load(file, weights_only=True)
        return states

    def loaded(self, states: list[Any], step: int) -> Run:
        for part, state in zip(self._parts(), states, strict=True):
            part.load_state_dict(state)
        self.step = step
        return self

    def _parts(self) -> tuple[Any, ...]:
        return self.stack, self.optimizer, self.scheduler


def trained(rank: int, *args: Any, **options: Any) -> dict[str, Any]:
    return Run(*args, **options).train(rank)


def on_ranks(rank: int, groups: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    return trained(rank, groups, **options)


RANKS = Cases(
    2,
    on_ranks,
    {
        "decay": (DECAY, {}),
        "one": ([{}], {}),
        "equal": ([{}, {}], {}),
        "apart": ([{}, {}], {"tie_groups": False}),
        "ratio": ([{}, {}], {"max_lr": [0.05, 0.005], "tie_groups": True}),
    },
    full={
        "one wrapped": ([{}], {"wrapped": True}),
        "equal wrapped": ([{}, {}], {"wrapped": True}),
        "softmax": (
            [{}, {}],
            {"max_lr": [0.05, 0.005], "tie_groups": True, "auto_lr": hk.SoftmaxController(4), "trust": 3.0},
        ),
    },
)


def moved(result: dict[str, Any]) -> bool:
    """Return whether the controller moved the learning rate of the first group away from those of plain OneCycleLR."""
    plain = torch.optim.lr_scheduler.OneCycleLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), 0.05, STEPS)
    scheduled = []
    for _ in range(STEPS):
        scheduled += plain.get_last_lr()
        plain.optimizer.step()
        plain.step()
    return [rates[0] for rates in result["base"]] != scheduled


def test_decay_and_no_decay_have_one_multiplier_in_every_cycle() -> None:
    for result in RANKS["decay"]:
        assert all(first == second for first, second in result["rates"])
        assert all(record["values"].keys() == {"lr/0"} for record in result["history"])
    departing = [a != b for a, b in zip(*(result["rates"] for result in RANKS["decay"]), strict=True)]
    assert all(departing[:10]), "the replicas differ in every cycle until the peak"
    apart = RANKS["apart"][0]
    assert any(first != second for first, second in apart["rates"])
    assert apart["history"][0]["values"].keys() == {"lr/0", "lr/1"}


@pytest.mark.parametrize("around", ["", pytest.param(" wrapped", marks=pytest.mark.full)])
def test_tied_groups_train_as_one_group(around: str) -> None:
    for one, tied in zip(RANKS["one" + around], RANKS["equal" + around], strict=True):
        assert moved(one), "a controller that does nothing proves nothing"
        assert same(one["parameters"], tied["parameters"])
        assert same(one["history"], tied["history"]), "slopes, losses and base values"
        assert one["rates"] == [[first] for first, second in tied["rates"] if first == second]


@pytest.mark.parametrize("case", ["ratio", pytest.param("softmax", marks=pytest.mark.full)])
def test_tied_groups_keep_the_ratio_of_their_peaks(case: str) -> None:
    for result in RANKS[case]:
        assert moved(result)
        for numbers in (result["rates"], result["base"]):
            assert all(second == pytest.approx(first / 10, rel=1e-12) for first, second in numbers)


@pytest.mark.parametrize("options", [{}, {"max_lr": None, "scout": QUICK, "sync_every": 3}], ids=["run", "scouting"])
def test_tied_groups_of_a_stack_train_as_one_group(options: dict[str, Any]) -> None:
    one, tied = trained(0, [{}], 4, **options), trained(0, [{}, {}], 4, **options)
    assert same(one["parameters"], tied["parameters"])
    assert same(one["history"], tied["history"])
    assert one["rates"] == [[first] for first, second in tied["rates"] if first == second]


class TestCheckpoints:
    def test_tied_groups_resume_bit_for_bit(self) -> None:
        run = Run(DECAY, 4)
        run.train(until=5)
        saved = run.saved()
        resumed = Run(DECAY, 4).loaded(saved, 5)
        assert same(_timeless(resumed.train()), _timeless(run.train()))
        assert [each["name"] for each in saved[2]["hdet"][0]["config"]["hyperparameters"]] == ["lr/0"]

    @pytest.mark.parametrize("options", [{}, {"wrapped": True}, {"max_lr": None, "scout": QUICK}])
    def test_groups_that_were_saved_apart_go_on_apart(self, options: dict[str, Any]) -> None:
        """As checkpoints of versions that tied no groups do: their ``config`` has no ``tied``."""
        run = Run([{}, {}], 4, tie_groups=False, **options)
        run.train(until=5)
        saved = run.saved()
        resumed = Run([{}, {}], 4, **options)
        assert len(resumed.scheduler.cycle.spread.hyperparameters) == 1
        resumed.loaded(saved, 5)
        assert same(_timeless(resumed.train()), _timeless(run.train()))
        assert len(resumed.scheduler.cycle.spread.hyperparameters) == 2
        tied = Run([{}, {}], 4, **options)
        tied.train(until=3)
        resumed.scheduler.load_state_dict(tied.scheduler.state_dict())
        assert len(resumed.scheduler.cycle.spread.hyperparameters) == 1, "and tied again with another checkpoint"

    def test_a_tied_run_is_not_loaded_into_an_untied_one(self) -> None:
        tied, apart = Run(DECAY, 4), Run(DECAY, 4, tie_groups=False)
        before = apart.rates()
        with pytest.raises(ValueError, match=r"made with hyperparameters=\[\{'name': 'lr/0'.*'tied': \[1\]"):
            apart.scheduler.load_state_dict(tied.scheduler.state_dict())
        assert apart.rates() == before

    def test_a_damaged_checkpoint_leaves_the_ties_as_they_are(self) -> None:
        run, apart = Run(DECAY, 4), Run(DECAY, 4, tie_groups=False)
        apart.train(until=4)
        state, before, cycle = apart.scheduler.state_dict(), run.rates(), run.scheduler.cycle
        state["hdet"][0]["shared"] = "yes"
        with pytest.raises(ValueError, match=r"hdet\.shared"):
            run.scheduler.load_state_dict(state)
        assert (run.scheduler.cycle, run.rates()) == (cycle, before)
        run.train(until=4)
        assert len(run.scheduler.history) == 2


def _timeless(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result without the rates and base values of steps that only one of two runs made."""
    return {"history": result["history"], "parameters": result["parameters"]}


def test_a_release_gives_every_tied_group_its_own_value_back() -> None:
    run = Run([{}, {}], 4, max_lr=[0.05, 0.005], tie_groups=True)
    run.train(until=6)
    scheduled = list(run.scheduler.cycle.spread.scheduled)
    hk.release(run.optimizer)
    assert [each["lr"] for each in run.optimizer.param_groups] == scheduled
    assert scheduled[1] == pytest.approx(scheduled[0] / 10)


def test_groups_may_be_numbers_of_any_library() -> None:
    """They become plain: names and checkpoints have them."""
    params = [{"params": [torch.ones(2, requires_grad=True)], "lr": 0.1 * (number + 1)} for number in range(3)]
    optimizer = torch.optim.SGD(params, momentum=0.9)
    scheduler = hk.HDETOneCycleLR(
        optimizer,
        0.1,
        10,
        tie_groups=[np.array([0, 2])],  # type: ignore[list-item]
        explore=[hk.Explore("weight_decay", base=np.float32(0.5), groups=torch.tensor([1]))],  # type: ignore[arg-type]
    )
    found = scheduler.cycle.spread.hyperparameters
    assert [(hyper.name, hyper.groups, hyper.base) for hyper in found] == [
        ("lr/0", (0, 2), None),
        ("lr/1", (1,), None),
        ("weight_decay/1", (1,), 0.5),
    ]
    assert [type(group) for hyper in found for group in hyper.groups] == [int] * 4
