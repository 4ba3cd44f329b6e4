"""The update rules in plain torch: the text that every other backend is compared with, and that runs anywhere.

θ is a parameter, g its gradient (already multiplied by the AMP and clipping factor, and negated for ``maximize``), t
the number of this step, counted from 1. A rule first derives, for all parameters at once, what is the same for every
element of one; then it updates one parameter after the other. On an accelerator what is derived stays there, as
float64 scalars, so that nothing waits for it; on the CPU it is Python numbers, and a branch not taken costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hdet_kernels.buckets import flat_view
from hdet_kernels.ops.chunks import NO_GRADIENT, ChunkTable, Gradients

States = list[Tensor | None]

#: A number or truth value that was derived: on the host, or a tensor without dimensions.
Scalar = Any


class Row(NamedTuple):
    """The columns of the hyperparameter table (``ops.table.COLUMNS``), each with one element a parameter."""

    lr: Tensor
    weight_decay: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    momentum: Tensor
    dampening: Tensor
    lr_decay: Tensor
    nesterov: Tensor
    amsgrad: Tensor
    maximize: Tensor


class Rule(Protocol):
    def derive(self, t: Tensor, h: Row) -> tuple[Tensor, ...]:
        """What :meth:`update` needs after the states, with one element a parameter."""

    def update(self, theta: Tensor, g: Tensor, states: States, *derived: Scalar) -> tuple[Tensor, States]:
        """The new parameter and states, from flat old ones."""


class SGD:
    """Stochastic gradient descent.

    With weight decay λ, momentum μ and dampening τ::

        g ← g + λ·θ
        b ← g                       at the first step with μ ≠ 0
        b ← μ·b + (1 − τ)·g         afterwards
        d = g + μ·b (nesterov), b (momentum), g (μ = 0)
        θ ← θ − lr·d
    """

    def derive(self, t: Tensor, h: Row) -> tuple[Tensor, ...]:
        on = h.momentum != 0
        return h.weight_decay, h.weight_decay != 0, on, h.momentum, 1 - h.dampening, t <= 1, h.nesterov > 0, h.lr

    def update(self, theta: Tensor, g: Tensor, states: States, *derived: Scalar) -> tuple[Tensor, States]:
        decay, decays, on, momentum, take, first, nesterov, lr = derived
        (buffer,) = states
        g = _with_l2(theta, g, decay, decays)
        if buffer is None:
            return theta - lr * g, states
        moved = _choose(first, lambda: g, lambda: momentum * buffer + take * g)
        direction = _choose(nesterov, lambda: g + momentum * moved, lambda: moved)
        new = _choose(on, lambda: moved, lambda: buffer)
        return theta - lr * _choose(on, lambda: direction, lambda: g), [new]


class AdamW:
    """Adam, with the decay of weights outside of the moments.

    With decoupled weight decay λ::

        θ ← θ·(1 − lr·λ)
        m ← β₁·m + (1 − β₁)·g
        v ← β₂·v + (1 − β₂)·g²
        u = max(u, v) (amsgrad), v (otherwise)
        θ ← θ − lr/(1 − β₁ᵗ) · m / (√u/√(1 − β₂ᵗ) + ε)
    """

    def derive(self, t: Tensor, h: Row) -> tuple[Tensor, ...]:
        return 1 - h.lr * h.weight_decay, *_adam_derived(t, h)

    def update(self, theta: Tensor, g: Tensor, states: States, *derived: Scalar) -> tuple[Tensor, States]:
        keep, *moments = derived
        return _adam_update(theta * keep, g, states, *moments)


class Adam:
    """Adam, with weight decay λ as an L2 penalty: g ← g + λ·θ, then as :class:`AdamW` without its decay."""

    def derive(self, t: Tensor, h: Row) -> tuple[Tensor, ...]:
        return h.weight_decay, h.weight_decay != 0, *_adam_derived(t, h)

    def update(self, theta: Tensor, g: Tensor, states: States, *derived: Scalar) -> tuple[Tensor, States]:
        decay, decays, *moments = derived
        return _adam_update(theta, _with_l2(theta, g, decay, decays), states, *moments)


class Adagrad:
    """Adagrad.

    With L2 weight decay λ and learning rate decay κ::

        g ← g + λ·θ
        s ← s + g²
        θ ← θ − lr/(1 + (t − 1)·κ) · g / (√s + ε)
    """

    def derive(self, t: Tensor, h: Row) -> tuple[Tensor, ...]:
        return h.weight_decay, h.weight_decay != 0, h.lr / (1 + (t - 1) * h.lr_decay), h.eps

    def update(self, theta: Tensor, g: Tensor, states: States, *derived: Scalar) -> tuple[Tensor, States]:
        decay, decays, size, eps = derived
        (total,) = _required(states, 1)
        g = _with_l2(theta, g, decay, decays)
        total = total + g * g
        return theta - size * (g / (total.sqrt() + eps)), [total]


class Lion:
    """Lion.

    With decoupled weight decay λ::

        θ ← θ·(1 − lr·λ) − lr·sign(β₁·m + (1 − β₁)·g)
        m ← β₂·m + (1 − β₂)·g
    """

    def derive(self, t: Tensor, h: Row) -> tuple[Tensor, ...]:
        return 1 - h.lr * h.weight_decay, h.lr, h.beta1, 1 - h.beta1, h.beta2, 1 - h.beta2

    def update(self, theta: Tensor, g: Tensor, states: States, *derived: Scalar) -> tuple[Tensor, States]:
        keep, lr, keep1, take1, keep2, take2 = derived
        (m,) = _required(states, 1)
        return theta * keep - lr * (keep1 * m + take1 * g).sign(), [keep2 * m + take2 * g]


RULES: dict[str, Rule] = {"sgd": SGD(), "adam": Adam(), "adamw": AdamW(), "adagrad": Adagrad(), "lion": Lion()}


def step(
    rule: str,
    param: Tensor,
    states: Sequence[Tensor | None],
    steps: Tensor,
    table: Tensor,
    chunks: ChunkTable,
    grads: Gradients,
    multiplier: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Apply ``rule`` to every slot that has a gradient; see :func:`hdet_kernels.ops.step`."""
    h = Row(*table[chunks.slots[:, 2]].unbind(1))
    # The first step with momentum is told by its count, so in sgd steps without momentum do not count.
    t = steps.to(table.dtype) + ((h.momentum != 0) if rule == "sgd" else 1)
    factor = 1 - 2 * h.maximize
    if multiplier is not None:
        factor = factor * multiplier.squeeze()
    skip: Scalar = False if found_inf is None else found_inf.squeeze() > 0
    columns = (factor, *RULES[rule].derive(t, h))
    if _free_to_read(param):
        if skip:
            return
        derived = zip(*(column.tolist() for column in columns), strict=True)
    else:
        derived = zip(*(column.unbind() for column in columns), strict=True)
    compute = torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype
    for slot, grad, (own_factor, *own) in zip(chunks.entries, grads.tensors, derived, strict=True):
        if grad is None or slot.numel == 0:
            continue
        span = slice(slot.offset, slot.offset + slot.numel)
        theta = param[span]
        old = [None if state is None else state[span] for state in states]
        wide = [None if state is None else state.to(compute) for state in old]
        g = flat_view(grad).to(compute)
        if isinstance(own_factor, Tensor) or own_factor != 1:
            g = g * own_factor
        new = RULES[rule].update(theta.to(compute), g, wide, *own)
        _store(theta, new[0], skip)
        for target, value in zip(old, new[1], strict=True):
            if target is not None and value is not None:
                _store(target, value, skip)
    _store(steps, torch.where(chunks.point_at(grads) != NO_GRADIENT, t.to(steps.dtype), steps), skip)


def _free_to_read(tensor: Tensor) -> bool:
    """Whether the host can read the tensor without waiting for a device."""
    return tensor.device.type == "cpu"


def _choose(condition: Scalar, yes: Callable[[], Tensor], no: Callable[[], Tensor]) -> Tensor:
    if isinstance(condition, bool):
        return yes() if condition else no()
    return torch.where(condition, yes(), no())


def _store(target: Tensor, value: Tensor, skip: Scalar) -> None:
    if value is not target:
        target.copy_(_choose(skip, lambda: target, lambda: value))


def _adam_derived(t: Tensor, h: Row) -> tuple[Tensor, ...]:
    size, root = h.lr / (1 - h.beta1**t), (1 - h.beta2**t).sqrt()
    return 1 - h.beta1, h.beta2, 1 - h.beta2, h.amsgrad > 0, size, root, h.eps


def _adam_update(theta: Tensor, g: Tensor, states: States, *derived: Scalar) -> tuple[Tensor, States]:
    take1, keep2, take2, amsgrad, size, root, eps = derived
    m, v = _required(states, 2)
    m = m + take1 * (g - m)
    v = keep2 * v + take2 * (g * g)
    largest, used = states[2], v
    if largest is not None:
        before = largest
        largest = _choose(amsgrad, lambda: torch.maximum(before, v), lambda: before)
        used = _choose(amsgrad, lambda: torch.maximum(before, v), lambda: v)
    return theta - size * (m / (used.sqrt() / root + eps)), [m, v, largest]


def _with_l2(theta: Tensor, g: Tensor, decay: Scalar, decays: Scalar) -> Tensor:
    # Not only to save work: 0·θ is not 0 where θ is infinite.
    return _choose(decays, lambda: g + decay * theta, lambda: g)


def _required(states: States, count: int) -> list[Tensor]:
    present = [state for state in states[:count] if state is not None]
    if len(present) != count:
        raise ValueError(f"this rule needs {count} state buffers, got {len(present)}")
    return present
