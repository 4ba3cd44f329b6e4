"""The peers of the benchmarks: that they do the work that they are compared in, and what is said of absent ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bench import comparison_table, implementations, peers, suites

DEVICES = ("cpu", "cuda")


def parameters(device: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """So small that in bf16 too a step of the learning rate is far above the rounding."""
    source = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=source).mul(0.01)) for shape in ((64, 64), (4097,))]
    params = [nn.Parameter(param.detach().to(device, dtype)) for param in params]
    for param in params:
        param.grad = torch.randn(param.shape, generator=source).to(device, dtype)
    return params


def absent(**what: Any) -> peers.Peer:
    return peers.Peer(**{"title": "nobody", "package": "nobody", "module": "nobody.at_all", "make": list} | what)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_makes_the_step_of_torch(name: str, device: str) -> None:
    """Root mean squares: of the smallest elements 8 bits keep little, as their authors mean it."""
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


@pytest.mark.parametrize("device", DEVICES)
def test_the_compiled_step_is_compiled(device: str) -> None:
    if (reason := implementations.why_not("torch-compiled", device)) is not None:
        pytest.skip(reason)
    optimizer = peers.CompiledAdamW(parameters(device))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    optimizer.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs


def test_bytes_are_those_of_parameters_gradients_and_state() -> None:
    params = parameters("cpu")
    optimizer = torch.optim.AdamW(params)
    optimizer.step()
    count = sum(param.numel() for param in params)
    assert peers.bytes_moved(params, optimizer, clipped=False) == pytest.approx(28 * count, rel=1e-3)  # and step counts
    assert peers.bytes_moved(params, optimizer, clipped=True) == pytest.approx(32 * count, rel=1e-3)


def test_bytes_are_found_within_whatever_holds_the_state() -> None:
    class Quantised:
        def __init__(self) -> None:
            self.codes, self.scales, self.name = torch.zeros(256, dtype=torch.uint8), torch.zeros(1), "codes"

    class Holder:
        state = {0: {"moments": [Quantised(), {"sum": torch.zeros(2)}]}}  # noqa: RUF012

    assert peers.bytes_moved([], Holder(), clipped=False) == 2 * (256 + 4 + 8)


def test_an_absent_peer_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PEERS, "nobody", absent())
    missing = "absent: there is no module nobody.at_all; pip install nobody"
    assert peers.why_not("nobody", "cpu") == missing
    assert peers.present()["nobody"] == missing
    assert implementations.why_not("nobody", "cpu") == missing


def test_a_peer_for_gpus_says_so_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PEERS, "nobody", absent(module="torch"))
    assert peers.why_not("nobody", "cpu") == "nobody needs a GPU"


def test_no_large_model_is_compiled() -> None:
    assert "up to 200 tensors" in (peers.why_not("torch-compiled", "cuda", 201) or "")
    assert "up to 200 tensors" not in (peers.why_not("torch-compiled", "cuda", 200) or "")


def test_a_peer_that_raises_is_noted_and_ours_is_not_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "failed", {})
    with pytest.raises(pytest.skip.Exception, match="optimi failed: ValueError: no such luck"), peers.guarded("optimi"):
        raise ValueError("no such\n luck")
    assert peers.present()["optimi"] == "failed: ValueError: no such luck"
    with pytest.raises(ValueError, match="ours"), peers.guarded("hdet-cpp"):
        raise ValueError("ours")


def test_a_peer_knows_no_rule_but_adamw() -> None:
    with pytest.raises(ValueError, match="torch-compiled is an AdamW, and was asked for lion"):
        implementations.optimizer("torch-compiled", "lion", parameters("cpu"))


def test_every_peer_has_a_place_in_the_tables_and_work_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(suites.HERE)
    from bench import test_optim_step

    for name, peer in peers.PEERS.items():
        assert comparison_table.WAYS[name] == peer.title
        assert peer.works
        assert set(peer.works) <= set(test_optim_step.WORKS)
