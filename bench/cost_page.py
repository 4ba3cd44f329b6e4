"""Write docs/cost.md: the cost of an average every T steps by the cost model, and the check of the model.

``pages.py`` calls this module. Every figure comes from ``cost_model.py`` or from the recorded run of ``link_check.py``.
"""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from bench.cost_model import (
    CHEAPEST,
    H200,
    INFINIBAND,
    INTERNET,
    MODELS,
    NETWORKS,
    NVLINK,
    PLAIN,
    REPLICAS,
    ROW_BYTES,
    TREE_SHARE,
    Model,
    Network,
    Sync,
    control_row,
    control_row_over_gloo,
    ddp_overhead,
    overhead,
    ring_gather,
)
from bench.markdown import table_lines

PLOT = "converge_cost.png"
SHOWN_REPLICAS = (8, 128, 2048, 16384)
# Steps that hide the average of the smallest model in a data centre.
FEW_STEPS = Sync(overlap=2)


def text(results: Path) -> str:
    """Return the page; ``results`` is the folder with ``cost_check.json``."""
    parts = [
        "# What does an average every T steps cost?",
        "Written by `python -m bench.pages` from `bench/cost_model.py` and `bench/results/cost_check.json`.",
        _answer(),
        "## Share of the training time",
        f"The table has the cost of averaging the parameters every T = {PLAIN.every} steps, by the number of replicas. "
        f'Columns *int8* use `compress="int8"` and run behind the next {CHEAPEST.overlap} steps. Beside it is the '
        "time that DDP with 128 replicas waits for fp32 gradients at *every* step. With shared gradients HDET pays "
        "both. With local gradients it pays no DDP, but AdamW's moments are averaged too: three times the bytes. × "
        "means times the training time. Ten times the T costs a tenth.",
        "\n".join(cost_table()),
        f"![Cost of averaging against the number of replicas, over three networks]({PLOT})",
        _model(),
        _thousands(),
        _constants(),
        _check(json.loads((results / "cost_check.json").read_text())),
    ]
    return "\n\n".join(parts) + "\n"


def _answer() -> str:
    centre = max(overhead(REPLICAS[-1], model, network) for model, network in product(MODELS, NETWORKS[:2]))
    plain, cheap = ([overhead(8, model, NETWORKS[2], sync) for model in MODELS] for sync in (PLAIN, CHEAPEST))
    return (
        f"In a data centre: at most {share(centre)} of the training time, with up to {_count(REPLICAS[-1])} "
        f"replicas and T = {PLAIN.every}, the default of long runs. Over lines of 1 Gb/s, 8 replicas pay "
        f"{share(min(plain))} to {share(max(plain))} in fp32, and {share(min(cheap))} to {share(max(cheap))} in int8 "
        f"behind the next {CHEAPEST.overlap} steps."
    )


def cost_table() -> list[str]:
    """Return the table of networks and models against the number of replicas."""
    header = ["network", "parameters", "step", "DDP, 128"]
    header += [f"{name}, {_count(n)}" for name in ("fp32", "int8") for n in SHOWN_REPLICAS]
    rows = []
    for network, model in product(NETWORKS, MODELS):
        cells = [network.name, _sized(model), _seconds(model.step(H200)), share(ddp_overhead(128, model, network))]
        cells += [share(overhead(n, model, network, sync)) for sync in (PLAIN, CHEAPEST) for n in SHOWN_REPLICAS]
        rows.append(cells)
    return table_lines(header, rows, left=2)


def _model() -> str:
    return f"""## The model

A message of B bytes takes α + B/β over a link with latency α and bandwidth β. With N replicas:

| collective | seconds | |
| --- | --- | --- |
| ring | 2(N−1)·α + 2(N−1)/N·B/β | reduce-scatter, then all-gather |
| tree | 2⌈log₂N⌉·α + 2·B/({TREE_SHARE:.2f}·β) | double binary tree |
| two-phase | N·α + 2(N−1)/N·B/β | all-to-all and all-gather, for int8 |
| control row | 2⌈log₂N⌉·α + 2·{ROW_BYTES}·N/({TREE_SHARE:.2f}·β) | tree over a table of all rows, at every average |
| control row, gloo | ⌈log₂N⌉·α + {ROW_BYTES}·(N−1)/β | exchanges in pairs, in which the known rows double |

Parameters travel in buckets of 512 MiB of fp32, one after the other, and each bucket pays its latencies. NCCL uses the
faster of ring and tree. In nodes of eight GPUs all bytes cross NVLink, and an eighth of them each network card. Passes
over local memory (checksum, backup, compression) run at the copy bandwidth. A model that does not fit one GPU
(16 bytes a parameter in 70 % of {H200.memory / 1e9:g} GB) is sharded over S of them, a power of two, and each GPU
averages its shard. Over the internet all shards of a replica share one line. The time in which the processes evaluate
the rows is left out."""


def _thousands() -> str:
    """Return the section on the control row with thousands of replicas."""
    (nodes, card, _), model = NETWORKS, MODELS[0]
    cycle = PLAIN.every * model.step(H200)
    rows = []
    for network in (nodes, card):
        for n in (128, 1024, 16384):
            times = [ring_gather(n, network), control_row(n, network), control_row_over_gloo(n, network)]
            costs = [overhead(n, model, network, sync) for sync in (PLAIN, FEW_STEPS)]
            as_ring = costs[0] + (times[0] - times[1]) / cycle
            rows.append([network.name, _count(n), *map(_seconds, times), *map(share, (as_ring, *costs))])
    header = ["network", "replicas", "around a ring", "as a tree", "in pairs", "average, with the ring", "average"]
    header.append(f"average behind {FEW_STEPS.overlap} steps")
    flat, known = (control_row_over_gloo(16384, Network("", card.link, node, NVLINK)) for node in (1, nodes.node))
    floor = 2 * 4 * model.params / card.link.bandwidth / cycle
    whole = overhead(16384, model, card)
    return "\n".join(
        [
            "## Thousands of replicas",
            "",
            "Every process sees the control row of every replica: the controller, the history and the errors that name "
            "ranks need them. Around a ring, as in the all-gather of NCCL and gloo, that takes N−1 hops. So NCCL adds "
            "up a table that is zero but for the own row, which is a tree for small messages, and over gloo the "
            "processes exchange what they know in pairs, the distant ones first. The bits of a row stay as they are. "
            "The table has the seconds of the control row, and the share of the training time that an average takes "
            f"with it, for {_sized(model)} parameters in fp32.",
            "",
            *table_lines(header, rows),
            "",
            "Both ways have two levels where nodes have several processes. NCCL's tree is a chain within a node. The "
            "last exchanges, with most of the bytes, are between neighbours, so that nodes of 2ʲ consecutive ranks "
            "keep j of the hops to themselves, without being told where a node ends: with 16 384 replicas in nodes of "
            f"{nodes.node} the rows take {_seconds(known)} instead of {_seconds(flat)}.",
            "",
            f"What is left on InfiniBand, {share(whole)} with 16 384 replicas, are the parameters: an all-reduce moves "
            f"at least twice their bytes, which takes {share(floor)} of the training time through one card. Less needs "
            f"nodes whose replicas share their cards, or `overlap_steps={FEW_STEPS.overlap}`.",
        ]
    )


def _constants() -> str:
    return f"""## Where the constants come from

- **NVLink**: {NVLINK.hop * 1e6:g} µs a hop is the ring latency of NCCL's own tuner (`src/graph/tuning.cc`, protocol
  Simple). {NVLINK.bandwidth / 1e9:g} GB/s is what a ring reaches of 450 (NVIDIA/nccl-tests issue 212, NVIDIA/nccl issue
  1455).
- **InfiniBand**: {INFINIBAND.hop * 1e6:g} µs a hop, from the same file. {INFINIBAND.bandwidth / 1e9:g} GB/s of a
  400 Gb/s card: 190 GB/s over four of them, where the tree reached 150 (NVIDIA/nccl issue 1368).
- **Internet**: {INTERNET.hop * 1e3:g} ms a hop is an assumption (half a round trip between Europe and America).
  {INTERNET.bandwidth / 1e6:.1f} MB/s is 1 Gb/s less the headers of Ethernet, IP and TCP.
- **GPU**: {H200.flops / 1e12:g} TFLOP/s in bf16 and {H200.memory / 1e9:g} GB are from NVIDIA's H200 data sheet.
  {H200.utilisation * 100:g} % utilisation is within the 38 to 43 % of the Llama 3 report. {H200.tokens} tokens a GPU
  and step is an assumption; a step takes 6·parameters·tokens FLOP. The copy bandwidth of {H200.copy / 1e12:g} TB/s was
  measured on an H200.

The model leaves out other traffic, waiting for the slowest replica, and NVLink SHARP. A public measurement on four
nodes of eight GPUs has 320 GB/s (NVIDIA/nccl issue 1221) where this model has {NVLINK.bandwidth / 1e9:g}."""


def _check(record: dict[str, Any]) -> str:
    """Return the section that compares the model with the recorded collectives."""
    links = " and ".join(f"{link['rate Mb/s']} Mb/s with {link['delay ms']:g} ms" for link in record["links"])
    rows = [
        [
            f"{link['rate Mb/s']} Mb/s, {link['delay ms']:g} ms",
            str(entry["ranks"]),
            f"{entry['bytes']:,}".replace(",", " "),
            _seconds(entry["measured s"]),
            f"{_seconds(entry['predicted s'])} ({entry['error']:+.0%})",
            f"{_seconds(entry['textbook s'])} ({entry['textbook error']:+.0%})",
        ]
        for link in record["links"]
        for entry in _averages(link)
    ]
    header = ["link", "ranks", "bytes", "measured", "gloo's ring", "plain ring"]
    return "\n".join(
        [
            "## Check against measured links",
            "",
            f"Averages of 2, 4 and 8 gloo ranks over links of {links} were measured and predicted from the latency and "
            "the bandwidth of point-to-point messages (`python -m bench.link_check`, torch "
            f"{record['torch']}, {record['date']}, on {record['cores']} cores that were busy with other work). gloo "
            "asks the receiver before it sends, so that a hop takes 2α. A ring with this rule is off by "
            f"{_errors(record, 'error')}. The plain ring of the table above is off by "
            f"{_errors(record, 'textbook error')}.",
            "",
            *table_lines(header, rows),
            "",
            "The gather of the control rows alone, in turns with gloo's all-gather of as many bytes, which is a ring:",
            "",
            *_gathers(record),
        ]
    )


def _gathers(record: dict[str, Any]) -> list[str]:
    rows = [
        [
            f"{link['rate Mb/s']} Mb/s, {link['delay ms']:g} ms",
            str(entry["ranks"]),
            *(_seconds(entry[name]) for name in ("measured s", "predicted s", "ring s", "ring predicted s")),
        ]
        for link in record["links"]
        for entry in link["gathers"]
    ]
    return table_lines(["link", "ranks", "in pairs", "predicted", "around a ring", "predicted"], rows)


def _averages(link: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in link["checks"] if entry["operation"] == "converge"]


def _errors(record: dict[str, Any], name: str) -> str:
    """Return median and greatest error of messages that are dominated by bytes, and of those dominated by hops."""
    found = [entry for link in record["links"] for entry in _averages(link)]
    large = [abs(entry[name]) for entry in found if entry["bytes"] >= 1_000_000]
    small = [abs(entry[name]) for entry in found if entry["bytes"] < 1_000_000]
    return (
        f"{share(median(large))} in the median and {share(max(large))} at most for 1 to 64 MB, {share(median(small))} "
        f"and {share(max(small))} for 4 and 64 kB"
    )


def plot(path: Path) -> None:
    """Draw the overhead against the number of replicas, one panel for each network, beside that of DDP."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    panels = figure.subplots(1, len(NETWORKS), sharey=True)
    colours = ("tab:blue", "tab:green", "tab:orange", "tab:red")
    for panel, network in zip(panels, NETWORKS, strict=True):
        for model, colour in zip(MODELS, colours, strict=True):
            for sync, style in ((PLAIN, "-"), (CHEAPEST, "--")):
                panel.plot(REPLICAS, [overhead(n, model, network, sync) for n in REPLICAS], style, color=colour, lw=1.6)
            waited = [ddp_overhead(n, model, network) or math.nan for n in REPLICAS]
            panel.plot(REPLICAS, waited, ":", color=colour, lw=1.6)
        panel.axhline(0.01, color="black", lw=1)
        panel.set(title=network.name, xscale="log", yscale="log", ylim=(1e-6, 1e5), xlim=(REPLICAS[0], REPLICAS[-1]))
        panel.set_xticks(SHOWN_REPLICAS, [_count(n) for n in SHOWN_REPLICAS])
        panel.minorticks_off()
        panel.grid(color="0.92")
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    panels[0].set_yticks([1e-6, 1e-4, 1e-2, 1, 1e2, 1e4])
    panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:,.10g} %".replace(",", " ")))
    panels[0].set_ylabel(f"of the training time (T = {PLAIN.every})")
    panels[1].set_xlabel("replicas")
    panels[0].text(9, 0.0125, "1 %", fontsize=9)
    panels[0].text(9, 0.3, "DDP hides its gradients\nbehind the backward pass", fontsize=9, color="0.4")
    lines = [Line2D([], [], color=colour, lw=1.6) for colour in colours]
    lines += [Line2D([], [], color="black", ls=style, lw=1.6) for style in ("-", "--", ":")]
    names = [model.name for model in MODELS]
    names += ["average, fp32", f"average, int8 behind {CHEAPEST.overlap} steps", "DDP, every step"]
    figure.legend(lines, names, loc="outside lower center", ncols=7, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def share(value: float) -> str:
    """Format a share of the training time."""
    if value == 0:
        return "0"
    if value >= 10:
        return f"{value:,.0f} ×".replace(",", " ")
    percent = 100 * value
    return "< 0.01 %" if percent < 0.01 else f"{percent:.2g} %" if percent < 10 else f"{percent:.0f} %"


def _sized(model: Model) -> str:
    gpus = model.gpus(H200)
    return model.name if gpus == 1 else f"{model.name} on {gpus} GPUs"


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1e3:.2g} ms" if value < 0.0995 else f"{value * 1e3:.0f} ms"
    return f"{value:.2g} s" if value < 9.95 else f"{value:,.0f} s".replace(",", " ")


def _count(value: int) -> str:
    return f"{value:,}".replace(",", " ") if value >= 10_000 else str(value)
