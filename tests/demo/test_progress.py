"""The progress bar."""

from __future__ import annotations

import io
import re

import pytest

from hdet_kernels.demo.progress import Bar


class _Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_bar_on_a_terminal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = _Terminal()
    bar = Bar("HDET", 10, stream)
    for step in range(1, 11):
        bar.update(step, "loss 1.000")
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert all(len(line) <= 60 for line in text.replace("\x1b[K", "").strip().split("\r"))


def test_bar_elsewhere_is_a_line_every_quarter() -> None:
    stream = io.StringIO()
    bar = Bar("HDET", 1000, stream)
    for step in range(1, 1001):
        bar.update(step, "loss 1.000")
    assert [re.search(r"(\d+)/1000", line)[1] for line in stream.getvalue().splitlines()] == [  # type: ignore[index]
        "250",
        "500",
        "750",
        "1000",
    ]
