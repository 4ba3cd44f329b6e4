"""Time ``optimizer.step()`` on the host (until the call returns) and in all (until the device is done).

    python -m pytest bench/test_host_time.py --benchmark-only -k gpu

Single calls on an idle device are timed, so that they never wait for a full queue. ``fixed`` is ``gradients="fixed"``.
The others are the default: ``same`` has gradients at the addresses of the last step, ``swapped`` in one of two sets of
tensors by turns, ``new`` in tensors of a fresh backward pass, which have no Python object yet. torch and the peers
(``peers.py``) are measured after a backward pass too. Two bare loops show what Python alone takes: ``gradients`` reads
``param.grad`` and ``addresses`` also the gradients' addresses.

A host that others share is slow at times. Of every way the median and the best call are recorded, and in turns with the
calls the bare loop ``addresses`` on the same tensors: their ratio depends less on the moment.

On a CPU the tensors have four elements, so that the update itself takes a small part of the time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from torch import nn

from bench import copy_bandwidth, implementations, measure, models, peers

# Models with one, some and many tensors, which host time depends on.
MODELS: dict[str, dict[str, models.Shapes]] = {
    "cuda": {
        "one-tensor": [(1024, 1024)],
        **{name: models.MODELS["cuda"][name].shapes for name in ("gpt2-124M", "many-small-10k")},
    },
    "cpu": {"one-tensor": [(4,)], "tiny-148": [(4,)] * 148, "tiny-10k": [(4,)] * 10_000},
}

# The bare loops.
LOOPS: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "gradients": lambda params: [param.grad for param in params],
    "addresses": lambda params: [param.grad.data_ptr() for param in params],  # type: ignore[union-attr]
}


def _cases(wall: bool) -> Iterator[Any]:
    for device, known in MODELS.items():
        for model in known:
            if wall and (device == "cpu" or not models.is_small(model)):
                continue  # done when it returns, or dominated by the device: test_optim_step.py measures it
            for way, addresses in _ways(device, wall):
                reason = implementations.why_not(way, device, tensors=len(known[model]))
                yield implementations.case(device, model, way, addresses, why_not=reason)


def _ways(device: str, wall: bool) -> Iterator[tuple[str, str]]:
    yield from (("torch-foreach", "new"), ("torch-fused", "new"))
    yield from ((peer, "new") for peer, known in peers.PEERS.items() if "adamw-fp32" in known.works)
    for backend in implementations.BACKENDS[device]:
        if backend != "torch":  # the fallback is not measured
            yield from ((f"hdet-{backend}", addresses) for addresses in ("fixed", "same", "swapped", "new"))
    if not wall:
        yield from ((loop, addresses) for loop in LOOPS for addresses in ("swapped", "new"))


def call_of(way: str, addresses: str, params: list[nn.Parameter]) -> measure.Call:
    if way in LOOPS:
        return partial(LOOPS[way], params)
    options = {"gradients": "fixed"} if addresses == "fixed" else {}
    return implementations.optimizer(way, "adamw", params, **options).step


class LoopInTurns:
    """Prepares a call, and times the bare loop on gradients that were prepared alike before."""

    def __init__(self, prepare: Callable[[], None], params: list[nn.Parameter]) -> None:
        self.prepare, self.params = prepare, params
        self.times: list[float] = []

    def __call__(self) -> None:
        self.prepare()
        start = time.perf_counter()
        LOOPS["addresses"](self.params)
        self.times.append(time.perf_counter() - start)
        self.prepare()


def _run(benchmark: Any, device: str, model: str, way: str, addresses: str, wall: bool) -> None:
    copy_bandwidth.measure_once(device)
    params = models.parameters(MODELS[device][model], device)
    models.set_gradients(params)
    prepare: Callable[[], None] = partial(measure.synchronize, device)
    if addresses in ("swapped", "new"):
        prepare = (models.Swap if addresses == "swapped" else models.Backward)(params, device)
    loop = None if way in LOOPS or wall else LoopInTurns(prepare, params)
    with peers.guarded(way):
        step = call_of(way, addresses, params)
        call = measure.until_done(step, device) if wall else step
        planned = measure.few_rounds(call, loop or prepare, device, 200 if device == "cuda" else 20)
        benchmark.pedantic(call, setup=loop or prepare, **planned)
    benchmark.extra_info["tensors"] = len(params)
    if benchmark.stats is not None:  # None with --benchmark-disable
        stats = benchmark.stats.stats
        found = {"us": stats.median * 1e6, "best us": stats.min * 1e6, "spread": stats.iqr / stats.median}
        if loop is not None:
            found["loop us"] = statistics.median(loop.times) * 1e6
        benchmark.extra_info |= found
        print(f"\n{benchmark.name}: " + ", ".join(f"{name} {value:.2f}" for name, value in found.items()))


@pytest.mark.parametrize(("device", "model", "way", "addresses"), list(_cases(wall=False)))
def test_until_it_returns(benchmark: Any, device: str, model: str, way: str, addresses: str) -> None:
    _run(benchmark, device, model, way, addresses, wall=False)


@pytest.mark.parametrize(("device", "model", "way", "addresses"), list(_cases(wall=True)))
def test_until_it_is_done(benchmark: Any, device: str, model: str, way: str, addresses: str) -> None:
    _run(benchmark, device, model, way, addresses, wall=True)
