"""Plan the rounds of the scouting phase: how long each is, and which learning rates it compares."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hdet_kernels.scout.settings import ScoutSettings

#: Lowest and highest logarithm of the learning rates that are still considered.
Bracket = tuple[float, float]


@dataclass(frozen=True)
class Plan:
    """The division of a run into scouting rounds and the run proper.

    Args:
        rounds: steps of each round.
        run: steps that remain for the run.
    """

    rounds: tuple[int, ...]
    run: int

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


def make_plan(
    total_steps: int,
    replicas: int,
    settings: ScoutSettings,
    *,
    workable: Callable[[int], bool] = lambda steps: True,
) -> Plan:
    """Return the rounds of a run.

    Every round narrows the range to the neighbours of the best candidate. There are as many rounds as it takes for
    neighbouring candidates to differ by ``settings.factor`` at most, or as many as the steps allow. The last is the
    longest: it decides, and the longer a miniature is the more it resembles the run.

    Args:
        total_steps: steps of the rounds and the run.
        replicas: N, the number of candidates of a round.
        settings: the constants.
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
    steps = int(settings.share * total_steps + 1e-6)
    if steps < settings.fewest:
        least = math.ceil(settings.fewest / settings.share - 1e-6)
        raise ValueError(
            f"max_lr=None takes {settings.share:.0%} of the steps, at least {settings.fewest}, to find a learning "
            f"rate, got total_steps={total_steps}: pass total_steps of at least {least}, or a learning rate"
        )
    rounds = _lengths(steps, rounds_needed(replicas, settings), settings)
    rounds = [_workable(length, workable, settings.fewest) for length in rounds]
    # A run whose own schedule cannot be built gives a step to the last round.
    while not workable(total_steps - sum(rounds)):
        rounds[-1] = _workable(rounds[-1] + 1, workable, rounds[-1] + 1)
    return Plan(tuple(rounds), total_steps - sum(rounds))


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
