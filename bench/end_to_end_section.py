"""The tables of what ``test_end_to_end.py`` recorded: the whole step, and where its time goes."""

from __future__ import annotations

import records
from cost_model import grid
from layout import NOTHING, WAYS, short
from records import Entry

#: What ours costs beside torch's is at most this, or the claim fails.
CLAIM = 1.0
#: The way that syncs after every step.
SYNCING = "a sync every step"


def section(found: list[Entry]) -> str:
    """Of the suite's entries on one device."""
    found = [entry for entry in found if "amortised" in entry["extra_info"]]
    return f"{_whole(found)}\n\n{_parts(found)}" if found else ""


def _whole(found: list[Entry]) -> str:
    every = list(found[0]["extra_info"]["amortised"])
    title = (
        "**A whole training step** under bf16 autocast (forward, backward, clipping, step, scheduler, zero_grad): "
        "plain torch (AdamW with `fused=True`, `OneCycleLR`, `clip_grad_norm_`) beside ours with HDET on "
        "(`FusedAdamW` that clips, `HDETOneCycleLR`), in turns; and the peak of the memory. A sync is what an average "
        "and the controller add to a step, over a process group of one rank: what the wires take with many is in the "
        "table of costs. "
        "Ratios are ours / torch, for a step between syncs and with its share of a sync every T; behind them the "
        f"quartiles of the turns. {_verdict(found)}"
    )
    header = ["", "torch", "ours", "a sync", "between syncs", *(f"T = {t}" for t in every)]
    header += ["with an optimizer at the copy bandwidth"]
    body = []
    for entry in found:
        info, ours = entry["extra_info"], _ours(entry)
        ways, sync = info["ways"], info["sync"]
        peaks = f"{short(sync['ms'])} ms, {_mebibytes(ways[SYNCING]['peak MiB'])}"
        cells = [_way(ways["torch-fused"]), _way(ways[ours]), peaks, _ratio(info["ratio"])]
        cells += [_ratio(info["amortised"][t]) for t in every]
        body.append([_label(entry), *cells, f"{info['least ratio']:.3f}"])
    return "\n".join([title, records.sources(found), "", *grid(header, body)])


def _verdict(found: list[Entry]) -> str:
    """Whether HDET with our optimizer costs no more than plain training with torch's, in how many of all cases."""
    ratios = {
        (_label(entry), every): ratio["ratio"]
        for entry in found
        for every, ratio in entry["extra_info"]["amortised"].items()
    }
    above = [f"{label} with T = {every} ({ratio:.3f})" for (label, every), ratio in ratios.items() if ratio > CLAIM]
    told = f"At most {CLAIM:.1f}, syncs included, in {len(ratios) - len(above)} of {len(ratios)} cases"
    return f"{told}; not for {', '.join(above)}." if above else f"{told}."


def _parts(found: list[Entry]) -> str:
    """A row for each training and way; a step that the profiler could not look into says why."""
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
                body.append([_label(entry), WAYS[way], parts, *[NOTHING] * len(names)])
                continue
            cells = [_part(parts.get(name)) for name in names]
            body.append([_label(entry), WAYS[way], *cells, short(sum(part["device ms"] for part in parts.values()))])
    device = found[0]["params"]["device"]
    of_what = "that the device is busy" if device == "cuda" else "of each part"
    title = f"**Where the time goes**, in ms {of_what} (torch's profiler); ours clips within its optimizer's step."
    return "\n".join([title, "", *grid(["", "", *names, "in all"], body, left=2)])


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
