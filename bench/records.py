"""Read and describe recorded benchmarks: the JSON of pytest-benchmark with the additions of ``conftest.py``."""

from __future__ import annotations

import datetime
import json
import shlex
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

Entry = dict[str, Any]


def files(places: Sequence[Path]) -> list[Path]:
    """Return the files among ``places`` and the JSON files of the folders among them."""
    found: list[Path] = []
    for place in places:
        if not place.exists():
            raise FileNotFoundError(f"no record at {place}: give the JSON file of a benchmark, or a folder of them")
        found += sorted(place.glob("*.json")) if place.is_dir() else [place]
    return found


def entries(places: Sequence[Path]) -> list[Entry]:
    """Return every benchmark of the files and folders ``places``; ``record`` is the content of its file."""
    found = []
    for path in files(places):
        record = json.loads(path.read_text())
        found += [entry | {"record": record} for entry in record.get("benchmarks", ())]
    return found


def suite(entry: Entry) -> str:
    """Return the suite of an entry: ``optim_step`` for ``bench/test_optim_step.py``."""
    return Path(entry["fullname"].split("::")[0]).stem.removeprefix("test_")


def of(found: Iterable[Entry], name: str) -> list[Entry]:
    """Return the entries of one suite."""
    return [entry for entry in found if suite(entry) == name]


def device_of(entry: Entry) -> str:
    """Return the device of an entry; benchmarks without one run on the CPU."""
    return str((entry["params"] or {}).get("device", "cpu"))


def records(found: Iterable[Entry]) -> list[dict[str, Any]]:
    """Return the records that the entries belong to, each once."""
    return list({id(entry["record"]): entry["record"] for entry in found}.values())


def machine(record: dict[str, Any], device: str) -> str:
    """Describe the machine of a record: device, driver, clock, torch, date, and copy bandwidth if measured."""
    known, info = record.get("yardsticks", {}).get(device, {}), record["machine_info"]
    if device == "cuda":
        state = known.get("under load")
        driver = f", driver {state['driver_version']}, {state['clocks.sm']} under load" if state else ""
        what = info["gpu"] + driver
    else:
        what = info["cpu"].get("brand_raw") or info["machine"]
        what += f", load {info['load before']:.1f} before the run"
    what += f", torch {info['torch']}, {record['datetime'][:10]}"
    if known:
        what += f"; copy of {known['copied']}: {known['copy B/s'] / 1e9:.0f} GB/s"
    return what


def command_line(module: str, arguments: Sequence[str], without: Collection[str] = ("--out",)) -> str:
    """Return the command that runs a module, without options that have a path of this machine."""
    left = list(arguments)
    for option in without:
        while option in left:
            at = left.index(option)
            del left[at : at + 2]
    return shlex.join(["python", "-m", module, *left])


def provenance(command: str) -> dict[str, str]:
    """Return the command that makes a record, the date and the version of torch."""
    return {"command": command, "date": datetime.date.today().isoformat(), "torch": torch.__version__}
