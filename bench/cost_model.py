"""What does HDET cost me? The time that converge takes, modelled, as a share of the training time.

python bench/cost_model.py                                    # tables
python bench/cost_model.py --plot docs/converge_cost.png      # and the plot
python bench/cost_model.py --csv grid.csv                     # and every combination

A message of B bytes takes α + B/β over a link with α seconds a hop and β bytes a second. With N replicas:

    ring         2(N−1)·α + 2(N−1)/N·B/β         reduce-scatter, then all-gather, each in N−1 hops
    tree         2⌈log₂N⌉·α + 2·B/(0.79·β)       double binary tree: up and down, in two halves at once
    two-phase    N·α + 2(N−1)/N·B/β              all-to-all in one hop, all-gather in N−1; for compressed values
    control row  (N−1)·(α + 160/β)               all-gather around a ring

The parameters travel in buckets of 512 MiB of fp32, one after the other, and each pays its hops. Of a ring through
nodes of g replicas, 2(N−N/g) hops are within nodes and 2(N/g−1) between them, of a tree 2(g−1) and 2⌈log₂(N/g)⌉. Every
GPU has a network card of its own, g rings run at once, and the slower kind of link sets the pace: all bytes go within
the node, a g-th of them through each card. NCCL chooses between ring and tree. gloo has the ring alone, and asks before
it sends, so that a hop costs twice (``link_check.py``).

What a sync costs: the control row and the collectives, or what is left of them behind ``overlap`` steps; and passes
over local memory at the copy bandwidth. It is divided by T steps of 6·parameters·tokens/(FLOP/s·utilisation) seconds
each. A model that does not fit one GPU (16 bytes a parameter in 70 % of 141 GB) is cut over S of them, a power of two;
each averages its S-th with its peers in the other replicas. Over the internet a replica has one line, through which all
S parts go.

Where the constants are from:

    NVLink        3.4 µs a hop: the ring latency of NCCL's own tuner (its src/graph/tuning.cc, protocol Simple).
                  370 GB/s: what a ring gets of 450 (NVIDIA/nccl-tests issue 212, NVIDIA/nccl issue 1455).
    InfiniBand    14 µs a hop: the same file. 47.5 GB/s of a 400 Gb/s card: 190 GB/s over four of them, where the
                  tree got 150, which is the 0.79 above (NVIDIA/nccl issue 1368).
    internet      50 ms a hop (half a round trip between Europe and America) is an assumption; 117.7 MB/s is
                  1 Gb/s less the headers of Ethernet, IP and TCP (1448 bytes of every 1538).
    GPU           989 TFLOP/s in bf16 without sparsity, 141 GB (NVIDIA's H200 data sheet); 40 % of it used (38 to
                  43 % in the Llama 3 report); 8192 tokens a GPU and step is an assumption. The copy bandwidth of
                  4.264 TB/s was measured on an H200.

What it leaves out: other traffic on the network, waiting for the slowest replica, and NVLink SHARP (480 instead of 370
GB/s within a node). A public measurement of four nodes of eight has 320 GB/s (NVIDIA/nccl issue 1221) where this model
has 370. How far hops and bytes hold against real collectives is measured by ``link_check.py``.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

BUCKET_BYTES = 512 * 2**20
#: What DistributedDataParallel puts into one collective.
DDP_BUCKET_BYTES = 25 * 2**20
#: The control row: up to 20 numbers in fp64.
ROW_BYTES = 160
#: Of the bandwidth of a ring.
TREE_SHARE = 150 / 190
#: Backward's share of a step: two of the three matrix products of every layer. DDP's collectives run behind it.
BACKWARD = 2 / 3

#: Bytes an element on the wire; int8 has one fp32 scale for 256 elements.
WIRES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 4 / 256}
ALGORITHMS = ("ring", "tree", "best")

#: Bytes of local memory an element: the control row's checksum; the copy that comes back if a collective fails; the
#: difference to the last consensus, with its rounding error kept, and what arrived, added to it; two copies for a
#: collective beside the training, their difference, and its sum with what was trained meanwhile.
CHECKSUM, BACKUP, ENCODE, DECODE, SNAPSHOT, DIFFERENCE, LANDING = 4, 8, 17, 13, 16, 12, 12


@dataclass(frozen=True)
class Link:
    """hop: seconds until the first byte arrives (α). bandwidth: bytes a second, each way (β)."""

    name: str
    hop: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.hop >= 0 and self.bandwidth > 0):
            raise ValueError(
                f"link {self.name}: hop must be at least 0 s and bandwidth above 0 B/s, got {self.hop} and "
                f"{self.bandwidth}"
            )


@dataclass(frozen=True)
class Network:
    """link: between nodes. inside: within a node of ``node`` GPUs. shared_line: all GPUs of a replica share a link."""

    name: str
    link: Link
    node: int = 1
    inside: Link | None = None
    shared_line: bool = False

    def __post_init__(self) -> None:
        if self.node < 1 or (self.node > 1) != (self.inside is not None):
            raise ValueError(
                f"network {self.name}: node must be 1 without a link inside of it and more with one, got "
                f"{self.node} and {self.inside}"
            )


@dataclass(frozen=True)
class Gpu:
    """flops: peak, of which ``utilisation`` is used. copy: bytes read and written a second. tokens: a step."""

    flops: float = 989e12
    utilisation: float = 0.4
    copy: float = 4.264e12
    memory: float = 141e9
    tokens: int = 8192


@dataclass(frozen=True)
class Model:
    name: str
    params: float

    def __post_init__(self) -> None:
        if not self.params > 0:
            raise ValueError(f"model {self.name}: params must be above 0, got {self.params}")

    def gpus(self, gpu: Gpu) -> int:
        """S: the GPUs of one replica, so that parameters, gradients and AdamW's moments fit into 70 % of them."""
        return 2 ** max(0, math.ceil(math.log2(16 * self.params / (0.7 * gpu.memory))))

    def step(self, gpu: Gpu) -> float:
        """Seconds of one step without any communication; S GPUs take S times the tokens."""
        return 6 * self.params * gpu.tokens / (gpu.flops * gpu.utilisation)


@dataclass(frozen=True)
class Sync:
    """How replicas converge.

    every: steps between two syncs (T). overlap: steps behind which the collectives run. moments: AdamW's two moments
    are averaged with the parameters, as they are when gradients are local. bucket_bytes: of fp32 in one collective.
    """

    every: int = 1000
    wire: str = "fp32"
    algorithm: str = "best"
    overlap: int = 0
    moments: bool = False
    bucket_bytes: float = BUCKET_BYTES

    def __post_init__(self) -> None:
        if self.wire not in WIRES:
            raise ValueError(f"wire must be one of {', '.join(WIRES)}, got {self.wire!r}")
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {self.algorithm!r}")
        if self.every < 1:
            raise ValueError(f"every must be at least 1 step, got {self.every}")
        if not 0 <= self.overlap < self.every:
            raise ValueError(f"overlap must be from 0 to every - 1 = {self.every - 1} steps, got {self.overlap}")
        if not self.bucket_bytes > 0:
            raise ValueError(f"bucket_bytes must be above 0, got {self.bucket_bytes}")


@dataclass(frozen=True)
class Cost:
    """Seconds of one sync: control row, collectives, what of both is waited for, passes over local memory."""

    row: float
    collectives: float
    exposed: float
    local: float

    @property
    def total(self) -> float:
        return self.exposed + self.local


NVLINK = Link("NVLink", 3.4e-6, 370e9)
INFINIBAND = Link("InfiniBand 400 Gb/s", 14e-6, 47.5e9)
INTERNET = Link("internet 1 Gb/s", 0.05, 1e9 / 8 * 1448 / 1538)

NETWORKS = (
    Network("NVLink nodes of 8", INFINIBAND, node=8, inside=NVLINK),
    Network("InfiniBand", INFINIBAND),
    Network("1 Gb/s internet", INTERNET, shared_line=True),
)
MODELS = (Model("124 M", 124e6), Model("1.5 B", 1.5e9), Model("8 B", 8e9), Model("70 B", 70e9))
REPLICAS = tuple(2**power for power in range(3, 15))
H200 = Gpu()
#: The two ends of what can be chosen: all as it is by default, and all that hides or shrinks the collectives.
PLAIN = Sync()
THRIFTY = Sync(wire="int8", overlap=100)


def ring(replicas: int, nbytes: float, link: Link) -> float:
    """2(N−1)·α + 2(N−1)/N·B/β"""
    return allreduce(replicas, nbytes, Network(link.name, link), "ring")


def tree(replicas: int, nbytes: float, link: Link) -> float:
    """2⌈log₂N⌉·α + 2·B/(0.79·β)"""
    return allreduce(replicas, nbytes, Network(link.name, link), "tree")


def two_phase(replicas: int, nbytes: float, link: Link) -> float:
    """N·α + 2(N−1)/N·B/β"""
    return allreduce(replicas, nbytes, Network(link.name, link), "two-phase")


def all_gather(replicas: int, nbytes: float, link: Link) -> float:
    """(N−1)·(α + B/β) for B bytes from each"""
    _check_replicas(replicas)
    return (replicas - 1) * (link.hop + nbytes / link.bandwidth)


def allreduce(
    replicas: int, nbytes: float, network: Network, algorithm: str, collectives: int = 1, gpus: int = 1
) -> float:
    """Seconds to reduce ``nbytes`` in ``collectives`` parts, one after the other, between replicas of ``gpus`` each."""
    _check_replicas(replicas)
    if replicas == 1:
        return 0.0
    if algorithm == "best":
        return min(allreduce(replicas, nbytes, network, name, collectives, gpus) for name in ("ring", "tree"))
    together, nodes = _nodes(replicas, network, gpus)
    outside, inside = network.link, network.inside or network.link
    if algorithm == "ring":
        hops = 2 * (replicas - nodes) * inside.hop + 2 * (nodes - 1) * outside.hop
    elif algorithm == "tree":
        hops = 2 * (together - 1) * inside.hop + 2 * math.ceil(math.log2(nodes)) * outside.hop
    elif algorithm == "two-phase":
        slower = outside if nodes > 1 else inside
        hops = slower.hop + (replicas - nodes) * inside.hop + (nodes - 1) * outside.hop
    else:
        raise ValueError(f"algorithm must be ring, tree, two-phase or best, got {algorithm!r}")
    sent = 2 * nbytes / TREE_SHARE if algorithm == "tree" else 2 * (replicas - 1) / replicas * nbytes
    pace = sent / inside.bandwidth if together > 1 else 0.0
    if nodes > 1:
        pace = max(pace, sent / together / outside.bandwidth)
    return collectives * hops + pace


def control_row(replicas: int, network: Network, gpus: int = 1) -> float:
    """The all-gather of the control rows, around a ring whatever the AllReduce does."""
    _check_replicas(replicas)
    _, nodes = _nodes(replicas, network, gpus)
    inside = network.inside or network.link
    return (replicas - nodes) * (inside.hop + ROW_BYTES / inside.bandwidth) + (nodes - 1) * (
        network.link.hop + ROW_BYTES / network.link.bandwidth
    )


def converge(replicas: int, model: Model, network: Network, sync: Sync = PLAIN, gpu: Gpu = H200) -> Cost:
    """What one sync takes."""
    _check_replicas(replicas)
    if replicas == 1:
        return Cost(0.0, 0.0, 0.0, 0.0)
    gpus = model.gpus(gpu)
    elements = model.params / gpus * (3 if sync.moments else 1)
    on_a_line = elements * gpus if network.shared_line else elements
    collectives = math.ceil(4 * elements / sync.bucket_bytes) * (gpus if network.shared_line else 1)
    algorithm = sync.algorithm if sync.wire == "fp32" else "two-phase"
    took = allreduce(replicas, on_a_line * WIRES[sync.wire], network, algorithm, collectives, gpus)
    row = control_row(replicas, network, gpus)
    exposed = max(0.0, row + took - sync.overlap * model.step(gpu))
    local = CHECKSUM
    local += 0 if sync.wire == "fp32" else ENCODE + DECODE
    local += BACKUP if sync.wire == "fp32" and not sync.overlap else 0
    local += SNAPSHOT + DIFFERENCE + LANDING if sync.overlap else 0
    return Cost(row, took, exposed, elements * local / gpu.copy)


def overhead(replicas: int, model: Model, network: Network, sync: Sync = PLAIN, gpu: Gpu = H200) -> float:
    """Of the time that T steps take: 0.01 is one per cent."""
    return converge(replicas, model, network, sync, gpu).total / (sync.every * model.step(gpu))


def ddp_overhead(replicas: int, model: Model, network: Network, gpu: Gpu = H200) -> float:
    """What data parallel training waits for its fp32 gradients at every step, as a share of the step: what is left of
    the AllReduces behind the backward pass."""
    gpus, step = model.gpus(gpu), model.step(gpu)
    nbytes = 4 * model.params / (1 if network.shared_line else gpus)
    took = allreduce(replicas, nbytes, network, "best", math.ceil(nbytes / DDP_BUCKET_BYTES), gpus)
    return max(0.0, took - BACKWARD * step) / step


def _nodes(replicas: int, network: Network, gpus: int) -> tuple[int, int]:
    """Replicas that share a node, and nodes."""
    together = min(max(1, network.node // gpus), replicas)
    return together, math.ceil(replicas / together)


def _check_replicas(replicas: int) -> None:
    if replicas < 1:
        raise ValueError(f"there must be at least 1 replica, got {replicas}")


def main_table() -> list[str]:
    """Rows of Markdown: network and model against the number of replicas, at T = 1000."""
    shown = (8, 128, 2048, 16384)
    header = ["network", "parameters", "step", "DDP, 128"]
    header += [f"{way}, {_count(n)}" for way in ("fp32", "int8 + overlap") for n in shown]
    body = []
    for network, model in product(NETWORKS, MODELS):
        cells = [network.name, _sized(model), _seconds(model.step(H200)), share(ddp_overhead(128, model, network))]
        cells += [share(overhead(n, model, network, sync)) for sync in (PLAIN, THRIFTY) for n in shown]
        body.append(cells)
    return grid(header, body, left=2)


def interval_table(replicas: int = 128) -> list[str]:
    """T against network and model; shared gradients beside local ones, whose moments travel too."""
    intervals = (100, 1000, 10_000)
    ways: dict[str, Callable[[int], Sync]] = {
        "shared, fp32": lambda t: Sync(every=t),
        "local, fp32": lambda t: Sync(every=t, moments=True),
        "local, int8 + overlap": lambda t: Sync(every=t, moments=True, wire="int8", overlap=t // 10),
    }
    header = ["network", "parameters", "DDP", *(f"{way}, T = {_count(t)}" for way in ways for t in intervals)]
    body = []
    for network, model in product(NETWORKS, MODELS):
        cells = [network.name, _sized(model), share(ddp_overhead(replicas, model, network))]
        cells += [share(overhead(replicas, model, network, way(t))) for way in ways.values() for t in intervals]
        body.append(cells)
    return grid(header, body, left=2)


def seconds_table(model: Model = MODELS[1]) -> list[str]:
    """Seconds of one sync by algorithm and wire, nothing hidden; the control row, a part of all of them, by itself."""
    header = ["network", "replicas", "ring, fp32", "tree, fp32", "bf16", "int8", "control row alone"]
    ways = (Sync(algorithm="ring"), Sync(algorithm="tree"), Sync(wire="bf16"), Sync(wire="int8"))
    body = []
    for network, replicas in product(NETWORKS, (8, 128, 2048, 16384)):
        costs = [converge(replicas, model, network, sync) for sync in ways]
        cells = [_seconds(cost.total) for cost in costs]
        body.append([network.name, _count(replicas), *cells, _seconds(costs[0].row)])
    return grid(header, body, left=2)


def rows() -> Iterator[dict[str, Any]]:
    """Every combination, for a table of one's own."""
    wires = [("fp32", "ring"), ("fp32", "tree"), ("bf16", "best"), ("int8", "best")]
    for network, model, n, t in product(NETWORKS, MODELS, REPLICAS, (100, 300, 1000, 3000, 10_000)):
        for (wire, algorithm), overlapped, moments in product(wires, (False, True), (False, True)):
            sync = Sync(t, wire, algorithm, t // 10 if overlapped else 0, moments)
            cost = converge(n, model, network, sync)
            yield {
                "network": network.name,
                "parameters": int(model.params),
                "GPUs a replica": model.gpus(H200),
                "replicas": n,
                "T": t,
                "wire": wire,
                "algorithm": algorithm if wire == "fp32" else "two-phase",
                "overlap": sync.overlap,
                "gradients": "local" if moments else "shared",
                "step s": model.step(H200),
                "control row s": cost.row,
                "collectives s": cost.collectives,
                "exposed s": cost.exposed,
                "local s": cost.local,
                "overhead": overhead(n, model, network, sync),
                "DDP overhead": ddp_overhead(n, model, network),
            }


def plot(path: Path) -> None:
    """Overhead against replicas, a panel for each network; what DDP waits at every step is there to compare with."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    panels = figure.subplots(1, len(NETWORKS), sharey=True)
    colours = ("tab:blue", "tab:green", "tab:orange", "tab:red")
    for panel, network in zip(panels, NETWORKS, strict=True):
        for model, colour in zip(MODELS, colours, strict=True):
            for sync, style in ((PLAIN, "-"), (THRIFTY, "--")):
                panel.plot(REPLICAS, [overhead(n, model, network, sync) for n in REPLICAS], style, color=colour, lw=1.6)
            waited = [ddp_overhead(n, model, network) or math.nan for n in REPLICAS]
            panel.plot(REPLICAS, waited, ":", color=colour, lw=1.6)
        panel.axhline(0.01, color="black", lw=1)
        panel.set(title=network.name, xscale="log", yscale="log", ylim=(1e-6, 1e5), xlim=(REPLICAS[0], REPLICAS[-1]))
        panel.set_xticks([8, 128, 2048, 16384], ["8", "128", "2048", "16 384"])
        panel.minorticks_off()
        panel.grid(color="0.92")
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    panels[0].set_yticks([1e-6, 1e-4, 1e-2, 1, 1e2, 1e4])
    panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:,.10g} %".replace(",", " ")))
    panels[0].set_ylabel("of the training time (T = 1000)")
    panels[1].set_xlabel("replicas")
    panels[0].text(9, 0.0125, "1 %", fontsize=9)
    panels[0].text(9, 0.3, "DDP hides its gradients\nbehind the backward pass", fontsize=9, color="0.4")
    lines = [Line2D([], [], color=colour, lw=1.6) for colour in colours]
    lines += [Line2D([], [], color="black", ls=style, lw=1.6) for style in ("-", "--", ":")]
    names = [model.name for model in MODELS]
    names += ["converge, fp32", "converge, int8 behind 100 steps", "DDP, every step"]
    figure.legend(lines, names, loc="outside lower center", ncols=7, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def share(value: float) -> str:
    """A share of the training time, as a table shows it."""
    if value == 0:
        return "0"
    if value >= 10:
        return f"{value:,.0f} ×".replace(",", " ")
    percent = 100 * value
    return "< 0.01 %" if percent < 0.01 else f"{percent:.2g} %" if percent < 10 else f"{percent:.0f} %"


def grid(header: list[str], body: Iterable[list[str]], left: int = 1) -> list[str]:
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *body)]


def _sized(model: Model) -> str:
    gpus = model.gpus(H200)
    return model.name if gpus == 1 else f"{model.name} on {gpus} GPUs"


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1e3:.2g} ms" if value < 0.0995 else f"{value * 1e3:.0f} ms"
    return f"{value:.2g} s" if value < 9.95 else f"{value:,.0f} s".replace(",", " ")


def _count(value: int) -> str:
    return f"{value:,}".replace(",", " ") if value >= 10_000 else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description="What converge costs, modelled.")
    parser.add_argument("--plot", type=Path, help="draw the overhead into this file")
    parser.add_argument("--csv", type=Path, help="write every combination into this file")
    arguments = parser.parse_args()
    print("Converge, as a share of the training time, T = 1000, by the number of replicas:\n")
    print("\n".join(main_table()))
    print("\nBy T, with 128 replicas; local gradients need no DDP, but AdamW's moments travel too:\n")
    print("\n".join(interval_table()))
    print(f"\nOne sync of {MODELS[1].name} parameters, nothing hidden:\n")
    print("\n".join(seconds_table()))
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            found = list(rows())
            writer = csv.DictWriter(file, found[0])
            writer.writeheader()
            writer.writerows(found)
    if arguments.plot:
        plot(arguments.plot)


if __name__ == "__main__":
    main()
