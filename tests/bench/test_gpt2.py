"""The model of 124 M parameters in small: losses, resumed runs, the commands, and the page from their record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet_kernels as hk
from bench.gpt2 import __main__ as gpt2
from bench.gpt2 import page, text
from bench.gpt2.model import TINY, Losses
from bench.gpt2.text import Tokens

CPU = torch.device("cpu")
REPLICAS, SEQUENCES, STEPS = 4, 8, 70
ARGUMENTS = ["--tiny", "--fast", "--device", "cpu", "--steps", STEPS, "--replicas", REPLICAS, "--sequences", SEQUENCES]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tokens of a part of the standard library."""
    pytest.importorskip("tokenizers", reason="the text needs tokenizers: pip install tokenizers")
    folder = tmp_path_factory.mktemp("gpt2")
    library = Path(json.__file__).parents[1]
    text.prepare(folder, [library / name for name in ("email", "http", "json", "encodings")], 10**5, 2 * 10**6, 300)
    return folder


@pytest.fixture
def command(data: Path, tmp_path: Path) -> Any:
    """Return a function that runs a command and returns its exit code; its record is record.json."""

    def run(*words: object) -> int:
        where = ["--data", data, "--out", tmp_path / page.RECORD]
        return gpt2.main([str(word) for word in (*words, *ARGUMENTS, *where)])

    return run


def test_stack_and_plain_training_compute_the_same_model(data: Path) -> None:
    model, losses = TINY.build(0, CPU), Losses(TINY, torch.float32, compiled=False)
    tokens = Tokens.read(data).batch(SEQUENCES, TINY.context, seed=0, step=3)
    wanted = torch.stack([model(part) for part in tokens.chunk(REPLICAS)])
    wanted.mean().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    stack, plain = hk.ReplicaStack(TINY.build(0, CPU), REPLICAS), TINY.build(0, CPU)
    torch.testing.assert_close(stack.backward(losses.replica, tokens), wanted.detach())
    torch.testing.assert_close(stack.losses(losses.replica, tokens), wanted.detach())
    losses.plain(plain, tokens).backward()
    torch.testing.assert_close({name: parameter.grad[0] for name, parameter in stack.named_parameters()}, expected)
    torch.testing.assert_close({name: parameter.grad for name, parameter in plain.named_parameters()}, expected)


def test_windows_depend_on_seed_and_step_alone(data: Path) -> None:
    first, again = Tokens.read(data), Tokens.read(data)
    first.batch(SEQUENCES, TINY.context, seed=0, step=0)
    batch = first.batch(SEQUENCES, TINY.context, seed=0, step=1)
    assert torch.equal(batch, again.batch(SEQUENCES, TINY.context, seed=0, step=1))
    assert not torch.equal(batch, again.batch(SEQUENCES, TINY.context, seed=1, step=1))
    assert not torch.equal(batch, again.batch(SEQUENCES, TINY.context, seed=0, step=2))


def test_no_file_is_both_trained_on_and_held_out(tmp_path: Path) -> None:
    for index in range(400):
        (tmp_path / f"{index}.py").write_text(f"value_{index // 2} = {index // 2}\n")
    documents = list(text.files([tmp_path, tmp_path]))
    assert len(documents) == len({one.text for one in documents}) == 200
    assert any(text.is_held_out(one) for one in documents)


@pytest.mark.full
def test_resumed_runs_are_equal_bit_for_bit(command: Any, tmp_path: Path) -> None:
    assert command("resume", "--until", 6) == 0
    resumed = json.loads((tmp_path / page.RECORD).read_text())["resumed"]
    assert [(one["method"], one["lr"] is None) for one in resumed] == [("plain", 0), ("hdet", 0), ("hdet", 1)]
    assert all(one["parameters equal"] and one["losses equal"] for one in resumed)


def test_unprepared_text_and_grid_are_asked_for(command: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="prepare"):
        Tokens.read(tmp_path)
    with pytest.raises(ValueError, match="grid"):
        command("run", "hdet", "--lr", "best")
    with pytest.raises(ValueError, match="learning rate"):
        command("run", "plain", "--lr", "none")


@pytest.mark.full
@pytest.mark.parametrize(("method", "word"), [("plain", "1e-3"), ("hdet", "none")])
def test_a_run_that_is_stopped_goes_on_and_ends_as_in_one_piece(
    command: Any, tmp_path: Path, method: str, word: str
) -> None:
    path = tmp_path / page.RECORD
    arguments = ["run", method, "--lr", word]
    assert command(*arguments) == 0
    whole = json.loads(path.read_text())["runs"][0]
    path.unlink()
    assert command(*arguments, "--seconds", 0) == 1
    assert "runs" not in json.loads(path.read_text())
    assert command(*arguments, "--seconds", 0) == 0
    found = json.loads(path.read_text())["runs"][0]
    assert found.pop("stopped at") == [50]
    differ = {"stopped at", "ms a step", "command"}
    assert {key: found[key] for key in whole.keys() - differ} == {key: whole[key] for key in whole.keys() - differ}


@pytest.mark.full
def test_grid_and_starts_make_a_page(command: Any, tmp_path: Path) -> None:
    assert command("run", "plain", "--lr", 1e-3, 1e-2) == command("run", "hdet", "--lr", "3x", "none") == 0
    assert command("time", 2) == 0
    runs = json.loads((tmp_path / page.RECORD).read_text())["runs"]
    assert command("run", "plain", "--lr", "best") == 0
    assert json.loads((tmp_path / page.RECORD).read_text())["runs"] == runs  # it was there
    check_page(tmp_path)


def check_page(folder: Path) -> None:
    best = page.found(folder).best["lr"]  # type: ignore[union-attr]
    for words in (page.readme_text(folder), page.section(folder)):
        assert f"{best:g}, the best" in words
        assert f"{3 * best:g}, 3 times too high" in words
        assert "none: `max_lr=None`" in words
    page.draw_plot(folder, folder)
    assert (folder / page.PLOT).stat().st_size > 0


@pytest.mark.full
def test_page_shows_every_run_and_act(tmp_path: Path) -> None:
    shared = {
        "steps": 20,
        "tokens a step": 64,
        "replicas": 1,
        "every": 10,
        "ms a step": 1.0,
        "stopped at": [],
        "seed": 0,
    }
    shared |= {"machine": "a machine", "training": 3.0, "curve": [5.0, 3.0]}
    why = "step 10: the loss rises"
    runs = [
        {**shared, "method": "plain", "lr": 1e-3, "validation": 3.0},
        {**shared, "method": "plain", "lr": 3e-3, "validation": None, "training": None, "curve": [5.0, None]},
        {
            **shared,
            "method": "hdet",
            "lr": 3e-3,
            "validation": 3.03,
            "acts": [{"step": 10, "act": "return", "why": why}],
        },
        {**shared, "method": "hdet", "lr": None, "validation": 3.3, "acts": []},
    ]
    assert page.readme_text(tmp_path) == page.section(tmp_path) == ""
    (tmp_path / page.RECORD).write_text(json.dumps({"runs": runs, "text": {"train tokens": 10**6}}))
    check_page(tmp_path)
    assert "| 0.003, 3 times too high | not finite | 3.030 (+1.0 %) |" in page.readme_text(tmp_path)
    assert why in page.section(tmp_path)
