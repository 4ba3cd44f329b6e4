"""Any sequence of operations leaves the fused optimizers equal to torch's own."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet_kernels.optim import FusedAdagrad, FusedAdam, FusedAdamW, FusedLion, FusedOptimizer, FusedSGD
from tests.optim.cases import saved_and_loaded
from tests.properties.machines import explore

SEEDS = st.integers(0, 1000)
INDICES = st.integers(0, 7)
PRESENT = st.one_of(st.just(255), st.integers(0, 255))  # mostly all parameters have a gradient

SHAPES = ((3, 5), (), (17,), (0, 3), (2, 3, 2, 2))
ADDED_SHAPE = (4, 2)

#: dtype of our parameters, dtype of torch's, relative and absolute tolerance. bf16 parameters have float32 masters.
PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype, float, float]] = {
    "fp64": (torch.float64, torch.float64, 1e-9, 1e-12),
    "fp32": (torch.float32, torch.float32, 1e-5, 2e-6),
    "bf16-master": (torch.bfloat16, torch.float32, 1e-5, 2e-6),
}


class Lion(Optimizer):
    """Lion in torch, which has none: θ ← θ·(1 − lr·λ) − lr·sign(β₁·m + (1 − β₁)·g), m ← β₂·m + (1 − β₂)·g."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), **options: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0, "maximize": False, **options})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                g = -p.grad if group["maximize"] else p.grad
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(beta1 * m + (1 - beta1) * g))
                m.mul_(beta2).add_((1 - beta2) * g)


@dataclass(frozen=True)
class Pair:
    """torch's class, the fused class, the options of both, and the values that may be written to a group's entries."""

    torch: Any
    fused: type[FusedOptimizer]
    options: dict[str, Any]
    edits: dict[str, tuple[Any, ...]]


_RATES = {"lr": (0.0, 1e-4, 0.02), "maximize": (False, True)}
_DECAY = {"weight_decay": (0.0, 0.1)}
_ADAM = {**_RATES, **_DECAY, "betas": ((0.9, 0.999), (0.5, 0.9), (0.0, 0.8)), "eps": (1e-8, 1e-3)}

PAIRS: dict[str, Pair] = {
    "sgd": Pair(torch.optim.SGD, FusedSGD, {"lr": 0.1}, {**_RATES, **_DECAY, "momentum": (0.0, 0.9)}),
    "sgd-momentum": Pair(
        torch.optim.SGD,
        FusedSGD,
        {"lr": 0.05, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1},
        {**_RATES, **_DECAY, "momentum": (0.0, 0.5, 0.9), "dampening": (0.0, 0.5)},
    ),
    "sgd-nesterov": Pair(
        torch.optim.SGD,
        FusedSGD,
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "maximize": True},
        {**_RATES, **_DECAY, "momentum": (0.5, 0.9), "nesterov": (False, True)},
    ),
    "adam": Pair(torch.optim.Adam, FusedAdam, {"lr": 0.01, "weight_decay": 0.1}, _ADAM),
    "adam-amsgrad": Pair(torch.optim.Adam, FusedAdam, {"lr": 0.01, "amsgrad": True}, _ADAM),
    "adamw": Pair(torch.optim.AdamW, FusedAdamW, {"lr": 0.01, "weight_decay": 0.1}, _ADAM),
    "adamw-amsgrad": Pair(torch.optim.AdamW, FusedAdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}, _ADAM),
    "adagrad": Pair(
        torch.optim.Adagrad,
        FusedAdagrad,
        {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.2, "weight_decay": 0.01},
        {**_RATES, **_DECAY, "lr_decay": (0.0, 0.5), "eps": (1e-10, 1e-3)},
    ),
    "lion": Pair(
        Lion,
        FusedLion,
        {"lr": 0.01, "weight_decay": 0.1},
        {**_RATES, **_DECAY, "betas": ((0.9, 0.99), (0.5, 0.8), (0.0, 0.9))},
    ),
}


class OptimizerMachine(RuleBasedStateMachine):
    """A fused optimizer (``ours``) and torch's (``theirs``), kept equal by the same operations in any order.

    torch's gradients are clipped by ``clip_grad_norm_`` where the fused optimizer has ``max_grad_norm``.

    Args:
        name: of :data:`PAIRS`.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.pair = PAIRS[name]
        self.saved: dict[str, Any] | None = None

    @initialize(
        precision=st.sampled_from(list(PRECISIONS)),
        gradients=st.sampled_from(["autograd", "fixed"]),
        max_grad_norm=st.sampled_from([None, 1.0]),
        backend=st.sampled_from(["cpp", "torch"]),
    )
    def build(self, precision: str, gradients: str, max_grad_norm: float | None, backend: str) -> None:
        self.dtype, self.their_dtype, self.rtol, self.atol = PRECISIONS[precision]
        self.peaks: dict[tuple[int, str], float] = {}  # the largest values so far
        self.masters = self.dtype != self.their_dtype
        self.fixed, self.max_grad_norm = gradients == "fixed", max_grad_norm
        self.options = {"gradients": gradients, "max_grad_norm": max_grad_norm, "backend": backend}
        self.ours = [nn.Parameter(value) for value in _values(SHAPES, self.dtype)]
        self.theirs = [nn.Parameter(param.detach().to(self.their_dtype)) for param in self.ours]
        self.groups = [len(self.ours)]  # parameters of each group
        self.our_optimizer = self._fused(self.ours)
        self.their_optimizer = self._torch(self.theirs)
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3) for _ in range(2)]
        self.our_scaler, self.their_scaler = scalers
        for scaler in scalers:
            scaler.scale(torch.ones(()))  # makes its tensors

    def _split(self, params: list[nn.Parameter]) -> list[dict[str, Any]]:
        left = list(params)
        return [{"params": [left.pop(0) for _ in range(count)]} for count in self.groups]

    def _fused(self, params: list[nn.Parameter]) -> FusedOptimizer:
        return self.pair.fused(self._split(params), **self.pair.options, **self.options)

    def _torch(self, params: list[nn.Parameter]) -> Optimizer:
        plain = {} if self.pair.torch is Lion else {"foreach": False}
        made: Optimizer = self.pair.torch(self._split(params), **self.pair.options, **plain)
        return made

    # Steps

    def give_gradients(self, seed: int, present: int, scale: float) -> None:
        """Give random gradients, exact in bf16, to the trained parameters whose bit in ``present`` is set."""
        self.our_optimizer.zero_grad()
        self.their_optimizer.zero_grad()
        generator = torch.Generator().manual_seed(seed)
        for index, (mine, other) in enumerate(zip(self.ours, self.theirs, strict=True)):
            value = (torch.randn(mine.shape, generator=generator) * scale).to(torch.bfloat16)
            given = mine.requires_grad and bool(present >> index & 1)
            if self.fixed and mine.requires_grad:
                # A fixed gradient is never None: without one, the parameter takes a step with zeros.
                mine.grad.copy_(value if given else torch.zeros_like(value))  # type: ignore[union-attr]
                other.grad = mine.grad.to(other.dtype, copy=True)  # type: ignore[union-attr]
            elif given:
                mine.grad = torch.empty_like(mine).copy_(value)
                other.grad = value.to(other.dtype)

    @rule(seed=SEEDS, present=PRESENT, scale=st.sampled_from([0.01, 1.0, 10.0]))
    def step(self, seed: int, present: int, scale: float) -> None:
        self.give_gradients(seed, present, scale)
        self.our_optimizer.step()
        self._clip()
        self.their_optimizer.step()

    @rule(seed=SEEDS, present=PRESENT, overflows=st.booleans())
    def scaled_step(self, seed: int, present: int, overflows: bool) -> None:
        """Take a step under a GradScaler; with ``overflows``, one that it skips."""
        # torch has no momentum buffer before its first step. Ours has one, of zeros, after a skipped first step,
        # and a checkpoint then makes the next step the second, which dampening applies to.
        overflows &= "momentum" not in self.pair.options or self._states_have_equal_keys(all_of_them=True)
        self.give_gradients(seed, present, 1.0)
        if all(param.grad is None or not param.grad.numel() for param in self.ours):
            return  # GradScaler asserts that there is a gradient
        for params, optimizer, scaler in (
            (self.ours, self.our_optimizer, self.our_scaler),
            (self.theirs, self.their_optimizer, self.their_scaler),
        ):
            grads = [param.grad for param in params if param.grad is not None]
            for grad in grads:
                grad.mul_(scaler.get_scale())
            if overflows:
                first = next(grad for grad in grads if grad.numel())
                first[(0,) * first.dim()] = float("inf")
            if optimizer is self.their_optimizer:
                scaler.unscale_(optimizer)
                self._clip()
            scaler.step(optimizer)
            scaler.update()
        assert self.our_scaler.get_scale() == self.their_scaler.get_scale()

    def _clip(self) -> None:
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_([p for p in self.theirs if p.grad is not None], self.max_grad_norm)

    # Changes between steps

    @rule(data=st.data(), group=INDICES)
    def edit(self, data: st.DataObject, group: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.pair.edits)))
        value = data.draw(st.sampled_from(self.pair.edits[key]))
        for optimizer in (self.our_optimizer, self.their_optimizer):
            entries = optimizer.param_groups[group % len(self.groups)]
            if key == "dampening" and entries.get("nesterov"):
                return
            entries[key] = value

    @precondition(lambda self: len(self.groups) < 3)
    @rule(lr=st.sampled_from([0.0, 0.03]))
    def add_param_group(self, lr: float) -> None:
        (value,) = _values((ADDED_SHAPE,), self.dtype)
        self.ours.append(nn.Parameter(value))
        self.theirs.append(nn.Parameter(value.to(self.their_dtype, copy=True)))
        self.groups.append(1)
        self.our_optimizer.add_param_group({"params": [self.ours[-1]], "lr": lr})
        self.their_optimizer.add_param_group({"params": [self.theirs[-1]], "lr": lr})

    @rule(index=INDICES)
    def freeze(self, index: int) -> None:
        """Freeze a parameter, or unfreeze it."""
        for params in (self.ours, self.theirs):
            param = params[index % len(params)]
            param.requires_grad_(not param.requires_grad)
            param.grad = None
        self._renew()

    @rule(index=INDICES, transposed=st.booleans())
    def move(self, index: int, transposed: bool) -> None:
        """Give one of our parameters new memory, and another layout with ``transposed``."""
        param = self.ours[index % len(self.ours)]
        turned = transposed and param.dim() > 1
        value = param.data.transpose(0, 1) if turned else param.data
        copied = value.clone(memory_format=torch.contiguous_format if turned else torch.preserve_format)
        param.data = copied.transpose(0, 1) if turned else copied
        param.grad = None
        self._renew()

    def _renew(self) -> None:
        if self.fixed:
            self.our_optimizer.attach_gradients()

    @rule(index=INDICES, factor=st.sampled_from([0.5, -1.0, 1.25]))
    @torch.no_grad()
    def write(self, index: int, factor: float) -> None:
        """Multiply a parameter in place, as ``load_state_dict`` does; its master follows where it changed."""
        mine, other = self.ours[index % len(self.ours)], self.theirs[index % len(self.theirs)]
        mine.mul_(factor)
        if self.masters:
            # Two changes before the next step may lead back to what the master rounds to: then it is kept.
            master = self.our_optimizer.state[mine].get("master", mine.float())
            other.copy_(torch.where(mine == master.to(self.dtype), master, mine.float()))
        else:
            other.mul_(factor)

    @rule(index=INDICES, factor=st.sampled_from([0.0, 0.5]))
    @torch.no_grad()
    def write_state(self, index: int, factor: float) -> None:
        """Multiply the moments of a parameter in place."""
        for optimizer, params in ((self.our_optimizer, self.ours), (self.their_optimizer, self.theirs)):
            entries = optimizer.state[params[index % len(params)]]
            for name in _moments(self.their_optimizer.state[self.theirs[index % len(params)]]):
                entries[name].mul_(factor)

    # Checkpoints

    @rule()
    def save(self) -> None:
        def saved(params: Iterable[Tensor], optimizer: Optimizer) -> Any:
            return saved_and_loaded({"params": [p.detach() for p in params], "optimizer": optimizer.state_dict()})

        self.saved = {
            "groups": list(self.groups),
            "trains": [param.requires_grad for param in self.ours],
            "ours": saved(self.ours, self.our_optimizer),
            "theirs": saved(self.theirs, self.their_optimizer),
        }

    @precondition(lambda self: self.saved is not None)
    @rule(model_first=st.booleans())
    def load(self, model_first: bool) -> None:
        """Build everything anew and load a checkpoint, the parameters before or after the optimizer."""
        saved: Any = copy.deepcopy(self.saved)  # torch's load_state_dict keeps the loaded tensors and trains them
        self.groups = list(saved["groups"])
        shapes = [param.shape for param in saved["ours"]["params"]]
        self.ours = [nn.Parameter(torch.zeros(shape, dtype=self.dtype)) for shape in shapes]
        self.theirs = [nn.Parameter(torch.zeros(shape, dtype=self.their_dtype)) for shape in shapes]
        for params in (self.ours, self.theirs):
            for param, trains in zip(params, saved["trains"], strict=True):
                param.requires_grad_(trains)
        self.our_optimizer, self.their_optimizer = self._fused(self.ours), self._torch(self.theirs)
        for name, params, optimizer in (
            ("ours", self.ours, self.our_optimizer),
            ("theirs", self.theirs, self.their_optimizer),
        ):
            if not model_first:
                optimizer.load_state_dict(saved[name]["optimizer"])
            with torch.no_grad():
                for param, value in zip(params, saved[name]["params"], strict=True):
                    param.copy_(value)
            if model_first:
                optimizer.load_state_dict(saved[name]["optimizer"])

    @rule()
    def exchange(self) -> None:
        """Load each optimizer's state into the other; the masters stay ours, as torch's optimizers know none."""
        if not self._states_have_equal_keys():
            return
        mine = saved_and_loaded(self.our_optimizer.state_dict())
        if not self.masters:
            self.our_optimizer.load_state_dict(saved_and_loaded(self.their_optimizer.state_dict()))
        for entries in mine["state"].values():
            entries.pop("master", None)
        self.their_optimizer.load_state_dict(mine)

    def _states_have_equal_keys(self, all_of_them: bool = False) -> bool:
        mine, other = (
            {i for i, p in enumerate(ps) if o.state.get(p)}
            for ps, o in ((self.ours, self.our_optimizer), (self.theirs, self.their_optimizer))
        )
        return mine == other and (not all_of_them or len(mine) == len(self.ours))

    @rule()
    def deepcopy(self) -> None:
        self.ours, self.our_optimizer = copy.deepcopy((self.ours, self.our_optimizer))

    # Comparison

    @invariant()
    def equal(self) -> None:
        """Assert that parameters, state and groups are equal."""
        if not hasattr(self, "ours"):
            return
        for index, (mine, other) in enumerate(zip(self.ours, self.theirs, strict=True)):
            entries, expected = self.our_optimizer.state[mine], self.their_optimizer.state[other]
            exact = mine.detach()
            if "master" in entries:
                # Where something else wrote the parameter, its master follows at the next step.
                rounded = entries["master"].to(self.dtype)
                exact = torch.where(rounded == exact, entries["master"], exact.float())
            self._close((index, "param"), exact, other.detach())
            for name in _moments(expected):
                self._close((index, name), entries[name], expected[name])
            if "step" in expected:
                assert float(entries["step"]) == float(expected["step"])
        for mine_group, other_group in zip(
            self.our_optimizer.param_groups, self.their_optimizer.param_groups, strict=True
        ):
            keys = mine_group.keys() & other_group.keys() - {"params"}
            assert {"lr", "weight_decay", "maximize"} <= keys
            assert all(mine_group[key] == other_group[key] for key in keys)

    def _close(self, key: tuple[int, str], found: Tensor, expected: Tensor) -> None:
        # A sum that was large once keeps the roundings of then, also where it has become small.
        finite = expected[expected.isfinite()]
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        peak = self.peaks[key] = max(self.peaks.get(key, 1.0), largest)
        found, atol = found.to(expected.dtype), self.atol * peak
        if found.shape != expected.shape or not torch.allclose(found, expected, self.rtol, atol):
            # It compares in the same way, with a message, and takes a quarter of the time of the test.
            torch.testing.assert_close(found, expected, rtol=self.rtol, atol=atol)
            raise AssertionError(f"{key}: allclose differs from assert_close")


def _values(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(torch.bfloat16).to(dtype) for shape in shapes]
    return [v.to(memory_format=torch.channels_last) if v.dim() == 4 else v for v in values]


def _moments(entries: dict[str, Any]) -> list[str]:
    return [name for name, value in entries.items() if name != "step" and isinstance(value, Tensor)]


@pytest.mark.parametrize("name", PAIRS)
def test_any_sequence_equals_torch(name: str) -> None:
    explore(lambda: OptimizerMachine(name), examples=3, steps=15)


@pytest.mark.full
@pytest.mark.parametrize("name", PAIRS)
def test_many_sequences_equal_torch(name: str) -> None:
    explore(lambda: OptimizerMachine(name), examples=16, steps=50)
