"""The cost model: its formulas against numbers worked out by hand, and what must cost more than what."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import cost_model as cm
import pytest

#: 1 ms a hop and 1 kB/ms.
LINK = cm.Link("test", 1e-3, 1e6)
FLAT = cm.Network("flat", LINK)
by_network = pytest.mark.parametrize("network", cm.NETWORKS, ids=lambda network: network.name)
by_model = pytest.mark.parametrize("model", cm.MODELS, ids=lambda model: model.name)


@pytest.mark.parametrize(
    ("formula", "replicas", "nbytes", "expected_ms"),
    [
        ("ring", 2, 1000, 2 + 1),
        ("ring", 4, 1000, 6 + 1.5),
        ("ring", 8, 16_000, 14 + 28),
        ("tree", 2, 0, 2),
        ("tree", 8, 0, 6),
        ("tree", 9, 0, 8),
        ("tree", 8, 15_000, 6 + 38),  # 2 · 15 ms · 190/150
        ("two_phase", 4, 1000, 4 + 1.5),
        ("all_gather", 4, 1000, 3 * 2),
    ],
)
def test_formulas(formula: str, replicas: int, nbytes: int, expected_ms: float) -> None:
    assert getattr(cm, formula)(replicas, nbytes, LINK) == pytest.approx(expected_ms / 1e3)


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
def test_nodes(replicas: int, gpus: int, algorithm: str, expected_ms: float) -> None:
    nodes = cm.Network("nodes", LINK, node=8, inside=cm.Link("fast", 1e-4, 1e8))
    assert cm.allreduce(replicas, 80_000, nodes, algorithm, gpus=gpus) == pytest.approx(expected_ms / 1e3)


def test_every_bucket_pays_its_hops() -> None:
    one, three = (cm.allreduce(4, 1000, FLAT, "ring", collectives=n) for n in (1, 3))
    assert three - one == pytest.approx(2 * 6e-3)


def test_best_is_the_faster_one() -> None:
    for replicas, nbytes in ((2, 10**6), (1024, 10**3)):
        times = [cm.allreduce(replicas, nbytes, FLAT, name) for name in ("ring", "tree", "best")]
        assert times[2] == min(times[:2])
    assert cm.ring(2, 10**6, LINK) < cm.tree(2, 10**6, LINK)
    assert cm.tree(1024, 10**3, LINK) < cm.ring(1024, 10**3, LINK)


def test_one_converge_by_hand() -> None:
    """1.5 B parameters in fp32, 8 replicas on InfiniBand: 6 GB in 12 buckets of 512 MiB."""
    cost = cm.converge(8, cm.MODELS[1], cm.NETWORKS[1], cm.Sync(algorithm="ring"))
    assert cost.row == pytest.approx(7 * (14e-6 + 160 / 47.5e9))
    assert cost.collectives == pytest.approx(12 * 14 * 14e-6 + 2 * 7 / 8 * 6e9 / 47.5e9)
    assert cost.exposed == cost.row + cost.collectives
    assert cost.local == pytest.approx(1.5e9 * (4 + 8) / 4.264e12)
    step = 6 * 1.5e9 * 8192 / (989e12 * 0.4)
    assert cm.overhead(8, cm.MODELS[1], cm.NETWORKS[1], cm.Sync(algorithm="ring")) == pytest.approx(
        cost.total / (1000 * step)
    )


def test_a_large_model_is_cut_over_gpus() -> None:
    assert [model.gpus(cm.H200) for model in cm.MODELS] == [1, 1, 2, 16]
    card, line = (cm.converge(8, cm.MODELS[3], network, cm.Sync(algorithm="ring")) for network in cm.NETWORKS[1:])
    # Through sixteen cards a sixteenth each, in 33 buckets; through one line all of it.
    assert card.collectives == pytest.approx(33 * 14 * 14e-6 + 2 * 7 / 8 * 280e9 / 16 / 47.5e9)
    assert line.collectives == pytest.approx(16 * 33 * 14 * 0.05 + 2 * 7 / 8 * 280e9 / (125e6 * 1448 / 1538))


def test_overlap_hides_what_fits_behind_the_steps() -> None:
    model, network = cm.MODELS[1], cm.NETWORKS[2]
    plain, short, long = (cm.converge(8, model, network, cm.Sync(overlap=k)) for k in (0, 100, 900))
    assert short.exposed == pytest.approx(plain.row + plain.collectives - 100 * model.step(cm.H200))
    assert long.exposed == 0
    assert long.total == pytest.approx(1.5e9 * (4 + 16 + 12 + 12) / 4.264e12)


def test_moments_are_three_times_the_bytes() -> None:
    ring = cm.Sync(algorithm="ring", bucket_bytes=2**60)
    one, three = (cm.converge(8, cm.MODELS[0], FLAT, replace(ring, moments=moments)) for moments in (False, True))
    hops = 14e-3
    assert three.collectives - hops == pytest.approx(3 * (one.collectives - hops))


def test_ddp_pays_what_the_backward_pass_does_not_hide() -> None:
    model = cm.MODELS[0]
    step = model.step(cm.H200)
    assert cm.ddp_overhead(8, model, cm.NETWORKS[0]) == 0
    took = cm.allreduce(8, 4 * 124e6, cm.NETWORKS[1], "best", collectives=19)
    assert cm.ddp_overhead(8, model, cm.NETWORKS[1]) == pytest.approx((took - step * 2 / 3) / step)


SYNCS = [
    cm.Sync(),
    cm.Sync(algorithm="ring"),
    cm.Sync(algorithm="tree"),
    cm.THRIFTY,
    cm.Sync(wire="bf16", moments=True),
]


@by_network
@by_model
@pytest.mark.parametrize("sync", SYNCS, ids=lambda sync: f"{sync.wire}-{sync.algorithm}-{sync.overlap}")
def test_more_replicas_and_smaller_intervals_cost_more(network: object, model: object, sync: Any) -> None:
    by_replicas = [cm.overhead(n, model, network, sync) for n in (1, 2, 4, *cm.REPLICAS)]
    # What fits behind the steps costs the same for any number.
    assert all(fewer < more or (sync.overlap and fewer == more) for fewer, more in pairwise(by_replicas))
    assert by_replicas[0] == 0 < by_replicas[1]
    by_interval = [cm.overhead(64, model, network, replace(sync, every=t)) for t in (200, 1000, 10_000)]
    assert all(often > seldom for often, seldom in pairwise(by_interval))


@by_model
@pytest.mark.parametrize("sync", SYNCS, ids=lambda sync: f"{sync.wire}-{sync.algorithm}-{sync.overlap}")
def test_slower_links_cost_more(model: object, sync: Any) -> None:
    for replicas in cm.REPLICAS:
        node, card, line = (cm.overhead(replicas, model, network, sync) for network in cm.NETWORKS)
        assert node <= card < line
        late = cm.Network("late", replace(cm.INFINIBAND, hop=1e-3))
        narrow = cm.Network("narrow", replace(cm.INFINIBAND, bandwidth=1e9))
        slow = cm.overhead(replicas, model, late, sync)
        assert slow > card or (sync.overlap and slow == card)
        assert cm.overhead(replicas, model, narrow, sync) >= card


@by_network
@by_model
def test_compression_never_takes_the_wire_longer_than_a_ring(network: object, model: object) -> None:
    for replicas in cm.REPLICAS:
        times = [
            cm.converge(replicas, model, network, cm.Sync(wire=wire, algorithm="ring")).collectives
            for wire in ("fp32", "bf16", "int8")
        ]
        assert times[0] > times[1] > times[2]


@by_network
@by_model
def test_overlap_never_waits_longer(network: object, model: object) -> None:
    for replicas in cm.REPLICAS:
        waits = [cm.converge(replicas, model, network, cm.Sync(overlap=k)).exposed for k in (0, 10, 100)]
        assert waits == sorted(waits, reverse=True)


@by_model
def test_where_the_network_is_the_bottleneck_both_pay(model: object) -> None:
    """Within NVLink nodes the passes over local memory can cost more than what they save; see bf16 in the table."""
    for network in cm.NETWORKS[1:]:
        costs = [cm.overhead(8, model, network, sync) for sync in (cm.Sync(), cm.Sync(wire="int8"), cm.THRIFTY)]
        assert costs == sorted(costs, reverse=True)


@by_network
@by_model
def test_one_replica_costs_nothing(network: object, model: object) -> None:
    for sync in SYNCS:
        assert cm.overhead(1, model, network, sync) == 0
    assert cm.ddp_overhead(1, model, network) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cm.Sync(wire="fp8"), "fp32, bf16, int8, got 'fp8'"),
        (lambda: cm.Sync(algorithm="star"), "ring, tree, best, got 'star'"),
        (lambda: cm.Sync(every=0), "at least 1 step, got 0"),
        (lambda: cm.Sync(every=10, overlap=10), "every - 1 = 9 steps, got 10"),
        (lambda: cm.Sync(bucket_bytes=0), "bucket_bytes must be above 0, got 0"),
        (lambda: cm.Link("none", 0.0, 0.0), "link none: .* got 0.0 and 0.0"),
        (lambda: cm.Model("none", 0), "model none: params must be above 0, got 0"),
        (lambda: cm.Network("half", LINK, node=8), "network half: .* got 8 and None"),
        (lambda: cm.ring(0, 1, LINK), "at least 1 replica, got 0"),
        (lambda: cm.converge(-1, cm.MODELS[0], FLAT), "at least 1 replica, got -1"),
        (lambda: cm.allreduce(2, 1, FLAT, "star"), "got 'star'"),
    ],
)
def test_bad_arguments_are_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (1e-6, "< 0.01 %"),
        (1e-4, "0.01 %"),
        (0.0123, "1.2 %"),
        (0.5, "50 %"),
        (9.9, "990 %"),
        (1234, "1 234 ×"),
    ],
)
def test_shares_are_readable(value: float, shown: str) -> None:
    assert cm.share(value) == shown


def test_the_command_prints_draws_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(cm, "REPLICAS", (8, 64))
    arguments = ["cost_model.py", "--plot", str(tmp_path / "cost.png"), "--csv", str(tmp_path / "grid.csv")]
    monkeypatch.setattr(sys, "argv", arguments)
    cm.main()
    assert capsys.readouterr().out.count("| 1 Gb/s internet |") == 12
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "grid.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 4 * 2 * 5 * 4 * 2 * 2
    assert all(float(row["overhead"]) > 0 for row in rows)
