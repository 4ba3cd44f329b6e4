"""Table, plot and text about the model of 124 M parameters, from the record of its runs; nothing without a record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.markdown import percent, spaced, table, wrapped
from bench.plots import new_figure, save
from bench.tables import NOTHING, read, render

RECORD, PLOT = "h200_gpt2.json", "gpt2.png"
# Training begins at ln 50 304 = 10.8.
HIGHEST = 12.0
TICKS = (1, 1.5, 2, 3, 4, 6, 8, 11)

Row = dict[str, Any]


class Runs:
    """The runs of a record, and how far each is above the best plain one.

    Args:
        record: the content of the file.
    """

    def __init__(self, record: Row) -> None:
        self.record, self.all = record, list(record["runs"])
        plain = [run for run in self.all if run["method"] == "plain" and run["validation"] is not None]
        self.best = min(plain, key=lambda run: run["validation"])

    def of(self, method: str) -> list[Row]:
        """Return the runs of a method by their learning rate; the one without any is the last."""
        return sorted(
            (run for run in self.all if run["method"] == method),
            key=lambda run: float("inf") if run["lr"] is None else run["lr"],
        )

    def find(self, method: str, lr: float | None) -> Row | None:
        """Return the run of a method from a learning rate."""
        return next((run for run in self.all if run["method"] == method and _same(run["lr"], lr)), None)

    def excess(self, run: Row) -> float:
        """Return by how many percent the validation loss is above that of the best plain run."""
        return 100 * (run["validation"] / self.best["validation"] - 1)

    def start(self, lr: float | None) -> str:
        """Return a learning rate in words."""
        if lr is None:
            return "none: `max_lr=None`"
        factor = lr / self.best["lr"]
        if _same(lr, self.best["lr"]):
            return f"{lr:g}, the best"
        return (
            f"{lr:g}, {_times(factor)} times too high" if factor > 1 else f"{lr:g}, {_times(1 / factor)} times too low"
        )

    def cell(self, run: Row | None) -> str:
        """Return the validation loss of a run and its excess."""
        if run is None:
            return NOTHING
        if run["validation"] is None:
            return "not finite"
        excess = self.excess(run)
        return f"{run['validation']:.3f} ({'+' if excess > 0 else ''}{percent(excess)} %)"

    def table(self) -> str:
        """Return the table: a row for each learning rate, a column for each method."""
        rates: list[float | None] = []
        for run in (*self.of("plain"), *self.of("hdet")):
            if not any(_same(run["lr"], known) for known in rates):
                rates.append(run["lr"])
        rates.sort(key=lambda lr: float("inf") if lr is None else lr)
        rows = [[self.start(lr), *(self.cell(self.find(method, lr)) for method in ("plain", "hdet"))] for lr in rates]
        return table(["learning rate at the start", "plain OneCycleLR", "HDET"], rows)


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one / other - 1) < 0.01


def _times(factor: float) -> str:
    return f"{factor:.2g}"


def found(folder: Path) -> Runs | None:
    """Return the recorded runs of ``folder``; None if there is no record."""
    records = read(folder, RECORD)
    return Runs(records[0]) if records else None


def readme_text(folder: Path) -> str:
    """Return the sentence and the table of README.md."""
    runs = found(folder)
    if runs is None:
        return ""
    return "\n".join([wrapped(_render("readme_gpt2.md", runs)), "", runs.table()])


def section(folder: Path) -> str:
    """Return the section of docs/quality.md."""
    runs = found(folder)
    return "" if runs is None else "\n" + _render("gpt2.md", runs)


def _render(name: str, runs: Runs) -> str:
    best, text = runs.best, runs.record["text"]
    resumed = runs.record.get("resumed", [])
    return render(
        name,
        machine=best["machine"],
        steps=spaced(best["steps"]),
        tokens=spaced(best["tokens a step"]),
        replicas=max(run["replicas"] for run in runs.all),
        text=round(text["train tokens"] / 1e6),
        epochs=f"{best['steps'] * best['tokens a step'] / text['train tokens']:.1f}",
        ms={method: f"{_median(run['ms a step'] for run in runs.of(method)):.0f}" for method in ("plain", "hdet")},
        runs=runs.table(),
        acts=[(runs.start(run["lr"]), act["why"]) for run in runs.of("hdet") for act in run.get("acts", ())],
        resumed=resumed and all(one["parameters equal"] and one["losses equal"] for one in resumed),
        until=resumed[0]["steps"] if resumed else 0,
        stopped=sum(bool(run["stopped at"]) for run in runs.all),
    )


def _median(values: Any) -> float:
    return float(np.median(list(values)))


def draw_plot(results: Path, folder: Path) -> None:
    """Draw the training losses of all runs into ``folder``, with the acts of the controller as marks."""
    runs = found(results)
    if runs is None:
        return
    figure, axes = new_figure(1, 2, 5.6, 4.2, sharey=True)
    rates = [run["lr"] for run in runs.of("plain")]
    for axis, method, title in zip(axes[0], ("plain", "hdet"), ("plain OneCycleLR", "HDET"), strict=True):
        for run in runs.of(method):
            _draw(axis, runs, run, _colour(run["lr"], rates))
        axis.axhline(runs.best["training"], color="0.6", linestyle="--", linewidth=1)
        axis.set(title=title, xlabel="step", yscale="log")
        axis.set_yticks(TICKS, map(str, TICKS))
        axis.set_ylim(0.95 * runs.best["training"], HIGHEST)
        axis.minorticks_off()
        axis.grid(axis="y", color="0.92")
        axis.legend(frameon=False, fontsize=8, title="start: final validation loss", title_fontsize=8)
    axes[0][0].set_ylabel("training loss")
    save(figure, folder / PLOT)


def _draw(axis: Any, runs: Runs, run: Row, colour: str) -> None:
    curve = np.array([np.nan if value is None else value for value in run["curve"]], dtype=float)
    steps = run["every"] * (np.arange(len(curve)) + 0.5)
    final = "not finite" if run["validation"] is None else f"{run['validation']:.3f}"
    name = runs.start(run["lr"]).replace("`", "")
    axis.plot(steps, curve, color=colour, linewidth=1.2, label=f"{name}: {final}")
    at = [act["step"] for act in run.get("acts", ())]
    levels = np.interp(at, steps, np.nan_to_num(curve, nan=HIGHEST))
    axis.plot(at, np.minimum(levels, 0.98 * HIGHEST), "v", color=colour, markersize=7, markeredgecolor="black")


def _colour(lr: float | None, rates: Sequence[float]) -> str:
    """Return a colour that a learning rate has in both panels."""
    if lr is None:
        return "black"
    return f"C{min(range(len(rates)), key=lambda index: abs(np.log(rates[index] / lr))) if rates else 0}"
