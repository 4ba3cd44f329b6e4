"""Lists of runs."""

from __future__ import annotations

import json
from dataclasses import replace

from bench.quality import suite
from bench.quality.peers import PEERS
from bench.quality.sweep import SWEEPS
from bench.quality.tasks import TASKS
from tests.bench.quality.scripted import run_record


def test_jobs_are_complete_and_serialisable() -> None:
    for size in suite.SIZES.values():
        jobs = suite.grid_jobs(size) + suite.jobs_after(size, dict.fromkeys(size.tasks, 1e-2))
        assert {job["task"] for job in jobs} <= set(TASKS)
        assert all("spec" in job or job["kind"] == "scalar" for job in jobs)
        json.dumps(jobs)


def test_more_seeds_where_the_gap_is_small() -> None:
    """Plain training at the best learning rate has all seeds that others are compared by."""
    jobs = suite.jobs_after(suite.SIZES["full"], dict.fromkeys(("ratings", "language", "images"), 1.0))
    starts = [job for job in jobs if job["kind"] == "start" and job["spec"].get("probe", True)]
    many = {("hdet", 1 / 3): 640, ("hdet", 1.0): 192, ("hdet", 3.0): 192}
    many |= {("plain", 1 / 3): 640, ("plain", 1.0): 640, ("plain", 3.0): 192}
    for task in ("ratings", "images"):
        for factor in suite.STARTS:
            for method in ("hdet", "plain"):
                of = [j["spec"] for j in starts if j["task"] == task and j["factor"] == factor]
                seeds = sorted(spec["seed"] for spec in of if spec["method"] == method)
                count = many.get((method, factor), 10) if task == "images" else 10
                assert seeds == list(range(count))


def test_peers_run_from_all_starts_or_once() -> None:
    """What depends on the given learning rate starts at all of them, the rest runs once a seed."""
    size = replace(suite.SIZES["ci"], parts=("peers",))
    starts: dict[str, list[float]] = {}
    for job in suite.jobs_after(size, {"digits": 1e-2}):
        if job["spec"]["seed"] == 0:
            starts.setdefault(job["spec"]["method"], []).append(job["factor"])
            assert job["spec"]["lr"] == 1e-2 * job["factor"]
    for method, factors in starts.items():
        once = method in ("local SGD", "DiLoCo") or (method in PEERS and not PEERS[method].from_lr)
        assert factors == [1.0] if once else factors == list(suite.STARTS)
    here = {name for name, peer in PEERS.items() if peer.missing() is None and "adamw" in peer.stands_for}
    assert set(starts) == {*here, *SWEEPS, "PBT", "hypergradient", "local SGD", "DiLoCo"}


def test_parts() -> None:
    """Only the selected parts are run, in their order."""
    size = replace(suite.SIZES["full"], parts=("mixed", "paper"))
    kinds = [job["kind"] for job in suite.jobs_after(size, dict.fromkeys(size.tasks, 1.0))]
    assert kinds == sorted(kinds)
    assert set(kinds) == {"mixed", "paper"}


def test_best_learning_rate_of_a_grid() -> None:
    records = [run_record("grid", "plain", lr, seed, lr + 0.01 * seed) for lr in (3.0, 1.0, 2.0) for seed in (0, 1)]
    assert suite.best_rates(records) == {"digits": 1.0}
