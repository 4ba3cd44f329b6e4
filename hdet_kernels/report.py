"""Format the history of a scheduler as tables and plots.

Every function takes ``scheduler.history``, or the same records as dicts (from a checkpoint or a JSON file). Plots need
matplotlib (``pip install 'hdet_kernels[demo]'``) and do not change its global state (pyplot, backend).
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hdet_kernels.checks import check_kind, spell
from hdet_kernels.schedule.history import HistorySummary, SyncRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

History = Iterable[SyncRecord | Mapping[str, Any]]
Path = str | os.PathLike[str]

INK = "#1a1a2e"
MUTED = "#7a7f8c"


def table(history: History) -> str:
    """Return a Markdown table with a row for every sync.

    Columns have the mean, best and worst of the replicas' finite training losses since the last sync ("–" where none
    was recorded), the base value of every hyperparameter, what the controller did, the bytes that this process sent,
    and the time in ms. Below it is a line for every return and every learning rate found, with its reason.
    """
    records = records_of(history)
    names = list(records[0].base) if records else []
    header = ["step", "cycle", "mean loss", "best", "worst", *names, "act", "excluded", "collectives", "bytes", "ms"]
    rows = format_table(header, [_row(record, names) for record in records])
    reasons = [f"- {record.event}" for record in records if record.event is not None]
    return "\n".join([rows, "", *reasons]) if reasons else rows


def summary(history: History) -> dict[str, Any]:
    """Return totals over all syncs.

    The keys are ``syncs``, ``steps``, ``collectives``, ``bytes``, ``seconds``, ``excluded`` (how often a replica was
    left out), ``undone`` (how often all replicas returned to the start), ``lost`` (steps that were undone), ``events``
    (step and reason of each), ``peaks`` (given and last peak of the schedule, by learning rate), ``first_loss`` and
    ``last_loss`` (mean over replicas, None where none was recorded), and ``base``: the ``first``, ``last`` and ``peak``
    value of every hyperparameter at a sync.
    """
    records = records_of(history)
    losses = [loss_range(record.losses)[0] for record in records]
    names = list(records[0].base) if records else []
    bases = {name: [record.base[name] for record in records] for name in names}
    totals = HistorySummary()
    for record in records:
        totals.add(record)
    counted = ("collectives", "bytes", "seconds", "excluded", "undone", "lost", "events", "peaks")
    return {
        "syncs": len(records),
        "steps": records[-1].step if records else 0,
        **{name: getattr(totals, name) for name in counted},
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "base": {name: {"first": b[0], "last": b[-1], "peak": max(b)} for name, b in bases.items()},
    }


def plot_losses(history: History, path: Path) -> None:
    """Plot the training loss at every sync to ``path``: mean and range of the replicas, and the mean probe loss."""
    records = _nonempty(history)
    _check_path(path)
    figure, axes = new_figure("Training loss at every sync", "step", "loss")
    ranges = [loss_range(record.losses) for record in records]
    seen = [(record.step, *range_) for record, range_ in zip(records, ranges, strict=True) if range_[0] is not None]
    if seen:
        steps, mean, best, worst = zip(*seen, strict=True)
        axes.fill_between(steps, best, worst, color="#4878d0", alpha=0.25, linewidth=0, label="best to worst replica")
        axes.plot(steps, mean, color="#4878d0", linewidth=2, label="mean of the replicas")
    probes = [(r.step, loss_range(r.probes)[0]) for r in records if r.probes is not None]
    if probes:
        axes.plot(*zip(*probes, strict=True), color="#d65f5f", marker="o", markersize=4, label="mean on the probe")
    axes.legend(frameon=False)
    figure.savefig(path)


def plot_values(history: History, path: Path, name: str = "lr/0") -> None:
    """Plot hyperparameter ``name`` to ``path``: the value of every replica in each cycle, and the base value.

    Learning rates are named ``lr/0``, ``lr/1``, … by parameter group.

    Raises:
        ValueError: The history is empty or has no such hyperparameter.
    """
    records = _nonempty(history)
    _check_path(path)
    check_kind("name", name, str, "the name of a hyperparameter, such as 'lr/0'")
    if name not in records[0].values:
        raise ValueError(f"no hyperparameter {name!r} in this history; choose from {', '.join(records[0].values)}")
    figure, axes = new_figure(f"{name}: base and replicas", "step", name)
    steps = [record.step for record in records]
    rows = [record.values[name] for record in records]
    if len({len(row) for row in rows}) > 1:  # resumed with another number of replicas
        _scatter_ragged(axes, steps, rows)
    else:
        colours = replica_colours(len(rows[0]))
        for replica, (values, colour) in enumerate(zip(zip(*rows, strict=True), colours, strict=True)):
            axes.plot(steps, values, "o", markersize=4, color=colour, label=f"replica {replica}")
    axes.fill_between(steps, [min(r) for r in rows], [max(r) for r in rows], color=MUTED, alpha=0.12, linewidth=0)
    axes.plot(steps, [record.base[name] for record in records], color=INK, linewidth=2, label="base", zorder=1)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes.legend(frameon=False, ncols=1 + (len(rows[0]) > 8))
    figure.savefig(path)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 0) -> str:
    """Return a padded Markdown table; the first ``left`` columns are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        placed = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return f"| {' | '.join(placed)} |"

    rule = [("-" * w) if i < left else ("-" * (w - 1) + ":") for i, w in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def format_bytes(count: float) -> str:
    """Format a number of bytes in decimal units: "548.9 kB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def new_figure(title: str, xlabel: str, ylabel: str, size: tuple[float, float] = (9, 5)) -> tuple[Figure, Axes]:
    """Return an empty labelled figure that is not registered with pyplot."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib, which is not installed: pip install 'hdet_kernels[demo]'") from error
    figure = Figure(figsize=size, dpi=150, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=13, color=INK, pad=12)
    axes.set_xlabel(xlabel, color=INK)
    axes.set_ylabel(ylabel, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelcolor=INK, which="both")
    axes.grid(True, color="#e6e8ee", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def replica_colours(count: int) -> list[Any]:
    """Return ``count`` distinguishable colours, one for each replica."""
    import matplotlib

    if count <= 8:
        return list(matplotlib.colormaps["Dark2"].colors[:count])  # type: ignore[attr-defined]
    return [matplotlib.colormaps["turbo"](0.05 + 0.9 * index / (count - 1)) for index in range(count)]


def records_of(history: History) -> list[SyncRecord]:
    """Return the records of a history, those that are dicts as records; raise TypeError or ValueError if it is none."""
    if isinstance(history, str | bytes | Mapping) or not isinstance(history, Iterable):
        hint = "pass scheduler.history" if hasattr(history, "history") else "pass the history of a scheduler"
        raise TypeError(f"history must be a list of sync records, got {spell(history)}: {hint}")
    return [record_of(f"history[{index}]", record) for index, record in enumerate(history)]


def record_of(name: str, record: SyncRecord | Mapping[str, Any]) -> SyncRecord:
    """Return a record that may be given as a dict; raise TypeError or ValueError, with ``name``, if it is none."""
    if isinstance(record, SyncRecord):
        return record
    check_kind(name, record, Mapping, "a SyncRecord, or the dict that its to_dict() returns")
    try:
        return SyncRecord(**record)
    except TypeError as error:
        needed = ", ".join(field.name for field in dataclasses.fields(SyncRecord))
        raise ValueError(f"{name} must be a SyncRecord, or a dict with {needed}; got {spell(dict(record))}") from error


def _nonempty(history: History) -> list[SyncRecord]:
    records = records_of(history)
    if not records:
        raise ValueError("the history is empty: there is nothing to plot before the first sync")
    return records


def _check_path(path: object) -> None:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be the path of an image to write, such as 'losses.png', got {spell(path)}")


def _row(record: SyncRecord, names: Sequence[str]) -> list[str]:
    excluded = ", ".join(map(str, record.excluded)) or "–"
    return [
        str(record.step),
        str(record.cycle),
        *(_number(loss) for loss in loss_range(record.losses)),
        *(_number(record.base[name]) for name in names),
        record.act or "–",
        excluded,
        str(record.collectives),
        format_bytes(record.bytes),
        f"{1000 * record.seconds:.1f}",
    ]


def loss_range(losses: Sequence[float | None]) -> tuple[float | None, float | None, float | None]:
    """Return mean, best and worst of the finite losses; None, which JSON has instead of NaN, is not recorded."""
    finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    return (
        (math.fsum(loss / len(finite) for loss in finite), min(finite), max(finite)) if finite else (None, None, None)
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _scatter_ragged(axes: Axes, steps: Sequence[int], rows: Sequence[Sequence[float]]) -> None:
    points = [(step, value) for step, row in zip(steps, rows, strict=True) for value in row]
    axes.plot(*zip(*points, strict=True), "o", markersize=4, color=MUTED, label="replicas")
