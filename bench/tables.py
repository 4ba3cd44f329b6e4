"""Read records as pandas frames and format them as Markdown: what the report of a run and all pages are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bench import peers, records
from bench.markdown import percent, short, spaced, table
from bench.records import Entry

NOTHING = "–"

# Titles of the implementations in tables, in the order of the columns.
TITLES = {
    "torch-foreach": "torch foreach",
    "torch-fused": "torch fused",
    "torch-flatten": "torch flatten",
    "torch": "torch",
    **{name: peer.title for name, peer in peers.PEERS.items()},
    "fbgemm": "FBGEMM",
    "hdet-cuda": "`cuda`",
    "hdet-triton": "`triton`",
    "hdet-cpp": "`cpp`",
    "hdet-torch": "`torch`",
}
# Our backends in the order in which one is compared with the peers; never the pure-torch fallback.
OURS = ("hdet-cuda", "hdet-cpp", "hdet-triton")


def read(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """Return the records of ``folder`` whose names match, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


def frame(entries: Iterable[Entry]) -> pd.DataFrame:
    """Return a row for each case and implementation: suite, device, case, way, parameters and results.

    ``ms`` is the time of a call. A case whose implementations took turns has a row for each of them.
    """
    rows = []
    for entry in entries:
        info, params = entry["extra_info"], entry["params"] or {}
        way = next((params[key] for key in ("way", "kind", "method") if key in params), "")
        named = [str(value) for key, value in params.items() if key not in ("device", "way", "kind", "method")]
        test = entry["name"].split("[")[0].removeprefix("test_")
        known = {
            "suite": records.suite(entry),
            "device": records.device_of(entry),
            "test": test,
            "case": ", ".join(named) or test,
            **params,
        }
        if known["suite"] == "overlap":  # the time that a sync adds
            kinds = ("waited for", "behind the steps")
            rows += [known | {"way": kind, "ms": info[kind]["added ms"]} for kind in kinds]
        elif "ways" in info:
            shared = {key: value for key, value in info.items() if key != "ways"}
            rows += [known | shared | {"way": each} | found for each, found in info["ways"].items()]
        else:
            ms = info.get("ms", info["us"] / 1e3 if "us" in info else None)
            if ms is None and "share" not in info and entry.get("stats"):
                ms = entry["stats"]["median"] * 1e3
            rows.append(known | info | {"way": way, "ms": ms})
    return pd.DataFrame(rows)


def suite_table(found: pd.DataFrame) -> str:
    """Return a table of one suite on one device: a row for each case, a column for each implementation.

    The last column is the time of our fastest backend over that of the fastest peer. The suite of the memory has bytes.
    """
    found = found[found["ms"].notna()]
    order = [*TITLES, *sorted(set(found["way"]) - TITLES.keys())]
    ways = [way for way in order if way in set(found["way"])]
    ours = next((way for way in OURS if way in ways), next((way for way in ways if way.startswith("hdet")), None))
    theirs = [way for way in ways if way in TITLES and not way.startswith("hdet")]
    rows = []
    for (test, case), group in found.groupby(["test", "case"], sort=False):
        by_way = {row["way"]: row for row in group.to_dict("records")}
        times = [by_way[way]["ms"] for way in theirs if way in by_way]
        ratio = by_way[ours]["ms"] / min(times) if ours in by_way and times else None
        cells = [_cell(by_way[way]) if way in by_way else NOTHING for way in ways]
        label = case if len(set(found["test"])) == 1 or case == test else f"{test}: {case}"
        rows.append([label, *cells, NOTHING if ratio is None else f"{ratio:.3f}"])
    return table(["", *(TITLES.get(way, way or "ms") for way in ways), "ours / best peer"], rows)


def _cell(row: dict[str, Any]) -> str:
    peaks = row.get("peak B a parameter")
    return f"{peaks['step']:.2f} B a parameter" if isinstance(peaks, dict) else time_cell(row)


def time_cell(row: dict[str, Any]) -> str:
    """Format a time, with its share of the copy bandwidth where that is known and the cache does not help."""
    share = row.get("share")
    known = share is not None and not pd.isna(share) and row.get("cached") is not True
    return f"{short(row['ms'])} ms" + (f" ({share:.0%})" if known else "")


def render(name: str, **values: Any) -> str:
    """Return the template ``bench/templates/name`` with ``values``."""
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(
        loader=loader,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    filters: dict[str, Callable[..., str]] = {"short": short, "spaced": spaced, "percent": percent}
    environment.filters |= filters
    return environment.get_template(name).render(table=table, **values)
