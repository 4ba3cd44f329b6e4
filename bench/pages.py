"""Write the generated documentation from the recorded results; no GPU is needed.

python -m bench.pages            # write docs/benchmarks.md, docs/cost.md, docs/quality.md, docs/reliability.md, their
                                 # plots, and the tables of README.md and bench/README.md
python -m bench.pages --check    # write nothing; exit code 1 if a page is not up to date

Every file of ``bench/results`` and ``bench/quality/results`` is read. The plots of docs/benchmarks.md show the records
of the GPU; a comment in the page has the checksum of these records, so that a stale plot is noticed.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench import cost_page, readme_tables, records, reliability_page, run_report, sections, suites
from bench.markdown import table_lines
from bench.quality import report as quality_report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
QUALITY_RESULTS = ROOT / "bench" / "quality" / "results"
DOCS = ROOT / "docs"

INTRODUCTION = """# Benchmarks

Written by `python -m bench.pages` from the records in `bench/results`. `bench/README.md` describes how times are
measured and how to repeat a run; `make bench` measures all of it on your machine. Each section names its machine and
its command.

A time is a median. In brackets is its share of the copy bandwidth of the same run: the bytes that the operation has to
move, over its time, over the bandwidth of a copy. A ratio below 1 means that ours is faster. `cuda`, `triton`, `cpp`
and `torch` are the backends of hdet_kernels.

In the first plot every operation and backend is a point, the median over models. At the dashed line it is as fast as a
copy. In the second plot, bars to the right of 1 mean that ours is faster; bars are the median over models, thin lines
go from the least to the greatest. In the third plot, the dashed line is the time of the bytes at the copy bandwidth."""


def benchmarks_page() -> str:
    """Return docs/benchmarks.md."""
    plots = "\n\n".join(f"![{title}]({name})" for name, title in run_report.PLOTS.items())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in gpu_records())).hexdigest()[:16]
    comment = f"<!-- plots of the GPU records with SHA-256 {digest}… -->"
    tables = sections.text(records.entries([RESULTS]), drift=RESULTS / "drift.json")
    return f"{INTRODUCTION}\n\n{plots}\n\n{comment}\n\n{tables}\n"


def gpu_records() -> list[Path]:
    """Return the recorded files that have benchmarks of a GPU."""
    return [path for path in records.files([RESULTS]) if "cuda" in map(records.device_of, records.entries([path]))]


def readme(text: str) -> str:
    """Return README.md with the speed and quality tables between their markers."""
    text = between(text, "speed", readme_tables.speed_table(RESULTS))
    return between(text, "quality", readme_tables.quality_text(QUALITY_RESULTS))


def bench_readme(text: str) -> str:
    """Return bench/README.md with the table of suites between its markers."""
    body = [[f"`{name}`", suite.what] for name, suite in suites.SUITES.items()]
    return between(text, "suites", "\n".join(table_lines(["suite", "what it measures"], body, left=2)))


def between(text: str, name: str, new: str) -> str:
    """Replace the text between the lines ``<!-- name -->`` and ``<!-- /name -->``."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"expected one line {begin.strip()} and, after it, one line {end}")
    return f"{text[: text.index(begin)]}{begin}{new}\n{text[text.index(end) :]}"


# Every generated file, and the function that returns its text from the present one.
PAGES: dict[Path, Callable[[str], str]] = {
    DOCS / "benchmarks.md": lambda _: benchmarks_page(),
    DOCS / "cost.md": lambda _: cost_page.text(RESULTS),
    DOCS / "quality.md": lambda _: quality_report.text(quality_report.read(QUALITY_RESULTS)),
    DOCS / "reliability.md": lambda _: reliability_page.text(RESULTS),
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


def draw_plots(folder: Path = DOCS) -> None:
    """Draw the plots of all pages into ``folder``; if one fails, none is replaced."""
    with tempfile.TemporaryDirectory() as temporary:
        drawn = run_report.plots(gpu_records(), Path(temporary))
        if drawn != list(run_report.PLOTS):
            sys.exit(f"not all plots could be drawn, and nothing was written: {drawn}")
        cost_page.plot(Path(temporary) / cost_page.PLOT)
        quality_report.draw_plots(quality_report.read(QUALITY_RESULTS), Path(temporary))
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
