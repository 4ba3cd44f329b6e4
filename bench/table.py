"""The tables of recorded results and of the cost model, as they stand in the README between comments.

python bench/table.py            # print them
python bench/table.py --write    # put them into the README

Every file of ``bench/results`` is read, whatever its name; a benchmark without a record is left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import cost_section
from cost_model import grid

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- bench/table.py: begin -->", "<!-- bench/table.py: end -->"
COST_BEGIN, COST_END = "<!-- bench/table.py, cost: begin -->", "<!-- bench/table.py, cost: end -->"

Entry = dict[str, Any]
Key = Callable[[Entry, Entry, str], tuple[str, ...]]
NOTHING = "–"

WAYS = {
    "torch-foreach": "torch foreach",
    "torch-fused": "torch fused",
    "torch-flatten": "torch flatten",
    "torch": "torch",
    "hdet-cuda": "`cuda`",
    "hdet-triton": "`triton`",
    "hdet-cpp": "`cpp`",
}
ADDRESSES = {
    "fixed": 'gradients="fixed"',
    "same": "default, gradients at the same addresses",
    "swapped": "default, gradients in two sets of tensors by turns",
    "new": "default, gradients fresh from a backward pass",
}


def table() -> str:
    entries = list(_entries())
    parts = (
        _steps,
        _stack_steps,
        _stack_training,
        _host_times,
        _training,
        _reductions,
        _packs,
        _wires,
        _drift,
        _overlap,
        _on_the_cpu,
        _scheduler,
    )
    return "\n\n".join(text for part in parts if (text := part(entries)))


def in_readme(text: str) -> str:
    """The README's text with the tables in their places."""
    return _between(_between(text, BEGIN, END, table()), COST_BEGIN, COST_END, cost_section.text(RESULTS))


def _between(text: str, begin: str, end: str, new: str) -> str:
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n{new}\n{end}{tail}"


def _entries() -> Iterable[Entry]:
    """Every benchmark that was recorded, with its ``record``: the file that it is from."""
    for path in sorted(RESULTS.glob("*.json")):
        record = json.loads(path.read_text())
        yield from (entry | {"record": record} for entry in record.get("benchmarks", ()))


def _of(entries: list[Entry], name: str, device: str | None = None) -> list[Entry]:
    """The entries of one file of benchmarks on one device. A share without the yardstick of its run says nothing."""
    return [
        entry
        for entry in entries
        if f"/test_{name}.py::" in entry["fullname"]
        and (device is None or (entry["params"] or {}).get("device") == device)
        and (name == "scheduler_step" or entry["record"].get("yardsticks"))
    ]


def _steps(entries: list[Entry]) -> str:
    found = _of(entries, "optim_step", "cuda")

    def key(params: Entry, info: Entry, name: str) -> tuple[str, ...]:
        return f"{params['work']} ({info['bytes a parameter']} B)", _model(params["model"], info)

    title = (
        "**`optimizer.step()` as the user calls it**: median time, and its share of the copy bandwidth of the same "
        "run. Beside the work, the bytes that must move for each parameter. many-small: wall time of single steps, "
        "with gradients at new addresses every time."
    )
    return _section(title, found, ("work", "model"), key)


def _stack_steps(entries: list[Entry]) -> str:
    found = _of(entries, "stack_step", "cuda")

    def key(params: Entry, info: Entry, name: str) -> tuple[str, ...]:
        if "initial_noise" in name:
            return "`warm_noisy_init_`", "8"
        return f"AdamW, {params['gradients']} gradients", str(params["replicas"])

    title = (
        "**A stack of R replicas** of 268 M parameters each, fp32 (of 34 M for the noise). A step with a shared "
        "gradient must move 20 + 8R bytes a parameter, with local ones 28R; torch's has R separate parameters and "
        "moves 28R."
    )
    return _section(title, found, ("work", "R"), key)


def _stack_training(entries: list[Entry]) -> str:
    found = _of(entries, "stack_training", "cuda")
    if not found:
        return ""
    names = {
        "torch-fused": "one plain model",
        "hdet-stack": "stack",
        "hdet-stack-graphs": "stack, `cuda_graphs=True`",
        "processes": "8 processes",
    }
    body = []
    for entry in found:
        info = entry["extra_info"]
        ways, best = info["ways"], info["ways"]["hdet-stack-graphs"]["ms"]
        cells = [f"{_short(ways[name]['ms'])} ms, {ways[name]['peak MiB'] / 1024:.1f} GiB" for name in names]
        ratios = [f"{best / ways['torch-fused']['ms']:.2f}", f"{ways['processes']['ms'] / best:.1f}"]
        body.append([f"{info['tokens']} tokens", *cells, *ratios])
    lines = [
        f"**A whole training step of {found[0]['extra_info']['replicas']} replicas** of a transformer of "
        f"{found[0]['extra_info']['parameters'] / 1e6:.1f} M parameters under bf16 autocast, beside one plain model "
        "(torch's fused AdamW and OneCycleLR) on the same tokens, and 8 processes under DDP over gloo on the same GPU; "
        "and the memory that torch took.",
        _sources(found),
        "",
    ]
    header = ["", *names.values(), "stack with graphs / plain", "processes / stack with graphs"]
    return "\n".join(lines + grid(header, body))


def _host_times(entries: list[Entry]) -> str:
    found = _of(entries, "host_time", "cuda")
    if not found:
        return ""
    columns: list[str] = []
    rows: dict[str, dict[str, str]] = {}
    for entry in found:
        params, info = entry["params"], entry["extra_info"]
        column = f"{info['tensors']:,} tensor{'s' if info['tensors'] > 1 else ''}".replace(",", " ")
        column += ", until the device is done" if "is_done" in entry["name"] else ""
        columns += [column] if column not in columns else []
        if params["way"] == "addresses":
            row = "a bare loop over `param.grad.data_ptr()`"
        elif params["way"].startswith("torch"):
            row = WAYS[params["way"]]
        else:
            row = f"{WAYS[params['way']]}, {ADDRESSES[params['addresses']]}"
        rows.setdefault(row, {})[column] = _short(info["us"])
    lines = [
        "**Host time of `step()`** in µs: until the call returns, on an idle device, AdamW in fp32.",
        _sources(found),
        "",
    ]
    lines += grid(
        ["", *columns], ([row, *(cells.get(name, NOTHING) for name in columns)] for row, cells in rows.items())
    )
    return "\n".join(lines)


def _training(entries: list[Entry]) -> str:
    found = _of(entries, "training_step", "cuda")
    title = (
        "**A whole training step** (forward, backward, step, zero_grad) under bf16 autocast, in turns; behind the "
        "ratio the quartiles of the turns."
    )
    return _turns(title, found, lambda entry: f"{entry['params']['model']}, {entry['params']['clipping']}")


def _reductions(entries: list[Entry]) -> str:
    found = _of(entries, "reduce", "cuda")

    def key(params: Entry, info: Entry, name: str) -> tuple[str, ...]:
        return f"`{params['operation']}`", params["dtype"], _model(params["model"], info)

    title = "**One read of all gradients**; a read alone can be faster than a copy."
    return _section(title, found, ("operation", "gradients", "model"), key, sort=1)


def _packs(entries: list[Entry]) -> str:
    found = _of(entries, "pack", "cuda")

    def key(params: Entry, info: Entry, name: str) -> tuple[str, ...]:
        if "mean_of_rows" in name:
            return "mean of 8 rows", params["dtype"], "268 M elements", NOTHING
        return f"`{params['operation']}`", params["dtype"], _model(params["model"], info), params["place"]

    title = (
        "**Tensors into one staging buffer and back**, and the mean of stacked replicas. odd: nothing lies at a "
        "multiple of 16 bytes in the buffer."
    )
    return _section(title, found, ("operation", "tensors", "model", "place"), key, sort=1)


def _drift(entries: list[Entry]) -> str:
    """``bench/drift.py`` has a record of its own."""
    path = RESULTS / "drift.json"
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


def _overlap(entries: list[Entry]) -> str:
    found = [entry for entry in entries if "/test_overlap.py::" in entry["fullname"]]
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


def _wires(entries: list[Entry]) -> str:
    found = _of(entries, "wire", "cuda")

    def key(params: Entry, info: Entry, name: str) -> tuple[str, ...]:
        return f"`{params['operation']}`", params["format"], _model(params["size"], info)

    title = "**The parts of a compressed average** of 8 processes."
    return _section(title, found, ("operation", "format", "elements"), key, sort=2)


def _on_the_cpu(entries: list[Entry]) -> str:
    found = _of(entries, "cpp_step")
    title = "**On the CPU**, AdamW in fp32 with two threads, in turns; behind the ratio the quartiles of the turns."
    return _turns(title, found, lambda entry: entry["params"]["model"])


def _scheduler(entries: list[Entry]) -> str:
    found = _of(entries, "scheduler_step")
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


def _section(title: str, found: list[Entry], names: tuple[str, ...], key: Key, sort: int = 0) -> str:
    """A row for each ``key`` (of parameters, results and name of an entry), sorted by the first ``sort`` of its parts:
    time and share of every way, and the ratio of ours to each of torch's."""
    if not found:
        return ""
    rows: dict[tuple[str, ...], dict[str, Entry]] = {}
    for entry in found:
        params, info = entry["params"], entry["extra_info"]
        rows.setdefault(key(params, info, entry["name"]), {})[params["way"]] = info
    rows = dict(sorted(rows.items(), key=lambda item: item[0][:sort]))
    ours = "hdet-cuda"
    used = [way for way in WAYS if any(way in cells for cells in rows.values())]
    theirs = [way for way in used if way.startswith("torch") and ours in used]
    header = [*names, *(WAYS[way] for way in used), *(f"{WAYS[ours]} / {WAYS[way]}" for way in theirs)]
    body = []
    for key, cells in rows.items():
        ratios = [
            f"{cells[ours]['ms'] / cells[way]['ms']:.3f}" if ours in cells and way in cells else NOTHING
            for way in theirs
        ]
        body.append([*key, *(_cell(cells.get(way)) for way in used), *ratios])
    lines = [title, _sources(found), "", *grid(header, body, left=len(names))]
    if any(info["cached"] for cells in rows.values() for info in cells.values()):
        lines += ["", "\\* so small that it stays in the cache in part: the share says little."]
    return "\n".join(lines)


def _turns(title: str, found: list[Entry], label: Any) -> str:
    if not found:
        return ""
    used = [way for way in WAYS if any(way in entry["extra_info"]["ways"] for entry in found)]
    body = []
    for entry in found:
        info, ratio = entry["extra_info"], entry["extra_info"]["ratio"]
        cells = [_cell(info["ways"].get(way)) for way in used]
        body.append([label(entry), *cells, f"{ratio['ratio']:.3f} ({ratio['low']:.3f}–{ratio['high']:.3f})"])
        if "least ratio" in info:
            body[-1].append(f"{info['least ratio']:.3f}")
    header = ["", *(WAYS[way] for way in used), "ours / torch fused"]
    header += ["with an optimizer at the copy bandwidth"] if len(body[0]) > len(header) else []
    return "\n".join([title, _sources(found), "", *grid(header, body)])


def _sources(found: list[Entry]) -> str:
    """What the entries were measured on and by which command."""
    device = found[0]["params"].get("device", "cpu")
    return " ".join(_source(record, device) for record in {id(e["record"]): e["record"] for e in found}.values())


def _source(record: dict[str, Any], device: str) -> str:
    machine, known = record["machine_info"], record["yardsticks"][device]
    if device == "cuda":
        state = known["under load"]
        driver = f", driver {state['driver_version']}, {state['clocks.sm']} under load" if state else ""
        what = machine["gpu"] + driver
    else:
        what = machine["cpu"].get("brand_raw") or machine["machine"]
        what += f", load {machine['load before']:.1f} before the run"
    return (
        f"{what}, torch {machine['torch']}, {record['datetime'][:10]}; copy of {known['copied']}: "
        f"{known['copy B/s'] / 1e9:.0f} GB/s. `{machine['command']}`"
    )


def _model(name: str, info: dict[str, Any]) -> str:
    return f"{name}\\*" if info["cached"] else name


def _cell(info: dict[str, float] | None) -> str:
    if info is None:
        return NOTHING
    return f"{_short(info['ms'])} ms" + (f" ({info['share']:.1%})" if "share" in info else "")


def _short(value: float) -> str:
    """Four digits that count, or all that stand before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:#.4g}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        readme = ROOT / "README.md"
        readme.write_text(in_readme(readme.read_text()))
    else:
        print(table())
