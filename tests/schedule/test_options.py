"""The keywords that both schedulers share: names, defaults, documentation, and what a typo gives."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from torch.optim import lr_scheduler as schedules

import hdet_kernels as hk
from hdet_kernels.schedule.arguments import DEFAULTS, explored, with_defaults
from tests.schedule.cases import adam, groups_of

#: Defaults that are part of the published signature.
PUBLISHED = {
    "spread": 0.3,
    "sync_every": None,
    "auto_lr": True,
    "trust": 3.0,
    "probe": None,
    "explore": (),
    "gradients": "auto",
    "ensemble": None,
    "average_state": "auto",
    "average_buffers": True,
    "model": None,
    "seed": 0,
}
#: The remaining ones.
OTHERS = {"bucket_bytes": None, "compress": None, "overlap_steps": 0, "backup": True, "outer": None, "merge": "mean"}
OTHERS |= {"history_file": None, "scout": None, "tie_groups": "auto"}


def keywords(scheduler: Any) -> dict[str, Any]:
    parameters = inspect.signature(scheduler).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}


def test_defaults() -> None:
    assert DEFAULTS == PUBLISHED | OTHERS
    assert keywords(hk.HDETOneCycleLR) == DEFAULTS


def test_keywords_of_both_schedulers_are_the_same_apart_from_total_steps() -> None:
    assert keywords(hk.HDETScheduler) == {"total_steps": None} | DEFAULTS


@pytest.mark.parametrize("scheduler", [hk.HDETOneCycleLR, hk.HDETScheduler])
def test_the_signature_shows_types_and_no_catch_all(scheduler: Any) -> None:
    parameters = inspect.signature(scheduler).parameters
    assert all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    assert all(parameters[name].annotation is not inspect.Parameter.empty for name in DEFAULTS)
    assert "spread: float = 0.3" in str(inspect.signature(scheduler))


def test_arguments_begin_with_torchs_in_torchs_order() -> None:
    theirs = list(inspect.signature(schedules.OneCycleLR).parameters.values())
    ours = list(inspect.signature(hk.HDETOneCycleLR).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in ours[len(theirs) :])


def test_every_option_is_documented_once_and_in_order() -> None:
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(hk.HDETOneCycleLR) or "", re.M)
    assert documented == list(DEFAULTS)


def one_cycle(optimizer: Any, **options: Any) -> Any:
    return hk.HDETOneCycleLR(optimizer, 0.1, 10, **options)


def wrapped(optimizer: Any, **options: Any) -> Any:
    return hk.HDETScheduler(schedules.CosineAnnealingLR(optimizer, 10), **options)


@pytest.mark.parametrize(("make", "name"), [(one_cycle, "HDETOneCycleLR"), (wrapped, "HDETScheduler")])
@pytest.mark.parametrize(("typo", "meant"), [("sync_evry", "sync_every"), ("autolr", "auto_lr"), ("probes", "probe")])
def test_a_typo_raises_with_the_keyword_that_was_meant(make: Any, name: str, typo: str, meant: str) -> None:
    optimizer = adam()
    before = {key for group in groups_of(optimizer) for key in group}
    expected = rf"^{name}\(\) got an unexpected keyword argument '{typo}'; did you mean '{meant}'\?$"
    with pytest.raises(TypeError, match=expected):
        make(optimizer, **{typo: 3})
    if make is one_cycle:
        assert {key for group in groups_of(optimizer) for key in group} == before


def test_an_unknown_keyword_raises_with_all_keywords() -> None:
    with pytest.raises(TypeError, match=rf"'xyzzy'; it takes {', '.join(DEFAULTS)}$"):
        one_cycle(adam(), xyzzy=3)


def test_options_that_are_given_replace_defaults() -> None:
    complete = with_defaults({"spread": 0.1, "seed": 5}, "S")
    assert complete == DEFAULTS | {"spread": 0.1, "seed": 5}
    assert DEFAULTS["spread"] == 0.3


def test_explore_takes_any_iterable_of_several() -> None:
    several = (hk.Explore("eps"), hk.Explore("weight_decay"))
    given = with_defaults({"explore": iter(several)}, "S")
    assert explored(given, cycle_momentum=True) == several


@pytest.mark.parametrize("name", ["momentum", "betas[0]"])
def test_a_momentum_that_the_schedule_sets_cannot_be_explored(name: str) -> None:
    given = with_defaults({"explore": [hk.Explore(name, spread=0.01, bounds=(0.5, 0.99))]}, "S")
    with pytest.raises(ValueError, match=r"cannot be explored while the schedule sets it .* cycle_momentum=False"):
        explored(given, cycle_momentum=True)
    assert len(explored(given, cycle_momentum=False)) == 1
    setter = with_defaults({"explore": [hk.Explore(name, base=0.9, apply=print)]}, "S")
    assert len(explored(setter, cycle_momentum=True)) == 1
