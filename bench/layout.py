"""How results become a table: ways beside each other, with their share of the copy bandwidth and the ratio to peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import peers
import records
from cost_model import grid
from records import Entry

Key = Callable[[Entry, Entry, str], tuple[str, ...]]
NOTHING = "–"

#: More peers than these in one table, and those that few rows have get their own.
MANY = 3

#: How a way is called in a table, and the order of the columns.
WAYS = {
    "torch-foreach": "torch foreach",
    "torch-fused": "torch fused",
    "torch-flatten": "torch flatten",
    "torch": "torch",
    **{name: peer.title for name, peer in peers.PEERS.items()},
    "hdet-cuda": "`cuda`",
    "hdet-triton": "`triton`",
    "hdet-cpp": "`cpp`",
    "hdet-torch": "`torch`",
}


def section(title: str, found: list[Entry], names: tuple[str, ...], key: Key, sort: int = 0) -> str:
    """A row for each ``key`` (of parameters, results and name of an entry), sorted by the first ``sort`` of its parts:
    time and share of every way, and the ratio of our fastest backend to each of the others' ways. Where these are
    many, those that few rows have stand in a table of their own."""
    found = [entry for entry in found if "ms" in entry["extra_info"]]
    if not found:
        return ""
    rows: dict[tuple[str, ...], dict[str, Entry]] = {}
    for entry in found:
        params, info = entry["params"], entry["extra_info"]
        rows.setdefault(key(params, info, entry["name"]), {})[params["way"]] = info
    rows = dict(sorted(rows.items(), key=lambda item: item[0][:sort]))
    used = used_ways(rows.values())
    ours = fastest(used)
    theirs = [way for way in used if not way.startswith("hdet-") and ours]
    apart = [way for way in theirs if 2 * sum(way in cells for cells in rows.values()) < len(rows)]
    apart = apart if len(theirs) > MANY else []
    used, theirs = ([way for way in ways if way not in apart] for ways in (used, theirs))
    header = [*names, *(WAYS[way] for way in used), *(f"{WAYS[ours]} / {WAYS[way]}" for way in theirs if ours)]
    body = []
    for key, cells in rows.items():
        ratios = [_ratio(cells, ours, way) or NOTHING for way in theirs]
        body.append([*key, *(cell(cells.get(way)) for way in used), *ratios])
    lines = [title, records.sources(found), "", *grid(header, body, left=len(names))]
    if apart and ours:
        body = [
            [*key, *(cell(cells.get(way)) + _ratio(cells, ours, way, after=": ") for way in apart)]
            for key, cells in rows.items()
            if any(way in cells for way in apart)
        ]
        header = [*names, *(WAYS[way] for way in apart)]
        lines += ["", f"The others in the same run, each with {WAYS[ours]} over it:", ""]
        lines += grid(header, body, left=len(names))
    if any(info["cached"] for cells in rows.values() for info in cells.values()):
        lines += ["", "\\* so small that it stays in the cache in part: the share says little."]
    return "\n".join(lines)


def _ratio(cells: dict[str, Entry], ours: str | None, way: str, after: str = "") -> str:
    return f"{after}{cells[ours]['ms'] / cells[way]['ms']:.3f}" if ours in cells and way in cells else ""


def turns(title: str, found: list[Entry], label: Callable[[Entry], str]) -> str:
    """A row for each entry whose ways took turns."""
    if not found:
        return ""
    used = used_ways(entry["extra_info"]["ways"] for entry in found)
    body = []
    for entry in found:
        info, ratio = entry["extra_info"], entry["extra_info"]["ratio"]
        cells = [cell(info["ways"].get(way)) for way in used]
        body.append([label(entry), *cells, f"{ratio['ratio']:.3f} ({ratio['low']:.3f}–{ratio['high']:.3f})"])
    header = ["", *(WAYS[way] for way in used), "ours / torch fused"]
    return "\n".join([title, records.sources(found), "", *grid(header, body)])


def used_ways(rows: Any) -> list[str]:
    seen = {way for cells in rows for way in cells}
    return [way for way in WAYS if way in seen]


def fastest(used: Sequence[str]) -> str | None:
    """Ours, that the others are held against; the fallback never."""
    return next((way for way in ("hdet-cuda", "hdet-cpp", "hdet-triton") if way in used), None)


def model(name: str, info: dict[str, Any]) -> str:
    return f"{name}\\*" if info["cached"] else name


def cell(info: dict[str, Any] | None) -> str:
    """Time and share; and of how many bytes a parameter, where a way has to move others than the work asks for."""
    if info is None:
        return NOTHING
    if "share" not in info:
        return f"{short(info['ms'])} ms"
    other = f" of {info['bytes a parameter']:.3g} B" if "work's bytes a parameter" in info else ""
    return f"{short(info['ms'])} ms ({info['share']:.1%}{other})"


def short(value: float) -> str:
    """Four digits that count, or all that stand before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:#.4g}"
