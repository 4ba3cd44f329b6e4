"""Write the report of a run: machine, copy bandwidth, peers, suites, plots, and the tables of ``sections.py``."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from bench import peers, records, scaling_section, sections
from bench.markdown import table_lines
from bench.outcome import Outcome
from bench.records import Entry
from bench.suites import SUITES

PLOTS = {
    "roofline.png": "Share of the copy bandwidth against the bytes moved for each parameter",
    "peers.png": "Time of each peer relative to ours",
    "scaling.png": "Step time against the number of parameters and of tensors",
}


def text(
    entries: list[Entry], outcomes: Sequence[Outcome], device: str, when: datetime.date, drawn: str | list[str]
) -> str:
    """Return the report; ``drawn`` are the plots that were written, or the reason why there are none."""
    parts = [f"# Benchmarks, {when}", _machine(entries, device), _peers(entries), _outcomes(outcomes)]
    parts.append("## Plots")
    parts += [drawn] if isinstance(drawn, str) else [f"![{PLOTS[name]}]({name})" for name in drawn]
    parts.append(sections.text(entries) or "Nothing was measured.")
    return "\n\n".join(filter(None, parts)) + "\n"


def plots(recorded: Sequence[Path], out: Path) -> str | list[str]:
    """Draw the plots into ``out`` and return their names, or the reason why there are none."""
    from bench import plots

    for name in PLOTS:
        (out / name).unlink(missing_ok=True)  # from an earlier run
    entries = records.entries(recorded)
    try:
        drawn = [
            plots.roofline(entries, out / "roofline.png"),
            plots.bars(entries, out / "peers.png"),
            scaling_section.plot(entries, out / "scaling.png"),
        ]
    except ImportError as error:
        return f"None: {error}."
    written = [name for name, there in zip(PLOTS, drawn, strict=True) if there]
    return written or "None: no suite of this run recorded shares or peers."


def _machine(entries: list[Entry], device: str) -> str:
    if not entries:
        return ""
    record = max(records.records(entries), key=lambda record: device in record.get("yardsticks", {}))
    info, known = record["machine_info"], record.get("yardsticks", {}).get(device, {})
    lines = [records.machine(record, device) + "."]
    if info.get("quick"):
        lines.append("**A quick run, which only checks that everything runs: its times are meaningless.**")
    facts = {
        "Python": info["python_version"],
        "CPU threads": info["threads"],
        **{f"backend `{name}`": state for name, state in info["backends"].items()},
    }
    if known:
        copies = ", ".join(f"{size}: {rate / 1e9:.0f}" for size, rate in known["copies B/s"].items())
        launch = known["launch us"]
        facts["copy bandwidth in GB/s, bytes read and written"] = copies
        facts["kernel launch in µs"] = f"{launch['in a row']:.2f} in a series, {launch['alone']:.2f} until it is done"
    facts |= {f"GPU under load: {name}": value for name, value in (known.get("under load") or {}).items()}
    return "\n".join(
        [*lines, "", *table_lines(["", ""], [[name, str(value)] for name, value in facts.items()], left=2)]
    )


def _peers(entries: list[Entry]) -> str:
    """Return the table of peers with version, or the reason for their absence or failure."""
    found: dict[str, str] = {}
    for record in records.records(entries):
        for name, state in record["machine_info"].get("peers", {}).items():
            if not found.get(name, "").startswith("failed"):
                found[name] = state
    if not found:
        return ""
    body = [[_title(name), state, _note(name)] for name, state in found.items()]
    return "\n".join(["## Peers", "", *table_lines(["peer", "version, or why it is absent", "note"], body, left=3)])


def _title(name: str) -> str:
    return peers.PEERS[name].title if name in peers.PEERS else name


def _note(name: str) -> str:
    return peers.PEERS[name].note if name in peers.PEERS else ""


def _outcomes(outcomes: Sequence[Outcome]) -> str:
    body = [[each.name, SUITES[each.name].what, each.line, f"{each.seconds:.0f}"] for each in outcomes]
    lines = ["## Suites", "", *table_lines(["suite", "measures", "cases", "seconds"], body, left=3)]
    failures = [f"- `{case}` of {each.name}: {why}" for each in outcomes for case, why in each.failed.items()]
    lines += ["", "Failed:", "", *failures] if failures else []
    reasons: dict[str, list[str]] = {}
    for each in outcomes:
        for why, count in each.skipped.items():
            reasons.setdefault(why, []).append(f"{each.name} {count}")
    skips = [f"- {why} ({', '.join(where)})" for why, where in reasons.items()]
    return "\n".join([*lines, "", "Skipped cases:", "", *skips] if skips else lines)
