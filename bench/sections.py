"""Format the records of every suite as a section of Markdown: description, machine, command and table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from bench import end_to_end_section, memory_section, records, scaling_section
from bench.comparison_table import NOTHING, TITLES, comparison, in_order, model, short, turns
from bench.markdown import section_text, table_lines
from bench.records import Entry

GRADIENTS = {
    "fixed": '`gradients="fixed"`',
    "same": "gradients at the same addresses",
    "swapped": "gradients in two sets of tensors by turns",
    "new": "gradients fresh from a backward pass",
}
# The bare loops of ``test_host_time.py``.
LOOPS = {"gradients": "param.grad", "addresses": "param.grad.data_ptr()"}
# Bytes of an element.
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}


def text(entries: list[Entry], drift: Path | None = None) -> str:
    """Return the sections of all suites that have entries, those of the GPU first.

    Args:
        entries: The recorded benchmarks.
        drift: The record of ``compression_drift.py``, if it is to be shown.
    """
    devices = [device for device in ("cuda", "cpu") if device in map(records.device_of, entries)]
    parts = []
    for device in devices:
        here = [entry for entry in entries if records.device_of(entry) == device]
        parts += [part(records.of(here, name)) for name, part in BY_DEVICE.items()]
    parts.append(_drift(drift) if drift is not None else "")
    parts += [part(records.of(entries, name)) for name, part in OTHERS.items()]
    return "\n\n".join(filter(None, parts))


def _steps(found: list[Entry]) -> str:
    def key(params: Entry, info: Entry, name: str) -> tuple[str, ...]:
        least = info.get("work's bytes a parameter", info["bytes a parameter"])
        return f"{params['work']} ({least} B)", model(params["model"], info)

    description = (
        "Median time of `optimizer.step()`, and its share of the copy bandwidth of the same run. In brackets behind "
        "the optimizer are the bytes that a step must move for each parameter. many-small: wall time of single steps "
        "with gradients at new addresses every time."
    )
    return comparison("Optimizer step", description, found, ("optimizer", "model"), key)


def _stack_steps(found: list[Entry]) -> str:
    def key(params: Entry, info: Entry, name: str) -> tuple[str, ...]:
        elements = f" of {short_count(info['parameters'])}" if params.get("size", "large") != "large" else ""
        dtype = f" in {params['dtype']}" if params.get("dtype", "fp32") != "fp32" else ""
        return f"AdamW{dtype}, {params['gradients']} gradients{elements}", str(params["replicas"])

    if not found:
        return ""
    each = max(entry["extra_info"].get("parameters", 0) for entry in found)
    description = (
        f"R replicas of {short_count(each)} parameters each in fp32. A step with "
        " a shared gradient must move 20 + 8R bytes a parameter, with local gradients 28R. torch's fused AdamW has "
        "R separate parameters and moves 28R."
    )
    if any(entry["params"].get("dtype") == "bf16" for entry in found):
        description += " With everything in bf16 it is 10 + 4R and 14R."
    return comparison("Optimizer step of a stack", description, found, ("operation", "R"), key)


def _stack_training(found: list[Entry]) -> str:
    if not found:
        return ""
    names = {
        "torch-fused": "one plain model",
        "hdet-stack": "stack",
        "hdet-stack-graphs": "stack, `cuda_graphs=True`",
        "processes": "8 processes",
    }
    names = {way: name for way, name in names.items() if way in found[0]["extra_info"]["ways"]}
    ours, title = (
        ("hdet-stack-graphs", "stack with graphs") if "hdet-stack-graphs" in names else ("hdet-stack", "stack")
    )
    body = []
    for entry in found:
        info = entry["extra_info"]
        ways, best = info["ways"], info["ways"][ours]["ms"]
        cells = [f"{short(ways[name]['ms'])} ms, {ways[name]['peak MiB'] / 1024:.1f} GiB" for name in names]
        ratios = [f"{best / ways['torch-fused']['ms']:.2f}", f"{ways['processes']['ms'] / best:.1f}"]
        body.append([f"{info['tokens']} tokens", *cells, *ratios])
    first = found[0]["extra_info"]
    description = (
        f"Time and memory of {first['replicas']} replicas of a transformer of {_millions(first['parameters'])} "
        "parameters under bf16 autocast, beside one plain model (torch's fused AdamW and OneCycleLR) on the same "
        "tokens, and beside 8 processes under DDP over gloo on the same "
        f"{'GPU' if records.device_of(found[0]) == 'cuda' else 'CPU'}."
    )
    header = ["", *names.values(), f"{title} / plain", f"processes / {title}"]
    heading = "Whole training step of a stack"
    return section_text(heading, description, records.sources(found), table_lines(header, body))


def _muon(found: list[Entry]) -> str:
    if not found:
        return ""
    used = in_order(entry["extra_info"]["ways"] for entry in found)
    body = []
    for entry in found:
        info = entry["extra_info"]
        cells = [f"{short(info['ways'][way]['ms'])} ms" if way in info["ways"] else NOTHING for way in used]
        both = (info["ratio"], info["stack ratio"])
        ratios = [f"{each['ratio']:.3f} ({each['low']:.3f}–{each['high']:.3f})" for each in both]
        name = f"{entry['params']['model']}, {info['tensors']} matrices, {_millions(info['parameters'])}"
        body.append([name, *cells, *ratios, f"{info['stack floor']['ratio']:.3f}"])
    description = (
        "A step of Muon on the matrices of the blocks in fp32, in turns; torch is `torch.optim.Muon`. The last columns "
        "are ratios of our fastest backend: to torch, and 8 replicas of a stack that share a gradient to one, measured "
        "and expected: if reading and writing the parameters of 7 more replicas adds the time of a copy. It is less "
        "where the host is slower than the device. In brackets are the quartiles of the turns." + _not_measured(found)
    )
    lines = table_lines(["", *(TITLES[way] for way in used), "ours / torch", "8 replicas / 1", "expected"], body)
    return section_text("Muon" + _place(found), description, records.sources(found), lines)


def _rowwise(found: list[Entry]) -> str:
    description = (
        "Lookup, backward pass and update of embedding tables with sparse gradients, in turns; torch is its sparse "
        "Adagrad, with a sum for each element. In brackets are the quartiles of the turns." + _not_measured(found)
    )
    return turns(
        "Training step of embedding tables, row-wise Adagrad" + _place(found),
        description,
        found,
        lambda entry: f"{entry['params']['tables']}, {short_count(entry['extra_info']['rows'])} rows",
    )


def _place(found: list[Entry]) -> str:
    """Return what a heading says of the device: the CPU is named."""
    return " on the CPU" if found and records.device_of(found[0]) == "cpu" else ""


def _not_measured(found: list[Entry]) -> str:
    """Return a sentence about the peers that could not be measured."""
    absent = {name: reason for entry in found for name, reason in entry["extra_info"]["absent"].items()}
    listed = "; ".join(f"{name} ({reason})" for name, reason in absent.items())
    return f" Not measured: {listed}." if absent else ""


def _host_times(found: list[Entry]) -> str:
    if not found:
        return ""
    columns: list[str] = []
    rows: dict[str, dict[str, str]] = {}
    for entry in found:
        params, info = entry["params"], entry["extra_info"]
        if "us" not in info:  # a peer that failed
            continue
        column = f"{info['tensors']:,} tensor{'s' if info['tensors'] > 1 else ''}".replace(",", " ")
        column += ", until the device is done" if "is_done" in entry["name"] else ""
        columns += [column] if column not in columns else []
        if params["way"] in LOOPS:
            row = f"loop over `{LOOPS[params['way']]}` alone"
        elif not params["way"].startswith("hdet-"):
            row = TITLES[params["way"]]
        else:
            row = f"{TITLES[params['way']]}, {GRADIENTS[params['addresses']]}"
        rows.setdefault(row, {})[column] = _host_time(info)
    body = ([row, *(cells.get(name, NOTHING) for name in columns)] for row, cells in rows.items())
    heading = "Host time of a step" + _place(found)
    description = "Time in µs until `step()` returns, on an idle device, for AdamW in fp32."
    if any("best us" in entry["extra_info"] for entry in found):
        description += (
            " The median of single calls; in brackets the best one, and the median in bare loops over "
            f"`{LOOPS['addresses']}` of the same tensors, which took turns with the calls."
        )
    if records.device_of(found[0]) == "cpu":
        description += " It includes the update of the tensors, which have four elements each."
    return section_text(heading, description, records.sources(found), table_lines(["", *columns], body))


def _host_time(info: Entry) -> str:
    notes = [f"best {short(info['best us'])}"] if "best us" in info else []
    notes += [f"{short(info['us'] / info['loop us'])} loops"] if "loop us" in info else []
    return short(info["us"]) + (f" ({', '.join(notes)})" if notes else "")


def _reductions(found: list[Entry]) -> str:
    def key(params: Entry, info: Entry, name: str) -> tuple[str, ...]:
        return f"`{params['operation']}`", params["dtype"], model(params["model"], info)

    description = "One read of all gradients. A read alone can be faster than a copy."
    return comparison("Norm of gradients", description, found, ("operation", "gradients", "model"), key, sort=1)


def _packs(found: list[Entry]) -> str:
    def key(params: Entry, info: Entry, name: str) -> tuple[str, ...]:
        if "mean_of_rows" in name:
            elements = info["bytes"] // (8 * WIDTHS[params["dtype"]] + 4)
            return "mean of 8 rows", params["dtype"], f"{short_count(elements)} elements", NOTHING
        return f"`{params['operation']}`", params["dtype"], model(params["model"], info), params["place"]

    description = (
        "Tensors into one staging buffer and back, and the mean of stacked replicas. *odd*: no tensor lies at a "
        "multiple of 16 bytes in the buffer."
    )
    return comparison(
        "Packing, and the mean of a stack", description, found, ("operation", "tensors", "model", "place"), key, sort=1
    )


def _wires(found: list[Entry]) -> str:
    def key(params: Entry, info: Entry, name: str) -> tuple[str, ...]:
        return f"`{params['operation']}`", params["format"], model(params["size"], info)

    description = "The local operations of a compressed average of 8 processes."
    return comparison("Compression", description, found, ("operation", "format", "elements"), key, sort=2)


def _drift(path: Path) -> str:
    if not path.exists():
        return ""
    record = json.loads(path.read_text())
    syncs = list(next(iter(record["ways"].values()))["drift"])
    description = (
        f"Distance of the consensus from the exact mean of {record['ranks']} replicas, in units of the step between "
        "two syncs (root mean square), and the bytes of a sync relative to fp32. Error feedback keeps the distance "
        "constant; the rows without it are from an option that has been removed since."
    )
    source = f"torch {record['torch']}, {record['date']}. `python -m bench.compression_drift --out drift.json`"
    body = [
        [way, f"{found['bytes'] / found['in full']:.3f}", *(f"{found['drift'][sync]:.2g}" for sync in syncs)]
        for way, found in record["ways"].items()
    ]
    lines = table_lines(["", "bytes", *(f"after {sync} syncs" for sync in syncs)], body)
    return section_text("Drift of a compressed consensus", description, source, lines)


def _overlap(found: list[Entry]) -> str:
    if not found:
        return ""
    commands = {entry["record"]["machine_info"]["command"] for entry in found}
    description = (
        "Time in ms that a sync adds to the training steps around it: in all, and until the call returns. Every "
        "collective is delayed by 50 ms, as over a slow network."
    )
    names = {"cuda": "GPT-2 124 M, one rank over NCCL", "cpu": "4 M parameters, two ranks over gloo"}
    body = []
    for entry in found:
        info = entry["extra_info"]
        cells = [info[kind] for kind in ("waited for", "behind the steps")]
        numbers = [f"{cell['added ms']:.2f}, {cell['until it returns ms']:.2f}" for cell in cells]
        body.append([names[entry["params"]["device"]], f"{info['step ms']:.1f}", *numbers])
    lines = table_lines(["", "a step", "sync waited for", "sync behind the next 5 steps"], body)
    return section_text("Overlapped sync", description, " ".join(f"`{command}`" for command in sorted(commands)), lines)


def _on_the_cpu(found: list[Entry]) -> str:
    description = (
        "With two threads, in turns: AdamW in fp32 on two models, then four tensors of a million elements in every "
        "precision. The ratio is to torch's fused step or, where that is missing or leaves the parameters unchanged, "
        "to foreach; in brackets are the quartiles of the turns. fp16 parameters have fp32 state here, fp16 in torch."
    )
    return turns("Optimizer step on the CPU", description, found, lambda entry: entry["params"]["model"])


def _sharded(found: list[Entry]) -> str:
    description = (
        "AdamW in fp32 on the shards of `fully_shard`, with two threads, in turns; one process holds all shards. With "
        "clipping, torch's times have `clip_grad_norm_` in them. In brackets are the quartiles of the turns."
    )
    title = "Optimizer step under `fully_shard` on the CPU"
    return turns(title, description, found, lambda entry: _sharded_case(entry["params"]))


def _sharded_case(params: Entry) -> str:
    return f"{params['model']}{', clipped' if params['clip'] else ''}"


def _scheduler(found: list[Entry]) -> str:
    if not found:
        return ""
    times = {(entry["params"]["kind"], entry["params"]["groups"]): entry["stats"]["median"] * 1e6 for entry in found}
    groups = [count for kind, count in times if kind == "hdet"]
    body = [[str(count), f"{times['torch', count]:.0f} µs", f"{times['hdet', count]:.0f} µs"] for count in groups]
    lines = table_lines(["parameter groups", "torch's OneCycleLR", "HDETOneCycleLR"], body)
    command = f"`{found[0]['record']['machine_info']['command']}`"
    return section_text("Host time of `scheduler.step(loss)`", "Between two syncs.", command, lines)


def _converge(found: list[Entry]) -> str:
    if not found:
        return ""
    columns = [entry["params"]["model"] for entry in found]
    body = []
    for way in found[0]["extra_info"]["ways"]:
        cells = []
        for entry in found:
            info = entry["extra_info"]
            ratio = f", {info['ratios'][way]['ratio']:.2f}" if way in info["ratios"] else ""
            cells.append(f"{short(info['ways'][way]['ms'])} ms{ratio}")
        body.append([way, *cells])
    description = (
        "Two ranks on one machine, all methods in turns; the second number is the ratio to the faster of the two "
        "all-reduces, of which the flat one has 16 tensors in one buffer already and copies more of them there and "
        "back. *loose*: parameters of any optimizer. *in place*: parameters that live in buckets."
    )
    return section_text(
        "Average of two replicas over gloo", description, records.sources(found), table_lines(["", *columns], body)
    )


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 10**5 else f"{count / 1e3:.0f} k"


def short_count(count: int) -> str:
    """Format a count in millions or thousands: "268 M"."""
    return f"{count / 1e6:.0f} M" if count >= 10**6 else f"{count / 1e3:.0f} k"


Section = Callable[[list[Entry]], str]

# Sections that are written for each device, by suite.
BY_DEVICE: dict[str, Section] = {
    "optim_step": _steps,
    "stack_step": _stack_steps,
    "stack_training": _stack_training,
    "muon": _muon,
    "rowwise": _rowwise,
    "host_time": _host_times,
    "end_to_end": end_to_end_section.section,
    "reduce": _reductions,
    "pack": _packs,
    "wire": _wires,
    "scaling": scaling_section.section,
    "memory": memory_section.section,
}
# Sections that cover several devices or the host alone.
OTHERS: dict[str, Section] = {
    "overlap": _overlap,
    "cpp_step": _on_the_cpu,
    "sharded_step": _sharded,
    "scheduler_step": _scheduler,
    "converge": _converge,
}
