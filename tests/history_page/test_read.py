"""Histories in files: those of a scheduler, lists, and what is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hdet_kernels as hk
from hdet_kernels.history_page import read_history
from tests.history_page.histories import run
from tests.schedule.cases import Place, adam, advance


def test_the_file_of_a_scheduler_and_a_list_give_the_same(tmp_path: Path) -> None:
    lines, whole = tmp_path / "history.jsonl", tmp_path / "history.json"
    optimizer = adam()
    scheduler = hk.HDETOneCycleLR(optimizer, 0.1, 8, sync_every=2, auto_lr=False, ensemble=Place(3), history_file=lines)
    for step in range(8):
        advance(optimizer, scheduler, *([1.0] if step > 1 else []))
    found = read_history(lines)
    assert [record.step for record in found] == [2, 4, 6, 8]
    assert found[0].losses == [None] * 3
    assert found[1:] == scheduler.history[1:]
    whole.write_text(json.dumps([json.loads(line) for line in lines.read_text().splitlines()]))
    assert read_history(whole) == found


def test_a_record_of_before_has_no_slopes(tmp_path: Path) -> None:
    plain = run(1)[0].to_dict()
    for name in ("slopes", "errors", "posterior", "distance", "landed", "taken", "undone"):
        del plain[name]
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps(plain) + "\n")
    (found,) = read_history(path)
    assert (found.slopes, found.distance) == (None, None)


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    line = json.dumps(run(1)[0].to_dict())
    path.write_text(f"{line}\n{line[:50]}")
    assert len(read_history(path)) == 1


RECORD = json.dumps(run(1)[0].to_dict())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: there is nothing to show"),
        (" \n\n", "is empty"),
        ("[]", "has no record"),
        ("hello\n", "line 1 is not valid JSON"),
        (f"{RECORD}\nhello\n{RECORD}\n", "line 2 is not valid JSON"),
        ("[1, 2", "is not valid JSON"),
        ('{"step": 3}\n', "line 1 is not the record of a sync: .*must be a SyncRecord, or a dict with step, cycle"),
        (f"[{RECORD}, 7]", "entry 1 is not the record of a sync"),
        ("3\n", "line 1 is not the record of a sync"),
        (RECORD.replace('"losses": [', '"losses": ["x", '), "line 1 is not the record of a sync"),
        (RECORD.replace('"values": {"lr/0"', '"values": {"lr/1"'), "base, values and losses do not fit"),
        (RECORD.replace('"base": {"lr/0": ', '"base": {"lr/0": null, "a": '), "is not the record of a sync"),
    ],
)
def test_what_is_no_history_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "history.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as refused:
        read_history(path)
    assert str(path) in str(refused.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*missing.jsonl: pass the history_file="):
        read_history(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match="cannot be read as text"):
        read_history(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read as text"):
        read_history(tmp_path / "binary")
