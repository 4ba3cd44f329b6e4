"""Run the demo: train, print the table, write the files."""

from __future__ import annotations

import sys

from hdet_kernels import report
from hdet_kernels.demo.launch import place, run_ranks
from hdet_kernels.demo.options import Options
from hdet_kernels.demo.outcome import TITLES, comparison, gathered, verdict, write_json
from hdet_kernels.demo.plots import plot_learning_rates, plot_training_losses
from hdet_kernels.demo.progress import Bar
from hdet_kernels.demo.tasks import TASKS
from hdet_kernels.demo.training import Progress, train_both


def run_demo(options: Options) -> None:
    """Train with OneCycleLR and with HDET, print the table, and write the files to ``options.out``.

    Raises:
        RankFailed: A replica raised or died.
    """
    backend, device = place(options.replicas)
    kind = "CPU" if device == "cpu" else "one GPU each" if backend == "nccl" else "sharing the GPUs"
    where = f"{options.replicas} replicas, {kind}, {backend}"
    print(f"Task: {TASKS[options.task].title}.")
    print(f"Two runs of {options.steps} steps from peak learning rate {options.max_lr:g}: {where}.")
    sys.stdout.flush()

    bars = _Bars()
    runs = gathered(run_ranks(options.replicas, train_both, options, on_message=bars.show))
    print(f"\n{comparison(runs, options)}\n\n{verdict(runs)}\n")

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


class _Bars:
    """One progress bar for each run, created at its first message."""

    def __init__(self) -> None:
        self.bars: dict[str, Bar] = {}

    def show(self, progress: Progress) -> None:
        if progress.run not in self.bars:
            self.bars[progress.run] = Bar(TITLES[progress.run], progress.steps, sys.stderr)
        self.bars[progress.run].update(progress.step, f"loss {progress.loss:.3f}  lr {progress.lr:.1e}")
