"""The update rules in plain torch: the text that every other backend is compared with, and that runs anywhere.

θ is a parameter, g its gradient (already multiplied by the AMP and clipping factor, and negated for ``maximize``), t
the number of this step, counted from 1. A rule first derives, for all parameters at once, what is the same for every
element of one; then it updates one parameter after the other. On an accelerator what is derived stays there, as
float64 scalars, so that nothing waits for it; on the CPU it is Python numbers, and a branch not taken costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hdet_kernels.buckets import in_full, wide_dtype
from hdet_kernels.ops import STATES, Scalars, Work, operators
from hdet_kernels.ops.chunks import NO_GRADIENT, ChunkTable, Gradients, flat_gradients
from hdet_kernels.ops.reference_noise import add_noise_ as add_noise_
from hdet_kernels.ops.reference_pack import pack as pack
from hdet_kernels.ops.reference_pack import unpack as unpack
from hdet_kernels.ops.reference_wire import wire_operators as wire_operators
from hdet_kernels.ops.rounding import random_bits, round_stochastically, rounding_key

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
    max_grad_norm: Tensor
    seed: Tensor
    nesterov: Tensor
    amsgrad: Tensor
    maximize: Tensor


class Rule(Protocol):
    def derive(self, t: Tensor, first: Tensor, h: Row) -> tuple[Tensor, ...]:
        """What :meth:`update` needs after the states, with one element a parameter. ``first``: no momentum before."""

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

    def derive(self, t: Tensor, first: Tensor, h: Row) -> tuple[Tensor, ...]:
        on = h.momentum != 0
        return h.weight_decay, h.weight_decay != 0, on, h.momentum, 1 - h.dampening, first, h.nesterov > 0, h.lr

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

    def derive(self, t: Tensor, first: Tensor, h: Row) -> tuple[Tensor, ...]:
        return 1 - h.lr * h.weight_decay, *_adam_derived(t, h)

    def update(self, theta: Tensor, g: Tensor, states: States, *derived: Scalar) -> tuple[Tensor, States]:
        keep, *moments = derived
        return _adam_update(theta * keep, g, states, *moments)


class Adam:
    """Adam, with weight decay λ as an L2 penalty: g ← g + λ·θ, then as :class:`AdamW` without its decay."""

    def derive(self, t: Tensor, first: Tensor, h: Row) -> tuple[Tensor, ...]:
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

    def derive(self, t: Tensor, first: Tensor, h: Row) -> tuple[Tensor, ...]:
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

    def derive(self, t: Tensor, first: Tensor, h: Row) -> tuple[Tensor, ...]:
        return 1 - h.lr * h.weight_decay, h.lr, h.beta1, 1 - h.beta1, h.beta2, 1 - h.beta2

    def update(self, theta: Tensor, g: Tensor, states: States, *derived: Scalar) -> tuple[Tensor, States]:
        keep, lr, keep1, take1, keep2, take2 = derived
        (m,) = _required(states, 1)
        return theta * keep - lr * (keep1 * m + take1 * g).sign(), [keep2 * m + take2 * g]


RULES: dict[str, Rule] = {"sgd": SGD(), "adam": Adam(), "adamw": AdamW(), "adagrad": Adagrad(), "lion": Lion()}


def bind_step(work: Work) -> Callable[[Gradients, Scalars], None]:
    chunks, rounding = work.chunks, work.stochastic_rounding
    offsets = [slot.offset for slot in chunks.entries]
    operator = partial(_operators()[0], *work.flats, chunks.slots)

    def run(grads: Gradients, scalars: Scalars) -> None:
        operator(chunks.point_at(grads), offsets, flat_gradients(grads), *scalars, rounding)

    return run


def grad_norm(chunks: ChunkTable, grads: Gradients) -> Tensor:
    return _operators()[1](chunks.chunks, flat_gradients(grads))


def all_finite(chunks: ChunkTable, grads: Gradients) -> Tensor:
    return _operators()[2](chunks.chunks, flat_gradients(grads))


@cache
def _operators() -> tuple[Any, Any, Any]:
    tables = "Tensor slots, Tensor gradients, int[] offsets, Tensor?[] tensors"
    return (
        operators.register(
            "torch_step_", f"{operators.FLATS}, {tables}, {operators.SCALARS}", "()", _step, operators.fake_step
        ),
        operators.register(
            "torch_grad_norm", "Tensor chunks, Tensor?[] tensors", "Tensor", _grad_norm, operators.fake_norm
        ),
        operators.register(
            "torch_all_finite", "Tensor chunks, Tensor?[] tensors", "Tensor", _all_finite, operators.fake_finite
        ),
    )


def _step(
    rule: int,
    param: Tensor,
    master: Tensor | None,
    state0: Tensor | None,
    state1: Tensor | None,
    state2: Tensor | None,
    steps: Tensor,
    table: Tensor,
    slots: Tensor,
    gradients: Tensor,
    offsets: Sequence[int],
    tensors: Sequence[Tensor | None],
    grad_scale: Tensor | None,
    norm: Tensor | None,
    found_inf: Tensor | None,
    stochastic_rounding: bool,
) -> None:
    name = list(STATES)[rule]
    own_rule = RULES[name]
    states = [state0, state1, state2][: len(STATES[name])]
    h = Row(*table[slots[:, 2]].unbind(1))
    t = steps.to(table.dtype).abs() + 1
    skip: Scalar = False if found_inf is None else found_inf.squeeze() > 0
    columns = (
        _gradient_factor(h, grad_scale, norm),
        rounding_key(h.seed, t) if stochastic_rounding else t,
        *own_rule.derive(t, steps <= 0, h),
    )
    if _free_to_read(param):
        if skip:
            return
        skip = False
        derived = zip(*(column.tolist() for column in columns), strict=True)
    else:
        derived = zip(*(column.unbind() for column in columns), strict=True)
    compute = torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype
    for offset, grad, (factor, key, *own) in zip(offsets, tensors, derived, strict=True):
        if grad is None or grad.numel() == 0:
            continue
        span = slice(offset, offset + grad.numel())
        old = [None if state is None else state[span] for state in states]
        wide = [None if state is None else state.to(compute) for state in old]
        g = grad.to(compute)
        if isinstance(factor, Tensor) or factor != 1:
            g = g * factor
        full = param[span] if master is None else in_full(param[span], master[span])
        theta, new = own_rule.update(full.to(compute), g, wide, *own)
        stored = [param[span], None if master is None else master[span], *old]
        for stream, (target, value) in enumerate(zip(stored, [theta, theta, *new], strict=False)):
            if target is None or value is None:
                continue
            if stochastic_rounding and target.dtype == torch.bfloat16:
                value = round_stochastically(value, random_bits(key, stream, offset, value))
            target.copy_(_unless(skip, target, value))
    counted = torch.where((h.momentum != 0) | (steps > 0), t, -t) if name == "sgd" else t
    counted = torch.where(gradients[:, 0] != NO_GRADIENT, counted.to(steps.dtype), steps)
    steps.copy_(_unless(skip, steps, counted))


def _grad_norm(chunks: Tensor, tensors: Sequence[Tensor | None]) -> Tensor:
    wide = wide_dtype(chunks.device)
    norms = [torch.linalg.vector_norm(grad, dtype=wide) for grad in tensors if grad is not None and grad.numel()]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else chunks.new_zeros((), dtype=wide)


def _all_finite(chunks: Tensor, tensors: Sequence[Tensor | None]) -> Tensor:
    finite = [grad.isfinite().all() for grad in tensors if grad is not None]
    return torch.stack(finite).all() if finite else chunks.new_ones((), dtype=torch.bool)


def _gradient_factor(h: Row, grad_scale: Tensor | None, norm: Tensor | None) -> Tensor:
    """What gradients are multiplied by: AMP's scale undone, clipped to a global norm, negated for ``maximize``."""
    factor = torch.ones_like(h.lr) if grad_scale is None else grad_scale.to(h.lr.dtype).reciprocal().expand_as(h.lr)
    if norm is not None:
        # As in clip_grad_norm_: 1e-6 keeps a zero norm from dividing by zero.
        clip = (h.max_grad_norm / (norm.squeeze() * factor + 1e-6)).clamp(max=1.0)
        factor = torch.where(h.max_grad_norm > 0, factor * clip, factor)
    return factor * (1 - 2 * h.maximize)


def _free_to_read(tensor: Tensor) -> bool:
    """Whether the host can read the tensor without waiting for a device."""
    return tensor.device.type == "cpu"


def _choose(condition: Scalar, yes: Callable[[], Tensor], no: Callable[[], Tensor]) -> Tensor:
    if isinstance(condition, bool):
        return yes() if condition else no()
    return torch.where(condition, yes(), no())


def _unless(skip: Scalar, old: Tensor, new: Tensor) -> Tensor:
    return _choose(skip, lambda: old, lambda: new)


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
