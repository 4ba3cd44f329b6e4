"""Write docs/reliability.md: how failures, damaged input and numerics are tested, with the figures of recorded runs.

``pages.py`` calls this module. Every figure comes from a record in ``bench/results``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.markdown import section_text, table_lines
from bench.stack_operations_section import read_records, stack_operations_section

Record = dict[str, Any]

INTRODUCTION = """# Reliability

How failures, damaged input and numerics are tested, and with which results. Written by `python -m bench.pages` from
the records in `bench/results`; each section names its command, machine and date. [When something goes
wrong](usage/failures.md) tells what a user sees."""

OTHER_TESTS = """## Tests without a record

`make test` and `make test-full` run these on every commit:

- **Any sequence of operations** (`tests/properties`, hypothesis): steps, skipped steps, syncs, groups added and
  edited, parameters frozen and moved, states saved and loaded in any order. Our optimizers stay equal to torch's, and
  a scheduler equal to a reference of 60 lines that was written from the equations.
- **Malformed calls** (`tests/bad_input`): more than 300 rows, each with its exception and message. After every one of
  them parameters, optimizer, scheduler, hooks and random generators are bit by bit as before. Checkpoint files that
  are truncated, random, of wrong types, or claim 10⁹ entries.
- **Damaged checkpoints** (`tests/schedule/checkpoint/test_state_schema.py`): every leaf of real scheduler states,
  damaged in twelve ways.
- **Orders of loading** (`tests/schedule/test_loading_order.py`): model, optimizer and scheduler in every order, with
  the scheduler built at every point between them, continue the same run bit by bit.
- **Golden checkpoints** (`tests/golden`): files of this release, which later ones must load and continue."""

NOT_COVERED = """## Not covered

- **NCCL with several ranks.** NCCL refuses two ranks on one GPU. Several ranks are tested with gloo, on CPU and CUDA
  tensors, and NCCL with one rank. Timeouts and aborts of NCCL are torch's.
- **Silent data corruption.** A flipped bit that leaves a finite number cannot be told from training.
- **Layers in another order without names.** Two layers of one shape cannot be told apart unless the optimizer was
  built from `named_parameters()` or the scheduler was given `model=`.
- **Damaged moments that the replicas of a stack share.** With shared gradients a process has them once. NaN in them is
  noticed one sync later, when it has spread to all replicas: the run then stops with an error, as before that sync.
- **Several machines.** Processes run on one machine; a network that loses or delays packets was not tried.
- **Other devices** than CPU and CUDA."""


def text(results: Path) -> str:
    """Return the page; ``results`` is the folder of the records."""
    parts = [
        INTRODUCTION,
        faults_section(_records(results, "*chaos*.json")),
        numerics_section(_records(results, "*numerics*.json")),
        state_section(_records(results, "state_quality*.json")),
        gpu_section(_records(results, "*_tests.json")),
        OTHER_TESTS,
        NOT_COVERED,
        stack_operations_section(read_records(results)),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _records(folder: Path, pattern: str) -> list[Record]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


def _source(record: Record) -> str:
    return f"{record['machine']}, torch {record['torch']}, {record['date']}. `{record['command']}`"


def faults_section(records: list[Record]) -> str:
    """Return the section of the injected faults: totals, and a table of the kinds with a column for each record."""
    if not records:
        return ""
    description = (
        "`make chaos` injects seeded faults into groups of real processes: ranks that die, stop or hang; NaN and inf "
        "in parameters, gradients, moments, buffers and losses; ranks with other settings, names or orders; errors in "
        "forward passes, probes, setters, optimizers and collectives; damaged and stale checkpoints. After every fault "
        "it checks that healthy ranks are bit-equal after each sync, that model, optimizer and scheduler are as before "
        "the sync or as after it, that the error names the rank and the cause, and that a resumed run equals the "
        "undisturbed one."
    )
    totals = [
        f"- {record['machine']}: **{record['faults']} faults** of {record['kinds']} kinds in "
        f"{record['configurations']} configurations, {record['seconds']:.0f} s: "
        f"**{len(record['violations'])} violations**"
        for record in records
    ]
    kinds = {name: entry["expected"] for record in records for name, entry in record["by kind"].items()}
    body = [
        [name, expected, *(_runs(record["by kind"].get(name)) for record in records)]
        for name, expected in kinds.items()
    ]
    header = ["fault", "must end", *(record["machine"] for record in records)]
    sources = "\n\n".join(map(_source, records))
    violations = [
        f"- {record['machine']}, {each['case']}: {'; '.join(each['violations'])}"
        for record in records
        for each in record["violations"]
    ]
    listed = [["Violations:", "", *violations]] if violations else []
    return section_text("Injected faults", description, sources, totals, *listed, table_lines(header, body, left=2))


def _runs(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "–"
    return f"{entry['runs'] - entry['broken']} of {entry['runs']}"


def numerics_section(records: list[Record]) -> str:
    """Return the section of the errors against float64, with one table for each record."""
    if not records:
        return ""
    description = (
        "The relative error of parameters after many steps against the same recursion in float64 (root mean square "
        "over the elements), ours beside torch.optim's in float32 and in bf16. Stochastic rounding and bf16 state "
        "have the errors of 16 bits by design: torch in bf16 is their peer."
    )
    blocks: list[list[str]] = []
    for record in records:
        names = list(dict.fromkeys(name for entry in record["errors"].values() for name in entry))
        body = [
            [rule, *(f"{entry[name]['rms']:.1e}" if name in entry else "–" for name in names)]
            for rule, entry in record["errors"].items()
        ]
        steps = f"{record['steps']:,}".replace(",", " ")
        blocks += [[f"{record['machine']}, {steps} steps:"]]
        blocks += [table_lines(["rule", *names], body), *_losses(record), [_extremes(record)]]
    return section_text("Numerics over time", description, "\n\n".join(map(_source, records)), *blocks)


def _losses(record: Record) -> list[list[str]]:
    """Return the table of the losses that training reached, where they were recorded."""
    if "losses" not in record:
        return []
    entries = [(rule, spread, entry) for rule, of in record["losses"].items() for spread, entry in of.items()]
    _, _, first = entries[0]
    names = [name for name in first if name != "fp64"]
    body = [
        [rule, spread, f"{entry['fp64']['loss']:.2e}", *(_with_interval(entry[name]) for name in names)]
        for rule, spread, entry in entries
    ]
    description = (
        "The loss after as many steps with noisy gradients and a learning rate that falls to 0, over that of the same "
        f"training in float64 (geometric mean of {first['fp64']['runs']} runs and its 95 % interval). The *spread* "
        "says how many times larger the largest gradients of a block of 256 neighbours are than its smallest:"
    )
    return [[description], table_lines(["rule", "spread", "loss in float64", *names], body)]


def _with_interval(entry: Mapping[str, float]) -> str:
    return f"{entry['ratio']:.4f} ({entry['low']:.4f} to {entry['high']:.4f})"


def _extremes(record: Record) -> str:
    rates = [pair for rules in record["learning rates"].values() for pair in rules.values()]
    cases = [case for rules in record["subnormals"].values() for case in rules.values()]
    return (
        f"Learning rates from 1e-12 to 1e3, in all backends ({', '.join(record['learning rates'])}): at most "
        f"{max(pair['ours'] for pair in rates):.1f} roundings of float32 from float64, torch at most "
        f"{max(pair['torch'] for pair in rates):.1f}. Subnormal parameters, gradients and moments: "
        f"{sum(case['flushed'] for case in cases)} of {sum(case['results'] for case in cases)} results are flushed to "
        f"zero where torch's are not; ours are at most {max(case['units from truth'] for case in cases):.1e} units in "
        f"the last place from float64, torch's {max(case['torch from truth'] for case in cases):.1e}: a moment that is "
        "itself subnormal has few digits left, or none."
    )


def state_section(records: list[Record]) -> str:
    """Return the section of how training ends with state in fewer bits, with one table for each record."""
    if not records:
        return ""
    description = (
        "Validation losses after training with optimizer state in bf16 and in 8 bits, less those of the same training "
        "with state in float32, and twice their standard errors over the seeds. *Another order* is float32 with the "
        "examples in another order: the noise of training. The second learning rate of a task is four times its own."
    )
    header = ["task", "learning rate", "loss in float32"]
    blocks: list[list[str]] = []
    for record in records:
        tasks = record["tasks"]
        states = [state for state in next(iter(next(iter(tasks.values())).values())) if state != "float32"]
        body = [
            [task, rate.removeprefix("lr "), f"{entries['float32']['mean']:.4f}", *_differences(entries, states)]
            for task, rates in tasks.items()
            for rate, entries in rates.items()
        ]
        blocks += [table_lines([*header, *(state.removeprefix("float32, ") for state in states)], body)]
    return section_text("Training with state in 8 bits", description, "\n\n".join(map(_source, records)), *blocks)


def _differences(entries: Mapping[str, Mapping[str, float]], states: list[str]) -> list[str]:
    return [f"{entries[name]['difference']:+.4f} ± {2 * entries[name]['standard error']:.4f}" for name in states]


def gpu_section(records: list[Record]) -> str:
    """Return the section of the recorded test runs, by folder of tests."""
    if not records:
        return ""
    description = (
        "Tests that need a GPU, counted by folder of `tests`: every kernel beside its reference; optimizers, stacks "
        "and averages over gloo with CUDA tensors; CUDA graphs; compute-sanitizer (memory, races, initialisation); the "
        "same bits twice; two streams and pinned buffers under forced delays."
    )
    blocks: list[list[str]] = []
    for record in records:
        body = [
            [folder or "(top)", *(str(entry.get(outcome, 0)) for outcome in ("passed", "failed", "skipped"))]
            for folder, entry in record["tests"].items()
        ]
        blocks += [table_lines(["tests", "passed", "failed", "skipped"], body)]
        blocks += [["Failed:", "", *(f"- `{name}`" for name in record["failed"])]] if record["failed"] else []
    return section_text("On a GPU", description, "\n\n".join(map(_source, records)), *blocks)
