"""Write the report of a run: machine, copy bandwidth, peers, suites, plots, and a table of every suite."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from bench import peers, plots, records
from bench.markdown import table
from bench.records import Entry
from bench.suites import SUITES, Outcome
from bench.tables import frame, render, suite_table


def write(recorded: Sequence[Path], outcomes: Sequence[Outcome], device: str, out: Path) -> Path:
    """Write REPORT.md and the plots of a run into ``out``; return the path of the report."""
    entries = records.entries(recorded)
    for name in plots.CAPTIONS:
        (out / name).unlink(missing_ok=True)  # from an earlier run
    reasons: dict[str, list[str]] = {}
    for each in outcomes:
        for why, count in each.skipped.items():
            reasons.setdefault(why, []).append(f"{each.name} {count}")
    ran = [[each.name, SUITES[each.name].what, each.line, f"{each.seconds:.0f}"] for each in outcomes]
    text = render(
        "report.md",
        date=datetime.date.today(),
        **_machine(entries, device),
        suites=table(["suite", "measures", "cases", "seconds"], ran, left=3),
        failed=[f"`{case}` of {each.name}: {why}" for each in outcomes for case, why in each.failed.items()],
        skipped=[f"{why} ({', '.join(where)})" for why, where in reasons.items()],
        plots=[(plots.CAPTIONS[name], name) for name in plots.of_records(entries, out)],
        sections=_sections(entries),
    )
    path = out / "REPORT.md"
    path.write_text(text)
    return path


def _machine(entries: list[Entry], device: str) -> dict[str, object]:
    """Return what the template says of the machine; nothing where no case was measured."""
    if not entries:
        return {"machine": ""}
    record = max(records.records(entries), key=lambda record: device in record.get("yardsticks", {}))
    info, known = record["machine_info"], record.get("yardsticks", {}).get(device, {})
    facts = {
        "Python": info["python_version"],
        "CPU threads": info["threads"],
        **{f"backend `{name}`": state for name, state in info["backends"].items()},
    }
    if known:
        launch = known["launch us"]
        copies = ", ".join(f"{size}: {rate / 1e9:.0f}" for size, rate in known["copies B/s"].items())
        facts["copy bandwidth in GB/s, bytes read and written"] = copies
        facts["kernel launch in µs"] = f"{launch['in a row']:.2f} in a series, {launch['alone']:.2f} until it is done"
    facts |= {f"GPU under load: {name}": value for name, value in (known.get("under load") or {}).items()}
    present: dict[str, str] = {}
    for each in records.records(entries):
        for name, state in each["machine_info"].get("peers", {}).items():
            if not present.get(name, "").startswith("failed"):
                present[name] = state
    listed = [
        [peers.PEERS[name].title if name in peers.PEERS else name, state, getattr(peers.PEERS.get(name), "note", "")]
        for name, state in present.items()
    ]
    return {
        "machine": records.machine(record, device),
        "quick": info.get("quick"),
        "facts": table(["", ""], facts.items(), left=2),
        "peers": table(["peer", "version, or why it is absent", "note"], listed, left=3),
    }


def _sections(entries: list[Entry]) -> list[tuple[str, str]]:
    """Return a heading and a table for each suite and device."""
    if not entries:
        return []
    found = frame(entries)
    return [
        (f"{suite} ({'GPU' if device == 'cuda' else 'CPU'}): {SUITES[suite].what}", suite_table(group))
        for (suite, device), group in found.groupby(["suite", "device"], sort=False)
        if suite in SUITES
    ]
