"""The commands of ``python -m bench.gpt2``; see ``__init__.py``."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import records

from .model import FULL, TINY
from .text import PIECES, Tokens, installed, prepare
from .train import METHODS, Run, Setup, disagreement, resumed_exactly

# Dense bf16 operations a second that vendors state, by a word of the device's name.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
# How far loss and gradient may be from those of the module under autocast: roundings of bf16.
LARGEST_ERRORS = (0.01, 0.1)
# Too high, as factors of the best learning rate.
FACTORS = {"best": 1.0, "3x": 3.0, "10x": 10.0, "30x": 30.0}

# Method and learning rate of the runs that are stopped and resumed.
RESUMED: dict[str, tuple[str, float | None]] = {
    "plain": ("plain", 1e-3),
    "hdet": ("hdet", 1e-3),
    "none": ("hdet", None),
}


class Record:
    """The file into which every command writes: runs, times and resumed runs."""

    def __init__(self, path: Path, command: str, device: torch.device) -> None:
        self.path = path
        self._made = {**records.provenance(command), "machine": machine(device)}
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def find(self, **wanted: object) -> dict[str, Any] | None:
        """Return the run with these values."""
        runs = self.content.get("runs", ())
        return next((run for run in runs if all(run.get(key) == value for key, value in wanted.items())), None)

    def best(self, steps: int, seed: int) -> float:
        """Return the learning rate of the plain run with the lowest validation loss."""
        known = [
            run
            for run in self.content.get("runs", ())
            if (run["method"], run["steps"], run["seed"]) == ("plain", steps, seed) and run["validation"] is not None
        ]
        if not known:
            raise ValueError(f"{self.path} has no plain run of {steps} steps with seed {seed}: run the grid first")
        return float(min(known, key=lambda run: run["validation"])["lr"])

    def add(self, kind: str, entry: dict[str, Any]) -> None:
        """Write one more entry."""
        self.content.setdefault(kind, []).append({**entry, **self._made})
        self.write()

    def write(self, **values: Any) -> None:
        """Write the file, with more values."""
        self.content |= values
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")


def machine(device: torch.device) -> str:
    """Return the name of the GPU or CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def be_deterministic() -> None:
    """Choose algorithms whose results are the same at every run: a run in pieces is then the run in one."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing reads it, and filling takes time


def learning_rate(word: str, record: Record, setup: Setup) -> float | None:
    """Return a learning rate that was given as a number, as a factor of the best one, or as "none"."""
    if word == "none":
        return None
    if word not in FACTORS:
        return float(word)
    return float(f"{FACTORS[word] * record.best(setup.steps, setup.seed):.6g}")


def run(args: argparse.Namespace, setup: Setup, record: Record) -> int:
    """Train from one learning rate after another; return 1 if the time was over before the last one was done."""
    text = Tokens.read(args.data)
    record.write(text=text.about)
    deadline = time.perf_counter() + args.seconds
    for word in args.lr:
        lr = learning_rate(word, record, setup)
        name = f"{args.method} from {'no learning rate' if lr is None else f'{lr:g}'}"
        if record.find(method=args.method, lr=lr, steps=setup.steps, seed=setup.seed):
            print(f"{name}: is in {record.path}")
            continue
        epochs = setup.steps * setup.tokens / len(text.train)
        print(f"{name}: {setup.steps} steps of {setup.tokens} tokens, {epochs:.2f} epochs", flush=True)
        path = args.data / f"{args.method}_{lr}_{setup.steps}_{setup.seed}.pt"
        training = Run(setup, text, args.method, lr)
        if path.exists():
            training.load(path)
            print(f"  goes on at step {training.step}")
        try:
            done = training.train(setup.steps, deadline)
        except RuntimeError as error:  # no replica is finite: the other runs go on
            print(f"  failed after step {training.step}: {error}", *getattr(error, "__notes__", ()), sep="\n  ")
            record.add("failures", {"method": args.method, "lr": lr, "step": training.step, "error": str(error)})
            continue
        if not done:
            training.save(path)
            print(f"  stopped at step {training.step}, kept in {path}; give the same command again")
            return 1
        entry = training.record()
        record.add("runs", entry)
        path.unlink(missing_ok=True)
        print(f"  validation {entry['validation']}, training {entry['training']}, {entry['ms a step']:.1f} ms a step")
        for act in entry.get("acts", ()):
            print(f"  {act['why']}")
        del training
        free()
    return 0


def measure(args: argparse.Namespace, setup: Setup, record: Record) -> int:
    """Time steps of plain training and of the stack, after a check that both compute the model; return 1 if not."""
    text = Tokens.read(args.data)
    batch = setup.to_device(text.batch(setup.sequences, setup.size.context, setup.seed, 0))
    for method, errors in disagreement(setup, batch).items():
        print(f"{method}: loss and gradient differ from those of the module by {errors[0]:.1e} and {errors[1]:.1e}")
        if any(error > largest for error, largest in zip(errors, LARGEST_ERRORS, strict=True)):
            print(f"more than {LARGEST_ERRORS}: {method} computes another model, try --eager")
            return 1
    free()
    peak = next((value for word, value in PEAKS.items() if word in machine(setup.device)), None)
    for method in METHODS:
        start = time.perf_counter()
        training = Run(setup, text, method, 1e-3)
        training.train(5)  # compiles
        began = time.perf_counter() - start
        training.train(5 + args.steps_timed)
        seconds = training.times[-1]
        rate = setup.size.flops(setup.tokens) / seconds
        memory = torch.cuda.max_memory_allocated() / 2**30 if setup.device.type == "cuda" else 0.0
        entry = {"method": method, "ms a step": 1e3 * seconds, "tokens a step": setup.tokens, "FLOP/s": rate}
        entry |= {"share of the peak": peak and rate / peak, "peak GiB": memory, "seconds to begin": began}
        record.add("times", {**entry, "compiled": setup.compiled})
        share = f", {rate / peak:.0%} of the peak" if peak else ""
        print(
            f"{method}: {1e3 * seconds:.1f} ms a step, {rate / 1e12:.0f} TFLOP/s{share}, {memory:.1f} GiB, "
            f"{began:.0f} s until the fifth step",
            flush=True,
        )
        del training
        free()
    return 0


def resume(args: argparse.Namespace, setup: Setup, record: Record) -> int:
    """Compare runs in one piece and in two; return 1 if any differs."""
    text, worst = Tokens.read(args.data), 0
    for start in args.only:
        method, lr = RESUMED[start]
        name = f"{method} from {'no learning rate' if lr is None else f'{lr:g}'}"
        print(f"{name}: {args.until} steps in one piece and in two", flush=True)
        entry = resumed_exactly(setup, text, method, lr, args.until, args.data / "resume.pt")
        equal = entry["parameters equal"] and entry["losses equal"]
        record.add("resumed", entry)
        print(f"  {'equal bit for bit' if equal else 'NOT equal'}", flush=True)
        worst = max(worst, not equal)
        free()
    return worst


def free() -> None:
    """Give the memory of the last run back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--data", type=Path, default=Path("bench-out/gpt2"), help="folder of tokens and checkpoints")
    common.add_argument("--tiny", action="store_true", help="a model of two layers of width 32, on little text")
    trained = argparse.ArgumentParser(add_help=False, parents=[common])
    trained.add_argument("--out", type=Path, default=Path("bench-out/gpt2.json"), help="record to write into")
    trained.add_argument("--steps", type=int, default=1500, help="length of the schedule")
    trained.add_argument("--sequences", type=int, default=32, help="windows of a step, of all replicas together")
    trained.add_argument("--replicas", type=int, default=8, help="replicas of the stack")
    trained.add_argument("--seed", type=int, default=0)
    trained.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    trained.add_argument("--eager", action="store_true", help="without torch.compile, which is for GPUs")
    trained.add_argument("--fast", action="store_true", help="allow algorithms that differ from run to run")
    parser = argparse.ArgumentParser(prog="python -m bench.gpt2", description="Train a model of GPT-2's shape.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare", parents=[common], help="make tokens from the text of installed packages")
    one.add_argument("--text", type=Path, nargs="+", help="folders to look in; default: those of the installation")
    one.add_argument("--characters", type=float, default=260e6, help="take every k-th file if there are more")
    one.add_argument("--sample", type=float, default=30e6, help="characters that the tokenizer is trained on")
    one = commands.add_parser("time", parents=[trained], help="time a few steps")
    one.add_argument("steps_timed", type=int, nargs="?", default=20)
    one = commands.add_parser("resume", parents=[trained], help="compare runs in one piece and in two")
    one.add_argument("--only", nargs="+", choices=list(RESUMED), default=list(RESUMED), help="some of the runs")
    one.add_argument("--until", type=int, default=60, help="steps; the run is stopped after half of them")
    one = commands.add_parser("run", parents=[trained], help="train")
    one.add_argument("method", choices=list(METHODS))
    one.add_argument("--lr", nargs="+", required=True, help=f"numbers, none, or of the best: {', '.join(FACTORS)}")
    one.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long, with a checkpoint")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    logging.basicConfig(level=logging.WARNING, format="  %(message)s")
    if args.command == "prepare":
        folders = args.text or installed()
        pieces, sample, most = (512, 1e6, 2e6) if args.tiny else (PIECES, args.sample, args.characters)
        about = prepare(args.data, folders, int(sample), int(most), pieces)
        print(", ".join(f"{key}: {value}" for key, value in about.items()))
        if about["train tokens"] < 60e6 and not args.tiny:
            print("fewer than 60 M tokens: windows repeat; name more folders by --text")
        return 0
    device = torch.device(args.device)
    if not args.fast:
        be_deterministic()
    compiled = device.type == "cuda" and not args.eager
    setup = Setup(TINY if args.tiny else FULL, args.sequences, args.replicas, args.steps, args.seed, device, compiled)
    record = Record(args.out, records.command_line("bench.gpt2", argv, without=("--out", "--data")), device)
    return {"time": measure, "resume": resume, "run": run}[args.command](args, setup, record)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
