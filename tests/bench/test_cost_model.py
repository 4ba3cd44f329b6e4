"""The cost model: its formulas against numbers worked out by hand, and comparisons that must hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from bench import cost_model as cm
from hdet_kernels.converge.handshake import COLUMNS

# 1 ms a hop and 1 kB/ms.
LINK = cm.Link("test", 1e-3, 1e6)
FLAT = cm.Network("flat", LINK)
SYNCS = [cm.PLAIN, cm.CHEAPEST, cm.Sync(wire="int8"), cm.Sync(overlap=100)]
by_network = pytest.mark.parametrize("network", cm.NETWORKS, ids=lambda network: network.name)
by_model = pytest.mark.parametrize("model", cm.MODELS, ids=lambda model: model.name)
by_sync = pytest.mark.parametrize("sync", SYNCS, ids=lambda sync: f"{sync.wire}-{sync.overlap}")


@pytest.mark.parametrize(
    ("algorithm", "replicas", "nbytes", "expected_ms"),
    [
        ("ring", 2, 1000, 2 + 1),
        ("ring", 4, 1000, 6 + 1.5),
        ("ring", 8, 16_000, 14 + 28),
        ("tree", 2, 0, 2),
        ("tree", 8, 0, 6),
        ("tree", 9, 0, 8),
        ("tree", 8, 15_000, 6 + 38),  # 2 · 15 ms · 190/150
        ("two-phase", 4, 1000, 4 + 1.5),
    ],
)
def test_formulas(algorithm: cm.Algorithm, replicas: int, nbytes: int, expected_ms: float) -> None:
    assert cm.allreduce(replicas, nbytes, FLAT, algorithm) == pytest.approx(expected_ms / 1e3)


def test_control_rows_are_gathered_around_a_ring_and_confirmed() -> None:
    assert len(COLUMNS) * 8 == cm.ROW_BYTES
    assert cm.control_row(4, FLAT) == pytest.approx(2 * 3 * (1e-3 + 184e-6))
    nodes = cm.Network("nodes", LINK, node=8, inside=cm.Link("fast", 1e-4, 1e8))
    assert cm.control_row(16, nodes) == pytest.approx(2 * (14 * (1e-4 + 1.84e-6) + 1e-3 + 184e-6))


@pytest.mark.parametrize(
    ("replicas", "gpus", "algorithm", "expected_ms"),
    [
        # Eight on one node: 14 hops of 0.1 ms and 2·7/8·80 kB at 100 kB/ms.
        (8, 1, "ring", 1.4 + 1.4),
        # Two nodes: 28 hops within, 2 between; 150 kB within a node, an eighth of it through each card at 1 kB/ms.
        (16, 1, "ring", 2.8 + 2 + 18.75),
        # Up and down a chain of eight, and one level of the tree; 160 kB·190/150 an eighth each.
        (16, 1, "tree", 1.4 + 2 + 160 / 8 * 190 / 150),
        # A replica of eight GPUs fills a node: all between nodes.
        (2, 8, "ring", 2 + 80),
        # Four replicas of two GPUs share a node.
        (8, 2, "ring", 12 * 0.1 + 2 + 140 / 4),
    ],
)
def test_nodes(replicas: int, gpus: int, algorithm: cm.Algorithm, expected_ms: float) -> None:
    nodes = cm.Network("nodes", LINK, node=8, inside=cm.Link("fast", 1e-4, 1e8))
    assert cm.allreduce(replicas, 80_000, nodes, algorithm, gpus=gpus) == pytest.approx(expected_ms / 1e3)


def test_best_is_the_faster_algorithm() -> None:
    faster = []
    for replicas, nbytes in ((2, 10**6), (1024, 10**3)):
        times = {name: cm.allreduce(replicas, nbytes, FLAT, name) for name in ("ring", "tree")}
        assert cm.allreduce(replicas, nbytes, FLAT, "best") == min(times.values())
        faster.append(min(times, key=lambda name: times[name]))
    assert faster == ["ring", "tree"]


def test_one_sync_by_hand() -> None:
    """1.5 B parameters in fp32, 8 replicas on InfiniBand: 6 GB in 12 buckets of 512 MiB."""
    cost = cm.converge(8, cm.MODELS[1], cm.NETWORKS[1])
    assert cost.row == pytest.approx(2 * 7 * (14e-6 + 184 / 47.5e9))
    assert cost.collectives == pytest.approx(12 * 14 * 14e-6 + 2 * 7 / 8 * 6e9 / 47.5e9)
    assert cost.exposed == cost.row + cost.collectives
    assert cost.local == pytest.approx(1.5e9 * (4 + 8) / 4.264e12)
    step = 6 * 1.5e9 * 8192 / (989e12 * 0.4)
    assert cm.overhead(8, cm.MODELS[1], cm.NETWORKS[1]) == pytest.approx(cost.total / (1000 * step))


def test_large_model_is_sharded() -> None:
    assert [model.gpus(cm.H200) for model in cm.MODELS] == [1, 1, 2, 16]
    card, line = (cm.converge(8, cm.MODELS[3], network) for network in cm.NETWORKS[1:])
    # Through sixteen cards a sixteenth each, in 33 buckets; through one line all of it.
    assert card.collectives == pytest.approx(33 * 14 * 14e-6 + 2 * 7 / 8 * 280e9 / 16 / 47.5e9)
    assert line.collectives == pytest.approx(16 * 33 * 14 * 0.05 + 2 * 7 / 8 * 280e9 / (125e6 * 1448 / 1538))


def test_overlap_hides_what_fits_behind_the_steps() -> None:
    model, network = cm.MODELS[1], cm.NETWORKS[2]
    plain, short, long = (cm.converge(8, model, network, cm.Sync(overlap=k)) for k in (0, 100, 900))
    assert short.exposed == pytest.approx(plain.row + plain.collectives - 100 * model.step(cm.H200))
    assert long.exposed == 0
    assert long.total == pytest.approx(1.5e9 * (4 + 16 + 12 + 12) / 4.264e12)


def test_ddp_pays_what_the_backward_pass_does_not_hide() -> None:
    model = cm.MODELS[0]
    step = model.step(cm.H200)
    assert cm.ddp_overhead(8, model, cm.NETWORKS[0]) == 0
    took = cm.allreduce(8, 4 * 124e6, cm.NETWORKS[1], "best", collectives=19)
    assert cm.ddp_overhead(8, model, cm.NETWORKS[1]) == pytest.approx((took - step * 2 / 3) / step)


@by_network
@by_model
@by_sync
def test_more_replicas_and_smaller_intervals_cost_more(network: Any, model: Any, sync: Any) -> None:
    by_replicas = [cm.overhead(n, model, network, sync) for n in (1, 2, 4, *cm.REPLICAS)]
    # A sync that fits behind the steps costs the same for any number of replicas.
    assert all(fewer < more or (sync.overlap and fewer == more) for fewer, more in pairwise(by_replicas))
    assert by_replicas[0] == 0 < by_replicas[1]
    by_interval = [cm.overhead(64, model, network, replace(sync, every=t)) for t in (200, 1000, 10_000)]
    assert all(often > seldom for often, seldom in pairwise(by_interval))


@by_model
@by_sync
def test_slower_links_cost_more(model: Any, sync: Any) -> None:
    for replicas in cm.REPLICAS:
        node, card, line = (cm.overhead(replicas, model, network, sync) for network in cm.NETWORKS)
        assert node <= card < line
