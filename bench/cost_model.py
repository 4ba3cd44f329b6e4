"""Model the time that averaging the replicas takes, as a share of the training time.

A message of B bytes takes α + B/β over a link with latency α and bandwidth β. With N replicas:

    ring         2(N−1)·α + 2(N−1)/N·B/β         reduce-scatter, then all-gather, each in N−1 hops
    tree         2⌈log₂N⌉·α + 2·B/(0.79·β)       double binary tree: reduce up, broadcast down
    two-phase    N·α + 2(N−1)/N·B/β              all-to-all in one hop, all-gather in N−1; for int8
    control row  2(N−1)·(α + 184/β)              all-gather in N−1 hops of a row a replica, and one that confirms

Parameters travel in buckets of 512 MiB of fp32, one after the other, and each bucket pays its hops. NCCL chooses the
faster of ring and tree. In nodes of g GPUs, each with its own network card, a ring has 2(N−N/g) hops within nodes and
2(N/g−1) between them, a tree 2(g−1) and 2⌈log₂(N/g)⌉; g rings run at once and the slower kind of link sets the pace.

One sync costs the control row and the collectives, less what runs behind ``overlap`` training steps, plus passes over
local memory at the copy bandwidth. ``pages.py`` writes the results and the sources of the constants to
docs/cost.md; ``link_check.py`` compares hops and bytes with measured collectives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

BUCKET_BYTES = 512 * 2**20
# The default bucket of DistributedDataParallel.
DDP_BUCKET_BYTES = 25 * 2**20
# The control row has 23 numbers in fp64.
ROW_BYTES = 184
# Bandwidth of the tree over that of the ring.
TREE_SHARE = 150 / 190
# The backward pass has two of the three matrix products of every layer; DDP's collectives run behind it.
BACKWARD_SHARE = 2 / 3

# Bytes of an element in a message; int8 has one fp32 scale for 256 elements.
WIRE_BYTES = {"fp32": 4.0, "int8": 1.0 + 4 / 256}

# Bytes of local memory traffic for each element: the checksum of the control row, the backup that is restored if a
# collective fails, encoding and decoding of int8 with error feedback, and with overlap two snapshots, their difference
# and the addition of the result.
CHECKSUM, BACKUP, ENCODE, DECODE, SNAPSHOT, DIFFERENCE, LANDING = 4, 8, 17, 13, 16, 12, 12

Algorithm = Literal["ring", "tree", "two-phase", "best"]


@dataclass(frozen=True)
class Link:
    """A network link: ``hop`` is its latency in seconds (α), ``bandwidth`` in bytes a second each way (β)."""

    name: str
    hop: float
    bandwidth: float


@dataclass(frozen=True)
class Network:
    """Links between the replicas.

    Args:
        link: The link between nodes.
        node: GPUs of a node.
        inside: The link within a node, where a node has several GPUs.
        shared_line: Whether all GPUs of a replica share one link, as over the internet.
    """

    name: str
    link: Link
    node: int = 1
    inside: Link | None = None
    shared_line: bool = False


@dataclass(frozen=True)
class Gpu:
    """A GPU: peak FLOP/s and the share of it that is used, copy bandwidth in B/s, memory in bytes, tokens a step."""

    flops: float = 989e12
    utilisation: float = 0.4
    copy: float = 4.264e12
    memory: float = 141e9
    tokens: int = 8192


@dataclass(frozen=True)
class Model:
    """A model of ``params`` parameters."""

    name: str
    params: float

    def gpus(self, gpu: Gpu) -> int:
        """Return how many GPUs hold one replica: a power of two, with 16 bytes a parameter in 70 % of their memory."""
        return 2 ** max(0, math.ceil(math.log2(16 * self.params / (0.7 * gpu.memory))))

    def step(self, gpu: Gpu) -> float:
        """Return the seconds of one training step without communication; S GPUs process S times the tokens."""
        return 6 * self.params * gpu.tokens / (gpu.flops * gpu.utilisation)


@dataclass(frozen=True)
class Sync:
    """Options of the average: ``every`` steps (T), the format of the messages, and ``overlap`` steps behind which it
    runs."""

    every: int = 1000
    wire: Literal["fp32", "int8"] = "fp32"
    overlap: int = 0


@dataclass(frozen=True)
class Cost:
    """Seconds of one sync: control row, collectives, the part of both that training waits for, local memory passes."""

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
# The default, and the cheapest combination of options.
PLAIN = Sync()
CHEAPEST = Sync(wire="int8", overlap=100)


def allreduce(
    replicas: int, nbytes: float, network: Network, algorithm: Algorithm, collectives: int = 1, gpus: int = 1
) -> float:
    """Return the seconds to average ``nbytes`` in ``collectives`` parts between replicas of ``gpus`` GPUs each."""
    if replicas == 1:
        return 0.0
    if algorithm == "best":
        both: tuple[Algorithm, Algorithm] = ("ring", "tree")
        return min(allreduce(replicas, nbytes, network, name, collectives, gpus) for name in both)
    together, nodes = _nodes(replicas, network, gpus)
    outside, inside = network.link, network.inside or network.link
    if algorithm == "ring":
        hops = 2 * (replicas - nodes) * inside.hop + 2 * (nodes - 1) * outside.hop
    elif algorithm == "tree":
        hops = 2 * (together - 1) * inside.hop + 2 * math.ceil(math.log2(nodes)) * outside.hop
    else:
        slower = outside if nodes > 1 else inside
        hops = slower.hop + (replicas - nodes) * inside.hop + (nodes - 1) * outside.hop
    sent = 2 * nbytes / TREE_SHARE if algorithm == "tree" else 2 * (replicas - 1) / replicas * nbytes
    pace = sent / inside.bandwidth if together > 1 else 0.0
    if nodes > 1:
        pace = max(pace, sent / together / outside.bandwidth)
    return collectives * hops + pace


def control_row(replicas: int, network: Network, gpus: int = 1) -> float:
    """Return the seconds of the two gathers of a sync: of the control rows, and the one that confirms its end.

    Both are all-gathers around a ring. Where several GPUs hold a replica, each has a row; over a line that they share
    all rows pass one after the other.
    """
    _, nodes = _nodes(replicas, network, gpus)
    inside, outside = network.inside or network.link, network.link
    hops = (replicas - nodes) * (inside.hop + ROW_BYTES / inside.bandwidth)
    hops += (nodes - 1) * (outside.hop + ROW_BYTES / outside.bandwidth)
    return 2 * hops * (gpus if network.shared_line else 1)


def converge(replicas: int, model: Model, network: Network, sync: Sync = PLAIN, gpu: Gpu = H200) -> Cost:
    """Return the cost of one sync."""
    if replicas == 1:
        return Cost(0.0, 0.0, 0.0, 0.0)
    gpus = model.gpus(gpu)
    elements = model.params / gpus
    on_a_line = elements * gpus if network.shared_line else elements
    collectives = math.ceil(4 * elements / BUCKET_BYTES) * (gpus if network.shared_line else 1)
    algorithm: Algorithm = "best" if sync.wire == "fp32" else "two-phase"
    took = allreduce(replicas, on_a_line * WIRE_BYTES[sync.wire], network, algorithm, collectives, gpus)
    row = control_row(replicas, network, gpus)
    exposed = max(0.0, row + took - sync.overlap * model.step(gpu))
    local = CHECKSUM
    local += 0 if sync.wire == "fp32" else ENCODE + DECODE
    local += BACKUP if sync.wire == "fp32" and not sync.overlap else 0
    local += SNAPSHOT + DIFFERENCE + LANDING if sync.overlap else 0
    return Cost(row, took, exposed, elements * local / gpu.copy)


def overhead(replicas: int, model: Model, network: Network, sync: Sync = PLAIN, gpu: Gpu = H200) -> float:
    """Return the cost of a sync over the time of the T steps between two syncs; 0.01 is one per cent."""
    return converge(replicas, model, network, sync, gpu).total / (sync.every * model.step(gpu))


def ddp_overhead(replicas: int, model: Model, network: Network, gpu: Gpu = H200) -> float:
    """Return how long DDP waits for its fp32 gradients after the backward pass, as a share of a step."""
    gpus, step = model.gpus(gpu), model.step(gpu)
    nbytes = 4 * model.params / (1 if network.shared_line else gpus)
    took = allreduce(replicas, nbytes, network, "best", math.ceil(nbytes / DDP_BUCKET_BYTES), gpus)
    return max(0.0, took - BACKWARD_SHARE * step) / step


def _nodes(replicas: int, network: Network, gpus: int) -> tuple[int, int]:
    """Return how many replicas share a node, and how many nodes there are."""
    together = min(max(1, network.node // gpus), replicas)
    return together, math.ceil(replicas / together)
