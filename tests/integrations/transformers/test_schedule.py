"""Schedulers that are built from TrainingArguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_scheduler

import hdet_kernels as hk
from hdet_kernels.integrations.transformers.schedule import build_scheduler, checked_save, trainer_options
from tests.integrations.transformers import tiny

STEPS = 20


def scheduler_of(folder: Path, hdet: dict[str, Any], **given: Any) -> Any:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    args = tiny.arguments(str(folder), **given)
    return build_scheduler(args, optimizer, STEPS, trainer_options(hdet), model=model)


def rates_of(scheduler: Any) -> list[float]:
    found = []
    for _ in range(STEPS):
        found.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def test_the_default_is_one_cycle_that_peaks_after_the_warm_up(tmp_path: Path) -> None:
    scheduler = scheduler_of(tmp_path, {"auto_lr": False}, warmup_steps=5)
    assert isinstance(scheduler, hk.HDETOneCycleLR)
    rates = rates_of(scheduler)
    assert max(rates) == rates[4] == pytest.approx(1e-2)
    assert scheduler.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert rates_of(scheduler_of(tmp_path, {"auto_lr": False}))[5] == pytest.approx(1e-2)  # 30 %
    shares = scheduler_of(tmp_path, {"auto_lr": False}, warmup_steps=0.25)
    assert rates_of(shares) == rates


def test_keywords_and_the_peak_of_one_cycle_can_be_given(tmp_path: Path) -> None:
    keywords = {"div_factor": 10.0, "cycle_momentum": True}
    scheduler = scheduler_of(tmp_path, {"max_lr": 0.5, "auto_lr": False}, lr_scheduler_kwargs=keywords)
    assert rates_of(scheduler)[0] == pytest.approx(0.05)
    assert max(rates_of(scheduler_of(tmp_path, {"auto_lr": False}, warmup_steps=1))) == pytest.approx(1e-2)


@pytest.mark.parametrize(
    ("named", "hdet", "given"),
    [
        ("cosine", {}, {"lr_scheduler_type": "cosine", "warmup_steps": 4}),
        ("linear", {"schedule": "linear"}, {}),
        ("polynomial", {"schedule": "polynomial"}, {"lr_scheduler_kwargs": {"power": 2.0}}),
    ],
)
def test_schedules_of_transformers_are_wrapped(
    tmp_path: Path, named: str, hdet: dict[str, Any], given: dict[str, Any]
) -> None:
    scheduler = scheduler_of(tmp_path, {**hdet, "auto_lr": False}, **given)
    assert isinstance(scheduler, hk.HDETScheduler)
    plain = get_scheduler(
        named,
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-2),
        given.get("warmup_steps", 0),
        STEPS,
        given.get("lr_scheduler_kwargs"),
    )
    assert rates_of(scheduler) == rates_of(plain)


def test_a_second_training_begins_from_the_learning_rate_of_the_user(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    args = tiny.arguments(str(tmp_path))
    options = trainer_options({"schedule": "constant", "auto_lr": False})
    for _ in range(2):
        assert rates_of(build_scheduler(args, optimizer, STEPS, options, model=model)) == [1e-2] * STEPS


@pytest.mark.parametrize(
    ("hdet", "error", "message"),
    [
        ({"sync_evry": 3}, TypeError, "did you mean 'sync_every'"),
        ({"schedule": "triangle"}, ValueError, "schedule must be one of one_cycle, linear.*'triangle'"),
        ({"save": "often"}, ValueError, "save must be one of 'consensus', 'sync', got 'often'"),
        ({"schedule": "cosine", "max_lr": None}, ValueError, "max_lr is for the one cycle"),
    ],
)
def test_bad_options_are_named(hdet: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        trainer_options(hdet)


def test_a_peak_for_another_schedule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_lr is for the one cycle, got it with lr_scheduler_type='cosine'"):
        scheduler_of(tmp_path, {"max_lr": 1.0}, lr_scheduler_type="cosine")
    assert checked_save("sync") == "sync"
