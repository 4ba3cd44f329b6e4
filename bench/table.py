"""The README's tables of recorded results, of benchmarks and of the cost model, which stand there between comments.

python bench/table.py            # print the results
python bench/table.py --write    # put all into the README

Every file of ``bench/results`` is read, whatever its name; a benchmark without a record is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cost_section
import records
import sections

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- bench/table.py: begin -->", "<!-- bench/table.py: end -->"
COST_BEGIN, COST_END = "<!-- bench/table.py, cost: begin -->", "<!-- bench/table.py, cost: end -->"


def table() -> str:
    return sections.text(records.entries([RESULTS]), drift=RESULTS / "drift.json")


def in_readme(text: str) -> str:
    """The README's text with the tables in their places."""
    return _between(_between(text, BEGIN, END, table()), COST_BEGIN, COST_END, cost_section.text(RESULTS))


def _between(text: str, begin: str, end: str, new: str) -> str:
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n{new}\n{end}{tail}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        readme = ROOT / "README.md"
        readme.write_text(in_readme(readme.read_text()))
    else:
        print(table())
