"""The bars that HDET is to meet on the zoo, from each start and in both modes, and what was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .excess import MODES, Excesses, Start, Summary


@dataclass(frozen=True)
class Bar:
    """A limit for the excess over all tasks.

    Args:
        starts: The starts that it holds for, each by itself.
        text: The bar in words; ``{limit}`` and ``{within}`` stand for numbers.
        limits: The limit with a probe, and with training losses only.
        measure: Returns the figure, of which more is worse, from the excesses, mode, start and number of the mode; None
            where the runs do not tell.
    """

    starts: tuple[Start, ...]
    text: str
    limits: tuple[float, float]
    measure: Callable[[Excesses, str, Start, int], float | None]


@dataclass(frozen=True)
class Verdict:
    """A bar from one start in one mode: text, figure in percent, and whether it is met."""

    text: str
    figure: float
    met: bool


# Mean excess at the best learning rate, and median excess from ten times off, with a probe and without.
HARM = (0.3, 0.3)
RECOVERY = (1.0, 2.0)

# Shares of tasks are rounded in floating point.
ROUNDING = 1e-9

# Of each task the excess may be this high, with a probe and without, and so many tasks may be above it.
WITHIN = (3.0, 5.0)
ABOVE = (10.0, 20.0)


def _summary(excesses: Excesses, mode: str, start: Start) -> Summary:
    found = excesses.summary(mode, start)
    if found is None:
        raise ValueError(f"no runs of {mode} from start {start}: a bar needs the records of all its runs")
    return found


def _worse(excesses: Excesses, mode: str, start: Start, _: int) -> float | None:
    found = _summary(excesses, mode, start)
    return 100 * found.worse / found.compared if found.compared else None


def _above(excesses: Excesses, mode: str, start: Start, index: int) -> float:
    return 100 * (1 - excesses.share_within(mode, start, WITHIN[index]))


def _mean(excesses: Excesses, mode: str, start: Start, _: int) -> float:
    return _summary(excesses, mode, start).mean


def _median(excesses: Excesses, mode: str, start: Start, _: int) -> float:
    return _summary(excesses, mode, start).median


def _worst(excesses: Excesses, mode: str, start: Start, _: int) -> float:
    return _summary(excesses, mode, start).worst


WORSE_THAN_PLAIN = "worse than plain: ≤ {limit} of tasks"
ABOVE_LIMIT = "above {within}: ≤ {limit} of tasks"
BARS = (
    Bar((1.0,), "mean ≤ {limit}", HARM, _mean),
    Bar((1.0,), "worst ≤ {limit}", (2.0, 2.0), _worst),
    Bar((1.0,), WORSE_THAN_PLAIN, (5.0, 5.0), _worse),
    Bar((1 / 3, 3.0), "mean ≤ {limit}", (1.0, 1.5), _mean),
    Bar((1 / 3, 3.0), WORSE_THAN_PLAIN, (5.0, 5.0), _worse),
    Bar((1 / 10, 10.0), "median ≤ {limit}", RECOVERY, _median),
    Bar((1 / 10, 10.0), ABOVE_LIMIT, ABOVE, _above),
    Bar((1 / 30, 30.0), "median ≤ {limit}", (2.0, 4.0), _median),
    Bar((1 / 30, 30.0), WORSE_THAN_PLAIN, (0.0, 0.0), _worse),
    Bar((None,), "median ≤ {limit}", (1.0, 2.0), _median),
    Bar((None,), ABOVE_LIMIT, ABOVE, _above),
)


def verdicts(excesses: Excesses) -> list[tuple[Start, dict[str, Verdict]]]:
    """Return every bar from each of its starts: the start, and the verdict in each mode that has runs from there."""
    return [
        (start, {mode: one for mode in MODES if (one := _verdict(bar, excesses, mode, start)) is not None})
        for bar in BARS
        for start in bar.starts
    ]


def _verdict(bar: Bar, excesses: Excesses, mode: str, start: Start) -> Verdict | None:
    index = MODES.index(mode)
    figure = bar.measure(excesses, mode, start, index) if excesses.means(mode, start) else None
    if figure is None:
        return None
    limit = bar.limits[index]
    text = bar.text.format(limit=f"{limit:g} %", within=f"{WITHIN[index]:g} %")
    return Verdict(text, figure, figure <= limit + ROUNDING)
