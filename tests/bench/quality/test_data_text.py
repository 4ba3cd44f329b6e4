"""Parsing text."""

from __future__ import annotations

from bench.quality.data.text import parse_text


def test_whole_files_of_text_are_held_out() -> None:
    files = [(f"{number:02d}.rst", bytes([number]) * 3) for number in range(20)]
    found = parse_text(iter([*files, ("translations/xx.rst", b"no"), ("figure.svg", b"no")]))
    assert set(found["held_out"].tolist()) - {10} == {0} or set(found["held_out"].tolist()) == {0, 10}
    assert not set(found["train"].tolist()) & {0}
    assert b"no" not in found["train"].tobytes()
