"""Run many jobs in several processes: one small run leaves most of a GPU idle, and a laptop has several cores."""

from __future__ import annotations

import contextlib
import queue
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.multiprocessing as mp

from .results import Job, Record, Spec
from .rows import observe, train_rows
from .scalars import train_scalar
from .search import train_search
from .sweep import train_sweep
from .tasks import TASKS, Task
from .train import train, validation_loss

# How often a run is tried: where many processes share a GPU, recording a CUDA graph fails once in a while.
ATTEMPTS = 2
# Runs that are rows of one stack.
MOST_ROWS = 64


def run_jobs(jobs: Sequence[Job], device: str, workers: int, *, seconds: float = float("inf")) -> Iterator[Record]:
    """Run jobs and yield their records as they end, in no particular order: an error or Ctrl-C loses none of them.

    Args:
        jobs: What to run.
        device: "cuda" or "cpu".
        workers: Number of processes.
        seconds: Jobs that are not begun by then are left out, and their number is printed. Those that run are waited
            for: a process that ends in the middle of a kernel harms others that share the GPU with it.

    Yields:
        The records; that of a job that raised has an ``error``.
    """
    context = mp.get_context("spawn")
    waiting, done = context.Queue(), context.Queue()
    waiting.cancel_join_thread()  # jobs left in the queue would block the exit
    bundles = bundled(jobs) if device != "cpu" else [[job] for job in jobs]
    for bundle in bundles:
        waiting.put(bundle)
    processes = [
        context.Process(target=_work, args=(waiting, done, device), daemon=True)
        for _ in range(min(workers, len(bundles)))
    ]
    for process in processes:
        process.start()
    start, count = time.monotonic(), 0
    while count < len(jobs):
        left = start + seconds - time.monotonic()
        if left <= 0:
            _empty(waiting)
        try:
            records: list[Record] = done.get(timeout=min(left, 5.0) if left > 0 else 5.0)
        except queue.Empty:
            if any(process.is_alive() for process in processes):
                continue
            missing = len(jobs) - count
            if left > 0:
                raise RuntimeError(f"all worker processes died; {missing} of {len(jobs)} runs are missing") from None
            print(f"{missing} of {len(jobs)} runs were left out: the time is over", file=sys.stderr)
            break
        yield from records
        count += len(records)
        if "error" in records[-1]:
            print(f"{records[-1]['task']}, {records[-1]['kind']}: {records[-1]['error']}", file=sys.stderr)
        _show(count, len(jobs), time.monotonic() - start)
    for process in processes:
        process.join()


def _empty(waiting: Any) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            waiting.get_nowait()


def bundled(jobs: Sequence[Job]) -> list[list[Job]]:
    """Return the jobs in bundles: plain runs of a task together, as rows of one stack, and every other alone.

    Bundles of rows load the GPU, and single runs the host: the former are spread over the first half of the latter.
    """
    bundles: dict[object, list[Job]] = {}
    for number, job in enumerate(jobs):
        spec = Spec(**job["spec"]) if "spec" in job else None
        plain = spec is not None and spec == Spec(spec.task, "plain", spec.lr, spec.seed, steps=spec.steps)
        key: object = (spec.task, spec.steps) if spec is not None and plain and job["kind"] != "sweep" else number
        while len(bundles.get(key, ())) >= MOST_ROWS:
            key = (key,)
        bundles.setdefault(key, []).append(job)
    several = [bundle for bundle in bundles.values() if len(bundle) > 1]
    order = [bundle for bundle in bundles.values() if len(bundle) == 1]
    gap = max(len(order) // 2 // max(len(several), 1), 1)
    for number, bundle in enumerate(several):
        order.insert(number * (gap + 1), bundle)
    return order


def run_bundle(bundle: Sequence[Job], task: Task, device: torch.device) -> list[Record]:
    """Run the jobs of a bundle in this process."""
    if len(bundle) == 1:
        return [run_job(bundle[0], task, device)]
    start, specs = time.perf_counter(), [Spec(**job["spec"]) for job in bundle]
    lrs = [spec.lr for spec in specs if spec.lr is not None]
    found = train_rows(task, lrs, [spec.seed for spec in specs], device, steps=specs[0].steps)
    seconds = (time.perf_counter() - start) / len(bundle)
    initial = validation_loss(task, task.model().to(device))
    return [
        {**job, **spec.record(), "val": value, "seconds": seconds, "initial": initial}
        for job, spec, value in zip(bundle, specs, found.val.tolist(), strict=True)
    ]


def run_job(job: Job, task: Task, device: torch.device) -> Record:
    """Run one job in this process."""
    kind = job["kind"]
    if kind == "scalar":
        explored = {key: job[key] for key in ("name", "value", "seed", "explores")}
        return {**job, **train_scalar(task, **explored, device=device, steps=job.get("steps"))}
    if kind == "observe":
        return {**job, "observed": observe(task, device, steps=job.get("steps"))}
    spec = Spec(**job["spec"])
    return {**job, **{"sweep": train_sweep, "search": train_search}.get(kind, train)(task, spec, device)}


def _work(waiting: Any, done: Any, device: str) -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    where, tasks = torch.device(device), dict[str, Task]()
    while True:
        try:
            bundle = waiting.get(timeout=3)
        except queue.Empty:
            return
        name = bundle[0]["task"]
        for attempt in range(ATTEMPTS):
            try:
                if name not in tasks:
                    tasks[name] = TASKS[name](where)
                done.put(run_bundle(bundle, tasks[name], where))
                break
            except Exception as error:
                if attempt + 1 == ATTEMPTS:
                    traceback.print_exc()
                    why = f"{type(error).__name__}: {error}"
                    done.put([{**job, **job.get("spec", {}), "error": why} for job in bundle])


def _show(count: int, total: int, seconds: float) -> None:
    end = "\n" if count == total else ""
    print(f"\r{count:4d} of {total} runs, {seconds:.0f} s", end=end, file=sys.stderr, flush=True)
