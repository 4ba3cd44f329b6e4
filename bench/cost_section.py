"""What the README says of the cost of HDET, from the cost model and its recorded check; ``table.py`` puts it there."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from cost_model import H200, INFINIBAND, INTERNET, MODELS, NETWORKS, NVLINK, PLAIN, THRIFTY, main_table, overhead, share

PICTURE = "![Overhead of converge against replicas, over three networks](docs/converge_cost.png)"


def text(results: Path) -> str:
    lines = [f"{_answer()} {_what_the_table_shows()}", "", *main_table(), "", PICTURE, "", _sources()]
    check = results / "cost_check.json"
    return "\n".join([*lines, _check(check)] if check.exists() else lines)


def _answer() -> str:
    centre = max(overhead(2048, model, network) for model, network in product(MODELS, NETWORKS[:2]))
    plain, thrifty = ([overhead(8, model, NETWORKS[2], sync) for model in MODELS] for sync in (PLAIN, THRIFTY))
    return (
        f"In a data centre, at most {share(centre)} of the training time with up to 2048 replicas and "
        f"T = {PLAIN.every}, the default of long runs. Over 1 Gb/s lines, 8 replicas pay {share(min(plain))} to "
        f"{share(max(plain))} in fp32 and {share(min(thrifty))} to {share(max(thrifty))} in int8 behind the next "
        f"{THRIFTY.overlap} steps; ten times the T costs a tenth."
    )


def _what_the_table_shows() -> str:
    return (
        "The table has converge by the number of replicas, and beside it what DDP waits at *every* step for fp32 "
        "gradients with 128 replicas. With shared gradients HDET pays both; with local ones it pays no DDP, but "
        "AdamW's moments travel too: three times the bytes. × is times the training time."
    )


def _sources() -> str:
    return (
        f"Modelled by hops and bytes: NVLink {NVLINK.hop * 1e6:g} µs and {NVLINK.bandwidth / 1e9:g} GB/s, InfiniBand "
        f"{INFINIBAND.hop * 1e6:g} µs and {INFINIBAND.bandwidth / 1e9:g} GB/s (latencies of NCCL's own tuner, "
        f"bandwidths reported in its issues), internet {INTERNET.hop * 1e3:g} ms and 1 Gb/s (assumed); a step is "
        f"6·parameters·{H200.tokens} tokens at {H200.utilisation * 100:g} % of {H200.flops / 1e12:g} TFLOP/s. "
        "Formulas, sources and more tables (T from 100 to 10 000, ring and tree, bf16): `python bench/cost_model.py`."
    )


def _check(path: Path) -> str:
    record = json.loads(path.read_text())
    links = " and ".join(f"{link['rate Mb/s']} Mb/s with {link['delay ms']:g} ms" for link in record["links"])
    return (
        f"Checked on converges of 2, 4 and 8 gloo ranks over links of {links}, with the constants of a ping-pong "
        f"(`{record['command']}`, torch {record['torch']}, {record['date']}, on {record['cores']} busy cores): a ring "
        "that asks before it sends, as gloo's does, is off by "
        f"{_errors(record, 'error')}; the plain ring of the table by {_errors(record, 'textbook error')}."
    )


def _errors(record: dict[str, Any], name: str) -> str:
    """Median and greatest, of converges that are mostly bytes and of those that are mostly hops."""
    found = [entry for link in record["links"] for entry in link["checks"] if entry["operation"] == "converge"]
    large = [abs(entry[name]) for entry in found if entry["bytes"] >= 1_000_000]
    small = [abs(entry[name]) for entry in found if entry["bytes"] < 1_000_000]
    return (
        f"{share(median(large))} in the median and {share(max(large))} at most for 1 to 64 MB, {share(median(small))} "
        f"and {share(max(small))} for 4 and 64 kB"
    )
