"""What stands in the README and in the report of a run for every suite: a table, what it was measured on, and how."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import end_to_end_section
import memory_section
import records
import scaling_section
from cost_model import grid
from layout import NOTHING, WAYS, model, section, short, turns
from records import Entry

ADDRESSES = {
    "fixed": 'gradients="fixed"',
    "same": "default, gradients at the same addresses",
    "swapped": "default, gradients in two sets of tensors by turns",
    "new": "default, gradients fresh from a backward pass",
}
#: Bytes of an element.
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}


def text(entries: list[Entry], drift: Path | None = None) -> str:
    """Every section that has results, the suites of the GPU first; ``drift`` is the record of ``bench/drift.py``."""
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

    title = (
        "**`optimizer.step()` as the user calls it**: median time, and its share of the copy bandwidth of the same "
        "run. Beside the work, the bytes that must move for each parameter. many-small: wall time of single steps, "
        "with gradients at new addresses every time."
    )
    return section(title, found, ("work", "model"), key)


def _stack_steps(found: list[Entry]) -> str:
    def key(params: Entry, info: Entry, name: str) -> tuple[str, ...]:
        if "initial_noise" in name:
            return "`warm_noisy_init_`", "8"
        elements = f" of {short_count(info['parameters'])}" if params.get("size", "large") != "large" else ""
        dtype = f" in {params['dtype']}" if params.get("dtype", "fp32") != "fp32" else ""
        return f"AdamW{dtype}, {params['gradients']} gradients{elements}", str(params["replicas"])

    if not found:
        return ""
    each = max(entry["extra_info"].get("parameters", 0) for entry in found)
    title = (
        f"**A stack of R replicas** of {short_count(each)} parameters each, fp32 (of {short_count(each // 8)} for the "
        "noise). A step with a shared gradient must move 20 + 8R bytes a parameter, with local ones 28R; torch's has R "
        "separate parameters and moves 28R."
    )
    if any(entry["params"].get("dtype") == "bf16" for entry in found):
        title += " In bf16, states too, it is 10 + 4R and 14R."
    return section(title, found, ("work", "R"), key)


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
    ours, called = (
        ("hdet-stack-graphs", "stack with graphs") if "hdet-stack-graphs" in names else ("hdet-stack", "stack")
    )
    body = []
    for entry in found:
        info = entry["extra_info"]
        ways, best = info["ways"], info["ways"][ours]["ms"]
        cells = [f"{short(ways[name]['ms'])} ms, {ways[name]['peak MiB'] / 1024:.1f} GiB" for name in names]
        ratios = [f"{best / ways['torch-fused']['ms']:.2f}", f"{ways['processes']['ms'] / best:.1f}"]
        body.append([f"{info['tokens']} tokens", *cells, *ratios])
    lines = [
        f"**A whole training step of {found[0]['extra_info']['replicas']} replicas** of a transformer of "
        f"{_millions(found[0]['extra_info']['parameters'])} parameters under bf16 autocast, beside one plain model "
        "(torch's fused AdamW and OneCycleLR) on the same tokens, and 8 processes under DDP over gloo on the same "
        f"{'GPU' if records.device_of(found[0]) == 'cuda' else 'CPU'}; and the memory that torch took.",
        records.sources(found),
        "",
    ]
    header = ["", *names.values(), f"{called} / plain", f"processes / {called}"]
    return "\n".join(lines + grid(header, body))


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
        if params["way"] == "addresses":
            row = "a bare loop over `param.grad.data_ptr()`"
        elif not params["way"].startswith("hdet-"):
            row = WAYS[params["way"]]
        else:
            row = f"{WAYS[params['way']]}, {ADDRESSES[params['addresses']]}"
        rows.setdefault(row, {})[column] = short(info["us"])
    lines = [
        "**Host time of `step()`** in µs: until the call returns, on an idle device, AdamW in fp32.",
        records.sources(found),
        "",
    ]
    lines += grid(
        ["", *columns], ([row, *(cells.get(name, NOTHING) for name in columns)] for row, cells in rows.items())
    )
    return "\n".join(lines)


def _reductions(found: list[Entry]) -> str:
    def key(params: Entry, info: Entry, name: str) -> tuple[str, ...]:
        return f"`{params['operation']}`", params["dtype"], model(params["model"], info)

    title = "**One read of all gradients**; a read alone can be faster than a copy."
    return section(title, found, ("operation", "gradients", "model"), key, sort=1)


def _packs(found: list[Entry]) -> str:
    def key(params: Entry, info: Entry, name: str) -> tuple[str, ...]:
        if "mean_of_rows" in name:
            elements = info["bytes"] // (8 * WIDTHS[params["dtype"]] + 4)
            return "mean of 8 rows", params["dtype"], f"{short_count(elements)} elements", NOTHING
        return f"`{params['operation']}`", params["dtype"], model(params["model"], info), params["place"]

    title = (
        "**Tensors into one staging buffer and back**, and the mean of stacked replicas. odd: nothing lies at a "
        "multiple of 16 bytes in the buffer."
    )
    return section(title, found, ("operation", "tensors", "model", "place"), key, sort=1)


def _noises(found: list[Entry]) -> str:
    def key(params: Entry, info: Entry, name: str) -> tuple[str, ...]:
        return params["dtype"], model(params["model"], info)

    title = "**Normal noise added to all tensors**, the second half of `warm_noisy_init_`: a read and a write of each."
    return section(title, found, ("tensors", "model"), key)


def _wires(found: list[Entry]) -> str:
    def key(params: Entry, info: Entry, name: str) -> tuple[str, ...]:
        return f"`{params['operation']}`", params["format"], model(params["size"], info)

    title = "**The parts of a compressed average** of 8 processes."
    return section(title, found, ("operation", "format", "elements"), key, sort=2)


def _drift(path: Path) -> str:
    if not path.exists():
        return ""
    record = json.loads(path.read_text())
    syncs = list(next(iter(record["ways"].values()))["drift"])
    lines = [
        f"**Drift of the consensus** from the exact mean of {record['ranks']} replicas, in units of what one sync "
        "moves (root mean square), and the bytes of a sync beside those of fp32. "
        f"torch {record['torch']}, {record['date']}. "
        f"`{record['command']}`",
        "",
    ]
    body = [
        [way, f"{found['bytes'] / found['in full']:.3f}", *(f"{found['drift'][sync]:.2g}" for sync in syncs)]
        for way, found in record["ways"].items()
    ]
    return "\n".join(lines + grid(["", "bytes", *(f"after {sync} syncs" for sync in syncs)], body))


def _overlap(found: list[Entry]) -> str:
    if not found:
        return ""
    commands = {entry["record"]["machine_info"]["command"] for entry in found}
    lines = [
        "**What a sync adds to the training steps around it**, in ms: in all, and until the call returns. A collective "
        "takes 50 ms more here than between neighbours. " + " ".join(f"`{command}`" for command in sorted(commands)),
        "",
    ]
    names = {"cuda": "GPT-2 124 M, one rank over NCCL", "cpu": "4 M parameters, two ranks over gloo"}
    body = []
    for entry in found:
        info = entry["extra_info"]
        cells = [info[kind] for kind in ("waited for", "behind the steps")]
        numbers = [f"{cell['added ms']:.2f}, {cell['until it returns ms']:.2f}" for cell in cells]
        body.append([names[entry["params"]["device"]], f"{info['step ms']:.1f}", *numbers])
    return "\n".join(lines + grid(["", "a step", "waited for", "behind the next 5 steps"], body))


def _on_the_cpu(found: list[Entry]) -> str:
    title = "**On the CPU**, AdamW in fp32 with two threads, in turns; behind the ratio the quartiles of the turns."
    return turns(title, found, lambda entry: entry["params"]["model"])


def _scheduler(found: list[Entry]) -> str:
    if not found:
        return ""
    times = {(entry["params"]["kind"], entry["params"]["groups"]): entry["stats"]["median"] * 1e6 for entry in found}
    return (
        f"Host time of `scheduler.step(loss)` between two syncs (`{found[0]['record']['machine_info']['command']}`): "
        + "; ".join(
            f"{times['hdet', groups]:.0f} µs beside {times['torch', groups]:.0f} µs of torch's OneCycleLR with "
            f"{groups} parameter group{'s' if groups > 1 else ''}"
            for kind, groups in times
            if kind == "hdet"
        )
        + "."
    )


def _converge(found: list[Entry]) -> str:
    if not found:
        return ""
    columns = list(dict.fromkeys(entry["params"]["model"] for entry in found))
    rows: dict[str, dict[str, str]] = {}
    for entry in found:
        stats = entry["stats"]
        rows.setdefault(entry["params"]["method"], {})[entry["params"]["model"]] = f"{short(stats['median'] * 1e3)} ms"
    lines = [
        "**The average of two replicas over gloo**, the number of tensors and elements of each above the times. "
        f"{records.sources(found)}",
        "",
    ]
    body = [[row, *(cells.get(column, NOTHING) for column in columns)] for row, cells in rows.items()]
    return "\n".join(lines + grid(["", *columns], body))


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 10**5 else f"{count / 1e3:.0f} k"


def short_count(count: int) -> str:
    """«268 M»"""
    return f"{count / 1e6:.0f} M" if count >= 10**6 else f"{count / 1e3:.0f} k"


Section = Callable[[list[Entry]], str]

#: By suite: its section on one device.
BY_DEVICE: dict[str, Section] = {
    "optim_step": _steps,
    "stack_step": _stack_steps,
    "stack_training": _stack_training,
    "host_time": _host_times,
    "end_to_end": end_to_end_section.section,
    "reduce": _reductions,
    "pack": _packs,
    "noise": _noises,
    "wire": _wires,
    "scaling": scaling_section.section,
    "memory": memory_section.section,
}
#: Those that are of no device in particular, or of several.
OTHERS: dict[str, Section] = {
    "overlap": _overlap,
    "cpp_step": _on_the_cpu,
    "scheduler_step": _scheduler,
    "converge": _converge,
}
