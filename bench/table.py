"""The tables and plots of recorded results and the table of the cost model in the README, and that of suites in
``bench/README.md``, which stand there between comments.

python bench/table.py            # print the results
python bench/table.py --write    # put all into their places; needs matplotlib

Every file of ``bench/results`` is read, whatever its name; a benchmark without a record is left out. Plots are of the
GPU's.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from pathlib import Path

import cost_section
import records
import run_report
import sections
import suites
from cost_model import grid

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PLOTS = ROOT / "docs"
BEGIN, END = "<!-- bench/table.py: begin -->", "<!-- bench/table.py: end -->"
COST_BEGIN, COST_END = "<!-- bench/table.py, cost: begin -->", "<!-- bench/table.py, cost: end -->"
PLOTS_BEGIN, PLOTS_END = "<!-- bench/table.py, plots: begin -->", "<!-- bench/table.py, plots: end -->"
SUITES_BEGIN, SUITES_END = "<!-- bench/table.py, suites: begin -->", "<!-- bench/table.py, suites: end -->"


def table() -> str:
    return sections.text(records.entries([RESULTS]), drift=RESULTS / "drift.json")


def gpu_records() -> list[Path]:
    return [path for path in records.files([RESULTS]) if "cuda" in map(records.device_of, records.entries([path]))]


def plots() -> str:
    """The plots that ``--write`` draws. A comment says of what: a test sees when the records are others."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in gpu_records())).hexdigest()[:16]
    shown = "\n".join(f"![{what}](docs/{name})" for name, what in run_report.PLOTS.items())
    return f"{shown}\n<!-- of the GPU records with SHA-256 {digest}… -->"


def draw_plots() -> None:
    """All of them or, where one cannot be drawn, none: those that are there stay."""
    with tempfile.TemporaryDirectory() as folder:
        drawn = run_report.plots(gpu_records(), Path(folder))
        if drawn != list(run_report.PLOTS):
            sys.exit(f"not all plots could be drawn, and nothing was written: {drawn}")
        for name in drawn:
            shutil.copyfile(Path(folder) / name, PLOTS / name)


def in_readme(text: str) -> str:
    """The README's text with the tables in their places."""
    text = _between(text, PLOTS_BEGIN, PLOTS_END, plots())
    return _between(_between(text, BEGIN, END, table()), COST_BEGIN, COST_END, cost_section.text(RESULTS))


def in_bench_readme(text: str) -> str:
    body = [[f"`{name}`", suite.what] for name, suite in suites.SUITES.items()]
    return _between(text, SUITES_BEGIN, SUITES_END, "\n".join(grid(["suite", "what it measures"], body, left=2)))


def _between(text: str, begin: str, end: str, new: str) -> str:
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n{new}\n{end}{tail}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        draw_plots()
        for path, fill in ((ROOT / "README.md", in_readme), (ROOT / "bench" / "README.md", in_bench_readme)):
            path.write_text(fill(path.read_text()))
    else:
        print(table())
