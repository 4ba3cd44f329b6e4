"""Host time of ``optimizer.step()`` (until the call returns) and its wall time (until the device is done).

    python -m pytest bench/test_host_time.py --benchmark-only -k gpu

Single calls on an idle device, so that no full queue makes them wait. ``fixed`` is ``gradients="fixed"``; the others
are the default: ``same``, with gradients where they were in the last step; ``swapped``, in one of two sets of tensors
by turns; ``new``, where a backward pass has just put them, in tensors that have no Python object yet. torch's steps and
those of the peers (``peers.py``) are measured after the same backward pass. ``addresses`` is the loop that any
optimizer needs which looks where the gradients are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import measure
import models
import peers
import pytest
import ways
import yardstick
from torch import nn

#: Host time depends on the number of tensors: one, some and many.
MODELS: dict[str, dict[str, models.Shapes]] = {
    device: {"one-tensor": [(1024, 1024)], **{name: models.MODELS[device][name].shapes for name in names}}
    for device, names in {
        "cuda": ("gpt2-124M", "many-small-10k"),
        "cpu": ("transformer-5M", "many-small-1k"),
    }.items()
}


def _cases(wall: bool) -> Iterator[Any]:
    for device, known in MODELS.items():
        for model in known:
            if wall and not models.is_small(model):
                continue  # that is the time of the device, in test_optim_step.py
            for way, addresses in _ways(device, wall):
                reason = ways.why_not(way, device, tensors=len(known[model]))
                yield ways.case(device, model, way, addresses, why_not=reason)


def _ways(device: str, wall: bool) -> Iterator[tuple[str, str]]:
    yield from (("torch-foreach", "new"), ("torch-fused", "new"))
    yield from ((peer, "new") for peer, known in peers.PEERS.items() if "adamw-fp32" in known.works)
    for backend in ways.BACKENDS[device]:
        if backend != "torch":  # the fallback, which is for devices that have nothing else
            yield from ((f"hdet-{backend}", addresses) for addresses in ("fixed", "same", "swapped", "new"))
    if not wall:
        yield from (("addresses", "swapped"), ("addresses", "new"))


def call_of(way: str, addresses: str, params: list[nn.Parameter]) -> measure.Call:
    if way == "addresses":
        return lambda: [param.grad.data_ptr() for param in params]  # type: ignore[union-attr]
    options = {"gradients": "fixed"} if addresses == "fixed" else {}
    return ways.optimizer(way, "adamw", params, **options).step


def _run(benchmark: Any, device: str, model: str, way: str, addresses: str, wall: bool) -> None:
    yardstick.yardstick(device)
    params = models.parameters(MODELS[device][model], device)
    models.set_gradients(params)
    prepare: Callable[[], None] = partial(measure.synchronize, device)
    if addresses in ("swapped", "new"):
        prepare = (models.Swap if addresses == "swapped" else models.Backward)(params, device)
    with peers.guarded(way):
        step = call_of(way, addresses, params)
        call = measure.until_done(step, device) if wall else step
        benchmark.pedantic(
            call, setup=prepare, **measure.few_rounds(call, prepare, device, 200 if device == "cuda" else 20)
        )
    benchmark.extra_info["tensors"] = len(params)
    if benchmark.stats is not None:  # None with --benchmark-disable
        stats = benchmark.stats.stats
        benchmark.extra_info |= {"us": stats.median * 1e6, "spread": stats.iqr / stats.median}
        print(f"\n{benchmark.name}: {stats.median * 1e6:.1f} us (best {stats.min * 1e6:.1f})")


@pytest.mark.parametrize(("device", "model", "way", "addresses"), list(_cases(wall=False)))
def test_until_it_returns(benchmark: Any, device: str, model: str, way: str, addresses: str) -> None:
    _run(benchmark, device, model, way, addresses, wall=False)


@pytest.mark.parametrize(("device", "model", "way", "addresses"), list(_cases(wall=True)))
def test_until_it_is_done(benchmark: Any, device: str, model: str, way: str, addresses: str) -> None:
    _run(benchmark, device, model, way, addresses, wall=True)
