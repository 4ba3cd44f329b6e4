"""The quality suite in small: every method and task takes a few steps, and the recorded observations are replayed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hdet_kernels as hk
from bench.quality import __main__ as quality
from bench.quality import search, short_runs, suite
from bench.quality.observations import OBSERVATIONS
from bench.quality.peers import OPTIMIZERS, PEERS
from bench.quality.results import Spec
from bench.quality.rows import train_rows
from bench.quality.suite import SIZES
from bench.quality.tasks import TASKS
from bench.quality.train import train, validation_loss

CPU = torch.device("cpu")
METHODS = ["hypergradient", "fan-out", "local SGD", "DiLoCo", "PBT", "warm init", "paper"]
STEPS = 40


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the digits task on the CPU."""
    pytest.importorskip("sklearn", reason="the digits need scikit-learn: pip install scikit-learn")
    return TASKS["digits"](CPU, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def little_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the data of all tasks: a few hundred random examples."""
    folder, random = tmp_path_factory.mktemp("little"), np.random.default_rng(0)
    levels = [9, 52, 47, 17, 3, 7, 24, 15, 5, 10, 2, 3, 6, 8, 6, 6, 51, 37, 8, *[4] * 14]

    def numbers(below: Any, *shape: int) -> Any:
        return random.integers(below, size=shape)

    arrays = {
        "ratings": {
            "user": numbers(20, 400), "film": numbers(30, 400), "stars": numbers(5, 400) + 1,
            "time": numbers(10**6, 400), "gender": numbers(2, 20), "age": numbers(7, 20), "occupation": numbers(21, 20),
            "region": numbers(100, 20), "year": 1950 + numbers(50, 30), "genres": numbers(2, 30, 18),
        },
        "language": {"train": numbers(256, 4000), "held_out": numbers(256, 1000)},
        "images": {
            "train_images": numbers(256, 300, 28, 28), "train_classes": numbers(10, 300),
            "held_out_images": numbers(256, 100, 28, 28), "held_out_classes": numbers(10, 100),
        },
        "flights": {
            "day": numbers(365, 400), "hour": numbers(24, 400), "origin": numbers(3, 400), "carrier": numbers(16, 400),
            "dest": numbers(104, 400), "dep_delay": numbers(90, 400), "distance": numbers(2000, 400),
            "minute": numbers(60, 400), "arr_delay": numbers(90, 400),
        },
        "words": {"train": numbers(50, 2000), "held_out": numbers(50, 400)},
        "census": {
            "categories": numbers(levels, 400, len(levels)), "numbers": numbers(100, 400, 7), "rich": numbers(2, 400),
            "unseen": (np.arange(400) >= 300).astype(np.uint8),
        },
        "credit": {"categories": numbers(4, 100, 13), "numbers": numbers(100, 100, 7), "bad": numbers(2, 100)},
        "diamonds": {
            "categories": numbers([5, 7, 8], 300, 3), "numbers": random.random((300, 6), dtype=np.float32),
            "price": 326 + numbers(18000, 300),
        },
        "queries": {
            "features": random.standard_normal((400, 136)).astype(np.float16), "relevance": numbers(5, 400),
            "query": np.arange(400) // 25,
        },
        "weather": {"weather": (50 + 10 * random.standard_normal((3, 12 * 7 * 24, 8))).astype(np.float32)},
    }  # fmt: skip
    for name, found in arrays.items():
        np.savez(folder / f"{name}.npz", **found)
    return folder


@pytest.mark.parametrize("method", ["plain", "hdet", *(pytest.param(name, marks=pytest.mark.full) for name in METHODS)])
def test_every_method_learns(digits: Any, method: str) -> None:
    untrained = validation_loss(digits, digits.model())
    lr = 4e-4 if method == "DiLoCo" else 4e-3  # its outer momentum multiplies steps by seven
    found = train(digits, Spec("digits", method, lr, 0, steps=STEPS), CPU)
    assert found["val"] < 0.9 * untrained
    assert len(found["curve"]) >= STEPS // found["every"] - 1


@pytest.mark.full
@pytest.mark.parametrize("name", PEERS)
def test_every_peer_lowers_the_loss(digits: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    peer = PEERS[name]
    if (why := peer.missing()) is not None:
        pytest.skip(why)
    monkeypatch.setattr(type(digits), "optimizer", peer.stands_for[0])
    torch.manual_seed(0)
    untrained = validation_loss(digits, digits.model())
    steps = 100 if name == "DoWG" else 20  # whose first steps are a hundredth of the way from zero, and overshoot
    lr = 5e-2 if digits.optimizer == "sgd" else 4e-3
    assert train(digits, Spec("digits", name, lr, 0, steps=steps), CPU)["val"] < untrained


@pytest.mark.full
def test_clipping_and_warm_up_reach_every_way_of_training(digits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One model, the rows of a grid and replicas of a task end alike, and not as without one of its two settings."""
    monkeypatch.setattr(type(digits), "optimizer", "sgd")  # whose steps, unlike Adam's, are as large as the gradients
    spec = Spec("digits", "plain", 0.5, 0, steps=STEPS)

    def ends(clip: float | None, warm_up: float) -> list[float]:
        monkeypatch.setattr(type(digits), "clip", clip)
        monkeypatch.setattr(type(digits), "warm_up", warm_up)
        rows = train_rows(digits, [0.5], [0], CPU, steps=STEPS)
        fixed = replace(spec, method="hdet", options={"trust": 1.0})
        return [train(digits, spec, CPU)["val"], float(rows.val[0]), train(digits, fixed, CPU)["val"]]

    both, loose, slow = ends(0.1, 0.05), ends(None, 0.05), ends(0.1, 0.6)
    for found in (both, loose, slow):
        assert found == pytest.approx([found[0]] * 3, rel=0.01)
    assert abs(both[0] - loose[0]) > 0.1 * both[0]
    assert abs(both[0] - slow[0]) > 0.1 * both[0]


def check_task(name: str, folder: Path, device: torch.device, steps: int) -> None:
    """Train by one model and by two replicas, and compare their losses."""
    task: Any = TASKS[name](device, folder)  # type: ignore[call-arg]
    task.replicas, task.batch = 2, min(task.batch, 4)
    task.probes = task.validations = 16
    if device == CPU and hasattr(task, "shape"):  # many CPUs multiply bfloat16 a thousand times slower
        task.shape, task.context = {"width": 16, "heads": 2, "layers": 1}, 12
    spec = Spec(name, "plain", task.lr / 10, 0, steps=steps, options={"trust": 1.0})  # a return would train anew
    plain, stack = (train(task, replace(spec, method=method), device) for method in ("plain", "hdet"))
    assert stack["val"] == pytest.approx(plain["val"], rel=0.1)


@pytest.mark.full
@pytest.mark.parametrize("name", TASKS)
def test_every_task_takes_two_steps(name: str, little_data: Path) -> None:
    if "digits" in name:
        pytest.importorskip("sklearn", reason="the digits need scikit-learn: pip install scikit-learn")
    check_task(name, little_data, CPU, steps=2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TASKS)
def test_every_task_runs_on_a_gpu(name: str, little_data: Path) -> None:
    """Twelve steps, so that passes in training and in evaluation mode are replayed as CUDA graphs."""
    check_task(name, little_data, torch.device("cuda"), steps=12)


@pytest.mark.parametrize("method", [pytest.param(method, marks=pytest.mark.full) for method in search.METHODS])
def test_every_search_chooses_a_learning_rate(digits: Any, method: str) -> None:
    (found,) = (
        search.train_search(digits, Spec(**job["spec"]), CPU)
        for job in search.search_jobs(["digits"], 1)
        if (job["spec"]["method"], job["spec"]["options"]["share"]) == (method, 0.3)
    )
    assert digits.lr / 30 < found["chosen"] < digits.lr * 30
    whole, left = search.chosen_jobs([{"kind": "search", **found}])
    assert (whole["spec"]["steps"], left["spec"]["steps"]) == (None, 231)
    assert {whole["spec"]["lr"], left["spec"]["lr"]} == {found["chosen"]}


@pytest.mark.full
def test_the_default_share_costs_least_on_recorded_short_runs() -> None:
    """The excess of the choice and of the shorter run together, in both modes; and what half of a run buys."""
    for probe in (True, False):
        alone = {share: list(short_runs.played(share, probe).values()) for share in search.SHARES}
        for average in (np.median, np.mean):
            cost = {share: average(found) + short_runs.COST * share for share, found in alone.items()}
            assert min(cost, key=cost.__getitem__) == hk.ScoutSettings().share
        assert np.median(alone[0.5]) <= 1
        assert np.quantile(alone[0.5], 0.9) <= 6


def test_jobs_of_every_size_are_complete_and_serialisable() -> None:
    assert {task.optimizer for task in TASKS.values()} == set(OPTIMIZERS)
    for size in SIZES.values():
        jobs = suite.grid_jobs(size) + suite.jobs_after(size, dict.fromkeys(size.tasks, 1e-2))
        assert {job["task"] for job in jobs} <= set(TASKS)
        assert all("spec" in job or job["kind"] == "scalar" for job in jobs)
        json.dumps(jobs)


def test_recorded_observations_are_replayed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen = quality.observations.read(OBSERVATIONS)
    two = {task: seen[task] for task in ("ratings", "census")}  # which together have all starts
    quality.observations.write(tmp_path / "seen.npz", two, "two tasks of the record")
    assert quality.observations.source(tmp_path / "seen.npz") == "two tasks of the record"
    monkeypatch.setattr(sys, "argv", ["", "replay", "--observations", str(tmp_path / "seen.npz")])
    quality.main()
    assert capsys.readouterr().out.count("\n") == 2 * len(suite.STARTS) + 2, "two rows a start, and a head"
