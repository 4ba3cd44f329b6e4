"""The step of one block of elements in Triton: read, apply the update rule, round and store.

:func:`step_block` does so for one replica, :func:`step_rows` for all replicas of a stack that share a gradient. The
rules themselves are in :mod:`.triton_rules`, and :mod:`.triton_step` says which elements a block has.
"""
# mypy: disable-error-code="no-untyped-def"
# Functions decorated with triton.jit are compiled by Triton and have no Python types to check.

from __future__ import annotations

import triton
import triton.language as tl

from hdet_kernels.ops.triton_companding import centred_noise
from hdet_kernels.ops.triton_rounding import joined_master, nearest, random_base, split_master, write
from hdet_kernels.ops.triton_rules import NUMBERS, move, push

_NUMBERS = tl.constexpr(NUMBERS)


@triton.jit
def step_block(
    param,
    master,
    state0,
    state1,
    state2,
    scales0,
    scales1,
    n,
    mine,
    grad,
    at,
    quad,
    inside,
    RULE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    RANDOM: tl.constexpr,
    CODED: tl.constexpr,
):
    """Step those elements ``at`` of the flat buffers that are ``inside``, by the gradients at ``grad``."""
    wide: tl.constexpr = n.dtype.element_ty
    theta = _in_full(param, master, at, inside, wide)
    random = _random(quad, mine, RANDOM)
    g = tl.load(grad, mask=inside, other=0.0).to(wide) * tl.load(n)
    states = (state0, state1, state2, scales0, scales1)
    noise = centred_noise(random, at) if CODED else random
    direction, other = push(RULE, theta, g, n, *states, at, inside, (random, noise), STOCHASTIC)
    theta = move(RULE, theta, direction, other, n, CODED)
    _keep(param, master, at, theta, inside, random, STOCHASTIC)


@triton.jit
def step_rows(
    param,
    master,
    state0,
    state1,
    state2,
    scales0,
    scales1,
    n,
    mine,
    grad,
    at,
    quad,
    inside,
    rows,
    stride,
    step,
    RULE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    RANDOM: tl.constexpr,
    CODED: tl.constexpr,
):
    """Step the same elements of every row of the parameters.

    Rows are ``stride`` elements apart, and their numbers ``step`` slots.
    """
    wide: tl.constexpr = n.dtype.element_ty
    g = tl.load(grad, mask=inside, other=0.0).to(wide) * tl.load(n)
    theta = g
    if RULE == "sgd" or RULE == "adam" or RULE == "adagrad":
        # Replica 0's weight decay as an L2 penalty. Where it is 0, as callers ensure, nothing is read.
        theta = _in_full(param, master, at, tl.where(tl.load(n + 1) != 0, inside, False), wide)
    random = _random(quad, mine, RANDOM)
    states = (state0, state1, state2, scales0, scales1)
    noise = centred_noise(random, at) if CODED else random
    direction, other = push(RULE, theta, g, n, *states, at, inside, (random, noise), STOCHASTIC)
    # The row is a scalar, because pointers that the loop advances would get another layout.
    row = tl.cast(0, tl.int64)
    while row < rows:
        start, own = row * stride, n + row * (step * _NUMBERS)
        before = _in_full(param, master, start + at, inside, wide)
        moved = move(RULE, before, direction, other, own, CODED)
        own_random = _random(quad, mine + row * (step * 3), RANDOM)
        own_master = master
        if master is not None:
            own_master = master + start
        _keep(param + start, own_master, at, moved, inside, own_random, STOCHASTIC)
        row += 1


@triton.jit
def _in_full(param, master, at, inside, wide: tl.constexpr):
    """Return the master where the parameter is its rounding, bit for bit, else the parameter.

    A split master always fits.
    """
    stored = tl.load(param + at, mask=inside, other=0.0)
    theta = stored.to(wide)
    if master is None:
        pass
    elif master.dtype.element_ty == tl.int16:
        theta = joined_master(stored, tl.load(master + at, mask=inside, other=0))
    else:
        full = tl.load(master + at, mask=inside, other=0.0)
        same = nearest(full, stored.dtype).to(tl.int16, bitcast=True) == stored.to(tl.int16, bitcast=True)
        theta = tl.where(same, full, theta)
    return theta


@triton.jit
def _keep(param, master, at, theta, inside, random, STOCHASTIC: tl.constexpr):
    """Store the parameters, rounded, and their masters."""
    if master is None:
        write(param, at, theta, inside, random, 0, STOCHASTIC)
    elif master.dtype.element_ty == tl.int16:
        rounded, low = split_master(theta)
        tl.store(param + at, rounded.to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(master + at, low.to(tl.int16, bitcast=True), mask=inside)
    else:
        tl.store(master + at, theta, mask=inside)
        write(param, at, theta, inside, random, 0, STOCHASTIC)


@triton.jit
def _random(quad, mine, RANDOM: tl.constexpr):
    """Return the base of the random words; it is not used where nothing is rounded stochastically."""
    random = quad
    if RANDOM:
        random = random_base(quad, tl.load(mine + 2).to(tl.uint32))
    return random
