"""Plan the rounds of the scouting phase, compare the candidates of a round, and choose a learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hdet_kernels.checks import check_number, check_steps, keep_plain


@dataclass(frozen=True)
class ScoutSettings:
    """The constants of the scouting phase of a run with ``max_lr=None``.

    Args:
        share: steps of all rounds together over the steps of the run that follows: 1.0 is half of ``total_steps``.
        lowest, highest: the range of learning rates that the first round covers.
        first: share of the steps of the rounds apart that the first of them takes where there are two. The last of
            several takes ``(1 - first) / first`` times the steps of the first, and those between grow evenly.
        apart: where team rounds follow, the rounds apart take this share of the steps of the run.
        shortest, longest: steps of a team round, as a share of those of the run. There are team rounds if ``share``
            pays for one of the shortest after the rounds apart, and as few as last no longer than the longest.
        distance: smallest factor between the two candidates of the first team round.
        shift: the middle of these two is what the rounds apart found times ``(replicas / 2) ** shift``: a team sees
            that much more of the batch than a replica, and a larger batch asks for a larger learning rate.
        factor: rounds go on until neighbouring candidates differ by this factor at most, if there are enough steps.
        fewest: fewest steps of a round.
        tail: share of a round, at its end, whose mean training loss is compared.
        flat: candidates whose losses differ by less than this share of the loss count as equal.
        deviations: so do those that differ by less than this many standard errors.
        depth: candidates whose loss fell by at least ``1 - depth`` of what the best one's fell enter the parabola
            whose minimum is chosen.
        reach: so do those whose learning rate is within ``exp(reach)`` of the best one's.
    """

    share: float = 0.3
    lowest: float = 1e-5
    highest: float = 10.0
    first: float = 0.25
    apart: float = 0.1
    shortest: float = 0.2
    longest: float = 0.3
    distance: float = 4.0
    shift: float = 0.25
    factor: float = 3.1
    fewest: int = 10
    tail: float = 0.2
    flat: float = 0.001
    deviations: float = 1.5
    depth: float = 0.3
    reach: float = 1.0

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for a constant with which no phase can be planned."""
        within: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
            (("share",), {"above": 0, "at_most": 1, "remedy": "at 1 the search takes as many steps as the run"}),
            (("first", "tail", "depth"), {"above": 0, "below": 1}),
            (("lowest", "highest", "reach", "apart", "shortest", "longest"), {"above": 0}),
            (("flat", "deviations"), {"at_least": 0}),
            (("factor", "distance"), {"above": 1}),
            (("shift",), {}),
        )
        for names, bounds in within:
            for name in names:
                keep_plain(self, **{name: check_number(f"ScoutSettings.{name}", getattr(self, name), **bounds)})
        keep_plain(self, fewest=check_steps("ScoutSettings.fewest", self.fewest))
        if self.fewest < 4:
            raise ValueError(
                f"ScoutSettings.fewest must be at least 4, got {self.fewest}: a miniature needs some steps"
            )
        if self.shortest > self.longest:
            raise ValueError(
                f"ScoutSettings.shortest must not be above longest, got {self.shortest} and {self.longest}: they bound "
                "the length of a team round"
            )
        if self.lowest >= self.highest:
            raise ValueError(
                f"ScoutSettings.lowest must be below highest, got {self.lowest} and {self.highest}: they are the range "
                "of learning rates"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the constants by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


#: Lowest and highest logarithm of the learning rates that are still considered.
Bracket = tuple[float, float]


@dataclass(frozen=True)
class Plan:
    """The division of a run into scouting rounds and the run proper.

    Args:
        rounds: steps of each round.
        run: steps that remain for the run.
        teams: so many of the rounds, the last ones, are team rounds.
    """

    rounds: tuple[int, ...]
    run: int
    teams: int = 0

    @property
    def steps(self) -> int:
        """Steps of all rounds together."""
        return sum(self.rounds)

    @property
    def total_steps(self) -> int:
        """Steps of the rounds and the run."""
        return self.steps + self.run

    def before(self, number: int) -> int:
        """Return the steps of all rounds before round ``number``."""
        return sum(self.rounds[:number])

    def in_teams(self, number: int) -> bool:
        """Return whether round ``number`` is a team round."""
        return len(self.rounds) - self.teams <= number < len(self.rounds)


def make_plan(
    total_steps: int,
    replicas: int,
    settings: ScoutSettings,
    *,
    teams: bool = False,
    workable: Callable[[int], bool] = lambda steps: True,
) -> Plan:
    """Return the rounds of a run.

    In the first rounds every replica is apart. Each of them narrows the range to the neighbours of the best candidate.
    There are as many as it takes for neighbouring candidates to differ by ``settings.factor`` at most, or as many as
    the steps allow. The last is the longest: it decides, and the longer a miniature is the more it resembles the run.
    Where the share pays for them and gradients can be shared, team rounds follow.

    Args:
        total_steps: steps of the rounds and the run.
        replicas: N, the number of candidates of a round.
        settings: the constants.
        teams: whether replicas can share gradients in teams.
        workable: whether a schedule of so many steps can be built. The lengths of rounds avoid others.

    Raises:
        ValueError: there is one replica, or the run is too short for one round.
    """
    if replicas < 2:
        raise ValueError(
            "max_lr=None compares learning rates on several replicas, and there is one: pass a learning rate, or train "
            "replicas on one device (ensemble=stack.ensemble of hdet_kernels.ReplicaStack(model, 8)) or in several "
            "processes (torchrun)"
        )
    share = settings.share / (1 + settings.share)  # of all steps
    steps = int(share * total_steps + 1e-6)
    if steps < settings.fewest:
        least = math.ceil(settings.fewest / share - 1e-6)
        raise ValueError(
            f"max_lr=None takes {share:.0%} of the steps, at least {settings.fewest}, to find a learning rate, got "
            f"total_steps={total_steps}: pass total_steps of at least {least}, or a learning rate"
        )
    near = _team_lengths(steps, settings) if teams else []
    rounds = [*_lengths(steps - sum(near), rounds_needed(replicas, settings), settings), *near]
    rounds = [_workable(length, workable, settings.fewest) for length in rounds]
    # A run whose own schedule cannot be built gives a step to the last round.
    while not workable(total_steps - sum(rounds)):
        rounds[-1] = _workable(rounds[-1] + 1, workable, rounds[-1] + 1)
    return Plan(tuple(rounds), total_steps - sum(rounds), len(near))


def _team_lengths(steps: int, settings: ScoutSettings) -> list[int]:
    """Return the steps of each team round, of ``steps`` of all rounds; none if these do not pay for one."""
    left = settings.share - settings.apart
    count = math.ceil(left / settings.longest - 1e-6)
    length = int(steps * left / (settings.share * max(count, 1)) + 1e-6)
    apart = steps - count * length
    pays = left >= settings.shortest - 1e-6 and min(length, apart) >= settings.fewest
    return [length] * count if pays else []


def rounds_needed(replicas: int, settings: ScoutSettings) -> int:
    """Return after how many rounds neighbouring candidates differ by ``settings.factor`` at most; at least two."""
    spacing = (math.log(settings.highest) - math.log(settings.lowest)) / (replicas + 1)
    rounds = 1
    while rounds < 2 or spacing > math.log(settings.factor):
        spacing *= 2 / (replicas + 1)
        rounds += 1
    return rounds


def candidates(bracket: Bracket, replicas: int) -> tuple[float, ...]:
    """Return the learning rate of each replica: evenly spaced in the logarithm, inside ``bracket``, ascending."""
    low, high = bracket
    return tuple(math.exp(low + (high - low) * (index + 1) / (replicas + 1)) for index in range(replicas))


def first_team(size: int, rows: int) -> int:
    """Return how many of ``size`` replicas the first of two teams has; every process holds ``rows`` of them.

    A process is in one team with all of its replicas, unless it is the only one.
    """
    processes = size // rows
    return rows * ((processes + 1) // 2) if processes > 1 else (rows + 1) // 2


def team_candidates(pair: Bracket, first: int, replicas: int) -> tuple[float, ...]:
    """Return the learning rate of each replica: the lower one for the ``first`` replicas, the other for the rest."""
    low, high = map(math.exp, pair)
    return (low,) * first + (high,) * (replicas - first)


def first_bracket(settings: ScoutSettings) -> Bracket:
    """Return the range of the first round."""
    return math.log(settings.lowest), math.log(settings.highest)


def middle(bracket: Bracket) -> float:
    """Return the learning rate in the middle of a range."""
    return math.exp((bracket[0] + bracket[1]) / 2)


def tail_steps(length: int, settings: ScoutSettings) -> int:
    """Return how many steps at the end of a round of ``length`` steps are compared."""
    return max(round(settings.tail * length), 1)


def _lengths(steps: int, most: int, settings: ScoutSettings) -> list[int]:
    """Divide ``steps`` into rounds that grow by an even factor; into fewer if the first would be too short."""
    last = (1 - settings.first) / settings.first  # steps of the last round over those of the first
    for count in range(most, 1, -1):
        weights = [last ** (index / (count - 1)) for index in range(count)]
        lengths = [int(steps * weight / sum(weights)) for weight in weights]
        if min(lengths) >= settings.fewest:
            lengths[-1] += steps - sum(lengths)
            return lengths
    return [steps]


def _workable(length: int, workable: Callable[[int], bool], fewest: int) -> int:
    """Return the nearest number of steps that a schedule can be built for: a shorter one, unless that is too short."""
    shorter = next((each for each in range(length, fewest - 1, -1) if workable(each)), None)
    if shorter is not None:
        return shorter
    return next(each for each in range(length, length + 1000) if workable(each))


Array = NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """The outcome of one round. Arrays have one entry for each replica, by ascending learning rate.

    Args:
        rates: learning rates.
        losses: losses at the end; not finite for a replica that diverged.
        errors: standard errors of the losses; 0 where they are not known.
        level: the loss before the first step; NaN if it is not known.
    """

    rates: Array
    losses: Array
    errors: Array
    level: float = math.nan

    def __post_init__(self) -> None:
        object.__setattr__(self, "losses", np.where(np.isfinite(self.losses), self.losses, np.inf))
        object.__setattr__(self, "errors", np.where(np.isfinite(self.errors), self.errors, 0.0))

    @property
    def columns(self) -> tuple[Array, Array, Array]:
        """Learning rates, losses and errors."""
        return self.rates, self.losses, self.errors

    @property
    def best(self) -> int:
        """The candidate with the lowest loss.

        Raises:
            RuntimeError: none has a finite loss.
        """
        if not np.isfinite(self.losses).any():
            raise RuntimeError(
                f"no loss was finite at any of the learning rates {', '.join(f'{rate:.3g}' for rate in self.rates)}: "
                "look for an error in the model or the data, or pass max_lr"
            )
        return int(np.argmin(self.losses))

    def as_good(self, settings: ScoutSettings) -> list[int]:
        """Return the candidates whose loss cannot be told from the best one."""
        best = self.best
        noise = settings.deviations * np.hypot(self.errors, self.errors[best])
        allowed = np.maximum(noise, settings.flat * abs(self.losses[best]))
        return [int(index) for index in np.flatnonzero(self.losses - self.losses[best] <= allowed)]

    def learned(self, settings: ScoutSettings) -> bool:
        """Return whether the best loss is below that before the first step, by more than noise.

        The best of several that differ by noise alone is below the others, so that it has to be twice as far away.
        """
        best = self.best
        noise = max(2 * settings.deviations * self.errors[best], settings.flat * abs(self.losses[best]))
        return not self.level - self.losses[best] <= noise


@dataclass(frozen=True)
class Verdict:
    """A learning rate, and how it was found.

    Args:
        rate: the learning rate.
        how: the rule that chose it, for messages.
    """

    rate: float
    how: str


def narrow(seen: Comparison, bracket: Bracket, settings: ScoutSettings) -> Bracket:
    """Return the range of the next round: up to the neighbours of all candidates that are as good as the best.

    Where the losses cannot be told apart, nothing is known, and the range stays as wide as these candidates are.
    """
    good = seen.as_good(settings)
    edges = [bracket[0], *np.log(seen.rates).tolist(), bracket[1]]
    return edges[good[0]], edges[good[-1] + 2]


def by_team(seen: Comparison, first: int) -> Comparison:
    """Return the outcome of a team round by team, of which the first has ``first`` replicas: means over each."""
    teams = slice(first), slice(first, None)
    losses = np.array([seen.losses[team].mean() for team in teams])
    errors = np.array([np.sqrt((seen.errors[team] ** 2).sum()) / len(seen.errors[team]) for team in teams])
    return Comparison(seen.rates[[0, -1]], losses, errors, seen.level)


def together(before: Comparison | None, seen: Comparison) -> Comparison:
    """Return the outcomes of the team rounds before and of another one, by ascending learning rate."""
    if before is None:
        return seen
    rates, losses, errors = (np.concatenate(both) for both in zip(before.columns, seen.columns, strict=True))
    order = np.argsort(rates, kind="stable")
    return Comparison(rates[order], losses[order], errors[order], seen.level)


def first_pair(seen: Comparison, replicas: int, settings: ScoutSettings) -> Bracket:
    """Return the two learning rates of the first team round, after the last round apart.

    They are on both sides of what that round would choose, and at least as far from each other as its candidates. If
    it brought no loss below that of the start it says nothing, and they divide the whole range evenly.
    """
    if not seen.learned(settings):
        low, high = candidates(first_bracket(settings), 2)
        return math.log(low), math.log(high)
    centre = math.log(choose(seen, settings).rate) + settings.shift * math.log(replicas / 2)
    half = max(math.log(settings.distance), float(np.diff(np.log(seen.rates))[0])) / 2
    return centre - half, centre + half


def next_pair(near: Comparison, settings: ScoutSettings) -> Bracket:
    """Return the next two learning rates, on both sides of the best so far: half way to its neighbours.

    Beyond the lowest or the highest the next is ``settings.distance`` away. Where all diverged both are below.
    """
    logs, step = np.log(near.rates).tolist(), math.log(settings.distance)
    if not np.isfinite(near.losses).any():
        return logs[0] - 2 * step, logs[0] - step
    best = near.best
    edges = [logs[0] - 2 * step, *logs, logs[-1] + 2 * step]
    return (edges[best] + logs[best]) / 2, (logs[best] + edges[best + 2]) / 2


def choose(seen: Comparison, settings: ScoutSettings) -> Verdict:
    """Return the learning rate after the last round, or the last one apart.

    Where the best candidate cannot be told from the median one, it is the middle of those around it that are as good.
    Else it is the minimum of a parabola through the best candidate and those around it, in the logarithm of the
    learning rate. Candidates with a much higher loss are left out, because beyond the edge of stability losses do not
    follow a parabola. The minimum is not sought outside of the candidates that were used.
    """
    best, good = seen.best, seen.as_good(settings)
    logs = np.log(seen.rates)
    order = np.argsort(seen.losses, kind="stable")
    if int(order[len(order) // 2]) in good:
        low, high = _run_around(best, good)
        chosen, how = (logs[low] + logs[high]) / 2, "the middle of those that are equally good"
    else:
        chosen, how = _minimum(logs, seen, best, settings)
    return Verdict(float(math.exp(chosen)), how)


def choose_near(near: Comparison, settings: ScoutSettings) -> Verdict:
    """Return the learning rate after the last team round: as :func:`choose`, and below all of them if all diverged."""
    if not np.isfinite(near.losses).any():
        return Verdict(float(near.rates[0]) / settings.distance, "below those that diverged")
    return choose(near, settings)


def _run_around(best: int, good: list[int]) -> tuple[int, int]:
    """Return the first and last of the neighbouring candidates around ``best`` that are all in ``good``."""
    low = high = best
    while low - 1 in good:
        low -= 1
    while high + 1 in good:
        high += 1
    return low, high


def _minimum(logs: Array, seen: Comparison, best: int, settings: ScoutSettings) -> tuple[float, str]:
    used = _near(logs, seen, best, settings)
    if len(used) >= 3:
        x, y = logs[used] - logs[best], seen.losses[used] - seen.losses[best]
        curvature, slope, _ = np.polyfit(x, y / max(y.max(), 1e-300), 2)
        if curvature > 0:
            vertex = float(np.clip(-slope / (2 * curvature), x[0], x[-1]))
            return float(logs[best]) + vertex, f"the minimum of a parabola through {len(used)}"
    return float(logs[best]), "the best one"


def _near(logs: Array, seen: Comparison, best: int, settings: ScoutSettings) -> list[int]:
    """Return the neighbouring candidates around ``best`` that enter the parabola."""
    above = seen.losses - seen.losses[best]
    fell = seen.level - seen.losses[best]
    fine = np.isfinite(above) & ((above <= settings.depth * fell) if fell > 0 else (above >= 0))
    apart = np.abs(logs - logs[best])
    neighbour = np.abs(np.arange(len(logs)) - best) <= 1
    usable = np.flatnonzero(fine & (neighbour | (apart <= settings.reach))).tolist()
    low, high = _run_around(best, usable)
    return list(range(low, high + 1))
