"""Time the local operations of a compressed average of 8 processes: encode, merge and decode.

    python -m pytest bench/test_wire.py --benchmark-only -k gpu

Encoding reads three float32 buffers and writes one and the message. Decoding reads the message and one buffer and
writes two. Merging reads 8 shards and an error and writes one of each. The peer is plain torch. Launch shapes are in
csrc/wire_cuda.cu and hdet_kernels/ops/triton/wire.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bench import copy_bandwidth, implementations, measure
from hdet_kernels.ops.wire import FORMATS, Wire

OPERATIONS = ("encode", "merge", "decode")
SHARDS = 8
# Elements: the parameters of GPT-2, and a bucket of 1 GiB. On the CPU, sizes within and beyond the cache.
SIZES = {"cuda": {"124M": 124_439_808, "268M": 2**28}, "cpu": {"1M": 2**20, "8M": 2**23}}


def _cases() -> Iterator[Any]:
    for device, sizes in SIZES.items():
        for size in sizes:
            for format in FORMATS:
                for way in ("torch", *(f"hdet-{name}" for name in implementations.BACKENDS[device] if name != "torch")):
                    yield implementations.case(
                        device, size, format, way, why_not=implementations.why_not(way, device), on_device=True
                    )


def call_of(operation: str, wire: Wire) -> tuple[measure.Call, int]:
    """Return the call, and the bytes that it has to move."""
    travelling, one = SHARDS * wire.shard_bytes, 4 * wire.numel
    x, consensus = torch.randn(wire.numel, device=wire.device), torch.randn(wire.numel, device=wire.device)
    sent = wire.empty()
    wire.encode(x, consensus, None, sent)
    if operation == "encode":
        error = torch.zeros_like(x)
        return lambda: wire.encode(x, consensus, error, sent), 4 * one + travelling
    if operation == "merge":
        lost, merged = torch.zeros(wire.shard, device=wire.device), wire.empty()[0]
        return lambda: wire.merge(sent, SHARDS, lost, merged), travelling + 8 * wire.shard + wire.shard_bytes
    return lambda: wire.decode(sent, consensus, x), 3 * one + travelling


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("device", "size", "format", "way"), list(_cases()))
def test_wire(benchmark: Any, device: str, size: str, format: str, way: str, operation: str) -> None:
    copy_bandwidth.measure_once(device)
    wire = Wire(format, SIZES[device][size], SHARDS, device, backend=way.removeprefix("hdet-"))
    call, moved = call_of(operation, wire)
    benchmark.pedantic(call, warmup_rounds=1, **measure.plan(call, device, seconds=0.25))
    copy_bandwidth.report(benchmark, device, moved=moved, held=moved)
