"""The choice of a backend, and the messages where one cannot run."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from hdet_kernels.ops import backends as registry


def test_every_backend_says_ok_or_why_not() -> None:
    state = registry.backends()
    assert list(state) == ["cuda", "triton", "cpp", "torch"]
    assert state["torch"] == "ok"
    assert all(isinstance(reason, str) and reason for reason in state.values())


def test_triton_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    why_not = registry._PROBES["triton"]
    installed = importlib.util.find_spec("triton") is not None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_not() is None if installed else "pip install triton" in str(why_not())
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if installed:
        assert "no usable NVIDIA GPU (TRITON_INTERPRET=1" in str(why_not())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_not() == "triton is not installed; pip install triton"


def test_the_fastest_available_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(registry.ENVIRONMENT, raising=False)
    cpp = registry.backends()["cpp"] == "ok"
    assert registry.resolve("cpu") == ("cpp" if cpp else "torch")
    assert registry.resolve("meta") == "torch"
    for missing, expected in (((), "cpp"), (("cpp",), "torch")):
        monkeypatch.setattr(registry, "_reason", lambda name, missing=missing: "no" if name in missing else None)
        assert registry.resolve("cpu") == expected, "the interpreter is never chosen by itself"
    for missing, expected in (((), "cuda"), (("cuda",), "triton"), (("cuda", "triton"), "torch")):
        monkeypatch.setattr(registry, "_reason", lambda name, missing=missing: "no" if name in missing else None)
        assert registry.resolve("cuda") == expected


def test_precedence_is_argument_then_use_backend_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_reason", lambda name: None)
    monkeypatch.setenv(registry.ENVIRONMENT, "torch")
    assert registry.resolve("cpu") == "torch"
    registry.use_backend("cpp")
    try:
        assert registry.resolve("cpu") == "cpp"
        assert registry.resolve("cpu", "triton") == "triton"
    finally:
        registry.use_backend(None)
    assert registry.resolve("cpu") == "torch"


def test_an_unavailable_request_lists_reasons_and_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"cuda": "no GPU here", "cpp": "no compiler here", "triton": "not installed here"}
    monkeypatch.setattr(registry, "_reason", reasons.get)
    listing = r"not available.*cuda: no GPU here; triton: not installed here; cpp: no compiler here; torch: ok"
    for ask in (lambda: registry.resolve("cpu", "cpp"), lambda: registry.use_backend("cpp")):
        with pytest.raises(RuntimeError, match=rf"'cpp' \(\w+(=|\(\))\) is {listing}"):
            ask()
    monkeypatch.setenv(registry.ENVIRONMENT, "cuda")
    with pytest.raises(RuntimeError, match=r"'cuda' \(HDET_BACKEND\) is not available"):
        registry.resolve("cpu")


def test_unknown_and_unfit_backends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"unknown backend 'metal'.*cuda, triton, cpp, torch"):
        registry.resolve("cpu", "metal")
    monkeypatch.setattr(registry, "_reason", lambda name: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=r"'cuda' \(backend=\) cannot serve tensors on cpu.*are cpp, torch, triton"):
        registry.resolve("cpu", "cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=r"'triton' \(backend=\) cannot serve tensors on cpu.*are cpp, torch\."):
        registry.resolve("cpu", "triton")
    with pytest.raises(ValueError, match=r"'cpp' \(backend=\) cannot serve tensors on cuda.*are cuda, triton, torch"):
        registry.resolve("cuda", "cpp")


OPERATIONS = {
    "step": ("bind_step",),
    "reduce": ("grad_norm",),
    "pack": ("pack", "unpack"),
    "wire": ("wire_operators",),
    "rowwise": ("rowwise_adagrad",),
}


@pytest.mark.parametrize("name", ["cuda", "triton", "cpp", "torch"])
def test_every_backend_implements_every_operation(name: str) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    for operation, functions in OPERATIONS.items():
        module = registry.implementation(name, operation)
        for function in functions:
            assert callable(getattr(module, function)), f"{module.__name__} lacks {function}"
