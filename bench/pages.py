"""Write the generated documentation from the recorded results; no GPU is needed.

python -m bench.pages            # write docs/benchmarks.md, docs/cost.md, docs/quality.md, docs/reliability.md, their
                                 # plots, and the tables of README.md, docs/usage/optimizers.md and bench/README.md
python -m bench.pages --check    # write nothing; exit code 1 if a page is not up to date

Every figure is computed from a record of ``bench/results`` or ``bench/quality/results``, or by ``cost_model.py``; the
prose is in ``bench/templates``. A comment in docs/benchmarks.md has the checksum of the records that its plots show, so
that a stale plot is noticed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from bench import cost_model as cost
from bench import plots, records, suites
from bench.gpt2 import page as gpt2
from bench.markdown import short, spaced, table, wrapped
from bench.quality import page as quality
from bench.tables import NOTHING, frame, read, render, time_cell

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
QUALITY_RESULTS = ROOT / "bench" / "quality" / "results"
DOCS = ROOT / "docs"

Row = dict[str, Any]

# Work beside AdamW in fp32 that docs/benchmarks.md shows.
WORKS = {
    "adamw-fp32-clip": "AdamW, clipped",
    "adamw-bf16": "AdamW, all in bf16",
    "adamw-bf16-split-bf16-state": "AdamW, bf16, split masters, bf16 state",
    "adamw-bf16-int8-state": "AdamW, bf16, 8-bit state",
    "sgd-momentum-fp32": "SGD with momentum",
    "adagrad-fp32": "Adagrad",
    "lion-fp32": "Lion",
}
# What a fault must end in (tests/chaos/faults.py).
OUTCOMES = {
    "unharmed": "every rank ends as in the undisturbed run",
    "healed": "the replica is left out of one average, and is then like the others",
    "refused": "every rank gets an error that names the rank, with everything as before",
    "lost": "a process is gone: the others get an error, with everything as before",
    "rejected": "a checkpoint is refused, with everything as before",
}
SHOWN_REPLICAS = (8, 2048, 16384)


class Records:
    """The recorded benchmarks as a frame, and the row of a case."""

    def __init__(self, folder: Path) -> None:
        self.entries = records.entries([folder])
        self.frame = frame(self.entries)

    def rows(self, suite: str, **wanted: object) -> list[Row]:
        """Return the rows of a suite with these parameters."""
        found = self.frame[self.frame["suite"] == suite]
        for key, value in wanted.items():
            found = found[found[key] == value]
        return [{key: value for key, value in row.items() if _known(value)} for row in found.to_dict("records")]

    def one(self, suite: str, **wanted: object) -> Row:
        """Return the row of one case and implementation."""
        found = self.rows(suite, **wanted)
        if not found:
            raise KeyError(f"no record of {suite} has {wanted}: measure it, or take it from the page")
        return found[0]

    def machine(self, suite: str, device: str) -> str:
        """Return the name of the GPU or the CPU that a suite was measured on."""
        found = [entry for entry in records.of(self.entries, suite) if records.device_of(entry) == device]
        info = found[0]["record"]["machine_info"]
        return str(info["gpu"] if device == "cuda" else info["cpu"].get("brand_raw") or info["machine"])


def _known(value: object) -> bool:
    return isinstance(value, dict | list) or bool(pd.notna(value))


def benchmarks_page() -> str:
    """Return docs/benchmarks.md."""
    found = Records(RESULTS)
    one, rows = found.one, found.rows
    on_cpu = {row["model"]: row["ratio"]["ratio"] for row in rows("cpp_step", way="hdet-cpp")}
    return render(
        "benchmarks.md",
        gpu=found.machine("optim_step", "cuda"),
        cpu=found.machine("cpp_step", "cpu"),
        steps=_steps_table(found),
        works=_works_table(found),
        triton=_triton(found),
        on_cpu=[ratio for model, ratio in on_cpu.items() if not model.endswith("fp16")],
        in_fp16=[ratio for model, ratio in on_cpu.items() if model.endswith("fp16")],
        sharded=[row["ratio"]["ratio"] for row in rows("sharded_step", way="hdet-cpp")],
        host=_host_table(found),
        scheduler={(row["way"], row["groups"]): round(1e3 * row["ms"]) for row in rows("scheduler_step")},
        training=_training_table(found),
        stack_steps=_stack_steps_table(found),
        stack_training=_stack_training_table(found),
        mean={row["way"]: time_cell(row) for row in rows("pack", test="mean_of_rows", size="268M", dtype="fp32")},
        muon=one("muon", device="cuda", model="llama-1.2B", way="hdet-triton"),
        rowwise=one("rowwise", device="cuda", tables="26-of-1M", way="hdet-cuda"),
        rowwise_cpu={row["way"]: row["ms"] for row in rows("rowwise", device="cpu")},
        converge=_converge_table(found),
        overlap={
            device: {way: one("overlap", device=device, way=way)["ms"] for way in ("waited for", "behind the steps")}
            for device in ("cuda", "cpu")
        },
        wire=[row["share"] for row in rows("wire", way="hdet-cuda")],
        drift=read(RESULTS, "drift.json")[0]["ways"],
        memory=_memory_table(found),
        digest=hashlib.sha256(b"".join(path.read_bytes() for path in gpu_records())).hexdigest()[:16],
    )


def _ratio(ours: Row, theirs: Row) -> str:
    return f"{ours['ms'] / theirs['ms']:.2f}"


def _steps_table(found: Records) -> str:
    body = []
    for model in ("gpt2-124M", "llama-1.2B", "recsys-mix", "many-small-10k"):
        theirs, ours = (
            found.one("optim_step", model=model, work="adamw-fp32", way=way) for way in ("torch-fused", "hdet-cuda")
        )
        body.append([model, spaced(ours["tensors"]), time_cell(theirs), time_cell(ours), _ratio(ours, theirs)])
    return table(["model", "tensors", "torch fused", "ours", "ratio"], body)


def _works_table(found: Records) -> str:
    body = []
    for work, name in WORKS.items():
        case = {"suite": "optim_step", "model": "llama-1.2B", "work": work}
        ours, theirs = found.one(**case, way="hdet-cuda"), found.rows(**case, way="torch-fused")
        ratio = _ratio(ours, theirs[0]) if theirs else NOTHING
        body.append([name, f"{ours['bytes a parameter']:.3g}", time_cell(ours), ratio])
    return table(["", "bytes a parameter", "ours", "ratio"], body)


def _triton(found: Records) -> float:
    """Return the median time of ``triton`` over that of ``cuda`` in the same case."""
    steps = found.frame[(found.frame["suite"] == "optim_step")]
    times = steps.pivot_table(index=["work", "model"], columns="way", values="ms")
    return float((times["hdet-triton"] / times["hdet-cuda"]).median())


def _host_table(found: Records) -> str:
    cases = {
        "GPU, 148 tensors": ("cuda", "gpt2-124M", "hdet-cuda"),
        "GPU, 10 000 tensors": ("cuda", "many-small-10k", "hdet-cuda"),
        "CPU, 148 tensors": ("cpu", "tiny-148", "hdet-cpp"),
        "CPU, 10 000 tensors": ("cpu", "tiny-10k", "hdet-cpp"),
    }
    body = []
    for name, (device, model, way) in cases.items():
        case = {"suite": "host_time", "test": "until_it_returns", "device": device, "model": model}
        ours = [found.one(**case, way=way, addresses=kind)["us"] for kind in ("new", "same", "swapped", "fixed")]
        body.append([name, short(found.one(**case, way="torch-fused")["us"]), *map(short, ours)])
    return table(["", "torch fused", "fresh", "same", "swapped", "fixed"], body)


def _training_table(found: Records) -> str:
    body = []
    for row in found.rows("end_to_end", clipping="clip-1.0", way="torch-fused"):
        every = row["amortised"]["1000"]
        ratio = f"{every['ratio']:.3f} ({every['low']:.3f}–{every['high']:.3f})"
        body.append([row["model"], f"{short(row['ms'])} ms", f"{short(row['sync']['ms'])} ms", ratio])
    return table(["", "torch", "a sync", "ratio with T = 1000"], body)


def _stack_steps_table(found: Records) -> str:
    body = []
    for replicas in (2, 4, 8):
        theirs, ours = (
            found.one("stack_step", gradients="shared", replicas=replicas, way=way)
            for way in ("torch-fused", "hdet-cuda")
        )
        body.append([replicas, time_cell(theirs), time_cell(ours), _ratio(ours, theirs)])
    return table(["R", "torch, R parameters", "ours", "ratio"], body)


def _stack_training_table(found: Records) -> str:
    ways = {"torch-fused": "one plain model", "hdet-stack": "stack", "hdet-stack-graphs": "`cuda_graphs=True`"}
    ways["processes"] = "8 processes"
    body = []
    for training in ("16k-tokens", "64k-tokens"):
        cells = [found.one("stack_training", training=training, way=way) for way in ways]
        body.append([training, *(f"{short(row['ms'])} ms, {row['peak MiB'] / 1024:.1f} GiB" for row in cells)])
    return table(["", *ways.values()], body)


def _converge_table(found: Records) -> str:
    known = found.rows("converge", way="AllReduce of the same bytes") or found.rows(
        "converge", way="one flat AllReduce"
    )
    flat = {row["model"]: row["ms"] for row in known}
    ways = list(dict.fromkeys(row["way"] for row in found.rows("converge") if not row["way"].startswith("copy")))
    body = []
    for way in ways:
        times = {row["model"]: row["ms"] for row in found.rows("converge", way=way)}
        body.append([way, *(f"{short(ms)} ms ({ms / flat[model]:.2f})" for model, ms in times.items())])
    return table(["", *flat], body)


def _memory_table(found: Records) -> str:
    ways = {"torch-foreach": "torch foreach", "torch-fused": "torch fused", "hdet-cuda": "ours"}
    body = []
    for mode in ("adamw-fp32", "adamw-bf16-bf16-state", "adamw-bf16-stochastic-bf16-state", "adagrad-fp32"):
        peaks = [found.rows("memory", mode=mode, way=way) for way in ways]
        body.append([mode, *(f"{row[0]['peak B a parameter']['step']:.2f}" if row else NOTHING for row in peaks)])
    return table(["", *ways.values()], body)


def reliability_page() -> str:
    """Return docs/reliability.md."""
    chaos, tests = read(RESULTS, "chaos_*.json"), read(RESULTS, "*_tests.json")
    kinds = pd.DataFrame([{"kind": kind, **entry} for record in chaos for kind, entry in record["by kind"].items()])
    by_end = kinds.groupby("expected").agg(kinds=("kind", "nunique"), runs=("runs", "sum"), broken=("broken", "sum"))
    return render(
        "reliability.md",
        chaos=chaos,
        outcomes=[[end, meaning, *by_end.loc[end]] for end, meaning in OUTCOMES.items() if end in by_end.index],
        numerics=_numerics(),
        state=_state(read(RESULTS, "state_quality*.json")[0]["tasks"]),
        clipping=_clipping(read(RESULTS, "clipping_quality*.json")),
        tests=[
            record
            | {"passed": _sum(record, "passed"), "failures": _sum(record, "failed"), "skipped": _sum(record, "skipped")}
            for record in tests
        ],
        stack=_stack_operations(read(RESULTS, "*_stack_operations.json")),
    )


def _sum(record: Row, outcome: str) -> int:
    return sum(folder.get(outcome, 0) for folder in record["tests"].values())


def _numerics() -> Row:
    """Return the table of errors on the CPU, and the extremes over all records."""
    found = read(RESULTS, "numerics_*.json")
    errors: dict[str, dict[str, float]] = {}
    for record in read(RESULTS, "numerics_cpu*.json"):
        for rule, entries in record["errors"].items():
            errors.setdefault(rule, {}).update({name: entry["rms"] for name, entry in entries.items()})
    names = ["torch fp32", "fp32", "bf16, master", "torch bf16", "bf16, stochastic rounding", "fp32, state bf16"]
    names.append("fp32, state int8")
    body = [[rule, *(f"{row[name]:.1e}" if name in row else NOTHING for name in names)] for rule, row in errors.items()]
    rates = [pair for record in found for rules in record["learning rates"].values() for pair in rules.values()]
    cases = [case for record in found for rules in record["subnormals"].values() for case in rules.values()]
    losses = {
        f"{rule} with gradients that differ {spread}-fold within a block": entry["fp32, state int8"]["ratio"]
        for record in found
        for rule, spreads in record.get("losses", {}).items()
        for spread, entry in spreads.items()
        if "fp32, state int8" in entry
    }
    return {
        "steps": found[0]["steps"],
        "table": table(["rule", *names], body),
        "rates": {who: max(pair[who] for pair in rates) for who in ("ours", "torch")},
        "flushed": sum(case["flushed"] for case in cases),
        "results": sum(case["results"] for case in cases),
        "losses": losses,
        "worst": max(losses, key=lambda case: losses[case]),
    }


def _state(tasks: Mapping[str, Any]) -> Row:
    """Return in how many cases training with each state ends worse or better by more than two standard errors."""
    rows = pd.DataFrame(
        {"task": task, "rate": rate, "state": state, "loss": entry["mean"]}
        | {key: entry[key] for key in ("difference", "standard error")}
        for task, rates in tasks.items()
        for rate, states in rates.items()
        for state, entry in states.items()
    )
    rows = rows[rows["state"] != "float32"]
    worse = rows[rows["difference"] > 2 * rows["standard error"]]
    better = rows[rows["difference"] < -2 * rows["standard error"]]
    counts = {
        name: {state: int((found["state"] == state).sum()) for state in rows["state"].unique()}
        for name, found in (("worse", worse), ("better", better))
    }
    codes = worse[worse["state"] == "int8"]
    relative = codes["difference"] / (codes["loss"] - codes["difference"])
    return {"cases": int((rows["state"] == "int8").sum()), "worst": relative.max(), **counts}


def _clipping(found: list[Row]) -> str:
    """Return a table of the loss with exact clipping, and of how far the others are from it, with standard errors."""
    body, header = [], []
    for task, rates in itertools.chain.from_iterable(record["tasks"].items() for record in found):
        for rate, options in rates.items():
            exact, *others = options.items()
            header = ["task", "learning rate", exact[0], *(name for name, _ in others)]
            cells = [f"{each['difference']:+.4f} ± {each['standard error']:.4f}" for _, each in others]
            body.append([task, rate.removeprefix("lr "), f"{exact[1]['mean']:.4f}", *cells])
    return table(header, body, left=1)


def _stack_operations(found: list[Row]) -> Row:
    """Return the counts by device and precision, and the operations that are computed in a loop or one by one."""
    rows = pd.DataFrame(
        {
            "where": f"{record['device']}, {entry['precision']}",
            "operation": entry["operation"],
            "result": _result(entry),
        }
        for record in sorted(found, key=lambda record: record["device"] == "CPU")
        for entry in record["operations"]
        if entry["result"] != "unknown"
    )
    names = ["equal", "loop", "one by one", "refused", "wrong"]
    counts = pd.crosstab(rows["where"], rows["result"]).reindex(columns=names, fill_value=0)
    order = list(rows["where"].unique())
    return {
        "table": table(["", *names], [[where, *counts.loc[where]] for where in order]),
        "loop": list(rows[rows["result"] == "loop"]["operation"].unique()),
        "one_by_one": list(rows[rows["result"] == "one by one"]["operation"].unique()),
    }


def _result(entry: Row) -> str:
    if entry["result"] != "equal":
        return str(entry["result"])
    return "one by one" if entry["one by one"] else ("loop" if entry["loops"] else "equal")


def cost_page() -> str:
    """Return docs/cost.md."""
    model, card = cost.MODELS[0], cost.NETWORKS[1]
    cycle = cost.PLAIN.every * model.step(cost.H200)
    centre = max(cost.overhead(2048, each, network) for each, network in product(cost.MODELS, cost.NETWORKS[:2]))
    over_lines = {
        name: sorted(cost.overhead(8, each, cost.NETWORKS[2], sync) for each in cost.MODELS)
        for name, sync in (("plain", cost.PLAIN), ("cheap", cost.CHEAPEST))
    }
    record = read(RESULTS, "cost_check.json")[0]
    return render(
        "cost.md",
        centre=share(centre),
        **{name: (share(found[0]), share(found[-1])) for name, found in over_lines.items()},
        every=cost.PLAIN.every,
        behind=cost.CHEAPEST.overlap,
        replicas=cost.REPLICAS,
        costs=cost_table(),
        tree=cost.TREE_SHARE,
        row_bytes=cost.ROW_BYTES,
        gpu=cost.H200,
        rows_take=seconds(cost.control_row(16384, card)),
        rows_share=share(cost.control_row(16384, card) / cycle),
        floor=share(2 * 4 * model.params / card.link.bandwidth / cycle),
        nvlink=cost.NVLINK,
        infiniband=cost.INFINIBAND,
        internet=cost.INTERNET,
        check=record
        | {"links": " and ".join(f"{link['rate Mb/s']} Mb/s with {link['delay ms']:g} ms" for link in record["links"])}
        | {name: _errors(record, name) for name in ("error", "textbook error")},
    )


def cost_table() -> str:
    """Return the table of networks and models against the number of replicas."""
    header = ["network", "parameters", "step", "DDP, 128"]
    header += [f"{name}, {spaced(n)}" for name in ("fp32", "int8") for n in SHOWN_REPLICAS]
    rows = []
    for network, model in product(cost.NETWORKS, cost.MODELS):
        gpus = model.gpus(cost.H200)
        sized = model.name if gpus == 1 else f"{model.name} on {gpus} GPUs"
        waited = share(cost.ddp_overhead(128, model, network))
        syncs = product((cost.PLAIN, cost.CHEAPEST), SHOWN_REPLICAS)
        costs = [share(cost.overhead(n, model, network, sync)) for sync, n in syncs]
        rows.append([network.name, sized, seconds(model.step(cost.H200)), waited, *costs])
    return table(header, rows, left=2)


def _errors(record: Row, name: str) -> str:
    """Return median and greatest error of messages that are dominated by bytes, and of those dominated by hops."""
    found = [entry for link in record["links"] for entry in link["checks"] if entry["operation"] == "converge"]
    large = [abs(entry[name]) for entry in found if entry["bytes"] >= 1_000_000]
    small = [abs(entry[name]) for entry in found if entry["bytes"] < 1_000_000]
    return (
        f"{share(median(large))} in the median and {share(max(large))} at most for 1 to 64 MB, {share(median(small))} "
        f"and {share(max(small))} for 4 and 64 kB"
    )


def share(value: float) -> str:
    """Format a share of the training time."""
    if value == 0:
        return "0"
    if value >= 10:
        return f"{spaced(value)} ×"
    percent = 100 * value
    return "< 0.01 %" if percent < 0.01 else f"{percent:.2g} %" if percent < 10 else f"{percent:.0f} %"


def seconds(value: float) -> str:
    """Format a time in seconds or milliseconds with two digits."""
    if value < 1:
        return f"{value * 1e3:.2g} ms" if value < 0.0995 else f"{value * 1e3:.0f} ms"
    return f"{value:.2g} s" if value < 9.95 else f"{spaced(value)} s"


def quality_page() -> str:
    """Return docs/quality.md."""
    return quality.text(quality.read(QUALITY_RESULTS)) + gpt2.section(RESULTS)


def speed_table() -> str:
    """Return the table of README.md: AdamW on four models, the average of a stack, and a whole training step."""
    found = Records(RESULTS)
    rows = []
    for model in ("gpt2-124M", "llama-1.2B", "recsys-mix", "many-small-10k"):
        theirs, ours = (
            found.one("optim_step", model=model, work="adamw-fp32", way=way) for way in ("torch-fused", "hdet-cuda")
        )
        counted = f"{ours['parameters'] / 1e6:.0f} M parameters in {spaced(ours['tensors'])} tensors"
        rows.append([f"`AdamW.step()` fp32, {model}: {counted}", *_speeds(theirs, ours)])
    mean = {"suite": "pack", "test": "mean_of_rows", "size": "268M", "dtype": "fp32"}
    speeds = _speeds(found.one(**mean, way="torch"), found.one(**mean, way="hdet-cuda"))
    rows.append(["average of a stack of 8 replicas, 268 M parameters each", *speeds])
    whole = found.one("end_to_end", model="gpt2-124M", clipping="clip-1.0", way="torch-fused")
    ratio = whole["amortised"]["1000"]["ratio"]
    name = "whole training step of gpt2-124M with HDET, syncs included (T = 1000)"
    rows.append([name, f"{short(whole['ms'])} ms", f"{short(ratio * whole['ms'])} ms", f"{ratio:.2f}"])
    rows.append(
        ["peak of parameters, gradients and state of llama-7B in bf16: 8-bit state, `in_backward=True`", *_peaks(found)]
    )
    return table([found.machine("optim_step", "cuda"), "torch", "hdet_kernels", "ours / torch"], rows)


def _peaks(found: Records) -> list[str]:
    ways = ("torch-fused", "hdet-in-backward")
    theirs, ours = (found.one("in_backward", model="llama-7B", way=way)["peak"] for way in ways)
    return [*(f"{peak:.2f} bytes a parameter" for peak in (theirs, ours)), f"{ours / theirs:.2f}"]


def _speeds(theirs: Row, ours: Row) -> list[str]:
    return [*(time_cell(row) for row in (theirs, ours)), _ratio(ours, theirs)]


# The memory of a whole training step, where one way was measured after the other.
WHOLE = "whole peak GB"
# The ways of in_backward, and their titles in the table and in the line on host time.
STEPPED = {
    "torch-fused": "torch fused",
    "torch-hooks": "torch fused, in hooks",
    "bitsandbytes-8bit": "bitsandbytes 8-bit",
    "flashoptim-release": "FlashOptim, gradient release",
    "hdet-cuda": "ours, `step()`",
    "hdet-in-backward": "ours, `in_backward`",
}
STEPPED_HOST = {
    "torch-fused": "torch fused",
    "hdet-cpp": "`step()`",
    "hdet-in-backward": "`in_backward`",
    "hdet-in-backward, 8 launches": "in 8 launches",
}


def in_backward_table(found: Records) -> str:
    """Return the table of docs/usage/optimizers.md: peak bytes a parameter, and time over that of torch."""
    steps = found.rows("in_backward", test="in_backward", device="cuda")
    cases = dict.fromkeys((row["model"], row["precision"]) for row in steps)
    body = []
    for model, precision in cases:
        rows = {row["way"]: row for row in found.rows("in_backward", model=model, precision=precision)}
        theirs, *ours = (rows.get(way) for way in STEPPED)
        assert theirs is not None, f"no record of torch's fused AdamW with {model}"
        name = f"{model}, {'8 bits' if precision == 'bf16-int8' else 'fp32'}"
        cells = [f"{row['peak']:.2f}, {_ratio(row, theirs)}" if row else NOTHING for row in ours]
        body.append([name, f"{theirs['peak']:.2f}, {short(theirs['ms'])} ms", *cells])
    return table([found.machine("in_backward", "cuda"), *STEPPED.values()], body)


def optimizers_page(text: str) -> str:
    """Return docs/usage/optimizers.md with what steps in the backward pass take between its markers."""
    found = Records(RESULTS)
    host = found.rows("in_backward", test="host_time", device="cpu")
    times = ", ".join(f"{STEPPED_HOST.get(row['way'], row['way'])} {1e3 * row['ms']:.0f}" for row in host)
    words = f"Host time beside the backward pass, of {host[0]['tensors']:.0f} small tensors on a CPU, in µs: {times}"
    words += " (`cpu_in_backward.json`)."
    steps = found.rows("in_backward", test="in_backward", device="cuda")
    whole = ", ".join(f"{STEPPED[row['way']]} {row[WHOLE]:.1f}" for row in steps if WHOLE in row)
    words = f"Memory in all at the peak of a step of llama-7B, in GB: {whole}. {words}"
    return between(text, "in-backward", f"{in_backward_table(found)}\n\n{wrapped(words)}")


def readme(text: str) -> str:
    """Return README.md with the speed and quality tables between their markers."""
    text = between(text, "speed", speed_table())
    evidence = [gpt2.readme_text(RESULTS), quality.readme_text(quality.read(QUALITY_RESULTS))]
    return between(text, "quality", "\n\n".join(filter(None, evidence)))


def bench_readme(text: str) -> str:
    """Return bench/README.md with the table of suites between its markers."""
    body = [[f"`{name}`", suite.what] for name, suite in suites.SUITES.items()]
    return between(text, "suites", table(["suite", "what it measures"], body, left=2))


def between(text: str, name: str, new: str) -> str:
    """Replace the text between the lines ``<!-- name -->`` and ``<!-- /name -->``."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"expected one line {begin.strip()} and, after it, one line {end}")
    return f"{text[: text.index(begin)]}{begin}{new}\n{text[text.index(end) :]}"


# Every generated file, and the function that returns its text from the present one.
PAGES: dict[Path, Callable[[str], str]] = {
    DOCS / "benchmarks.md": lambda _: benchmarks_page(),
    DOCS / "cost.md": lambda _: cost_page(),
    DOCS / "quality.md": lambda _: quality_page(),
    DOCS / "reliability.md": lambda _: reliability_page(),
    DOCS / "usage" / "optimizers.md": optimizers_page,
    ROOT / "README.md": readme,
    ROOT / "bench" / "README.md": bench_readme,
}


def stale() -> list[Path]:
    """Return the pages that differ from what the records say."""
    found = []
    for path, page in PAGES.items():
        present = path.read_text() if path.exists() else ""
        if page(present) != present:
            found.append(path.relative_to(ROOT))
    return found


def gpu_records() -> list[Path]:
    """Return the recorded files that have benchmarks of a GPU."""
    return [path for path in records.files([RESULTS]) if "cuda" in map(records.device_of, records.entries([path]))]


def draw_plots(folder: Path = DOCS) -> None:
    """Draw the plots of all pages into ``folder``; if one fails, none is replaced."""
    with tempfile.TemporaryDirectory() as temporary:
        plots.of_records(records.entries(gpu_records()), Path(temporary))
        plots.costs(Path(temporary) / "converge_cost.png")
        quality.draw_plots(quality.read(QUALITY_RESULTS), Path(temporary))
        gpt2.draw_plot(RESULTS, Path(temporary))
        for path in Path(temporary).iterdir():
            shutil.copyfile(path, folder / path.name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pages", description="Write the generated documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is not up to date")
    if parser.parse_args().check:
        found = stale()
        for path in found:
            print(f"{path} is not up to date: run `python -m bench.pages`", file=sys.stderr)
        return 1 if found else 0
    draw_plots()
    for path, page in PAGES.items():
        path.write_text(page(path.read_text() if path.exists() else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
