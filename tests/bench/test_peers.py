"""The peers make the step that they are compared in; absent peers are named with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bench import comparison_table, implementations, peers, test_optim_step

DEVICES = ("cpu", "cuda")


def parameters(device: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return parameters so small that also in bf16 a step is far above the rounding."""
    source = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=source).mul(0.01)) for shape in ((64, 64), (4097,))]
    params = [nn.Parameter(param.detach().to(device, dtype)) for param in params]
    for param in params:
        param.grad = torch.randn(param.shape, generator=source).to(device, dtype)
    return params


def absent(**what: Any) -> peers.Peer:
    return peers.Peer(**{"title": "nobody", "package": "nobody", "module": "nobody.at_all", "make": list} | what)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * peer.compiled) for name, peer in peers.PEERS.items()]
)
def test_peer_makes_the_step_of_torch(name: str, device: str) -> None:
    """Root mean squares are compared, since 8 bits keep little of the smallest elements."""
    if (reason := implementations.why_not(name, device)) is not None:
        pytest.skip(reason)
    dtype = torch.float32 if "adamw-fp32" in peers.PEERS[name].works else torch.bfloat16
    ours, theirs = parameters(device, dtype), parameters(device)
    before = [param.detach().clone() for param in theirs]
    optimizer, reference = peers.PEERS[name].make(ours), torch.optim.AdamW(theirs, **peers.ADAMW)
    for _ in range(3):
        optimizer.step()
        reference.step()
    for own, other, start in zip(ours, theirs, before, strict=True):
        # The gradient is the same every time, so that each step moves every parameter by about the learning rate.
        moved = rms(other - start)
        assert moved == pytest.approx(3e-3, rel=0.05)
        rounding = torch.finfo(dtype).eps * rms(other) / moved
        assert rms(own - other) / moved <= (0.05 if "8bit" in name else 1e-3) + rounding


def rms(values: torch.Tensor) -> float:
    return values.detach().float().square().mean().sqrt().item()


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_step_is_compiled(device: str) -> None:
    if (reason := implementations.why_not("torch-compiled", device)) is not None:
        pytest.skip(reason)
    optimizer = peers.CompiledAdamW(parameters(device))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    optimizer.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs


def test_bytes_of_parameters_gradients_and_state_are_counted() -> None:
    params = parameters("cpu")
    optimizer = torch.optim.AdamW(params)
    optimizer.step()
    count = sum(param.numel() for param in params)
    assert peers.bytes_moved(params, optimizer, clipped=False) == pytest.approx(28 * count, rel=1e-3)  # and step counts
    assert peers.bytes_moved(params, optimizer, clipped=True) == pytest.approx(32 * count, rel=1e-3)


def test_bytes_within_nested_state_are_counted() -> None:
    class Quantised:
        def __init__(self) -> None:
            self.codes, self.scales, self.name = torch.zeros(256, dtype=torch.uint8), torch.zeros(1), "codes"

    class Holder:
        state = {0: {"moments": [Quantised(), {"sum": torch.zeros(2)}]}}  # noqa: RUF012

    assert peers.bytes_moved([], Holder(), clipped=False) == 2 * (256 + 4 + 8)


def test_absent_peer_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PEERS, "nobody", absent())
    missing = "absent: no module nobody.at_all; pip install nobody"
    assert peers.why_not("nobody", "cpu") == missing
    assert peers.present()["nobody"] == missing
    assert implementations.why_not("nobody", "cpu") == missing


def test_gpu_peer_is_refused_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PEERS, "nobody", absent(module="torch"))
    assert peers.why_not("nobody", "cpu") == "nobody needs a GPU"


def test_large_models_are_not_compiled() -> None:
    assert "up to 200 tensors" in (peers.why_not("torch-compiled", "cuda", 201) or "")
    assert "up to 200 tensors" not in (peers.why_not("torch-compiled", "cuda", 200) or "")


def test_failing_peer_is_skipped_and_our_failure_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "failed", {})
    with pytest.raises(pytest.skip.Exception, match="optimi failed: ValueError: no such luck"), peers.guarded("optimi"):
        raise ValueError("no such\n luck")
    assert peers.present()["optimi"] == "failed: ValueError: no such luck"
    with pytest.raises(ValueError, match="ours"), peers.guarded("hdet-cpp"):
        raise ValueError("ours")


def test_peer_implements_adamw_only() -> None:
    with pytest.raises(ValueError, match="torch-compiled implements adamw only, got rule='lion'"):
        implementations.optimizer("torch-compiled", "lion", parameters("cpu"))


def test_every_peer_has_a_title_and_existing_cases() -> None:
    for name, peer in peers.PEERS.items():
        assert comparison_table.TITLES[name] == peer.title
        assert peer.works
        assert set(peer.works) <= set(test_optim_step.WORKS)
