"""The table of recorded GPU results, as it stands in the README between its two comments.

python bench/table.py            # print it
python bench/table.py --write    # put it into the README
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- bench/table.py: begin -->", "<!-- bench/table.py: end -->"


def table() -> str:
    optim = json.loads((RESULTS / "h200_optim_step.json").read_text())
    scheduler = json.loads((RESULTS / "h200_scheduler_step.json").read_text())
    cells = {_key(entry): entry["extra_info"] for entry in optim["benchmarks"] if entry["params"]["device"] == "cuda"}
    machine = optim["machine_info"]
    copy = next(iter(cells.values()))["copy GB/s"]
    lines = [
        f"One {machine['gpu']}, torch {machine['torch']}, {optim['datetime'][:10]}; `{machine['command']}`. "
        f"Shares are of the bandwidth of a copy of 256 MB in that run, {copy:.0f} GB/s (a larger one is a little "
        "faster); fp32, `optimizer.step()` as the user calls it.",
        "",
        "| model | rule | torch fused | `hk.Fused*`, cuda | time, ours / torch |",
        "|---|---|---:|---:|---:|",
    ]
    for model, rule, way in cells:
        if way == "hdet-cuda":
            theirs, ours = cells[model, rule, "torch-fused"], cells[model, rule, way]
            ratio = ours["ms"] / theirs["ms"]
            lines.append(f"| {model} | {rule} | {_cell(theirs)} | {_cell(ours)} | {ratio:.2f} |")
    times = {(e["params"]["kind"], e["params"]["groups"]): e["stats"]["median"] * 1e6 for e in scheduler["benchmarks"]}
    lines += [
        "",
        f"Host time of `scheduler.step(loss)` between two syncs (`{scheduler['machine_info']['command']}`): "
        + "; ".join(
            f"{times['hdet', groups]:.0f} µs beside {times['torch', groups]:.0f} µs of torch's OneCycleLR with "
            f"{groups} parameter group{'s' if groups > 1 else ''}"
            for kind, groups in times
            if kind == "hdet"
        )
        + ".",
    ]
    return "\n".join(lines)


def _key(entry: dict[str, Any]) -> tuple[str, str, str]:
    params = entry["params"]
    return params["model"], params["rule"], params["way"]


def _cell(info: dict[str, float]) -> str:
    return f"{info['ms']:.3f} ms ({info['share']:.1%})"


def in_readme(text: str) -> str:
    """The README's text with the table in its place."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        readme = ROOT / "README.md"
        readme.write_text(in_readme(readme.read_text()))
    else:
        print(table())
