"""Write the two tables of README.md, speed and quality, from the recorded results; quality with its paragraph."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench import records
from bench.comparison_table import short
from bench.markdown import table_lines
from bench.quality import report as quality_report
from bench.quality.excess import MODES, PLAIN, Start, excesses
from bench.quality.results import Report
from bench.quality.selection import select
from bench.quality.zoo_page import headline
from bench.quality.zoo_tables import bars_met, percent, start_name
from bench.records import Entry

STEP_MODELS = ("gpt2-124M", "llama-1.2B", "recsys-mix", "many-small-10k")
TRAINED_MODEL = {"model": "gpt2-124M", "clipping": "clip-1.0"}
SYNC_EVERY = "1000"
# Starts of the quality table, as factors of the best learning rate of plain training.
STARTS = {0.1: "10× too low", 1.0: "at the best", 10.0: "10× too high"}

# Starts of the table of the zoo. Below the best the controller does nothing by default: one row shows it.
SHOWN: tuple[Start, ...] = (0.1, 1.0, 3.0, 10.0, None)

MORE = "[All starts, tasks and other methods](docs/quality.md)."


def speed_table(results: Path) -> str:
    """Return six rows: AdamW on four models, the average of a stack, and a whole training step."""
    entries = records.entries([results])
    rows = [_step_row(entries, model) for model in STEP_MODELS]
    rows += [_mean_row(entries), _training_row(entries)]
    record = records.of(entries, "optim_step")[0]["record"]
    header = [f"{record['machine_info']['gpu']}", "torch", "hdet_kernels", "ours / torch"]
    return "\n".join(table_lines(header, rows))


def _step_row(entries: list[Entry], model: str) -> list[str]:
    found = _by_way(records.of(entries, "optim_step"), model=model, work="adamw-fp32")
    theirs, ours = found["torch-fused"], found["hdet-cuda"]
    counted = f"{ours['parameters'] / 1e6:.0f} M parameters in {ours['tensors']:,} tensors".replace(",", " ")
    return [f"`AdamW.step()` fp32, {model}: {counted}", *_times(theirs, ours)]


def _mean_row(entries: list[Entry]) -> list[str]:
    of_mean = [entry for entry in records.of(entries, "pack") if "mean_of_rows" in entry["name"]]
    found = _by_way(of_mean, size="268M", dtype="fp32")
    return ["average of a stack of 8 replicas, 268 M parameters each", *_times(found["torch"], found["hdet-cuda"])]


def _training_row(entries: list[Entry]) -> list[str]:
    (entry,) = _matching(records.of(entries, "end_to_end"), **TRAINED_MODEL)
    info = entry["extra_info"]
    theirs, ratio = info["ways"]["torch-fused"]["ms"], info["amortised"][SYNC_EVERY]["ratio"]
    name = f"whole training step of {TRAINED_MODEL['model']} with HDET, syncs included (T = {SYNC_EVERY})"
    return [name, f"{short(theirs)} ms", f"{short(ratio * theirs)} ms", f"{ratio:.2f}"]


def _times(theirs: Entry, ours: Entry) -> list[str]:
    cells = [f"{short(info['ms'])} ms ({info['share']:.0%})" for info in (theirs, ours)]
    if ours["cached"]:  # the share of the bandwidth means little where the cache helps
        cells = [f"{short(info['ms'])} ms" for info in (theirs, ours)]
    return [*cells, f"{ours['ms'] / theirs['ms']:.2f}"]


def _matching(entries: list[Entry], **wanted: str) -> list[Entry]:
    return [entry for entry in entries if all(entry["params"].get(key) == value for key, value in wanted.items())]


def _by_way(entries: list[Entry], **wanted: str) -> dict[str, Entry]:
    return {entry["params"]["way"]: entry["extra_info"] for entry in _matching(entries, **wanted)}


def quality_text(results: Path) -> str:
    """Return a paragraph and a table: the excess over plain training at its best from each start, over the zoo.

    Without results of the zoo, the table has one row for each task: the losses of plain training and of HDET.
    """
    reports = quality_report.read(results)
    zoo = quality_report.zoo_of(reports)
    words, lines = _losses_table(reports) if zoo is None else _excess_table(zoo)
    return "\n".join([*textwrap.wrap(f"{MORE} {words}", 120, break_long_words=False), "", *lines])


def _excess_table(zoo: Report) -> tuple[str, list[str]]:
    found, rows = excesses(zoo.records), []
    words = [
        headline(found, zoo.records),
        bars_met(found),
        "In %, median / mean / worst task:",
    ]
    for start in SHOWN:
        summaries = [found.summary(way, start) for way in (PLAIN, *MODES)]
        if any(summaries[1:]):
            cells = [" / ".join(map(percent, (one.median, one.mean, one.worst))) if one else "–" for one in summaries]
            rows.append([start_name(start), *cells])
    return " ".join(filter(None, words)), table_lines(["start", PLAIN, *MODES], rows)


def _losses_table(reports: Sequence[Report]) -> tuple[str, list[str]]:
    words = (
        "Validation loss from a start ten times too low, at the best learning rate of a grid of ten, and ten times "
        "too high: eight replicas with a probe. The controller was made with images, ratings and language, and not "
        "with the others."
    )
    rows = [
        [task, *(_losses(report, task, start) for start in STARTS)]
        for report in sorted(reports, key=lambda report: len(report.records), reverse=True)
        for task in report.best
    ]
    return words, table_lines(["task", *(f"{name}: plain → HDET" for name in STARTS.values())], rows)


def _losses(report: Report, task: str, start: float) -> str:
    """Return the mean losses of plain training and of HDET over the seeds that both have."""
    found = {
        name: {
            run["seed"]: run["val"]
            for run in select(report.records, kind="start", task=task, method=name, factor=start, probe=True)
        }
        for name in ("plain", "hdet")
    }
    seeds = sorted(found["plain"].keys() & found["hdet"].keys())
    plain, hdet = (np.mean([found[method][seed] for seed in seeds]) for method in ("plain", "hdet"))
    return f"{plain:.4f} → {hdet:.4f}"
