"""Charts as SVG: what is drawn where."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

from hdet_kernels.history_page.drawing import BOTTOM, LEFT, RIGHT, SIZES, TOP, Chart, Curve, draw, thinned

WIDTH, HEIGHT = SIZES[False]


def paths(figure: str, kind: str) -> list[str]:
    return re.findall(rf'<path class="{kind}[^>]* d="([^"]*)"', figure)


def points(path: str) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path)]


def test_a_line_goes_from_corner_to_corner_and_has_gaps() -> None:
    curve = Curve("loss", [0, 1, 2, 3, 4], [0.0, 1.0, math.nan, 3.0, 4.0], "c0")
    figure = draw(Chart("t", "u", [curve], zero=True, steps=(0, 4)), 0)
    (line,) = paths(figure, "line")
    assert line.count("M") == 2, "two stretches"
    first, *_, last = points(line)
    assert first == (LEFT, HEIGHT - BOTTOM)
    assert last[0] == WIDTH - RIGHT
    assert TOP < last[1] < TOP + 15, "a little room above the highest value"


def test_single_points_between_gaps_are_dots() -> None:
    curve = Curve("", list(range(100)), [1.0 if n % 2 else None for n in range(100)], "c0")
    figure = draw(Chart("t", "u", [curve], steps=(0, 99)), 0)
    assert paths(figure, "line") == []
    assert paths(figure, "dots")[0].count("h0") == 50


def test_error_bars_reach_one_error_up_and_down_and_are_on_the_axis() -> None:
    curve = Curve("", [0, 1], [0.0, 1.0], "c0", "errors", errors=[2.0, None])
    figure = draw(Chart("t", "u", [curve], steps=(0, 1)), 0)
    (bar,) = paths(figure, "bar")
    low, high = (float(number) for number in re.fullmatch(r"M[\d.]+ ([\d.]+)V([\d.]+)", bar).groups())  # type: ignore[union-attr]
    assert TOP <= high < low <= HEIGHT - BOTTOM
    (dots,) = paths(figure, "dots")
    (_, zero), _ = points(dots)
    assert zero == round((low + high) / 2, 1)


def test_a_band_is_closed_and_a_value_above_the_ceiling_is_at_the_edge() -> None:
    band = Curve("", [0, 1], [2.0, 3.0], "c0", "band", lows=[1.0, 1.0])
    spike = Curve("", [0, 1], [1.0, 1e9], "c1")
    figure = draw(Chart("t", "u", [band, spike], ceiling=4.0, steps=(0, 1)), 0)
    assert paths(figure, "band")[0].endswith("z")
    assert len(points(paths(figure, "band")[0])) == 4
    assert points(paths(figure, "line")[0])[-1][1] == TOP


def test_peaks_survive_thinning() -> None:
    spiky = [(float(n), 1.0) for n in range(10_000)]
    spiky[4321] = (4321.0, 9.0)
    spiky[8765] = (8765.0, -9.0)
    found = thinned(spiky, 200)
    assert len(found) <= 202
    assert {spiky[4321], spiky[8765], spiky[-1]} <= set(found)
    assert found == sorted(found)


def test_a_figure_is_well_formed_and_describes_itself() -> None:
    marks = [(2.0, "bad", 'a "return" & more')]
    chart = Chart("<Loss>", "u & v", [Curve("a<b", [1, 3], [1.0, 2.0], "c0")], "note <", marks=marks, steps=(1, 3))
    figure = draw(chart, 7)
    svg = ElementTree.fromstring(
        re.sub(r"class=(\w+)", r'class="\1"', re.search(r"<svg viewBox=.0 0 500.*</svg>", figure)[0])
    )  # type: ignore[index]
    assert svg.get("role") == "img"
    assert svg.get("aria-labelledby") == "t7 d7"
    texts = {element.get("id"): element.text for element in svg if element.get("id")}
    assert texts["t7"] == "<Loss>"
    assert texts["d7"] == "u & v over steps 1 to 3, from 1 to 2: a<b"
    assert "a &quot;return&quot; &amp; more" in figure
