"""Compare implementations in a table: time, share of the copy bandwidth, and ratio of ours to each peer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench import peers, records
from bench.markdown import section_text, table_lines
from bench.records import Entry

Key = Callable[[Entry, Entry, str], tuple[str, ...]]
NOTHING = "–"

# With more peers than this, those that few rows have get a table of their own.
MANY_PEERS = 3

# Titles of the implementations in tables, in the order of the columns.
TITLES = {
    "torch-foreach": "torch foreach",
    "torch-fused": "torch fused",
    "torch-flatten": "torch flatten",
    "torch": "torch",
    **{name: peer.title for name, peer in peers.PEERS.items()},
    "fbgemm": "FBGEMM",
    "flash-muon": "flash-muon",
    "dion": "dion",
    "gram-newton-schulz": "gram-newton-schulz",
    "hdet-cuda": "`cuda`",
    "hdet-triton": "`triton`",
    "hdet-cpp": "`cpp`",
    "hdet-torch": "`torch`",
}


def comparison(
    heading: str, description: str, found: list[Entry], names: tuple[str, ...], key: Key, sort: int = 0
) -> str:
    """Return a section with time and share of every implementation, and the ratio of ours to the others.

    Args:
        heading: Title of the section.
        description: First paragraph.
        found: Entries of one suite on one device.
        names: Headers of the key columns.
        key: Function of (parameters, results, name) of an entry that returns the key columns of its row.
        sort: Rows are sorted by this many of the key columns.
    """
    found = [entry for entry in found if "ms" in entry["extra_info"]]
    if not found:
        return ""
    rows: dict[tuple[str, ...], dict[str, Entry]] = {}
    for entry in found:
        params, info = entry["params"], entry["extra_info"]
        rows.setdefault(key(params, info, entry["name"]), {})[params["way"]] = info
    rows = dict(sorted(rows.items(), key=lambda item: item[0][:sort]))
    used = in_order(rows.values())
    ours = fastest(used)
    theirs = [way for way in used if not way.startswith("hdet-") and ours]
    rare = [way for way in theirs if 2 * sum(way in cells for cells in rows.values()) < len(rows)]
    rare = rare if len(theirs) > MANY_PEERS else []
    used, theirs = ([way for way in ways if way not in rare] for ways in (used, theirs))
    header = [*names, *(TITLES[way] for way in used), *(f"{TITLES[ours]} / {TITLES[way]}" for way in theirs if ours)]
    body = []
    for labels, cells in rows.items():
        ratios = [_ratio(cells, ours, way) or NOTHING for way in theirs]
        body.append([*labels, *(cell(cells.get(way)) for way in used), *ratios])
    blocks = [table_lines(header, body, left=len(names))]
    if rare and ours:
        body = [
            [*labels, *(cell(cells.get(way)) + _ratio(cells, ours, way, after=": ") for way in rare)]
            for labels, cells in rows.items()
            if any(way in cells for way in rare)
        ]
        header = [*names, *(TITLES[way] for way in rare)]
        blocks.append([f"Other peers in the same run; after the colon the ratio of {TITLES[ours]} to the peer:"])
        blocks.append(table_lines(header, body, left=len(names)))
    if any(info["cached"] for cells in rows.values() for info in cells.values()):
        blocks.append(["\\* fits into the cache in part: the share means little."])
    return section_text(heading, description, records.sources(found), *blocks)


def _ratio(cells: dict[str, Entry], ours: str | None, way: str, after: str = "") -> str:
    return f"{after}{cells[ours]['ms'] / cells[way]['ms']:.3f}" if ours in cells and way in cells else ""


def turns(heading: str, description: str, found: list[Entry], label: Callable[[Entry], str]) -> str:
    """Return a section with a row for each entry whose implementations were measured in turns."""
    if not found:
        return ""
    used = in_order(entry["extra_info"]["ways"] for entry in found)
    body = []
    for entry in found:
        info, ratio = entry["extra_info"], entry["extra_info"]["ratio"]
        cells = [cell(info["ways"].get(way)) for way in used]
        body.append([label(entry), *cells, f"{ratio['ratio']:.3f} ({ratio['low']:.3f}–{ratio['high']:.3f})"])
    header = ["", *(TITLES[way] for way in used), "ours / torch"]
    return section_text(heading, description, records.sources(found), table_lines(header, body))


def in_order(rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the implementations that occur in ``rows``, in the order of the columns."""
    seen = {way for cells in rows for way in cells}
    return [way for way in TITLES if way in seen]


def fastest(used: Sequence[str]) -> str | None:
    """Return our backend that peers are compared with; never the pure-torch fallback."""
    return next((way for way in ("hdet-cuda", "hdet-cpp", "hdet-triton") if way in used), None)


def model(name: str, info: dict[str, Any]) -> str:
    """Mark the name of a model whose working set fits into the cache in part."""
    return f"{name}\\*" if info["cached"] else name


def cell(info: dict[str, Any] | None) -> str:
    """Format time and share, and the bytes a parameter where a peer moves others than the operation requires."""
    if info is None:
        return NOTHING
    if "share" not in info:
        return f"{short(info['ms'])} ms"
    other = f" of {info['bytes a parameter']:.3g} B" if "work's bytes a parameter" in info else ""
    return f"{short(info['ms'])} ms ({info['share']:.1%}{other})"


def short(value: float) -> str:
    """Format a number with four significant digits, or all digits before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:#.4g}"
