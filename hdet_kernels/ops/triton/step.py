"""The optimizer step in Triton, two launches for all parameters, and the norm of all gradients.

``_advance`` has one lane for each slot: it counts the step and derives the slot's numbers in float64. ``_walk`` has one
program for every ``BLOCK`` elements: it loads those numbers, applies the rule (:mod:`.rules`), rounds and stores, for
one replica or for all that share a gradient.
"""
# mypy: disable-error-code="no-untyped-def"
# Functions decorated with triton.jit are compiled by Triton and have no Python types to check.

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hdet_kernels.ops.chunks import (
    CHUNK,
    EMPTY_GRADIENT,
    GRADIENT_DTYPES,
    NO_GRADIENT,
    ChunkTable,
    MatchedGradients,
)
from hdet_kernels.ops.step import Scalars, Step
from hdet_kernels.ops.table import COLUMNS
from hdet_kernels.ops.torch.companding import BLOCK as STATE_BLOCK
from hdet_kernels.ops.triton.companding import centred_noise
from hdet_kernels.ops.triton.rounding import fours, joined_master, key_of, nearest, random_base, split_master, write
from hdet_kernels.ops.triton.rules import NUMBERS, SEED, column, count_after, derive, gradient_factor, move, push

# Elements of one program of _walk, and its warps: 8 elements for each thread. Measured on an H200 with AdamW in fp32
# and a table of chunks: 1024 with 4 warps did best, 90–97 % of the copy bandwidth; 4096 and more fell to 66–76 %.
BLOCK = 1024
WARPS = 4

# The same where parameters or states are rounded stochastically, with a limit on the registers of a thread. The
# compiler would take some 90, for blocks that are not whole, and few warps would be resident; whole blocks spill
# nothing with this limit. AdamW in bf16 on 2²⁸ parameters of an H200, with the time of the launch: 1024 elements and 4
# warps took 1.28 ms, with 72 registers 1.13 and with 64 1.26; 512 elements and 2 warps took 1.23 ms, with 64 registers
# 1.06 ms.
STOCHASTIC = {"BLOCK": 512, "num_warps": 2, "maxnreg": 64}

# The same with states in 8 bits: one block of codes and one warp, so that the largest number of a block is one
# reduction within it, whatever the dtypes. AdamW on 2²⁷ parameters of an H200, in bf16 with stochastic rounding, in
# bf16 with a split master, and in fp32, in percent of the copy bandwidth: 82, 88, 97 with 56 registers; 79, 86, 95 with
# 64; 73, 84, 91 with 72; 58, 81, 97 with 48. Two warps without a limit on registers reached 57, 78, 87.
CODED = {"BLOCK": 256, "num_warps": 1, "maxnreg": 56}

# Slots of one program of _advance. It moves some hundred bytes for each slot, so its shape hardly matters.
SLOTS = 128

# The most programs that share the chunks in the norm of the gradients. It is a constant, so that the order of the sum,
# and with it the last bit of the norm, does not depend on the GPU: 15 for each of the 132 processors of an H200. With 4
# warps a thread has 16 elements of a chunk, in fp32 four 16-byte loads. There are no atomics: every program writes a
# partial sum of its own, and a second, small launch sums them in a fixed order.
PROGRAMS = 2048

_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_COLUMNS = tl.constexpr(len(COLUMNS))
_NUMBERS = tl.constexpr(NUMBERS)
_CHUNK = tl.constexpr(CHUNK)
_STATE_BLOCK = tl.constexpr(STATE_BLOCK)
_NO_GRADIENT = tl.constexpr(NO_GRADIENT)
_EMPTY_GRADIENT = tl.constexpr(EMPTY_GRADIENT)

_FLOAT32 = tl.constexpr(GRADIENT_DTYPES.index(torch.float32))
_FLOAT64 = tl.constexpr(GRADIENT_DTYPES.index(torch.float64))
_BFLOAT16 = tl.constexpr(GRADIENT_DTYPES.index(torch.bfloat16))

# The bytes of a vector access.
_ALIGNED = tl.constexpr(16)


@triton.jit(do_not_specialize=["count", "rows", "groups", "rows_per_norm"])
def _advance(
    steps,
    table,
    slots,
    gradients,
    scale,
    norm,
    found_inf,
    numbers,
    plan,
    count,
    rows,
    groups,
    rows_per_norm,
    RULE: tl.constexpr,
    RANDOM: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Fill ``numbers`` [rows, slots, NUMBERS] and ``plan`` [rows, slots, 3], and count the step.

    ``plan`` has the address of the gradient (NO_GRADIENT where the slot is skipped) and its dtype, both for replica 0
    alone, and with ``RANDOM`` the key of the random bits. The hyperparameter table has ``groups`` rows for each
    replica.
    """
    slot = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    inside = slot < count
    group = tl.load(slots + slot * 3 + 2, mask=inside, other=0)
    first = table + group * _COLUMNS  # of replica 0, whose hyperparameters act on the gradient
    address = tl.load(gradients + slot * 2, mask=inside, other=_NO_GRADIENT)
    if found_inf is not None:
        address = tl.where(tl.load(found_inf) > 0, _NO_GRADIENT, address)
    before = tl.load(steps + slot, mask=inside, other=0.0)
    t = tl.abs(before).to(tl.float64) + 1
    if norm is not None:
        norm += group // rows_per_norm
    factor = gradient_factor(first, scale, norm, inside)

    tl.store(plan + slot * 3, address, mask=inside)
    tl.store(plan + slot * 3 + 1, tl.load(gradients + slot * 2 + 1, mask=inside, other=0), mask=inside)
    # One replica after the other: replicas in other lanes would read the counts that these lanes write.
    replica = tl.cast(0, tl.int64)
    while replica < rows:
        row, mine = first + replica * groups * _COLUMNS, replica * count + slot
        n = numbers + mine * _NUMBERS
        tl.store(n, factor, mask=inside)
        derive(RULE, n, row, t, before <= 0, inside)
        if RANDOM:
            tl.store(plan + mine * 3 + 2, key_of(column(row, SEED, inside), t).to(tl.int64), mask=inside)
        replica += 1
    tl.store(steps + slot, count_after(RULE, first, before, t, inside), mask=inside & (address != _NO_GRADIENT))


@triton.jit(do_not_specialize=["rows", "row_size", "slot_count"])
def _walk(
    param,
    master,
    state0,
    state1,
    state2,
    scales0,
    scales1,
    numbers,
    plan,
    chunks,
    rows,
    row_size,
    slot_count,
    NUMBER: tl.constexpr,
    TYPE: tl.constexpr,
    RULE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    RANDOM: tl.constexpr,
    CODED: tl.constexpr,
    VECTOR: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Step the slots whose gradient has dtype ``TYPE``, which is number ``NUMBER`` in the tables.

    With ``SHARED``, step all of ``rows`` replicas, which share the gradient. ``CODED``: states are stored in 8 bits.
    """
    program = tl.program_id(0).to(tl.int64)
    chunk = chunks + program // (_CHUNK // BLOCK) * 4
    begin = program % (_CHUNK // BLOCK) * BLOCK
    count = tl.load(chunk + 2) - begin
    slot = tl.load(chunk + 3)
    n, mine = numbers + slot * _NUMBERS, plan + slot * 3
    address = tl.load(mine)
    if (count > 0) & (address > _EMPTY_GRADIENT) & (tl.load(mine + 1) == NUMBER):
        offset = tl.load(chunk)
        lanes = tl.arange(0, BLOCK)
        first = address.to(tl.pointer_type(TYPE)) + tl.load(chunk + 1) + begin
        if CODED:
            tl.static_assert(BLOCK == _STATE_BLOCK, "a program has one block of codes")
        if scales0 is not None:
            scales0 += program
        if scales1 is not None:
            scales1 += program
        flats = (param, master, (state0, state1, state2), (scales0, scales1))
        stride, step = tl.cast(row_size, tl.int64), tl.cast(slot_count, tl.int64)
        whole = (count >= BLOCK) & (address % _ALIGNED == 0) & (offset % VECTOR == 0)
        if SHARED:
            whole = whole & (stride % VECTOR == 0)
        if whole:
            # Tell the compiler what was just tested, so that VECTOR elements become one access.
            grad = tl.multiple_of(first, VECTOR * TYPE.primitive_bitwidth // 8) + lanes
            at = offset // VECTOR * VECTOR + begin + lanes
            quads = ((offset + begin) >> 2) + fours(BLOCK, CODED)
            inside = tl.full([BLOCK], True, tl.int1)
            if SHARED:
                stride = stride // VECTOR * VECTOR
            replicas = (rows, stride, step)
            _step_block(*flats, n, mine, grad, at, quads, inside, replicas, RULE, STOCHASTIC, RANDOM, CODED, SHARED)
        else:
            grad = first + lanes
            at = offset + begin + lanes
            quad = at >> 2
            inside = lanes < count
            replicas = (rows, stride, step)
            _step_block(*flats, n, mine, grad, at, quad, inside, replicas, RULE, STOCHASTIC, RANDOM, CODED, SHARED)


@triton.jit
def _step_block(
    param,
    master,
    states,
    scales,
    n,
    mine,
    grad,
    at,
    quad,
    inside,
    replicas,
    RULE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    RANDOM: tl.constexpr,
    CODED: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Step those elements ``at`` of the flat buffers that are ``inside``, by the gradients at ``grad``.

    With ``SHARED``, step them in every row of the parameters. ``replicas`` has the number of rows, the elements from
    one to the next, and the slots from the numbers of one to those of the next.
    """
    wide: tl.constexpr = n.dtype.element_ty
    if not SHARED:
        theta = _in_full(param, master, at, inside, wide)
        random = _random(quad, mine, RANDOM)
    g = tl.load(grad, mask=inside, other=0.0).to(wide) * tl.load(n)
    if SHARED:
        theta = g
        if RULE == "sgd" or RULE == "adam" or RULE == "adagrad":
            # Replica 0's weight decay as an L2 penalty. Where it is 0, as callers ensure, nothing is read.
            theta = _in_full(param, master, at, tl.where(tl.load(n + 1) != 0, inside, False), wide)
        random = _random(quad, mine, RANDOM)
    noise = centred_noise(random, at) if CODED else random
    direction, other = push(RULE, theta, g, n, states, scales, at, inside, (random, noise), STOCHASTIC)
    if SHARED:
        rows, stride, step = replicas
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
    else:
        theta = move(RULE, theta, direction, other, n, CODED)
        _keep(param, master, at, theta, inside, random, STOCHASTIC)


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


def bind_step(step: Step) -> Callable[[MatchedGradients, Scalars], None]:
    """Return a function that runs ``step`` on given gradients and scalars."""
    known: tuple[object, list[int]] = (None, [])  # the gradient table of the last step, and the dtypes in it

    def run(grads: MatchedGradients, scalars: Scalars) -> None:
        nonlocal known
        if grads.table is not known[0]:
            known = grads.table, dtypes_of(grads)
        _step(step, scalars, step.chunks.point_at(grads), known[1])

    return run


def dtypes_of(grads: MatchedGradients) -> list[int]:
    """Return the numbers of the dtypes that occur. The step is launched once for each."""
    to_read = grads.table[grads.table[:, 0] > EMPTY_GRADIENT, 1]
    return np.flatnonzero(np.bincount(to_read)).tolist()


def _step(given: Step, scalars: Scalars, gradients: Tensor, dtypes: Sequence[int]) -> None:
    """Take a step with gradients of dtypes number ``dtypes``, given their table on the device."""
    _, param, *flats, scales0, scales1, steps, table = given.flats
    slots, chunks, rows = given.chunks.slots, given.chunks.chunks, given.rows
    count = len(slots)
    if count == 0:
        return
    coded = scales0 is not None or scales1 is not None
    # States in 8 bits are always rounded stochastically.
    structure = {"RULE": given.rule, "RANDOM": given.stochastic_rounding or coded}
    wide = torch.float64 if param.dtype == torch.float64 else torch.float32
    numbers = torch.empty((rows, count, NUMBERS), dtype=wide, device=param.device)
    plan = torch.empty((rows, count, 3), dtype=torch.int64, device=param.device)
    with torch.cuda.device_of(param):
        _advance[(triton.cdiv(count, SLOTS),)](
            steps,
            table,
            slots,
            gradients,
            *scalars,
            numbers,
            plan,
            count,
            rows,
            len(table) // rows,
            len(table) // (1 if scalars.norm is None else scalars.norm.numel()),
            SLOTS=SLOTS,
            **structure,
        )
        for number in dtypes if len(chunks) else ():
            dtype = GRADIENT_DTYPES[number]
            vector = vector_of(dtype, param, *flats)
            shape = shape_of(vector, rows, stochastic=given.stochastic_rounding, coded=coded)
            _walk[(len(chunks) * (CHUNK // shape["BLOCK"]),)](
                param,
                *flats,
                scales0,
                scales1,
                numbers,
                plan,
                chunks,
                rows,
                param.numel() // rows,
                count,
                NUMBER=number,
                TYPE=_TYPES[dtype],
                VECTOR=vector,
                SHARED=rows > 1,
                STOCHASTIC=given.stochastic_rounding,
                CODED=coded,
                **shape,
                **structure,
            )


def vector_of(gradient: torch.dtype, *flats: Tensor | None) -> int:
    """Return the elements of a vector access: 16 bytes of the widest dtype.

    Longer vectors of the narrow dtypes would give a thread other elements of them, and the compiler would exchange
    those through shared memory.
    """
    return 16 // max(gradient.itemsize, *(flat.element_size() for flat in flats if flat is not None))


def shape_of(vector: int, rows: int, *, stochastic: bool, coded: bool) -> dict[str, int]:
    """Return the elements of one program of ``_walk`` and its options."""
    if coded:
        return CODED
    if rows > 1:
        return {"BLOCK": block_of_rows(vector), "num_warps": WARPS}
    return STOCHASTIC if stochastic else {"BLOCK": BLOCK, "num_warps": WARPS}


def block_of_rows(vector: int) -> int:
    """Return the elements of one program where replicas share a gradient: one vector for each thread and replica.

    AdamW in fp32 on 2²⁸ parameters of 2 / 4 / 8 / 16 replicas reached 96 96 95 94 % of the copy bandwidth; with two
    vectors 97 92 96 95 %, with the loads of 2 replicas at a time 96 89 96 96 %, of 4 replicas 96 93 95 95 %.
    """
    return WARPS * 32 * vector


@triton.jit(do_not_specialize=["count", "each", "programs"])
def _reduce(chunks, gradients, partials, count, each, programs):
    """Store Σ g² over ``each`` chunks. A replica has ``count`` chunks, which ``programs`` programs share."""
    total = tl.cast(0.0, tl.float64)
    row = tl.program_id(0) // programs
    index = row * count + tl.program_id(0) % programs * each
    end = tl.minimum(index + each, (row + 1) * count)
    while index < end:  # not a range: the interpreter of Triton 3.6 cannot run over one with a recent numpy
        chunk = chunks + tl.cast(index, tl.int64) * 4
        start = tl.load(chunk + 1)
        length = tl.load(chunk + 2)
        gradient = gradients + tl.load(chunk + 3) * 2
        address = tl.load(gradient)
        number = tl.load(gradient + 1)
        if address > _EMPTY_GRADIENT:
            if number == _FLOAT32:
                total += _reduce_chunk(address, start, length, tl.float32)
            elif number == _FLOAT64:
                total += _reduce_chunk(address, start, length, tl.float64)
            elif number == _BFLOAT16:
                total += _reduce_chunk(address, start, length, tl.bfloat16)
            else:
                total += _reduce_chunk(address, start, length, tl.float16)
        index += 1
    tl.store(partials + tl.program_id(0), total)


@triton.jit
def _reduce_chunk(address, start, length, TYPE: tl.constexpr):
    lanes = tl.arange(0, _CHUNK)
    grad = address.to(tl.pointer_type(TYPE)) + start
    if (length == _CHUNK) & (address % _ALIGNED == 0):
        # Tell the compiler what was just tested, so that it loads vectors.
        part = _reduce_block(tl.load(tl.multiple_of(grad + lanes, _ALIGNED)))
    else:
        part = _reduce_block(tl.load(grad + lanes, mask=lanes < length, other=0.0))
    return part


@triton.jit
def _reduce_block(g):
    if g.dtype != tl.float64:
        g = g.to(tl.float32)
    # Squared in float64, so that the norm of a gradient of 1e25 does not overflow.
    g = g.to(tl.float64)
    return tl.sum(g * g)


@triton.jit(do_not_specialize=["count"])
def _finish(partials, result, count, PROGRAMS: tl.constexpr):
    row = tl.program_id(0)
    lanes = tl.arange(0, PROGRAMS)
    total = tl.sum(tl.load(partials + row * count + lanes, mask=lanes < count, other=0.0))
    tl.store(result + row, tl.sqrt(total))


def grad_norm(chunks: ChunkTable, grads: MatchedGradients, rows: int) -> Tensor:
    """Return the norm of the gradients of each of ``rows`` replicas, float64 [rows]."""
    result = torch.empty(rows, dtype=torch.float64, device=chunks.device)
    count = len(chunks.chunks) // rows
    each = max(triton.cdiv(count, max(PROGRAMS // rows, 1)), 1)
    programs = max(triton.cdiv(count, each), 1)
    partials = torch.empty(rows * programs, dtype=torch.float64, device=chunks.device)
    with torch.cuda.device_of(result):
        _reduce[(rows * programs,)](
            chunks.chunks, chunks.point_at(grads), partials, count, each, programs, num_warps=WARPS
        )
        _finish[(rows,)](partials, result, programs, PROGRAMS=PROGRAMS)
    return result
