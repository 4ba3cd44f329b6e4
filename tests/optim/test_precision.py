"""State keeps the precision in which it was saved, and half-precision training is as accurate as it should be."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hdet_kernels.optim import FusedAdamW
from tests.ops.cases import BACKENDS, QUICK
from tests.optim.cases import (
    FUSED,
    PAIRS,
    QUICK_FUSED,
    QUICK_PAIRS,
    assert_as_accurate_as_torch,
    choose,
    choose_backends,
    fused_optimizer,
    give_gradients,
    parameters,
    run,
    saved_and_loaded,
    torch_optimizer,
    with_backends,
)

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STATES = {"fp32-state": torch.float32, "bf16-state": torch.bfloat16, "int8-state": "int8"}


def masters(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[Tensor]:
    return [optimizer.state[param]["master"] for param in params]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(("backend", "name"), with_backends(QUICK, PAIRS, QUICK_PAIRS))
def test_masters_train_as_float32_parameters_do(backend: tuple[str, str], name: str, half: str) -> None:
    where, device = backend
    dtype = HALVES[half]
    ours = parameters(dtype, device)
    wide = [nn.Parameter(param.detach().float().cpu()) for param in ours]
    exact = [nn.Parameter(param.detach().double().cpu()) for param in ours]
    fused = fused_optimizer(name, ours, backend=where)
    run(fused, ours, range(5))
    run(torch_optimizer(name, wide), wide, range(5))
    run(torch_optimizer(name, exact), exact, range(5))
    for master, param, plain, true in zip(masters(fused, ours), ours, wide, exact, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(param, master.to(dtype)), "a parameter is the rounding of its master"
        if true.numel():
            error = (master.cpu().double() - true).abs().max()
            rounding = torch.finfo(torch.float32).eps * true.abs().max()
            assert error <= 2 * (plain.double() - true).abs().max() + rounding
    for flat in fused.state_flats().values():
        assert flat.dtype == torch.float32


@pytest.mark.parametrize(("backend", "name"), with_backends(QUICK, PAIRS, QUICK_PAIRS))
def test_everything_in_bf16_is_as_accurate_as_torch(backend: tuple[str, str], name: str) -> None:
    options = {"master_weights": False, "state_dtype": torch.bfloat16}
    fused = assert_as_accurate_as_torch(backend, name, torch.bfloat16, **options)
    assert all(flat.dtype == torch.bfloat16 for flat in fused.state_flats().values())
    assert not any("master" in entries for entries in fused.state.values())


@pytest.mark.parametrize("backend", choose_backends(BACKENDS, "torch-cpu", "cpp-cpu"))
def test_masters_follow_parameters_that_the_user_writes(backend: tuple[str, str]) -> None:
    where, device = backend
    model = nn.Linear(5, 3).to(device, torch.bfloat16)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3, weight_decay=0.0, backend=where)
    run(optimizer, list(model.parameters()), range(2))
    kept = [master.clone() for master in masters(optimizer, list(model.parameters()))]
    model.load_state_dict({"weight": torch.full((3, 5), 2.0), "bias": model.bias.detach()})
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    weight, bias = masters(optimizer, list(model.parameters()))
    assert torch.equal(weight, torch.full_like(weight, 2.0)), "the master takes the loaded values"
    assert torch.equal(bias, kept[1]), "an unchanged parameter keeps its master"


#: dtype of the parameters, and options.
KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "masters": (torch.bfloat16, {}),
    "stochastic": (torch.bfloat16, {"stochastic_rounding": True}),
    "fp32": (torch.float32, {}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", choose(STATES, "bf16-state", "int8-state"))
@pytest.mark.parametrize(("backend", "name"), with_backends(QUICK, FUSED, QUICK_FUSED))
def test_training_is_resumed_to_the_bit(backend: tuple[str, str], name: str, state: str, kind: str) -> None:
    """Training 4 steps equals training 2, saving, loading and training 2, in every precision."""
    if "amsgrad" in name and state == "int8-state":
        pytest.skip("refused")
    (where, device), (dtype, given) = backend, KINDS[kind]
    options = given | {"backend": where, "state_dtype": STATES[state]}
    straight, resumed = parameters(dtype, device), parameters(dtype, device)
    torch.manual_seed(1)
    whole = fused_optimizer(name, straight, **options)
    first = fused_optimizer(name, resumed, **options)
    run(whole, straight, range(4))
    run(first, resumed, range(2))
    torch.manual_seed(2)
    second = fused_optimizer(name, resumed, **options)
    second.load_state_dict(saved_and_loaded(first.state_dict()))
    second.load_state_dict(second.state_dict())  # its own: nothing changes
    run(second, resumed, range(2, 4))
    for a, b in zip(straight, resumed, strict=True):
        assert torch.equal(a, b)
        for key, value in whole.state[a].items():
            assert torch.equal(value, second.state[b][key]), key


def test_stochastic_rounding_does_not_use_the_seed_of_torch() -> None:
    """Under DDP every rank may have another torch seed, and the ranks would drift apart."""
    results = []
    for torch_seed, own in ((1, 0), (2, 0), (1, 7)):
        torch.manual_seed(torch_seed)
        before = torch.get_rng_state()
        params = parameters(torch.bfloat16)
        optimizer = FusedAdamW(params, lr=1e-4, stochastic_rounding=True)
        optimizer.param_groups[0]["rounding_seed"] = own
        run(optimizer, params, range(3))
        assert torch.equal(torch.get_rng_state(), before)
        results.append(torch.cat([param.detach().flatten() for param in params]))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", choose(PAIRS, "sgd-momentum", "adamw", "adagrad"))
def test_half_precision_checkpoints_are_exchanged_with_torch(name: str) -> None:
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    fused, torchs = fused_optimizer(name, ours), torch_optimizer(name, theirs)
    run(fused, ours, range(2))
    run(torchs, theirs, range(2))
    into_torch, into_fused = torch_optimizer(name, theirs), fused_optimizer(name, ours)
    into_torch.load_state_dict(saved_and_loaded(fused.state_dict()))
    into_fused.load_state_dict(saved_and_loaded(torchs.state_dict()))
    for mine, other in zip(ours, theirs, strict=True):
        for key, value in torchs.state[other].items():
            assert torch.equal(into_fused.state[mine][key].to(value), value), key
            assert torch.equal(into_torch.state[other][key], fused.state[mine][key].to(value)), key
    run(into_torch, theirs, range(2, 4))
    run(into_fused, ours, range(2, 4))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("backend", choose_backends(BACKENDS, "torch-cpu", "cpp-cpu"))
def test_bf16_gradients_of_float32_parameters_are_not_copied(backend: tuple[str, str]) -> None:
    where, device = backend
    narrow, wide = parameters(device=device), parameters(device=device)
    for param in narrow:
        param.grad_dtype = torch.bfloat16
    give_gradients(wide, seed=0)
    for mine, other in zip(narrow, wide, strict=True):
        assert other.grad is not None
        mine.grad = other.grad.to(torch.bfloat16)  # give_gradients rounds to bf16: nothing is lost here
    ours, plain = FusedAdamW(narrow, backend=where), FusedAdamW(wide, backend=where)
    flats = ours._flat_groups
    assert not any(flat.gradients(part, attrgetter("grad")).copied for flat in flats for part in flat.parts)
    ours.step()
    plain.step()
    for mine, other in zip(narrow, wide, strict=True):
        assert torch.equal(mine, other)
