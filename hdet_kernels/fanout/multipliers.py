"""Multipliers of the base values and the permutations that deal them to the replicas.

Replica r of N trains with η_j · ρ_{π_{j,k}(r)}: the multipliers ρ are symmetric around 1, and a permutation π for every
hyperparameter j and cycle k decides who has which, so that several hyperparameters are explored without confounding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hdet_kernels.checks import check_choice, check_kind, check_number, check_whole

#: Most replicas that multipliers are computed for: 128 MB of numbers.
MOST_REPLICAS = 2**24

Spacing = Literal["linear", "log"]


def multipliers(n: int, spread: float, spacing: Spacing = "linear") -> NDArray[np.float64]:
    """Return the multipliers ρ_0 … ρ_{n−1}, in increasing order.

    With u_r = (r − (n−1)/2) / max((n−1)/2, ½), which runs from −1 to 1:

    * ``linear``: ρ_r = 1 + spread·u_r, with mean 1, in [1 − spread, 1 + spread];
    * ``log``: ρ_r = (1 + spread)^{u_r}, with geometric mean 1, for wide spreads.
    """
    n = _checked_count(n)
    spread = check_spread(spread, spacing)
    centre = (n - 1) / 2
    u: NDArray[np.float64] = (np.arange(n, dtype=np.float64) - centre) / max(centre, 0.5)
    return 1 + spread * u if spacing == "linear" else np.power(1 + spread, u)


def permutation(n: int, *, seed: int, cycle: int, hyperparameter: str) -> NDArray[np.int64]:
    """Return the permutation π_{j,k} of 0 … n−1: replica r takes multiplier ρ_{π(r)}.

    It is a function of its arguments alone, so every rank computes the same one without communication. It sorts n
    64-bit words of a SHAKE-128 stream keyed by (seed, cycle, hyperparameter): the result depends on no generator's
    state and on no library's version, and no global generator is touched.
    """
    n = _checked_count(n)
    seed, cycle = check_whole("seed", seed), check_whole("cycle", cycle)
    check_kind("hyperparameter", hyperparameter, str, "the name of a hyperparameter, such as 'lr/0'")
    stream = hashlib.shake_128(f"{seed}/{cycle}/{hyperparameter}".encode()).digest(8 * n)
    return np.argsort(np.frombuffer(stream, dtype="<u8"), kind="stable")


def pairs(n: int, spreads: Sequence[tuple[float, Spacing]], *, seed: int, sync: int) -> NDArray[np.float64]:
    """Return multipliers [J, n] in which every replica departs from the base values in at most one hyperparameter.

    Replicas come in pairs, one below the base value and one as far above. The pairs are dealt in turn to the
    hyperparameters that have a spread; where there are fewer pairs than hyperparameters, the next cycle goes on with
    the next ones. The k pairs of one hyperparameter take the multipliers of 2·k replicas. With four replicas or more,
    the last pair trains with the base values: its replicas differ by noise only, which measures the noise. ``sync`` is
    the number of syncs before this cycle.
    """
    found = np.ones((len(spreads), n))
    wanted = [index for index, (spread, _) in enumerate(spreads) if spread > 0]
    count = n // 2 - (n >= 4)
    if not wanted or not count:
        return found
    seats = permutation(n, seed=seed, cycle=sync, hyperparameter="pairs")[: 2 * count].reshape(count, 2)
    dealt = [wanted[(sync * count + pair) % len(wanted)] for pair in range(count)]
    for index in set(dealt):
        mine = seats[[pair for pair in range(count) if dealt[pair] == index]]
        rho = multipliers(2 * len(mine), *spreads[index])
        found[index, mine[:, 0]], found[index, mine[:, 1]] = rho[: len(mine)], rho[: len(mine) - 1 : -1]
    return found


def _checked_count(n: int) -> int:
    checked = check_whole("the number of replicas", n, at_least=1)
    if checked > MOST_REPLICAS:
        raise ValueError(f"the number of replicas must be at most {MOST_REPLICAS}, got {checked}")
    return checked


def check_spread(spread: float, spacing: str, what: str = "spread") -> float:
    """Return ``spread`` as a float; raise unless it keeps every multiplier positive."""
    check_choice("spacing", spacing, ("linear", "log"))
    checked = check_number(what, spread, at_least=0, remedy="0 is no spread")
    if spacing == "linear" and checked >= 1:
        raise ValueError(
            f"{what} must be below 1 with linear spacing, got {spread}: the lowest multiplier 1 − spread would be "
            f"{1 - checked:g}; use a smaller spread, or spacing='log' for wide ones"
        )
    return checked
