"""The update rules in plain torch: begin to read here. All other backends are held against this text.

θ is a parameter, g its gradient (already multiplied by the AMP and clipping factor, and negated for ``maximize``), t
the number of this step, counted from 1. A rule has three parts:

- ``derive`` computes, for all parameters at once, the numbers that are the same for every element of a parameter, given
  t, where no step with momentum came before (``first``), and the hyperparameters.
- ``push`` updates the states of one parameter by its gradient and returns the direction of the update and the states.
- ``move`` applies that direction to the parameter.

Replicas that share a gradient share the push of replica 0. On an accelerator derived numbers stay there as scalars in
the dtype of the hyperparameter table, so that nothing waits for them; on the CPU they are Python numbers. :mod:`.step`
reads, rounds and writes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# The states of one parameter as flat tensors; None for an optional one that is not in use.
States = list[Any]

# A derived number or truth value: on the host, or a tensor without dimensions.
Scalar = Any

# The derived numbers of one parameter of one replica, by name.
Numbers = SimpleNamespace

# The result of a push: a direction and, for some rules, its divisor.
Push = tuple[Any, ...]


# The columns of the hyperparameter table (``ops.table.COLUMNS``) by name, each with one element for each parameter.
Row = SimpleNamespace


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
        slope = _with_l2(theta, g, n)
        moved = where(n.first, slope, n.momentum * buffer + n.take * slope)
        direction = where(n.nesterov, slope + n.momentum * moved, moved)
        return (where(n.on, direction, g), n.on), [where(n.on, moved, buffer)]

    def move(self, theta: Tensor, push: Push, n: Numbers) -> Tensor:
        direction, decayed = push
        return theta - n.lr * where(decayed, direction, _with_l2(theta, direction, n))


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
        m, v, u = states
        m = m + n.take1 * (g - m)
        v = n.keep2 * v + n.take2 * g * g  # in this order, as torch: g² alone overflows from 1.9e19 on
        if u is None:
            return (m, v.sqrt()), [m, v, None]
        largest = torch.maximum(u, v)
        return (m, where(n.amsgrad, largest, v).sqrt()), [m, v, where(n.amsgrad, largest, u)]

    def move(self, theta: Tensor, push: Push, n: Numbers) -> Tensor:
        m, root = push
        return theta * n.keep - n.size * (m / (root / n.root + n.eps))


class Adam(AdamW):
    """Adam with weight decay λ as an L2 penalty: g ← g + λ·θ, then as :class:`AdamW` without its decay."""

    def derive(self, t: Tensor, first: Tensor, h: Row) -> dict[str, Tensor]:
        alone = super().derive(t, first, h)
        return alone | {"keep": torch.ones_like(h.lr), "decay": h.weight_decay, "decays": h.weight_decay != 0}

    def push(self, theta: Tensor, g: Tensor, states: States, n: Numbers) -> tuple[Push, States]:
        return super().push(theta, _with_l2(theta, g, n), states, n)


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
        (total,) = states
        g = _with_l2(theta, g, n)
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
        (m,) = states
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
        return (where(n.nesterov, moved + n.take * (g - moved), moved), True), [moved]

    def move(self, theta: Tensor, push: Push, n: Numbers) -> Tensor:
        update, is_result = push
        return update if is_result else theta * n.keep - n.lr * update


RULES: dict[str, SGD | AdamW | Adagrad | Lion | Muon] = {
    "sgd": SGD(),
    "adam": Adam(),
    "adamw": AdamW(),
    "adagrad": Adagrad(),
    "lion": Lion(),
    "muon": Muon(),
}


def where(condition: Scalar, yes: Tensor, no: Tensor) -> Tensor:
    """Return ``yes`` where the condition holds and ``no`` elsewhere: one of them, if the host knows the condition."""
    if isinstance(condition, bool):
        return yes if condition else no
    return torch.where(condition, yes, no)


def _with_l2(theta: Tensor, g: Tensor, n: Numbers) -> Tensor:
    """Return g + λ·θ; g alone where λ is 0, because 0·θ is not 0 where θ is infinite."""
    return g if n.decays is False else where(n.decays, g + n.decay * theta, g)
