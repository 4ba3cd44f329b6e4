"""Draw a chart as SVG: lines, dots, bands and error bars over the steps of a run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeGuard, TypeVar

from hdet_kernels.history_page.scale import Scale, scale_of

#: Width and height of a chart, in pixels of a page of full width: half of it, or all of it.
SIZES = {False: (500, 270), True: (1040, 320)}

#: Space between the edges of a chart and its axes: left, right, top, bottom.
LEFT, RIGHT, TOP, BOTTOM = 58, 28, 28, 40

#: The most points of one chart. There are no more places for them, and the page stays small.
MOST_POINTS = 4000

Number = float | None
Point = tuple[float, float]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Curve:
    """One curve.

    Args:
        label: its name in the legend; empty: none.
        xs, ys: its points. What is None or not finite is a gap.
        colour: a class of the style sheet (``c0``, ``base``), or a CSS colour.
        kind: ``"line"``, ``"dots"`` or ``"errors"``.
        errors: for ``"errors"``: half the length of the bar at every point, None for a point without one.
        lows: for ``"band"``: the lower edge; ``ys`` are the upper one.
        strong: whether the line is wide.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[Number]
    colour: str
    kind: str = "line"
    errors: Sequence[Number] = ()
    lows: Sequence[Number] = ()
    strong: bool = False

    def finite(self) -> list[float]:
        """Return every finite number that the vertical axis has to show."""
        with_errors = [(y, e) for y, e in zip(self.ys, self.errors, strict=False) if _known(y) and _known(e)]
        ends = [end for y, e in with_errors for end in (y - e, y + e)]
        return [value for value in (*self.ys, *self.lows, *ends) if _known(value)]


@dataclass(frozen=True)
class Chart:
    """A chart over the steps of a run.

    Args:
        title: above it.
        unit: what the vertical axis shows, with its unit.
        curves: those to draw, the first one behind the others.
        note: a sentence below the title.
        log: whether the vertical axis may be logarithmic.
        zero: whether 0 is on the vertical axis.
        decades: the most powers of ten that a logarithmic axis spans, from the highest value down.
        ceiling: where the vertical axis ends; higher values are drawn at its end.
        marks: vertical lines: the step, a class of the style sheet, and its name in the legend.
        wide: whether it is as wide as the page.
        steps: first and last step of the horizontal axis. None: 0 and 1.
    """

    title: str
    unit: str
    curves: Sequence[Curve]
    note: str = ""
    log: bool = False
    zero: bool = False
    decades: float = math.inf
    ceiling: float = math.inf
    marks: Sequence[tuple[float, str, str]] = ()
    wide: bool = False
    steps: tuple[float, float] | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(curve.finite() for curve in self.curves)


@dataclass(frozen=True)
class Frame:
    """The axes of a chart, and where they are in its picture."""

    steps: Scale
    heights: Scale
    width: int
    height: int

    @property
    def right(self) -> int:
        return self.width - RIGHT

    @property
    def bottom(self) -> int:
        return self.height - BOTTOM

    def x(self, step: float) -> float:
        return round(LEFT + self.steps.place(step) * (self.right - LEFT), 1)

    def y(self, value: float) -> float:
        return round(self.bottom - self.heights.place(value) * (self.bottom - TOP), 1)


def draw(chart: Chart, number: int) -> str:
    """Return a figure with its caption, legend and SVG. ``number`` makes its ids differ from those of other charts."""
    (low, high), (width, height) = chart.steps or (0.0, 1.0), SIZES[chart.wide]
    values = (min(value, chart.ceiling) for curve in chart.curves for value in curve.finite())
    heights = scale_of(values, log=chart.log, zero=chart.zero, decades=chart.decades)
    steps = Scale(low, high, whole=True) if high > low else Scale(low - 1, low + 1, whole=True)
    frame = Frame(steps, heights, width, height)
    most = max(MOST_POINTS // max(len(chart.curves), 1), 60)
    body = [_axes(frame), *(_mark(frame, *mark) for mark in chart.marks)]
    body += [_curve(curve, frame, most) for curve in chart.curves]
    unit = f"{chart.unit}, logarithmic" if heights.log else chart.unit
    svg = (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-labelledby="t{number} d{number}">'
        f'<title id="t{number}">{escape(chart.title)}</title>'
        f'<desc id="d{number}">{escape(_description(chart))}</desc>'
        f'<text x="4" y="14">{escape(unit)}</text>'
        f'<text class=end x="{frame.right}" y="{height - 4}">step</text>{"".join(body)}</svg>'
    )
    note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
    return (
        f"<figure{' class=wide' if chart.wide else ''}><figcaption><h3>{escape(chart.title)}</h3>{note}</figcaption>"
        f"{_legend(chart)}{svg}</figure>"
    )


def _description(chart: Chart) -> str:
    """Return the chart in words: what is drawn, and between which values."""
    values = [value for curve in chart.curves for value in curve.finite()]
    low, high = chart.steps or (0.0, 1.0)
    names = ", ".join(curve.label for curve in chart.curves if curve.label)
    return f"{chart.unit} over steps {low:.0f} to {high:.0f}, from {min(values):.4g} to {max(values):.4g}: {names}"


def _legend(chart: Chart) -> str:
    entries = [(curve.label, curve.colour, curve.kind) for curve in chart.curves if curve.label]
    entries += [(label, colour, "mark") for _, colour, label in chart.marks]
    unique = dict.fromkeys(entries)
    if len(unique) < 2:
        return ""
    items = "".join(
        f'<li><svg class="key" viewBox="0 0 18 10" aria-hidden="true">{_key(kind, colour)}</svg>{escape(label)}</li>'
        for label, colour, kind in unique
    )
    return f"<ul class=legend>{items}</ul>"


def _key(kind: str, colour: str) -> str:
    if kind == "band":
        return f'<rect{_paint(colour, "band")} width="18" height="10"/>'
    path = "M9 5h0" if kind == "dots" else "M9 0v10" if kind == "mark" else "M0 5h18"
    return f'<path{_paint(colour, kind if kind != "errors" else "line")} d="{path}"/>'


def _axes(frame: Frame) -> str:
    parts = []
    for value, label in frame.heights.ticks():
        at = frame.y(value)
        parts.append(f'<path class=grid d="M{LEFT} {at}H{frame.right}"/>')
        parts.append(f'<text class=end x="{LEFT - 7}" y="{at + 4:g}">{label}</text>')
    for value, label in frame.steps.ticks():
        at = frame.x(value)
        parts.append(f'<path class=axis d="M{at} {frame.bottom}v4"/>')
        parts.append(f'<text class=middle x="{at}" y="{frame.bottom + 18}">{label}</text>')
    heights = frame.heights
    if not heights.log and heights.low < 0 < heights.high:
        parts.append(f'<path class=zero d="M{LEFT} {frame.y(0.0)}H{frame.right}"/>')
    parts.append(f'<path class=axis d="M{LEFT} {frame.bottom}H{frame.right}"/>')
    return "".join(parts)


def _mark(frame: Frame, step: float, colour: str, label: str) -> str:
    line = f"M{frame.x(step)} {TOP}V{frame.bottom}"
    return f'<path{_paint(colour, "mark")} d="{line}"><title>{escape(label)}: step {step:.0f}</title></path>'


def _curve(curve: Curve, frame: Frame, most: int) -> str:
    if curve.kind == "band":
        return _band(curve, frame, most)
    if curve.kind == "errors":
        return _error_bars(curve, frame, most)
    shown = [y if _known(y) and y >= frame.heights.low else None for y in curve.ys]
    # Dots that touch each other tell nothing.
    thin = _every_nth if curve.kind == "dots" else thinned
    runs = [thin(run, frame.width // 5 if curve.kind == "dots" else most) for run in _runs(curve.xs, shown)]
    points = [[(frame.x(a), frame.y(b)) for a, b in run] for run in runs]
    count = sum(map(len, points))
    if not count:
        return ""
    dots = "".join(f"M{a} {b}h0" for a, b in itertools.chain.from_iterable(points))
    if curve.kind == "dots":
        return f'<path{_paint(curve.colour, "dots")} d="{dots}"/>'
    lines = "".join(_polyline(run) for run in points if len(run) > 1)
    drawn = f'<path{_paint(curve.colour, "line strong" if curve.strong else "line")} d="{lines}"/>' if lines else ""
    # Few points, or single ones between gaps, would not be seen on a line.
    lonely = dots if count <= 40 else "".join(f"M{run[0][0]} {run[0][1]}h0" for run in points if len(run) == 1)
    return drawn + (f'<path{_paint(curve.colour, "dots")} d="{lonely}"/>' if lonely else "")


def _band(curve: Curve, frame: Frame, most: int) -> str:
    known = [
        (a, low, high)
        for a, low, high in zip(curve.xs, curve.lows, curve.ys, strict=True)
        if _known(low) and _known(high)
    ]
    known = _every_nth(known, most)
    if not known:
        return ""
    if len(known) == 1:
        a, low, high = known[0]
        return f'<path{_paint(curve.colour, "bar")} d="M{frame.x(a)} {frame.y(low)}V{frame.y(high)}"/>'
    edge = [(frame.x(a), frame.y(high)) for a, _, high in known] + [
        (frame.x(a), frame.y(low)) for a, low, _ in reversed(known)
    ]
    return f'<path{_paint(curve.colour, "band")} d="{_polyline(edge)}z"/>'


def _error_bars(curve: Curve, frame: Frame, most: int) -> str:
    points = [(a, b, error) for a, b, error in zip(curve.xs, curve.ys, curve.errors, strict=True) if _known(b)]
    bars, dots = "", ""
    for a, b, error in _every_nth(points, frame.width // 4):
        at = frame.x(a)
        dots += f"M{at} {frame.y(b)}h0"
        if _known(error):
            bars += f"M{at} {frame.y(b - error)}V{frame.y(b + error)}"
    return f'<path{_paint(curve.colour, "bar")} d="{bars}"/><path{_paint(curve.colour, "dots")} d="{dots}"/>'


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most about ``most`` of the points: of each stretch the lowest and the highest, so that peaks stay."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    found: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        found += sorted(ends)
    return [*found, points[-1]] if found[-1] != points[-1] else found


def _every_nth(points: Sequence[Item], most: int) -> list[Item]:
    """Return at most ``most`` of the points, at equal distances, and the last one."""
    every = math.ceil(len(points) / most)
    return [*points[::every], *points[-1:]] if every > 1 else list(points)


def _runs(xs: Sequence[float], ys: Sequence[Number]) -> Iterable[list[Point]]:
    """Yield the stretches of points without a gap."""
    run: list[Point] = []
    for a, b in zip(xs, ys, strict=True):
        if b is not None and math.isfinite(b):
            run.append((a, b))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _known(value: Number) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _polyline(points: Sequence[Point]) -> str:
    (a, b), *others = points
    return f"M{a} {b}L" + " ".join(f"{c} {d}" for c, d in others)


def _paint(colour: str, kind: str) -> str:
    """Return the attributes that give a shape its kind and colour."""
    if colour.startswith("hsl"):
        return f' class="{kind}" style="--c:{colour}"'
    return f' class="{kind} {colour}"'
