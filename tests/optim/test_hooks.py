"""Hooks of a step run once, whoever registered them."""

from __future__ import annotations

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hdet_kernels.optim import FusedAdamW
from tests.optim.cases import parameters, run


def test_hooks_of_an_optimizer_run() -> None:
    params = parameters()
    optimizer = FusedAdamW(params)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("save"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    run(optimizer, params, [0])
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after", "save", "loaded"]


def test_global_hooks_run_and_the_profiler_sees_the_step() -> None:
    params = parameters()
    optimizer = FusedAdamW(params)
    calls: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after")),
    ]
    try:
        run(optimizer, params, range(1))
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["before", "after"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(optimizer, params, range(1, 2))
    assert calls == ["before", "after"]
    seen = {event.key for event in profile.key_averages()}
    assert "Optimizer.step#FusedAdamW.step" in seen
    assert any(key.startswith("hdet_kernels::") for key in seen), "the operator"
