"""The optimizer step in plain torch: what is around an update rule of :mod:`.rules`, for one parameter after the other.

Parameters and states are read and widened, stepped by the rule, rounded and written. Nothing waits for a device: there,
what a flag of the hyperparameter table turns off is computed too, and not chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hdet_kernels.ops.chunks import NO_GRADIENT, ChunkTable, MatchedGradients, flat_gradients
from hdet_kernels.ops.step import STATES, Scalars, Step
from hdet_kernels.ops.table import COLUMNS
from hdet_kernels.ops.torch.companding import (
    SIGNED_STATES,
    block_count,
    decode,
    encode,
    first_scales,
    positions_of_bits,
)
from hdet_kernels.ops.torch.rounding import random_bits, random_bits_at, round_stochastically, rounding_key
from hdet_kernels.ops.torch.rules import RULES, Numbers, Row, Scalar, States, where
from hdet_kernels.split_master import split
from hdet_kernels.tensors import in_full, wide_dtype


def bind_step(step: Step) -> Callable[[MatchedGradients, Scalars], None]:
    """Return a function that runs ``step`` on given gradients and scalars."""
    chunks = step.chunks
    offsets = [slot.offset for slot in chunks.entries]
    of_scales = first_scales(slot.numel for slot in chunks.entries)

    def run(grads: MatchedGradients, scalars: Scalars) -> None:
        _step(step, scalars, chunks.point_at(grads), offsets, of_scales, flat_gradients(grads))

    return run


def _step(
    given: Step,
    scalars: Scalars,
    gradients: Tensor,
    offsets: Sequence[int],
    of_scales: Sequence[int],
    tensors: Sequence[Tensor | None],
) -> None:
    """Step every slot that has a gradient, and count its step."""
    name, param, steps, table, rows = given.rule, given.param, given.steps, given.table, given.rows
    groups = given.chunks.slots[:, 2]
    t = steps.to(table.dtype).abs() + 1
    h = _by_column(table[groups].unbind(1))  # of replica 0, each column [slots]
    own = _by_column(table.view(rows, -1, table.shape[1])[:, groups].unbind(2))  # of every replica, each [rows, slots]
    numbers = RULES[name].derive(t, steps <= 0, own)
    numbers["factor"] = _gradient_factor(h, scalars.grad_scale, _norm_of_slots(scalars.norm, groups, table))
    scales = [*given.scales, None, None, None]
    if given.stochastic_rounding or any(scale is not None for scale in scales):
        numbers["key"] = rounding_key(own.seed, t)
    skip: Scalar = False if scalars.found_inf is None else scalars.found_inf.squeeze() > 0
    readable = _free_to_read(param)
    if readable and skip:
        return
    skip = False if readable else skip
    masters = None if given.master is None else given.master.view(rows, -1)
    walk = _Walk(name, param.view(rows, -1), masters, skip, given.stochastic_rounding)
    of_slots = _by_slot(numbers, rows, readable)
    for offset, first, grad, own_numbers in zip(offsets, of_scales, tensors, of_slots, strict=True):
        if grad is None or grad.numel() == 0:
            continue
        span, blocks = slice(offset, offset + grad.numel()), slice(first, first + block_count(grad.numel()))
        stored = [
            _State(key, state[span], None if scale is None else scale[blocks])
            for key, state, scale in zip(STATES[name], given.states, scales, strict=False)
            if state is not None
        ]
        walk.step(span, grad, stored, own_numbers)
    counted = torch.where((h.momentum != 0) | (steps > 0), t, -t) if name == "sgd" else t
    counted = torch.where(gradients[:, 0] != NO_GRADIENT, counted.to(steps.dtype), steps)
    _put(steps, counted, skip)


@dataclass
class _State:
    """The part of a state buffer that belongs to one slot, and the scales of its blocks if it is codes of 8 bits."""

    name: str
    stored: Tensor
    scales: Tensor | None

    def read(self, dtype: torch.dtype) -> Tensor:
        if self.scales is None:
            return self.stored.to(dtype)
        return decode(self.stored, self.scales, self.name in SIGNED_STATES)


@dataclass
class _Walk:
    """A step over the slots of flat buffers; ``params`` and ``masters`` are [rows, n]."""

    rule: str
    params: Tensor
    masters: Tensor | None
    skip: Scalar
    stochastic: bool

    def step(self, span: slice, grad: Tensor, states: Sequence[_State], numbers: Sequence[Numbers]) -> None:
        """Step one slot, given the numbers of each replica. The gradient pushes the states of replica 0."""
        rule, dtype = RULES[self.rule], self._arithmetic()
        g = grad.to(dtype) * numbers[0].factor
        names = STATES[self.rule]
        old: States = [None] * len(names)
        for state in states:
            old[names.index(state.name)] = state.read(dtype)
        push, new = rule.push(self._theta(0, span), g, old, numbers[0])
        for row, n in enumerate(numbers):
            self._write_params(row, span, rule.move(self._theta(row, span), push, n), n)
        for state in states:
            k = names.index(state.name)
            before, value = old[k], new[k]
            if before is not None and value is not None and value is not before:
                self._write_state(state, 2 + k, span.start, before, value, numbers[0])

    def _arithmetic(self) -> torch.dtype:
        return torch.float64 if self.params.dtype == torch.float64 else torch.float32

    def _theta(self, row: int, span: slice) -> Tensor:
        """Return the parameters of a replica in full precision."""
        stored = self.params[row, span]
        return (stored if self.masters is None else in_full(stored, self.masters[row, span])).to(self._arithmetic())

    def _write_params(self, row: int, span: slice, theta: Tensor, n: Numbers) -> None:
        param = self.params[row, span]
        if self.masters is None:
            self._write(param, theta, 0, span.start, n)
            return
        master = self.masters[row, span]
        halves = split(theta) if master.dtype == torch.int16 else (theta, theta)
        for target, value in zip((param, master), halves, strict=True):
            _put(target, value, self.skip)

    def _write_state(self, state: _State, stream: int, offset: int, before: Tensor, value: Tensor, n: Numbers) -> None:
        if state.scales is None:
            self._write(state.stored, value, stream, offset, n)
            return
        position = torch.arange(offset, offset + value.numel(), device=value.device)
        noise = random_bits_at(n.key, 0, positions_of_bits(position))  # all states in 8 bits share it
        codes, scales = encode(value, state.name in SIGNED_STATES, noise)
        # A state that is not in use may be a new tensor of the same values. Encoded again, its last bits would change.
        same = value.eq(before).all()
        _put(state.stored, torch.where(same, state.stored, codes), self.skip)
        _put(state.scales, torch.where(same, state.scales, scales), self.skip)

    def _write(self, target: Tensor, value: Tensor, stream: int, offset: int, n: Numbers) -> None:
        """Round a value to the dtype of its buffer and write it; ``stream``: 0 for parameters, 2 and up for states."""
        if self.stochastic and target.dtype == torch.bfloat16:
            value = round_stochastically(value, random_bits(n.key, stream, offset, value))
        _put(target, value, self.skip)


def _by_column(columns: Sequence[Tensor]) -> Row:
    return Row(**dict(zip(COLUMNS, columns, strict=True)))


def _put(target: Tensor, value: Tensor, skip: Scalar) -> None:
    """Write a value, rounded to nearest, unless the step is skipped."""
    target.copy_(where(skip, target, value.to(target.dtype)))


def _free_to_read(tensor: Tensor) -> bool:
    """Return whether the host can read the tensor without waiting for a device."""
    return tensor.device.type == "cpu"


def _by_slot(columns: dict[str, Tensor], rows: int, readable: bool) -> Iterator[list[Numbers]]:
    """Yield, for each slot, the derived numbers of each replica.

    ``columns`` are [rows, slots], or [slots] where they are the same for all replicas.
    """
    whole = [column.expand(rows, -1).T for column in columns.values()]
    cells = [column.tolist() if readable else [slot.unbind() for slot in column.unbind()] for column in whole]
    for slot in zip(*cells, strict=True):
        yield [Numbers(**dict(zip(columns, values, strict=True))) for values in zip(*slot, strict=True)]


def _gradient_factor(h: Row, grad_scale: Tensor | None, norm: Tensor | None) -> Tensor:
    """Return the factor of the gradients: it undoes AMP's scale, clips to a norm, and is negative for ``maximize``."""
    factor = torch.ones_like(h.lr) if grad_scale is None else grad_scale.to(h.lr.dtype).reciprocal().expand_as(h.lr)
    if norm is not None:
        # As in clip_grad_norm_: 1e-6 keeps a zero norm from dividing by zero.
        clip = (h.max_grad_norm / (norm * factor + 1e-6)).clamp(max=1.0)
        factor = torch.where(h.max_grad_norm > 0, factor * clip, factor)
    return factor * (1 - 2 * h.maximize)


def _norm_of_slots(norm: Tensor | None, groups: Tensor, table: Tensor) -> Tensor | None:
    """Return the norm that clips each slot, given the slots' rows of the hyperparameter table."""
    if norm is None or norm.numel() == 1:
        return None if norm is None else norm.squeeze()
    return norm.reshape(-1)[groups // (len(table) // norm.numel())]


def grad_norm(chunks: ChunkTable, grads: MatchedGradients, rows: int) -> Tensor:
    """Return the norm of the gradients of each of ``rows`` replicas."""
    tensors = flat_gradients(grads)
    wide = wide_dtype(chunks.device)
    norms = torch.zeros(rows, dtype=wide, device=chunks.device)
    each = len(tensors) // rows
    for row in range(rows):
        own = [grad for grad in tensors[row * each : (row + 1) * each] if grad is not None and grad.numel()]
        if own:
            parts = [torch.linalg.vector_norm(grad, dtype=wide) for grad in own]
            norms[row] = torch.linalg.vector_norm(torch.stack(parts))
    return norms
