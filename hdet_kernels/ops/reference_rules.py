"""The update rules in plain torch, which run anywhere and are the reference for other backends.

θ is a parameter, g its gradient (already multiplied by the AMP and clipping factor, and negated for ``maximize``), t
the number of this step, counted from 1. A rule has three parts:

- ``derive`` computes, for all parameters at once, the numbers that are the same for every element of a parameter.
- ``push`` updates the states of one parameter by its gradient and returns the direction of the update.
- ``move`` applies that direction to the parameter.

Replicas that share a gradient share the push of replica 0. On an accelerator derived numbers stay there as float64
scalars, so that nothing waits for them. On the CPU they are Python numbers, and a branch that is not taken costs
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hdet_kernels.ops.step import check_rules

States = list[Tensor | None]

# A derived number or truth value: on the host, or a tensor without dimensions.
Scalar = Any

# The derived numbers of one parameter of one replica, by name.
Numbers = SimpleNamespace

# The result of a push: a direction and, for some rules, its divisor.
Push = tuple[Any, ...]


class Row(NamedTuple):
    """The columns of the hyperparameter table (``ops.table.COLUMNS``), each with one element for each parameter."""

    lr: Tensor
    weight_decay: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    momentum: Tensor
    dampening: Tensor
    lr_decay: Tensor
    max_grad_norm: Tensor
    seed: Tensor
    nesterov: Tensor
    amsgrad: Tensor
    maximize: Tensor


class Rule(Protocol):
    """An update rule."""

    def derive(self, t: Tensor, first: Tensor, h: Row) -> dict[str, Tensor]:
        """Return the derived numbers, each with one element for each parameter.

        ``first`` says where no step with momentum came before.
        """

    def push(self, theta: Tensor, g: Tensor, states: States, n: Numbers) -> tuple[Push, States]:
        """Return the push and the new states, given the old states as flat tensors."""

    def move(self, theta: Tensor, push: Push, n: Numbers) -> Tensor:
        """Return the new parameter."""


class SGD:
    """Stochastic gradient descent.

    With weight decay λ, momentum μ and dampening τ::

        g ← g + λ·θ
        b ← g                       at the first step with μ ≠ 0
        b ← μ·b + (1 − τ)·g         afterwards
        d = g + μ·b (nesterov), b (momentum), g (μ = 0)
        θ ← θ − lr·d

    With μ = 0 there is no state, and replicas that share g each add their own λ·θ.
    """

    def derive(self, t: Tensor, first: Tensor, h: Row) -> dict[str, Tensor]:
        return {
            "decay": h.weight_decay,
            "decays": h.weight_decay != 0,
            "on": h.momentum != 0,
            "momentum": h.momentum,
            "take": 1 - h.dampening,
            "first": first,
            "nesterov": h.nesterov > 0,
            "lr": h.lr,
        }

    def push(self, theta: Tensor, g: Tensor, states: States, n: Numbers) -> tuple[Push, States]:
        """Return the direction and whether it includes λ·θ."""
        (buffer,) = states
        if buffer is None:
            return (g, False), states
        slope = _with_l2(theta, g, n.decay, n.decays)
        moved = choose(n.first, lambda: slope, lambda: n.momentum * buffer + n.take * slope)
        direction = choose(n.nesterov, lambda: slope + n.momentum * moved, lambda: moved)
        new = choose(n.on, lambda: moved, lambda: buffer)
        return (choose(n.on, lambda: direction, lambda: g), n.on), [new]

    def move(self, theta: Tensor, push: Push, n: Numbers) -> Tensor:
        direction, decayed = push
        with_l2 = partial(_with_l2, theta, direction, n.decay, n.decays)
        return theta - n.lr * choose(decayed, lambda: direction, with_l2)


class AdamW:
    """Adam with weight decay that does not enter the moments.

    With decoupled weight decay λ::

        θ ← θ·(1 − lr·λ)
        m ← β₁·m + (1 − β₁)·g
        v ← β₂·v + (1 − β₂)·g²
        u = max(u, v) (amsgrad), v (otherwise)
        θ ← θ − lr/(1 − β₁ᵗ) · m / (√u/√(1 − β₂ᵗ) + ε)
    """

    def derive(self, t: Tensor, first: Tensor, h: Row) -> dict[str, Tensor]:
        return {
            "keep": 1 - h.lr * h.weight_decay,
            "take1": 1 - h.beta1,
            "keep2": h.beta2,
            "take2": 1 - h.beta2,
            "amsgrad": h.amsgrad > 0,
            "size": h.lr / (1 - h.beta1**t),
            "root": (1 - h.beta2**t).sqrt(),
            "eps": h.eps,
        }

    def push(self, theta: Tensor, g: Tensor, states: States, n: Numbers) -> tuple[Push, States]:
        """Return m and √u as the push."""
        m, v = _required(states, 2)
        m = m + n.take1 * (g - m)
        v = n.keep2 * v + n.take2 * g * g  # in this order, as torch: g² alone overflows from 1.9e19 on
        largest, used = states[2], v
        if largest is not None:
            before = largest
            largest = choose(n.amsgrad, lambda: torch.maximum(before, v), lambda: before)
            used = choose(n.amsgrad, lambda: torch.maximum(before, v), lambda: v)
        return (m, used.sqrt()), [m, v, largest]

    def move(self, theta: Tensor, push: Push, n: Numbers) -> Tensor:
        m, root = push
        return theta * n.keep - n.size * (m / (root / n.root + n.eps))


class Adam(AdamW):
    """Adam with weight decay λ as an L2 penalty: g ← g + λ·θ, then as :class:`AdamW` without its decay."""

    def derive(self, t: Tensor, first: Tensor, h: Row) -> dict[str, Tensor]:
        alone = super().derive(t, first, h)
        return alone | {"keep": torch.ones_like(h.lr), "decay": h.weight_decay, "decays": h.weight_decay != 0}

    def push(self, theta: Tensor, g: Tensor, states: States, n: Numbers) -> tuple[Push, States]:
        return super().push(theta, _with_l2(theta, g, n.decay, n.decays), states, n)


class Adagrad:
    """Adagrad.

    With L2 weight decay λ and learning rate decay κ::

        g ← g + λ·θ
        s ← s + g²
        θ ← θ − lr/(1 + (t − 1)·κ) · g / (√s + ε)
    """

    def derive(self, t: Tensor, first: Tensor, h: Row) -> dict[str, Tensor]:
        size = h.lr / (1 + (t - 1) * h.lr_decay)
        return {"decay": h.weight_decay, "decays": h.weight_decay != 0, "size": size, "eps": h.eps}

    def push(self, theta: Tensor, g: Tensor, states: States, n: Numbers) -> tuple[Push, States]:
        """Return g and √s as the push."""
        (total,) = _required(states, 1)
        g = _with_l2(theta, g, n.decay, n.decays)
        total = total + g * g
        return (g, total.sqrt()), [total]

    def move(self, theta: Tensor, push: Push, n: Numbers) -> Tensor:
        g, root = push
        return theta - n.size * (g / (root + n.eps))


class Lion:
    """Lion.

    With decoupled weight decay λ::

        θ ← θ·(1 − lr·λ) − lr·sign(β₁·m + (1 − β₁)·g)
        m ← β₂·m + (1 − β₂)·g

    with sign(0) = 0 and sign(NaN) = NaN.
    """

    def derive(self, t: Tensor, first: Tensor, h: Row) -> dict[str, Tensor]:
        betas = {"keep1": h.beta1, "take1": 1 - h.beta1, "keep2": h.beta2, "take2": 1 - h.beta2}
        return {"keep": 1 - h.lr * h.weight_decay, "lr": h.lr, **betas}

    def push(self, theta: Tensor, g: Tensor, states: States, n: Numbers) -> tuple[Push, States]:
        """Return the sign as the push."""
        (m,) = _required(states, 1)
        blend = n.keep1 * m + n.take1 * g
        # torch's sign(NaN) is 0, with which a parameter would stand still in silence.
        return (torch.where(blend.isnan(), blend, blend.sign()),), [n.keep2 * m + n.take2 * g]

    def move(self, theta: Tensor, push: Push, n: Numbers) -> Tensor:
        (sign,) = push
        return theta * n.keep - n.lr * sign


class Muon:
    """The two passes of Muon around the orthogonalisation of its update.

    With the state, the pass before it, which stores the update in place of θ::

        b ← μ·b + (1 − μ)·g
        θ ← μ·b + (1 − μ)·g (nesterov), b (otherwise)

    Without, the pass after it, for which g is the orthogonal update::

        θ ← θ·(1 − lr·λ) − lr·g
    """

    def derive(self, t: Tensor, first: Tensor, h: Row) -> dict[str, Tensor]:
        return {"keep": 1 - h.lr * h.weight_decay, "lr": h.lr, "take": 1 - h.momentum, "nesterov": h.nesterov > 0}

    def push(self, theta: Tensor, g: Tensor, states: States, n: Numbers) -> tuple[Push, States]:
        """Return the update and whether it is the result."""
        (buffer,) = states
        if buffer is None:
            return (g, False), states
        moved = buffer + n.take * (g - buffer)
        return (choose(n.nesterov, lambda: moved + n.take * (g - moved), lambda: moved), True), [moved]

    def move(self, theta: Tensor, push: Push, n: Numbers) -> Tensor:
        update, is_result = push
        return update if is_result else theta * n.keep - n.lr * update


RULES: dict[str, Rule] = {
    "sgd": SGD(),
    "adam": Adam(),
    "adamw": AdamW(),
    "adagrad": Adagrad(),
    "lion": Lion(),
    "muon": Muon(),
}
check_rules(__name__, RULES)


def choose(condition: Scalar, yes: Callable[[], Tensor], no: Callable[[], Tensor]) -> Tensor:
    """Return ``yes()`` or ``no()``; where the condition is a tensor, compute both and select on its device."""
    if isinstance(condition, bool):
        return yes() if condition else no()
    return torch.where(condition, yes(), no())


def _with_l2(theta: Tensor, g: Tensor, decay: Scalar, decays: Scalar) -> Tensor:
    # A decay of 0 is skipped, because 0·θ is not 0 where θ is infinite.
    return choose(decays, lambda: g + decay * theta, lambda: g)


def _required(states: States, count: int) -> list[Tensor]:
    present = [state for state in states[:count] if state is not None]
    if len(present) != count:
        raise ValueError(f"this rule needs {count} state buffers, got {len(present)}")
    return present
