"""The style sheet: every class that is drawn has a colour, in light and in dark, that can be read."""

from __future__ import annotations

import re

import pytest

from hdet_kernels.history_page import history_page
from hdet_kernels.history_page.style import COLOURS, STYLE
from tests.history_page.histories import HISTORIES


def luminance(colour: str) -> float:
    channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("which", "card"), [(0, "#ffffff"), (1, "#1a2029")])
def test_colours_stand_out_from_the_page(which: int, card: str) -> None:
    """At least 3 : 1, which WCAG 2 demands of graphics."""
    assert all(contrast(pair[which], card) >= 3 for pair in COLOURS)


def test_text_can_be_read_in_light_and_dark() -> None:
    light, dark = re.findall(r":root\{([^}]*)\}", STYLE)
    for text in (light, dark):
        named = dict(re.findall(r"--(\w+):(#\w+)", text))
        card = named["card"] if len(named["card"]) == 7 else "#ffffff"
        assert contrast(named["ink"], card) >= 7
        assert contrast(named["soft"], card) >= 4.5
        assert contrast(named["bad"], card) >= 4.5


def test_every_class_has_a_rule() -> None:
    used = set()
    for name in ("broken", "scouting", "64 replicas"):
        body = history_page(HISTORIES[name]).split("</style>")[1]
        for classes in re.findall(r'class="([^"]*)"|class=(\w+)', body):
            used |= set(" ".join(classes).split())
    assert {each for each in used if f".{each}" not in STYLE} == set()
