"""The tables of recorded results and of the cost model in the README, and of suites in ``bench/README.md``, which stand
there between comments.

python bench/table.py            # print the results
python bench/table.py --write    # put all into their places

Every file of ``bench/results`` is read, whatever its name; a benchmark without a record is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cost_section
import records
import sections
import suites
from cost_model import grid

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- bench/table.py: begin -->", "<!-- bench/table.py: end -->"
COST_BEGIN, COST_END = "<!-- bench/table.py, cost: begin -->", "<!-- bench/table.py, cost: end -->"
SUITES_BEGIN, SUITES_END = "<!-- bench/table.py, suites: begin -->", "<!-- bench/table.py, suites: end -->"


def table() -> str:
    return sections.text(records.entries([RESULTS]), drift=RESULTS / "drift.json")


def in_readme(text: str) -> str:
    """The README's text with the tables in their places."""
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
        for path, fill in ((ROOT / "README.md", in_readme), (ROOT / "bench" / "README.md", in_bench_readme)):
            path.write_text(fill(path.read_text()))
    else:
        print(table())
