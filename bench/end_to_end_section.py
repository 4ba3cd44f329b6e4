"""Format the records of ``test_end_to_end.py``: time of the whole training step, and of its parts."""

from __future__ import annotations

from bench import records
from bench.comparison_table import NOTHING, TITLES, short
from bench.markdown import section_text, table_lines
from bench.records import Entry

# The time of ours over torch's that is claimed not to be exceeded.
CLAIM = 1.0
# Key in the records: the training that syncs after every step.
SYNCING = "a sync every step"


def section(found: list[Entry]) -> str:
    """Return the sections of the suite's entries on one device."""
    found = [entry for entry in found if "amortised" in entry["extra_info"]]
    return f"{_whole(found)}\n\n{_parts(found)}" if found else ""


def _whole(found: list[Entry]) -> str:
    intervals = list(found[0]["extra_info"]["amortised"])
    description = (
        "Forward, backward, clipping, optimizer, scheduler and zero_grad under bf16 autocast, with the peak memory. "
        "torch: AdamW with `fused=True`, `OneCycleLR` and `clip_grad_norm_`. Ours: HDET with `FusedAdamW`, which clips "
        "within its step, and `HDETOneCycleLR`. Both are measured in turns. *A sync* is the time that an average and "
        "the controller add to a step, over a process group of one rank; the cost page has the network time of many "
        "replicas. Ratios are ours / torch, for a step between syncs and with a T-th of a sync added: the median of "
        f"the turns, in brackets its 95 % confidence interval. {_verdict(found)}"
    )
    header = ["", "torch", "ours", "a sync", "between syncs", *(f"T = {t}" for t in intervals)]
    header += ["optimizer at the copy bandwidth"]
    body = []
    for entry in found:
        info, ours = entry["extra_info"], _ours(entry)
        ways, sync = info["ways"], info["sync"]
        peaks = f"{short(sync['ms'])} ms, {_mebibytes(ways[SYNCING]['peak MiB'])}"
        cells = [_way(ways["torch-fused"]), _way(ways[ours]), peaks, _ratio(info["ratio"])]
        cells += [_ratio(info["amortised"][t]) for t in intervals]
        body.append([_label(entry), *cells, f"{info['least ratio']:.3f}"])
    return section_text("Whole training step", description, records.sources(found), table_lines(header, body))


def _verdict(found: list[Entry]) -> str:
    """Return in how many cases ours surely takes at most the time of torch's, syncs included, and the others."""
    ratios = {
        (_label(entry), every): ratio for entry in found for every, ratio in entry["extra_info"]["amortised"].items()
    }
    others = [f"{label} with T = {t}: {_ratio(ratio)}" for (label, t), ratio in ratios.items() if ratio["high"] > CLAIM]
    sure = f"{len(ratios) - len(others)} of {len(ratios)} cases"
    text = f"With syncs the whole interval is at or below {CLAIM:.1f} in {sure}"
    return f"{text}; the others are {'; '.join(others)}." if others else f"{text}."


def _parts(found: list[Entry]) -> str:
    """Return a row for each training and implementation, or the reason why the profiler failed."""
    known = [
        part
        for entry in found
        for parts in entry["extra_info"]["parts"].values()
        if isinstance(parts, dict)
        for part in parts
    ]
    names = [name for name in dict.fromkeys(_ORDER + tuple(known)) if name in known]
    body = []
    for entry in found:
        for way, parts in entry["extra_info"]["parts"].items():
            if isinstance(parts, str):
                body.append([_label(entry), TITLES[way], parts, *[NOTHING] * len(names)])
                continue
            cells = [_part(parts.get(name)) for name in names]
            body.append([_label(entry), TITLES[way], *cells, short(sum(part["device ms"] for part in parts.values()))])
    device = found[0]["params"]["device"]
    measured = "ms that the device is busy, by torch's profiler" if device == "cuda" else "ms"
    description = f"In {measured}. Our optimizer clips within its step."
    lines = table_lines(["", "", *names, "in all"], body, left=2)
    return section_text("Parts of a training step", description, "", lines)


_ORDER = ("forward", "backward", "clip", "optimizer", "scheduler", "zero_grad", "elsewhere")


def _part(found: dict[str, float] | None) -> str:
    return NOTHING if found is None else f"{found['device ms']:.3f}"


def _ours(entry: Entry) -> str:
    return next(way for way in entry["extra_info"]["ways"] if way.startswith("hdet-"))


def _label(entry: Entry) -> str:
    params, info = entry["params"], entry["extra_info"]
    return f"{params['model']}, {info['batch']}, {params['clipping']}"


def _way(found: dict[str, float]) -> str:
    return f"{short(found['ms'])} ms, {_mebibytes(found['peak MiB'])}"


def _mebibytes(value: float) -> str:
    return f"{value / 1024:.1f} GiB" if value >= 1024 else f"{value:.1f} MiB"


def _ratio(found: dict[str, float]) -> str:
    return f"{found['ratio']:.3f} ({found['low']:.3f}–{found['high']:.3f})"
