"""The ``torch`` backend: step and norm in plain torch, which runs anywhere and is the reference for other backends.

``reference_rules.py`` has the update rules. The other operations are in ``reference_pack.py``,
``reference_wire.py`` and ``reference_rowwise.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from hdet_kernels.ops.chunks import NO_GRADIENT, ChunkTable, MatchedGradients, flat_gradients
from hdet_kernels.ops.companding import (
    SIGNED_STATES,
    block_count,
    decode,
    encode,
    first_scales,
    positions_of_bits,
)
from hdet_kernels.ops.operators import FLATS, SCALARS, fake_in_place, fake_norm, register
from hdet_kernels.ops.reference_pack import pack as pack
from hdet_kernels.ops.reference_pack import unpack as unpack
from hdet_kernels.ops.reference_rowwise import rowwise_adagrad as rowwise_adagrad
from hdet_kernels.ops.reference_rules import RULES as RULES
from hdet_kernels.ops.reference_rules import Numbers, Push, Scalar, States, choose
from hdet_kernels.ops.reference_rules import Row as Row
from hdet_kernels.ops.reference_wire import wire_operators as wire_operators
from hdet_kernels.ops.rounding import random_bits, random_bits_at, round_stochastically, rounding_key
from hdet_kernels.ops.step import STATES, Scalars, StepArguments
from hdet_kernels.split_master import split
from hdet_kernels.tensors import in_full, wide_dtype


def bind_step(arguments: StepArguments) -> Callable[[MatchedGradients, Scalars], None]:
    """Return a function that runs the step on given gradients and scalars."""
    chunks, rounding, rows = arguments.chunks, arguments.stochastic_rounding, arguments.rows
    offsets = [slot.offset for slot in chunks.entries]
    of_scales = first_scales(slot.numel for slot in chunks.entries)
    operator = partial(_operators()[0], *arguments.flats, chunks.slots)

    def run(grads: MatchedGradients, scalars: Scalars) -> None:
        operator(chunks.point_at(grads), offsets, of_scales, flat_gradients(grads), *scalars, rounding, rows)

    return run


def grad_norm(chunks: ChunkTable, grads: MatchedGradients, rows: int) -> Tensor:
    """Return the norm of the gradients of each of ``rows`` replicas."""
    return _operators()[1](chunks.chunks, flat_gradients(grads), rows)


@cache
def _operators() -> tuple[Any, Any]:
    """Register the operators of step and norm, once, and return them. They take the gradients as flat tensors."""
    tables = "Tensor slots, Tensor gradients, int[] offsets, int[] first_scales, Tensor?[] tensors"
    return (
        register("torch_step_", f"{FLATS}, {tables}, {SCALARS}", "()", _step, fake_in_place),
        register("torch_grad_norm", "Tensor chunks, Tensor?[] tensors, int rows", "Tensor", _grad_norm, fake_norm),
    )


def _step(
    rule: int,
    param: Tensor,
    master: Tensor | None,
    state0: Tensor | None,
    state1: Tensor | None,
    state2: Tensor | None,
    scales0: Tensor | None,
    scales1: Tensor | None,
    scales2: Tensor | None,
    steps: Tensor,
    table: Tensor,
    slots: Tensor,
    gradients: Tensor,
    offsets: Sequence[int],
    of_scales: Sequence[int],
    tensors: Sequence[Tensor | None],
    grad_scale: Tensor | None,
    norm: Tensor | None,
    found_inf: Tensor | None,
    stochastic_rounding: bool,
    rows: int,
) -> None:
    name = list(STATES)[rule]
    own_rule = RULES[name]
    states = [state0, state1, state2][: len(STATES[name])]
    scales = [scales0, scales1, scales2][: len(states)]
    coded = any(scale is not None for scale in scales)
    params = param.view(rows, -1)
    masters = None if master is None else master.view(rows, -1)
    groups = slots[:, 2]
    h = Row(*table[groups].unbind(1))  # of replica 0, each column [slots]
    own = Row(*table.view(rows, -1, table.shape[1])[:, groups].unbind(2))  # of every replica, each column [rows, slots]
    t = steps.to(table.dtype).abs() + 1
    columns = own_rule.derive(t, steps <= 0, own)
    columns["factor"] = _gradient_factor(h, grad_scale, _norm_of_slots(norm, groups, table))
    if stochastic_rounding or coded:
        columns["key"] = rounding_key(own.seed, t)
    skip: Scalar = False if found_inf is None else found_inf.squeeze() > 0
    free = _free_to_read(param)
    if free and skip:
        return

    def put(target: Tensor, value: Tensor) -> None:
        target.copy_(value if free else _unless(skip, target, value))

    def keep(target: Tensor, value: Tensor, n: Numbers, stream: int, offset: int) -> None:
        if stochastic_rounding and target.dtype == torch.bfloat16:
            value = round_stochastically(value, random_bits(n.key, stream, offset, value))
        put(target, value)

    compute = torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype
    each = zip(offsets, of_scales, tensors, _by_slot(columns, rows, len(offsets), free), strict=True)
    for offset, first_scale, grad, numbers in each:
        if grad is None or grad.numel() == 0:
            continue
        span = slice(offset, offset + grad.numel())
        blocks = slice(first_scale, first_scale + block_count(grad.numel()))
        stored_states = [None if state is None else state[span] for state in states]
        own_scales = [None if scale is None else scale[blocks] for scale in scales]
        old = [
            state if state is None or scale is None else decode(state, scale, key in SIGNED_STATES)
            for key, state, scale in zip(STATES[name], stored_states, own_scales, strict=True)
        ]
        g, factor = grad.to(compute), numbers[0].factor
        if isinstance(factor, Tensor) or factor != 1:
            g = g * factor
        push: Push = ()
        new: States = []
        for row, n in enumerate(numbers):
            stored = params[row, span]
            full = stored if masters is None else in_full(stored, masters[row, span])
            theta = full.to(compute)
            if row == 0:
                push, new = own_rule.push(theta, g, [None if state is None else state.to(compute) for state in old], n)
            theta = own_rule.move(theta, push, n)
            if masters is None:
                keep(stored, theta, n, 0, offset)
            else:
                own_master = masters[row, span]
                param_half, master_half = split(theta) if own_master.dtype == torch.int16 else (theta, theta)
                put(stored, param_half)
                put(own_master, master_half)
        noise: Tensor | None = None  # all states in 8 bits share it
        for k, (target, before, value) in enumerate(zip(stored_states, old, new, strict=False)):
            if target is None or before is None or value is None or value is before:
                continue
            if (scale := own_scales[k]) is None:
                keep(target, value, numbers[0], 2 + k, offset)
            else:
                if noise is None:
                    position = torch.arange(offset, offset + value.numel(), device=value.device)
                    noise = random_bits_at(numbers[0].key, 0, positions_of_bits(position))
                codes, largest = encode(value, STATES[name][k] in SIGNED_STATES, noise)
                # A state that is not in use is a new tensor where the host may not read the hyperparameters. Encoded
                # again, it would change in its last bits.
                same = False if free else value.eq(before).all()
                put(target, _unless(same, target, codes))
                put(scale, _unless(same, scale, largest))
    counted = torch.where((h.momentum != 0) | (steps > 0), t, -t) if name == "sgd" else t
    counted = torch.where(gradients[:, 0] != NO_GRADIENT, counted.to(steps.dtype), steps)
    steps.copy_(counted if free else _unless(skip, steps, counted))


def _by_slot(columns: dict[str, Tensor], rows: int, slots: int, free: bool) -> list[list[Numbers]]:
    """Return, for each slot, the derived numbers of each replica.

    ``columns`` are [rows, slots], or [slots] where they are the same for all replicas.
    """
    whole = [column.expand(rows, slots).T for column in columns.values()]
    cells = [column.tolist() if free else [slot.unbind() for slot in column.unbind()] for column in whole]
    return [
        [Numbers(**dict(zip(columns, values, strict=True))) for values in zip(*slot, strict=True)]
        for slot in zip(*cells, strict=True)
    ]


def _grad_norm(chunks: Tensor, tensors: Sequence[Tensor | None], rows: int) -> Tensor:
    wide = wide_dtype(chunks.device)
    norms = chunks.new_zeros((rows,), dtype=wide)
    for row, own in enumerate(_by_row(tensors, rows)):
        parts = [torch.linalg.vector_norm(grad, dtype=wide) for grad in own if grad.numel()]
        if parts:
            norms[row] = torch.linalg.vector_norm(torch.stack(parts))
    return norms


def _by_row(tensors: Sequence[Tensor | None], rows: int) -> list[list[Tensor]]:
    """Return the gradients of each replica, without the missing ones."""
    each = len(tensors) // rows
    return [[t for t in tensors[row * each : (row + 1) * each] if t is not None] for row in range(rows)]


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


def _free_to_read(tensor: Tensor) -> bool:
    """Return whether the host can read the tensor without waiting for a device."""
    return tensor.device.type == "cpu"


def _unless(skip: Scalar, old: Tensor, new: Tensor) -> Tensor:
    return choose(skip, lambda: old, lambda: new)
