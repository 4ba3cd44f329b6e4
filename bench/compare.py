"""Compare two recorded runs; the exit code is 1 if something became slower.

python -m bench.compare old.json new.json
python -m bench.compare bench/results bench-out          # folders of records
python -m bench.compare old.json new.json --least 0.02   # changes below 2 % do not count

Ratios within one run are compared instead of times, so that clocks cancel: the time of ours over that of each peer of
the same case, and over that of a copy of the same bytes, which tells our own change from that of a peer. The spread of
a time is its interquartile range over its median. The spread of a ratio is the interquartile range of the ratios of
single turns where ours and torch's fused step took turns, else the root of the summed squares of both spreads.

A ratio is worse if new/old − 1 exceeds the root of the summed squares of its spreads in both runs, and ``--least``; it
is better if old/new − 1 does. Quartiles do not include the difference between two starts of a process: use ``--least``
with few rounds or on a busy machine. Cases with neither a peer nor a share (``test_overlap``) are not compared.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import records
from bench.markdown import table
from bench.records import Entry

# Parameters of a case that name the implementation; the others describe the operation.
IMPLEMENTATION = ("way", "kind", "method")
# Parameters of our implementations only: peers are measured once for all values.
OURS_ALONE = ("addresses",)
# Names that are no implementations: a part of every step that is measured alone.
PARTS = ("gradients", "addresses")
# Methods of ``test_converge.py`` that are the peers of all others.
PLAIN = ("one AllReduce per tensor", "one flat AllReduce", "AllReduce of the same bytes", "copy of the same bytes")
COPY = "a copy of its bytes"


@dataclass(frozen=True)
class Time:
    """A time in any unit, its relative spread (None if unknown), and its share of the copy bandwidth."""

    value: float
    spread: float | None
    share: float | None = None


@dataclass(frozen=True)
class Ratio:
    """A ratio of two times, and its relative spread."""

    value: float
    spread: float | None


@dataclass(frozen=True)
class Change:
    """The same ratio in two runs."""

    case: str
    old: Ratio
    new: Ratio
    least: float = 0.0

    @property
    def allowed(self) -> float | None:
        """Return the change that is explained by the spreads."""
        if self.old.spread is None or self.new.spread is None:
            return None
        return max(math.hypot(self.old.spread, self.new.spread), self.least)

    @property
    def verdict(self) -> str:
        if self.allowed is None:
            return "not judged: no spread"
        if self.new.value / self.old.value - 1 > self.allowed:
            return "worse"
        return "better" if self.old.value / self.new.value - 1 > self.allowed else "same"


def ratios(entries: Iterable[Entry]) -> dict[str, Ratio]:
    """Return the ratios of a run, by a name of case, implementation and peer."""
    found: dict[str, Ratio] = {}
    groups: dict[str, dict[tuple[str, str], Time]] = {}
    for entry in entries:
        info, name = entry["extra_info"], _case(entry)
        if "ways" in info:
            found |= _in_turns(name, info)
        else:
            groups.setdefault(name, {})[_implementation(entry)] = _time(entry)
    for name, times in groups.items():
        found |= _one_by_one(name, times)
    return found


def compare(old: Mapping[str, Ratio], new: Mapping[str, Ratio], least: float = 0.0) -> list[Change]:
    """Return the ratios that both runs have."""
    return [Change(case, ratio, new[case], least) for case, ratio in old.items() if case in new]


def report(old: Mapping[str, Ratio], new: Mapping[str, Ratio], changes: Sequence[Change]) -> str:
    """Format changed ratios as tables, and list the cases that only one run has."""
    lines = []
    for verdict in ("worse", "better", "not judged: no spread"):
        found = [change for change in changes if change.verdict == verdict]
        if found:
            lines += [f"{verdict}:", "", _table(found), ""]
    for name, own, other in (("old", old, new), ("new", new, old)):
        alone = [case for case in own if case not in other]
        lines += [f"only in the {name} run:", "", *(f"- {case}" for case in alone), ""] if alone else []
    counts = ", ".join(
        f"{sum(change.verdict == verdict for change in changes)} {verdict.split(':')[0]}"
        for verdict in ("worse", "better", "same", "not judged: no spread")
    )
    return "\n".join([*lines, f"{len(changes)} ratios in both: {counts}."])


def _table(changes: Sequence[Change]) -> str:
    worst = sorted(changes, key=lambda change: change.old.value / change.new.value)
    body = [
        [
            change.case,
            f"{change.old.value:.4g}",
            f"{change.new.value:.4g}",
            f"{change.new.value / change.old.value - 1:+.1%}",
            "–" if change.allowed is None else f"{change.allowed:.1%}",
        ]
        for change in worst
    ]
    return table(["case", "old", "new", "change", "spread"], body)


def _case(entry: Entry) -> str:
    """Return the test and its parameters, without the implementation."""
    test = entry["fullname"].split("[")[0].split("/")[-1]
    params = entry["params"] or {}
    kept = [str(value) for key, value in params.items() if key not in (*IMPLEMENTATION, *OURS_ALONE)]
    return f"{test}[{'-'.join(kept)}]"


def _implementation(entry: Entry) -> tuple[str, str]:
    """Return the implementation, and the values of parameters that only ours have."""
    params = entry["params"] or {}
    name = next((str(params[key]) for key in IMPLEMENTATION if key in params), "")
    return name, ", ".join(str(params[key]) for key in OURS_ALONE if key in params)


def _is_ours(way: str, ways: Iterable[str]) -> bool:
    if set(PLAIN) & set(ways):
        return way not in PLAIN
    return way.startswith("hdet")


def _time(entry: Entry) -> Time:
    info, stats = entry["extra_info"], entry["stats"]
    for unit in ("ms", "us"):
        if unit in info:
            return Time(info[unit], info.get("spread"), info.get("share"))
    return Time(stats["median"] * 1e3, stats["iqr"] / stats["median"])


def _one_by_one(name: str, times: dict[tuple[str, str], Time]) -> dict[str, Ratio]:
    ways = [way for way, _ in times]
    peers = {way: time for (way, _), time in times.items() if not _is_ours(way, ways) and way not in PARTS}
    found = {}
    for (way, kind), time in times.items():
        if way in PARTS or not _is_ours(way, ways):
            continue
        own = f"{name} {way}{f' ({kind})' if kind else ''}"
        for peer, theirs in peers.items():
            found[f"{own} / {peer}"] = Ratio(time.value / theirs.value, _both(time.spread, theirs.spread))
        if time.share is not None:
            found[f"{own} / {COPY}"] = Ratio(1 / time.share, time.spread)
    return found


def _in_turns(name: str, info: dict[str, Any]) -> dict[str, Ratio]:
    ways = {way: Time(found["ms"], found.get("spread")) for way, found in info["ways"].items()}
    ours = [way for way in ways if _is_ours(way, ways)]
    found = {}
    for own in ours:
        for peer, theirs in ways.items():
            if peer in ours:
                continue
            spread = _both(ways[own].spread, theirs.spread)
            if peer == "torch-fused" and len(ours) == 1 and "ratio" in info:
                turns = info["ratio"]
                spread = (turns["high"] - turns["low"]) / turns["ratio"]
            found[f"{name} {own} / {peer}"] = Ratio(ways[own].value / theirs.value, spread)
    return found


def _both(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else math.hypot(a, b)


def machines(entries: Iterable[Entry]) -> set[str]:
    """Return the names of the GPUs or CPUs of the entries."""
    infos = [record["machine_info"] for record in records.records(entries)]
    return {info.get("gpu") or info["cpu"].get("brand_raw") or info["machine"] for info in infos}


def main(argv: Sequence[str] | None = None) -> int:
    summary, rest = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="a record, or a folder of them")
    parser.add_argument("new", type=Path, help="a record, or a folder of them")
    parser.add_argument("--least", type=float, default=0.0, help="ignore changes up to this share")
    arguments = parser.parse_args(argv)
    try:
        before, after = records.entries([arguments.old]), records.entries([arguments.new])
    except FileNotFoundError as error:
        print(f"python -m bench.compare: error: {error}", file=sys.stderr)
        return 2
    if machines(before) != machines(after):
        old_machines, new_machines = (", ".join(sorted(machines(entries))) for entries in (before, after))
        print(f"the runs are from different machines: {old_machines}; {new_machines}\n")
    old, new = ratios(before), ratios(after)
    changes = compare(old, new, arguments.least)
    print(report(old, new, changes))
    return 1 if any(change.verdict == "worse" for change in changes) else 0


if __name__ == "__main__":
    sys.exit(main())
