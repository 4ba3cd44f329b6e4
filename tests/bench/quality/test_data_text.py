"""Parsing text."""

from __future__ import annotations

from bench.quality.data.text import parse_text, parse_words


def test_whole_files_of_text_are_held_out() -> None:
    files = [(f"{number:02d}.rst", bytes([number]) * 3) for number in range(20)]
    found = parse_text(iter([*files, ("translations/xx.rst", b"no"), ("figure.svg", b"no")]))
    assert set(found["held_out"].tolist()) - {10} == {0} or set(found["held_out"].tolist()) == {0, 10}
    assert not set(found["train"].tolist()) & {0}
    assert b"no" not in found["train"].tobytes()


def test_words_are_numbered_by_how_often_they_occur() -> None:
    """A word that is not in the text to train is the unknown one."""
    quotes = '"' * 3
    parts = {"train": " b a <unk> \n b b ", "valid": " a c \n", "test": " b \n"}
    module = "penn = {}\n" + "".join(f"penn['{key}'] = {quotes}{text}{quotes}\n\n" for key, text in parts.items())
    found = parse_words(iter([("__init__.py", module.encode()), ("version.py", b"")]))
    b, eos, a, unk = range(4)
    assert found["train"].tolist() == [b, a, unk, eos, b, b, eos]
    assert found["held_out"].tolist() == [a, unk, eos, b, eos]
