"""The update rules in Triton's language. ``torch/rules.py`` has their equations.

A rule has three functions. ``_derive_…`` runs once for each slot. It computes in float64 the numbers that are the same
for every element, and stores them, rounded once to the precision of the arithmetic, as the slot's *numbers* 1 and up.
Number 0 is the factor of the gradients, for every rule. ``_push_…`` and ``_move_…`` run once for each element. The push
reads and writes the states, and returns a direction and a second value that replicas share, such as the divisor of the
direction. The move returns the new parameter. ``n`` points to the numbers of one replica.
"""
# mypy: disable-error-code="no-untyped-def"
# Functions decorated with triton.jit are compiled by Triton and have no Python types to check.

from __future__ import annotations

import triton
import triton.language as tl

from hdet_kernels.ops.table import COLUMNS
from hdet_kernels.ops.triton.companding import read_codes, write_codes
from hdet_kernels.ops.triton.rounding import read, short_ratio, write

# The numbers of a slot: as many as the rule with the most has.
NUMBERS = 9

LR = tl.constexpr(COLUMNS.index("lr"))
WEIGHT_DECAY = tl.constexpr(COLUMNS.index("weight_decay"))
BETA1 = tl.constexpr(COLUMNS.index("beta1"))
BETA2 = tl.constexpr(COLUMNS.index("beta2"))
EPS = tl.constexpr(COLUMNS.index("eps"))
MOMENTUM = tl.constexpr(COLUMNS.index("momentum"))
DAMPENING = tl.constexpr(COLUMNS.index("dampening"))
LR_DECAY = tl.constexpr(COLUMNS.index("lr_decay"))
MAX_GRAD_NORM = tl.constexpr(COLUMNS.index("max_grad_norm"))
SEED = tl.constexpr(COLUMNS.index("seed"))
NESTEROV = tl.constexpr(COLUMNS.index("nesterov"))
AMSGRAD = tl.constexpr(COLUMNS.index("amsgrad"))
MAXIMIZE = tl.constexpr(COLUMNS.index("maximize"))


@triton.jit
def column(row, INDEX: tl.constexpr, inside):
    """Load a column of the hyperparameter table at ``row``, as float64."""
    return tl.load(row + INDEX, mask=inside, other=0.0).to(tl.float64)


@triton.jit
def derive(RULE: tl.constexpr, n, row, t, first, inside):
    """Store at ``n`` the numbers of slots whose hyperparameters are at ``row``.

    ``first`` says where no step with momentum came before.
    """
    if RULE == "sgd":
        _derive_sgd(n, row, first, inside)
    elif RULE == "adam":
        _derive_adam(n, row, t, inside, DECOUPLED=False)
    elif RULE == "adamw":
        _derive_adam(n, row, t, inside, DECOUPLED=True)
    elif RULE == "adagrad":
        _derive_adagrad(n, row, t, inside)
    elif RULE == "lion":
        _derive_lion(n, row, inside)
    elif RULE == "muon":
        _derive_muon(n, row, inside)
    else:
        tl.static_assert(False, "derive has no branch for this update rule")


@triton.jit
def push(RULE: tl.constexpr, theta, g, n, states, scales, at, inside, random, STOCHASTIC: tl.constexpr):
    """Update the states of elements ``at`` of the flat buffers, and return the direction and the second shared value.

    A state is ``None`` where the rule has none, and its scale where it is not stored in 8 bits. ``random`` has the base
    of the random bits, and for states in 8 bits their centred noise. ``theta`` is used only where weight decay is an L2
    penalty (number 1 of sgd, adam, adagrad) and not 0.
    """
    if RULE == "sgd":
        direction, other = _push_sgd(theta, g, n, states[0], scales[0], at, inside, random, STOCHASTIC)
    elif RULE == "adam":
        g = _with_l2(theta, g, tl.load(n + 1))
        direction, other = _push_adam(g, n, states, scales, at, inside, random, STOCHASTIC)
    elif RULE == "adamw":
        direction, other = _push_adam(g, n, states, scales, at, inside, random, STOCHASTIC)
    elif RULE == "adagrad":
        direction, other = _push_adagrad(theta, g, n, states[0], scales[0], at, inside, random, STOCHASTIC)
    elif RULE == "lion":
        direction, other = _push_lion(g, n, states[0], scales[0], at, inside, random, STOCHASTIC)
    elif RULE == "muon":
        direction, other = _push_muon(g, n, states[0], scales[0], at, inside, random, STOCHASTIC)
    else:
        tl.static_assert(False, "push has no branch for this update rule")
    return direction, other


@triton.jit
def move(RULE: tl.constexpr, theta, direction, other, n, CODED: tl.constexpr):
    """Return the new parameters. With states in 8 bits (``CODED``) quotients need not be exact."""
    if RULE == "sgd":
        theta = _move_sgd(theta, direction, other, n)
    elif RULE == "adam":
        theta = _move_adam(theta, direction, other, n, CODED)
    elif RULE == "adamw":
        theta = _move_adam(theta * tl.load(n + 1), direction, other, n, CODED)
    elif RULE == "adagrad":
        theta = _move_adagrad(theta, direction, other, n, CODED)
    elif RULE == "lion":
        theta = _move_lion(theta, direction, n)
    elif RULE == "muon":
        theta = _move_muon(theta, direction, other, n)
    else:
        tl.static_assert(False, "move has no branch for this update rule")
    return theta


@triton.jit
def gradient_factor(row, scale, norm, inside):
    """Return the factor of the gradients: it undoes AMP's scale, clips to a norm, and is negative for ``maximize``.

    ``norm`` points to the norm of each slot.
    """
    factor = 1.0
    if scale is not None:
        factor = 1.0 / tl.load(scale).to(tl.float64)
    if norm is not None:
        limit = column(row, MAX_GRAD_NORM, inside)
        # As in clip_grad_norm_: 1e-6 keeps a zero norm from dividing by zero, and a norm that is NaN reaches all.
        clip = limit / (tl.load(norm, mask=inside, other=0.0).to(tl.float64) * factor + 1e-6)
        factor = tl.where(limit > 0, factor * tl.where(clip > 1, 1.0, clip), factor)
    return factor * (1 - 2 * column(row, MAXIMIZE, inside))


@triton.jit
def count_after(RULE: tl.constexpr, row, before, t, inside):
    """Return the step count after step ``t``. For sgd it is negative until the first step with momentum."""
    count = t
    if RULE == "sgd":
        count = tl.where((column(row, MOMENTUM, inside) == 0) & (before <= 0), -t, t)
    return count


@triton.jit
def _derive_sgd(n, row, first, inside):
    tl.store(n + 1, column(row, WEIGHT_DECAY, inside), mask=inside)
    tl.store(n + 2, column(row, MOMENTUM, inside), mask=inside)
    tl.store(n + 3, 1 - column(row, DAMPENING, inside), mask=inside)
    tl.store(n + 4, column(row, LR, inside), mask=inside)
    tl.store(n + 5, column(row, NESTEROV, inside), mask=inside)
    tl.store(n + 6, first.to(tl.float64), mask=inside)


@triton.jit
def _push_sgd(theta, g, n, buffer, scales, at, inside, random, STOCHASTIC: tl.constexpr):
    """Return the direction and its momentum. With momentum 0 there is no state, and ``_move_sgd`` adds the decay."""
    momentum, take, nesterov, first = tl.load(n + 2), tl.load(n + 3), tl.load(n + 5), tl.load(n + 6)
    if buffer is not None:
        # Some groups may have no momentum: their part of the buffer is neither read nor written.
        on = tl.broadcast_to(momentum, g.shape) != 0
        slope = _with_l2(theta, g, tl.load(n + 1))
        b = _read(buffer, scales, at, inside & on, g.dtype, True)
        b = tl.where(first != 0, slope, momentum * b + take * slope)
        _write(buffer, scales, at, b, inside & on, random, 2, STOCHASTIC, True)
        g = tl.where(on, tl.where(nesterov != 0, slope + momentum * b, b), g)
    else:
        momentum = tl.zeros_like(momentum)
    return g, momentum


@triton.jit
def _move_sgd(theta, direction, momentum, n):
    decay = tl.load(n + 1)
    decay = tl.where(momentum == 0, decay, tl.zeros_like(decay))
    return theta - tl.load(n + 4) * _with_l2(theta, direction, decay)


@triton.jit
def _derive_adam(n, row, t, inside, DECOUPLED: tl.constexpr):
    lr, decay = column(row, LR, inside), column(row, WEIGHT_DECAY, inside)
    beta1, beta2 = column(row, BETA1, inside), column(row, BETA2, inside)
    tl.store(n + 1, 1 - lr * decay if DECOUPLED else decay, mask=inside)
    tl.store(n + 2, 1 - beta1, mask=inside)
    tl.store(n + 3, beta2, mask=inside)
    tl.store(n + 4, 1 - beta2, mask=inside)
    tl.store(n + 5, lr / _one_minus_power(beta1, t), mask=inside)
    tl.store(n + 6, 1 / tl.sqrt(_one_minus_power(beta2, t)), mask=inside)
    tl.store(n + 7, column(row, EPS, inside), mask=inside)
    tl.store(n + 8, column(row, AMSGRAD, inside), mask=inside)


@triton.jit
def _push_adam(g, n, states, scales, at, inside, random, STOCHASTIC: tl.constexpr):
    """Return the first moment and the root of the second."""
    average, square, largest = states
    average_scales, square_scales = scales
    take1, keep2, take2 = tl.load(n + 2), tl.load(n + 3), tl.load(n + 4)
    m = _read(average, average_scales, at, inside, g.dtype, True)
    v = _read(square, square_scales, at, inside, g.dtype, False)
    m = m + take1 * (g - m)
    v = keep2 * v + take2 * g * g  # in this order, as torch: g² alone overflows from 1.9e19 on
    _write(average, average_scales, at, m, inside, random, 2, STOCHASTIC, True)
    _write(square, square_scales, at, v, inside, random, 3, STOCHASTIC, False)
    used = v
    if largest is not None:
        # Some groups may not use amsgrad: their part of the buffer of the largest moments stays as it is.
        on = tl.broadcast_to(tl.load(n + 8), g.shape) != 0
        u = read(largest, at, inside & on, g.dtype)
        u = tl.where((v > u) | (v != v), v, u)  # NaN propagates, as in torch.maximum
        write(largest, at, u, inside & on, random[0], 4, STOCHASTIC)
        used = tl.where(on, u, v)
    return m, _root(used, square_scales is not None)


@triton.jit
def _move_adam(theta, m, root, n, CODED: tl.constexpr):
    size, per_root, eps = tl.load(n + 5), tl.load(n + 6), tl.load(n + 7)
    return theta - size * _ratio(m, root * per_root + eps, CODED)


@triton.jit
def _derive_adagrad(n, row, t, inside):
    tl.store(n + 1, column(row, WEIGHT_DECAY, inside), mask=inside)
    tl.store(n + 2, column(row, LR, inside) / (1 + (t - 1) * column(row, LR_DECAY, inside)), mask=inside)
    tl.store(n + 3, column(row, EPS, inside), mask=inside)


@triton.jit
def _push_adagrad(theta, g, n, total, scales, at, inside, random, STOCHASTIC: tl.constexpr):
    """Return the gradient and the root of the sum of its squares."""
    g = _with_l2(theta, g, tl.load(n + 1))
    s = _read(total, scales, at, inside, g.dtype, False) + g * g
    _write(total, scales, at, s, inside, random, 2, STOCHASTIC, False)
    return g, _root(s, scales is not None)


@triton.jit
def _move_adagrad(theta, g, root, n, CODED: tl.constexpr):
    return theta - tl.load(n + 2) * _ratio(g, root + tl.load(n + 3), CODED)


@triton.jit
def _derive_lion(n, row, inside):
    lr, decay = column(row, LR, inside), column(row, WEIGHT_DECAY, inside)
    beta1, beta2 = column(row, BETA1, inside), column(row, BETA2, inside)
    tl.store(n + 1, 1 - lr * decay, mask=inside)
    tl.store(n + 2, lr, mask=inside)
    tl.store(n + 3, beta1, mask=inside)
    tl.store(n + 4, 1 - beta1, mask=inside)
    tl.store(n + 5, beta2, mask=inside)
    tl.store(n + 6, 1 - beta2, mask=inside)


@triton.jit
def _push_lion(g, n, average, scales, at, inside, random, STOCHASTIC: tl.constexpr):
    """Return the sign twice: Lion has no second value."""
    keep1, take1, keep2, take2 = tl.load(n + 3), tl.load(n + 4), tl.load(n + 5), tl.load(n + 6)
    m = _read(average, scales, at, inside, g.dtype, True)
    blend = keep1 * m + take1 * g
    sign = tl.where(blend > 0, 1.0, tl.where(blend < 0, -1.0, blend))  # sign(0) = 0, and NaN stays NaN
    _write(average, scales, at, keep2 * m + take2 * g, inside, random, 2, STOCHASTIC, True)
    return sign, sign


@triton.jit
def _move_lion(theta, sign, n):
    return theta * tl.load(n + 1) - tl.load(n + 2) * sign


@triton.jit
def _derive_muon(n, row, inside):
    lr = column(row, LR, inside)
    tl.store(n + 1, 1 - lr * column(row, WEIGHT_DECAY, inside), mask=inside)
    tl.store(n + 2, lr, mask=inside)
    tl.store(n + 3, 1 - column(row, MOMENTUM, inside), mask=inside)
    tl.store(n + 4, column(row, NESTEROV, inside), mask=inside)


@triton.jit
def _push_muon(g, n, buffer, scales, at, inside, random, STOCHASTIC: tl.constexpr):
    """Return the update, and 1 where it is the result: with the state."""
    is_result = tl.zeros_like(g)
    if buffer is not None:
        take = tl.load(n + 3)
        b = _read(buffer, scales, at, inside, g.dtype, True)
        b = b + take * (g - b)
        _write(buffer, scales, at, b, inside, random, 2, STOCHASTIC, True)
        g = tl.where(tl.load(n + 4) != 0, b + take * (g - b), b)
        is_result += 1
    return g, is_result


@triton.jit
def _move_muon(theta, update, is_result, n):
    return tl.where(is_result != 0, update, theta * tl.load(n + 1) - tl.load(n + 2) * update)


@triton.jit
def _read(state, scales, at, mask, dtype: tl.constexpr, SIGNED: tl.constexpr):
    if scales is not None:  # noqa: SIM108 (of two branches, Triton compiles one)
        value = read_codes(state, scales, at, mask, SIGNED)
    else:
        value = read(state, at, mask, dtype)
    return value


@triton.jit
def _write(
    state, scales, at, value, mask, random, STREAM: tl.constexpr, STOCHASTIC: tl.constexpr, SIGNED: tl.constexpr
):
    if scales is not None:
        write_codes(state, scales, at, value, mask, random[1], SIGNED)
    else:
        write(state, at, value, mask, random[0], STREAM, STOCHASTIC)


@triton.jit
def _with_l2(theta, g, decay):
    # A decay of 0 is skipped, because 0·θ is not 0 where θ is infinite.
    return tl.where(decay != 0, g + decay * theta, g)


@triton.jit
def _one_minus_power(beta, t):
    """Return 1 − βᵗ in float64.

    Where βᵗ is near 1 the difference lacks the digits that exp rounded away. They are restored by the ratio of the
    exponent given to exp to the exponent that belongs to its result.
    """
    exponent = t * tl.log(beta)
    power = tl.exp(exponent)
    return tl.where(power > 0.5, (1 - power) * (exponent / tl.log(power)), 1 - power)


@triton.jit
def _root(x, CODED: tl.constexpr):
    # In float32 tl.sqrt and / are approximate: wrong in the last bits, and codes in the first ones.
    return tl.sqrt_rn(x) if x.dtype == tl.float32 and not CODED else tl.sqrt(x)


@triton.jit
def _ratio(x, y, CODED: tl.constexpr):
    if CODED:
        quotient = short_ratio(x, y)
    elif x.dtype == tl.float32:
        quotient = tl.div_rn(tl.broadcast_to(x, y.shape), y)
    else:
        quotient = x / y
    return quotient
