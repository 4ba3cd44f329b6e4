"""Run the demo: train with a progress bar, print the table, write the files."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

from hdet_kernels import report
from hdet_kernels.demo.outcome import (
    TITLES,
    acts,
    comparison,
    gathered,
    plot_learning_rates,
    plot_training_losses,
    verdict,
    write_json,
)
from hdet_kernels.demo.tasks import TextTask
from hdet_kernels.demo.training import Options, Progress, place, run_replicas, train_both

_WIDEST_BAR = 28
_REDRAW_SECONDS = 0.1
_LOG_SHARE = 0.25


def run_demo(options: Options) -> None:
    """Train with OneCycleLR and with HDET, print the table, and write the files to ``options.out``."""
    backend, device = place(options.replicas)
    kind = "CPU" if device == "cpu" else "one GPU each" if backend == "nccl" else "sharing the GPUs"
    where = f"{options.replicas} replicas, {kind}, {backend}"
    print(f"Task: {TextTask.title}.")
    print(f"Two runs of {options.steps} steps from peak learning rate {options.max_lr:g}: {where}.")
    sys.stdout.flush()

    bars: dict[str, Bar] = {}

    def show(progress: Progress) -> None:
        if progress.run not in bars:
            bars[progress.run] = Bar(TITLES[progress.run], options.steps, sys.stderr)
        bars[progress.run].update(progress.step, f"loss {progress.loss:.3f}  lr {progress.lr:.1e}")

    runs = gathered(run_replicas(options.replicas, train_both, options, on_message=show))
    print(f"\n{comparison(runs, options)}\n\n{verdict(runs)}")
    print("\n".join([*acts(runs["hdet"]), ""]))

    out = options.out
    files = {out / "results.json": "all numbers, step by step", out / "syncs.md": "every sync of the HDET run"}
    write_json(runs, options, backend, out / "results.json")
    (out / "syncs.md").write_text(report.table(runs["hdet"].history) + "\n", encoding="utf-8")
    try:
        plot_training_losses(runs, options, out / "training_loss.png")
        plot_learning_rates(runs, options, out / "learning_rates.png")
        files[out / "training_loss.png"] = "training loss of both runs"
        files[out / "learning_rates.png"] = "learning rate of every replica"
    except ImportError as error:
        print(error)
    width = max(len(str(file)) for file in files)
    for file, what in files.items():
        print(f"{file!s:<{width}}  {what}")


class Bar:
    """Progress of ``total`` steps, written to ``stream``."""

    def __init__(self, label: str, total: int, stream: TextIO) -> None:
        self.label = label
        self.total = total
        self.stream = stream
        self.terminal = stream.isatty()
        self.full, self.empty = "█░" if (stream.encoding or "").lower().startswith("utf") else "#."
        self.start = time.monotonic()
        self.drawn = -1.0
        self.logged = 0.0

    def update(self, done: int, note: str) -> None:
        """Show that ``done`` steps are finished, with ``note`` behind the bar."""
        now, ended = time.monotonic(), done == self.total
        if self.terminal and (ended or now - self.drawn >= _REDRAW_SECONDS):
            self.drawn = now
            print(f"\r{self._line(done, note)}\x1b[K", end="\n" if ended else "", file=self.stream, flush=True)
        elif not self.terminal and (ended or done / self.total >= self.logged + _LOG_SHARE):
            self.logged = done / self.total
            print(self._line(done, note), file=self.stream, flush=True)

    def _line(self, done: int, note: str) -> str:
        elapsed = time.monotonic() - self.start
        left = elapsed / done * (self.total - done) if done else 0.0
        when = f"{elapsed:.0f} s" if done == self.total else f"{left:.0f} s left"
        text = f"{done:>{len(str(self.total))}}/{self.total}  {note}  {when}"
        # A line that wraps cannot be redrawn.
        width = min(_WIDEST_BAR, shutil.get_terminal_size().columns - len(text) - 20) if self.terminal else _WIDEST_BAR
        filled = max(width, 0) * done // self.total
        bar = self.full * filled + self.empty * (width - filled)
        return f"{self.label:<18}{bar} {text}"
