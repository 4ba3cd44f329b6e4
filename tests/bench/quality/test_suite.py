"""Lists of runs."""

from __future__ import annotations

import json
from dataclasses import replace

from bench.quality import suite
from bench.quality.peers import PEERS
from bench.quality.sizes import SIZES
from bench.quality.sweep import SWEEPS
from bench.quality.tasks import TASKS


def test_jobs_are_complete_and_serialisable() -> None:
    for size in SIZES.values():
        jobs = suite.grid_jobs(size) + suite.jobs_after(size, dict.fromkeys(size.tasks, 1e-2))
        assert {job["task"] for job in jobs} <= set(TASKS)
        assert all("spec" in job or job["kind"] == "scalar" for job in jobs)
        json.dumps(jobs)


def test_more_seeds_where_the_gap_is_small() -> None:
    """Plain training at the best learning rate has all seeds that others are compared by."""
    jobs = suite.jobs_after(SIZES["full"], dict.fromkeys(("ratings", "language", "images"), 1.0))
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
    size = replace(SIZES["ci"], parts=("peers",))
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
    size = replace(SIZES["full"], parts=("mixed", "paper"))
    kinds = [job["kind"] for job in suite.jobs_after(size, dict.fromkeys(size.tasks, 1.0))]
    assert kinds == sorted(kinds)
    assert set(kinds) == {"mixed", "paper"}


def test_zoo_has_every_task_and_near_runs_around_the_best() -> None:
    size = SIZES["zoo"]
    assert set(size.tasks) == set(TASKS) - {"few digits"}
    assert suite.grid_jobs(size) == [], "each task's lr is the best of an earlier grid"
    near = [job["spec"] for job in suite.near_jobs(size, {"digits": 1.0})]
    assert {spec["seed"] for spec in near} == set(range(10))
    assert sorted({spec["lr"] for spec in near}) == [2.0**-0.5, 1.0, 2.0**0.5]
    assert suite.near_jobs(SIZES["ci"], {"digits": 1.0}) == []


def test_zoo_runs_all_ways_of_a_seed_before_the_next() -> None:
    size = replace(SIZES["zoo"], parts=("starts", "none"), options={"digits": {"slack": 0.9}})
    jobs = suite.jobs_after(size, dict.fromkeys(size.tasks, 1.0))
    for kind in ("start", "none"):
        seeds = [job["spec"]["seed"] for job in jobs if job["kind"] == kind]
        assert seeds == sorted(seeds)
    ways = {(job["spec"]["method"], job["spec"]["probe"]) for job in jobs}
    assert ways == {("plain", True), ("hdet", True), ("hdet", False), ("scout", True), ("scout", False)}
    digits = [job for job in jobs if job["task"] == "digits"]
    assert all((job["spec"]["options"] == {"slack": 0.9}) == (job["spec"]["method"] != "plain") for job in digits)
    counts = {
        factor: sum(job.get("factor") == factor and job["spec"]["method"] == "plain" for job in digits)
        for factor in suite.STARTS
    }
    assert counts == {factor: 5 if factor == 1.0 else 3 for factor in suite.STARTS}
    assert all(job["spec"]["lr"] is None for job in jobs if job["kind"] == "none")
