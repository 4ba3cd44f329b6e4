"""Optimizers of torch and of other packages, over two gloo ranks: what the next step needs is equal after a sync.

Moments depend on the gradients, which DDP shares. A second set of weights depends on the learning rate of each replica
too: Schedule-Free's ``z``, ASGD's ``ax``, Lookahead's slow weights. State in 8 bits has no mean.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import hdet_kernels as hk
from hdet_kernels.converge import converger_of
from hdet_kernels.ensemble import SingleReplica
from hdet_kernels.optim.foreign import same_modes
from hdet_kernels.schedule.undo.copies import reset_others, whole_state
from hdet_kernels.schedule.undo.undoing import KeptStart
from tests.ranks import Cases
from tests.training import WIDTH, batch, loss_of, network, same

EVERY = 3  # T


class Codes(Tensor):
    """A tensor subclass whose elements are in tensors inside of it, as torchao's state in 8 bits."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Codes:
        made: Codes = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            raise NotImplementedError(f"{func} on {cls.__name__}")
        return cls(func(args[0].inner))


class Coded(torch.optim.SGD):
    """An optimizer with state of the kinds that those in 8 bits have: codes with scales, or a tensor subclass."""

    def __init__(self, params: Any, lr: float, subclass: bool = False) -> None:
        super().__init__(params, lr)
        self.subclass = subclass

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            scale = param.grad.abs().max()
            codes = (param.grad / scale * 127).to(torch.int8)
            self.state[param] = {"codes": Codes(codes)} if self.subclass else {"codes": codes, "absmax": scale}
        return super().step()


class Lookahead(Optimizer):
    """Lookahead around an optimizer, as packages write it: slow weights in a state of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        self.optimizer = torch.optim.SGD(params, lr)
        self.param_groups, self.defaults = self.optimizer.param_groups, self.optimizer.defaults
        self.state = defaultdict(dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        self.optimizer.step()
        for param in self.param_groups[0]["params"]:
            slow = self.state[param].setdefault("slow", param.detach().clone())
            param.data.copy_(slow.lerp_(param.detach(), 0.5))


class Holder(torch.optim.SGD):
    """An optimizer that holds another one with state of its own, as SAM does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.base = torch.optim.ASGD(self.param_groups, lr, t0=1)

    def step(self, closure: Any = None) -> Any:
        return self.base.step()


def zero(params: Any, lr: float) -> Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # the import takes seconds

    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=lr)


def schedule_free(params: Any, lr: float) -> Any:
    import schedulefree

    optimizer = schedulefree.AdamWScheduleFree(params, lr=lr)
    optimizer.train()
    return optimizer


def bits_and_bytes(params: Any, lr: float) -> Any:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(params, lr=lr, min_8bit_size=1)


def torch_ao(params: Any, lr: float) -> Any:
    import torchao.optim

    return torchao.optim.AdamW8bit(params, lr=lr, block_size=16)


def muon(params: Any, lr: float) -> Optimizer:
    return torch.optim.Muon([param for param in params if param.dim() == 2], lr=lr)


def options(kind: Any, **given: Any) -> Callable[..., Optimizer]:
    return lambda params, lr: kind(params, lr=lr, **given)


T = torch.optim
MAKE: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in (T.Adam, T.Adamax, T.NAdam, T.RAdam, T.Adagrad, T.Adadelta, T.Adafactor)},
    **{kind.__name__: kind for kind in (T.Rprop, T.LBFGS, Holder, Lookahead, Coded)},
    "SGD": options(T.SGD, momentum=0.9),
    "SGD, coupled decay": options(T.SGD, momentum=0.9, weight_decay=0.1),
    "Adam, coupled decay": options(T.Adam, weight_decay=0.1),
    "AdamW": options(T.AdamW, amsgrad=True),
    "RMSprop": options(T.RMSprop, momentum=0.9, centered=True),
    "ASGD": options(T.ASGD, t0=1),
    "Muon": muon,
    "tensor subclass": options(Coded, subclass=True),
    "ZeroRedundancyOptimizer": zero,
    "schedulefree": schedule_free,
    "torchao": torch_ao,
    "bitsandbytes": bits_and_bytes,
}
REFUSED = ("LBFGS", "Lookahead", "ZeroRedundancyOptimizer")
MISSING = {name for name in ("schedulefree", "torchao", "bitsandbytes") if importlib.util.find_spec(name) is None}


def params(names: Iterable[str], *marks: Any) -> list[Any]:
    missing = {name: pytest.mark.skipif(name in MISSING, reason=f"{name} is not installed") for name in names}
    return [pytest.param(name, marks=[*marks, missing[name]]) for name in sorted(names)]


def installed(cases: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    return {name: case for name, case in cases.items() if case[0] not in MISSING}


def leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, dict | list):
        for _, entry in sorted(value.items()) if isinstance(value, dict) else enumerate(value):
            yield from leaves(entry)
    elif hasattr(type(value), "__tensor_flatten__"):
        yield from leaves([getattr(value, name) for name in value.__tensor_flatten__()[0]])
    elif isinstance(value, Tensor):
        yield value.detach().clone()


class Run:
    """A run of one rank under DDP, or on local gradients."""

    def __init__(self, rank: int, name: str, *, ddp: bool = True, **options: Any) -> None:
        self.rank, self.steps = rank, 0
        torch.manual_seed(0)
        # torchao leaves tensors of fewer than 4096 elements in 32 bits.
        wide = nn.Sequential(nn.Linear(WIDTH, 1024), nn.Tanh(), nn.Linear(1024, 1))
        self.module: nn.Module = wide if name == "torchao" else network()
        self.model: nn.Module = DistributedDataParallel(self.module) if ddp else self.module
        self.optimizer = MAKE[name](list(self.model.parameters()), lr=0.01)
        base = LambdaLR(self.optimizer, lambda _: 1.0)
        self.scheduler = hk.HDETScheduler(base, **{"sync_every": EVERY, "auto_lr": False, **options})

    def loss(self) -> Tensor:
        return loss_of(self.model, *batch(self.rank, self.steps))

    def closure(self) -> Tensor:
        self.optimizer.zero_grad()
        (loss := self.loss()).backward()
        return loss

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            if isinstance(self.optimizer, T.LBFGS):
                loss = self.optimizer.step(self.closure)
            else:
                loss = self.closure()
                self.optimizer.step()
            self.scheduler.step(torch.as_tensor(loss))
            self.steps += 1
        return self

    def parameters(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.module.parameters()]

    def state(self) -> list[Tensor]:
        every = [self.optimizer, *(one for one in vars(self.optimizer).values() if isinstance(one, Optimizer))]
        return [leaf for one in every for p in self.module.parameters() for leaf in leaves(one.state.get(p, {}))]


def _at_a_sync(rank: int, name: str) -> list[Any]:
    run = Run(rank, name).train(EVERY)
    return [run.parameters(), run.state(), [record.gradients for record in run.scheduler.history]]


QUICK = ("SGD, coupled decay", "AdamW", "ASGD", "Holder", "Coded", "schedulefree")
EQUAL = [name for name in MAKE if name not in REFUSED]
AT_A_SYNC = Cases(
    2,
    _at_a_sync,
    installed({name: (name,) for name in QUICK}),
    full=installed({name: (name,) for name in EQUAL if name not in QUICK}),
)


@pytest.mark.parametrize("name", [*params(QUICK), *params(set(EQUAL) - set(QUICK), pytest.mark.full)])
def test_parameters_and_state_are_equal_at_a_sync(name: str) -> None:
    """The scheduler finds out by itself that DDP shares gradients, also where state has no mean."""
    one, other = AT_A_SYNC[name]
    assert one[1]
    assert same(one, other)
    assert one[2] == ["shared"]


def _overlapped(rank: int) -> list[Tensor]:
    run = Run(rank, "SGD, coupled decay", gradients="shared", averaging=hk.Averaging(overlap_steps=1))
    return run.train(EVERY + 1).state()


def test_state_that_differs_is_averaged_where_an_overlapping_average_is_applied() -> None:
    one, other = Cases(2, _overlapped, [()])[()]
    assert same(one, other)


def _raises(rank: int, name: str, ddp: bool, options: dict[str, Any]) -> str:
    try:
        Run(rank, name, ddp=ddp, **options).train(EVERY)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


LEFT = {"averaging": hk.Averaging(state=False)}
MESSAGES: dict[str, tuple[tuple[Any, ...], str]] = {
    "LBFGS": (("LBFGS", True, {}), r"\(LBFGS\) is list of tensors, which has no mean, and the replicas differ"),
    "LBFGS, left alone": (("LBFGS", True, LEFT), "^$"),
    "Lookahead": (("Lookahead", True, {}), "Lookahead keeps state 'slow' of its own around SGD.*pass the inner"),
    "Lookahead, left alone": (("Lookahead", True, LEFT), "^$"),
    "Coded": (("Coded", False, {}), r"'codes' of parameter 0 \(Coded\) is Tensor of torch.int8, which has no mean"),
    "tensor subclass": (("tensor subclass", False, {}), r"'codes' of parameter 0 \(Coded\) is Codes of"),
    "torchao": (("torchao", False, {}), r"\(AdamW8bit\) is OptimState8bit.*hk.FusedAdamW \(in 8 bits with state_d"),
    "bitsandbytes": (("bitsandbytes", False, {}), r"'state1' of parameter 0 \(AdamW8bit\) is Tensor of torch.uint8"),
    "ZeroRedundancyOptimizer": (
        ("ZeroRedundancyOptimizer", True, {}),
        "ZeroRedundancyOptimizer makes the parameters of all processes equal.*state_dtype='int8'.*FSDP2",
    ),
}
_MESSAGES = Cases(2, _raises, installed({name: case for name, (case, _) in MESSAGES.items()}))


@pytest.mark.parametrize("name", params(MESSAGES))
def test_what_cannot_be_averaged_is_refused_by_name(name: str) -> None:
    for message in _MESSAGES[name]:
        assert re.search(MESSAGES[name][1], message)


# Schedule-Free: the parameters are y in training and x in evaluation, and the state has z

needs_schedule_free = pytest.mark.skipif("schedulefree" in MISSING, reason="schedulefree is not installed")


def _evaluated(rank: int, order: str) -> dict[str, Any]:
    """Evaluate in the middle of a cycle; return the weights that were seen, their mean, and how training goes on."""
    run = Run(rank, "schedulefree").train(EVERY + 2)
    optimizer, alone = run.optimizer, copy.deepcopy([p.detach() for p in run.module.parameters()])
    optimizer.eval()
    own = run.parameters()
    optimizer.train()
    with torch.no_grad():
        for param, value in zip(run.module.parameters(), alone, strict=True):
            param.copy_(value)  # eval() and train() round
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, own)
    if order == "before":
        optimizer.eval()
    with run.scheduler.consensus():
        if order != "before":
            optimizer.eval()
        seen = run.parameters()
        if order == "inside":
            optimizer.train()
    optimizer.train()
    mean = [torch.stack(pair).mean(0) for pair in zip(*gathered, strict=True)]
    return {"seen": seen, "mean": mean, "back": [run.parameters(), alone], "after": run.train(1).parameters()}


EVALUATED = Cases(2, _evaluated, [("before",), ("inside",), ("across",)])


@needs_schedule_free
@pytest.mark.parametrize("order", ["before", "inside", "across"])
def test_schedule_free_is_evaluated_at_the_mean_of_all_replicas(order: str) -> None:
    """Whether ``eval()`` is called before ``consensus()`` or inside, and ``train()`` inside or after it."""
    one, other = EVALUATED[(order,)]
    assert same(one["seen"], other["seen"])
    torch.testing.assert_close(one["seen"], one["mean"])
    for found in (one, other):
        torch.testing.assert_close(*found["back"])
    assert same(one["after"], other["after"]), "the sync after it"


def _modes(rank: int) -> list[Any]:
    run = Run(rank, "schedulefree").train(1)
    if rank:
        run.optimizer.eval()
    with contextlib.suppress(RuntimeError):
        run.scheduler.converge()
        return ["averaged"]
    run.optimizer.eval()
    run.scheduler.converge()
    return [run.parameters(), run.scheduler.in_sync]


@needs_schedule_free
def test_a_sync_averages_replicas_in_the_same_mode() -> None:
    one, other = Cases(2, _modes, [()])[()]
    assert len(one) == 2, "one in training and one in evaluation were averaged"
    assert same(one, other)


def _after_the_spread(rank: int) -> list[Any]:
    run = Run(rank, "schedulefree", spread=0.0).train(EVERY)
    run.scheduler.cycle.spread.begin_cycle(run.scheduler.cycle.run, EVERY)
    run.optimizer.param_groups[0]["weight_sum"] *= 1 + rank
    run.train(1)
    return [run.scheduler.in_sync, run.parameters()]


@needs_schedule_free
def test_numbers_in_groups_that_are_not_averaged_leave_replicas_apart() -> None:
    """Without a spread replicas with shared gradients stay equal, but Schedule-Free has sums of its own."""
    one, other = Cases(2, _after_the_spread, [()])[()]
    assert not same(one[1], other[1])
    assert not one[0]


@needs_schedule_free
def test_a_return_to_the_start_brings_numbers_in_groups_back() -> None:
    module = network()
    optimizer = schedule_free(module.parameters(), lr=0.1)
    before = copy.deepcopy(optimizer.param_groups[0] | {"params": None})
    kept = whole_state(optimizer)
    for step in range(3):
        loss_of(module, *batch(0, step)).backward()
        optimizer.step()
    assert optimizer.param_groups[0]["k"] == 3
    reset_others(optimizer, *kept)
    assert optimizer.param_groups[0] | {"params": None} == before
    assert not any(optimizer.state.values())


@needs_schedule_free
def test_the_start_is_evaluated_without_the_state_of_now() -> None:
    """While a learning rate is looked for, ``consensus()`` shows the model that the run begins with."""
    module = network()
    optimizer = schedule_free(module.parameters(), lr=0.1)
    kept = KeptStart(optimizer, converger_of(optimizer, SingleReplica()), None, tuple)
    kept.keep(0)
    start = copy.deepcopy(list(module.parameters()))
    for step in range(3):
        loss_of(module, *batch(0, step)).backward()
        optimizer.step()
    own, state = copy.deepcopy(list(module.parameters())), optimizer.state
    with kept.model_held(), same_modes(optimizer):
        optimizer.eval()
        assert same(list(module.parameters()), start)
    assert same(list(module.parameters()), own)
    assert optimizer.state is state
    assert optimizer.param_groups[0]["train_mode"]
