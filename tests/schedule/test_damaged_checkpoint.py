"""Damaged checkpoints: every leaf of real states is damaged in every way. A refusal names it and changes nothing."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import hdet_kernels as hk
from tests.ranks import Cases
from tests.schedule.undo_runs import Scripted, Trying
from tests.training import Trainer, same

DELETED = object()
DAMAGES: dict[str, Any] = {
    "deleted": DELETED,
    "None": None,
    "text": "x",
    "negative": -1,
    "fraction": 7.5,
    "nan": math.nan,
    "infinite": math.inf,
    "huge": 10**30,
    "list": [],
    "dict": {},
    "bool": True,
    "tensor": torch.ones(3, 5, 7),
}

#: Paths and the damages after which a value is as good as any other: a loss may be NaN, a number may be another number,
#: and where nothing is remembered it is found out again.
NUMBERS = "negative|fraction|huge"
HARMLESS = [
    (r"_\w+|.*\._\w+", "deleted"),  # details of torch's schedulers
    (r"(.*\.)?(_is_initial|_get_lr_called_within_step|cycle_momentum|use_beta1)", "bool"),
    (r"(.*\.)?(base_lrs|_last_lr)\[0\]|.*(scheduled|peaks|path_length|noise|q|s|m|mu|signs|ceiling)\[\d\]", NUMBERS),
    (
        r".*(peaks|path_length|caps|ceiling|log_likelihood)\[\d\]|.*\.(caps|changes|bends)",
        "None|list",
    ),
    (
        r".*\.(level|initial)|.*(bends|changes|log_likelihood\[0\]|caps|sums\[\d\])\[\d+\]",
        NUMBERS,
    ),
    (r".*(bends|changes)(\[\d+\])?|.*caps", "deleted|list"),
    (r".*(anchor|attempt|trial|before)", "deleted|None"),
    (r".*(losses|probes|sums\[\d\]|start|correction.*)\[\d+\]|.*window\.sum", f"{NUMBERS}|nan|infinite"),
    (
        r".*\.(probes|level|soundness|shared|displacement|pending|compression|outer|landed|taken|loss|counts|base|rate)",
        "None",
    ),
    (r".*\.(moved|velocity|start|start_at|stop_at|eta|gamma|total_steps|controller)", "None|list"),
    (r".*\.(version)", "text"),
    (r".*\.(bounds|excluded|losses|probes)|.*values\.lr/0", "list"),
    (r".*\.(config.*|controller|base|loss|state|state_before)", "dict"),
    (r".*(losses|values\.lr/0|excluded|probes)\[\d+\]|.*\.(landed|taken|lr/0)", "deleted"),
    (
        r".*\.(seconds|lr/0|first|lowest|highest|last|loss)|.*(lr/0|base|values|applied|eta|velocity|gamma)\[.*\]",
        NUMBERS,
    ),
    (r".*\.(shared|apart|begun|ever|acting|heal|has_state|probe)|.*(sound|healthy)\[\d\]", "bool"),
    (r".*\.(state|state_before)\..*|.*\.(state|state_before)", "deleted|dict"),
    (r".*(caps|eta|gamma)\[0\]", "deleted"),  # of one hyperparameter: an empty list is as before the first sync
    (r".*\.(peaks|buffers|buffers_before|integers)", "list"),  # where they are empty
    (r".*\.nesterov", "bool"),
    (r".*\.window\.count", "fraction"),  # a loss that was divided counts as a part of one
    (r".*displacement\.last\[0\]", "list"),  # of one group: as after the end
    (r".*_schedulers\[\d\]\.last_epoch", "negative"),
    (r".*\.(undo|kept|others|state|undone)", "None"),
    (r".*\.undone", "deleted"),
    (r".*\.(slopes|errors|posterior|distance)", "deleted|None|dict"),
    (r".*\.(slopes|errors)\..*|.*posterior\..*\[\d\]|.*\.distance", NUMBERS),
    (r".*\.(slopes|errors|posterior)\..*", "deleted"),
    (r".*\.others", "dict"),
    (r"hdet\.config\.controller_constants\..*", "deleted"),  # another version may have others
    (r".*\.(broken|better|no_better)", "list"),  # where they are empty
    (r"hdet\.(averaged|optimizer_state)", "bool"),
    (r"hdet\.(first|origin)", "deleted"),  # torch's last_epoch tells of an origin
    (r".*(anchor\[1\]|attempt\.position)", "fraction"),
    (r".*displacement\.slopes(\[\d\])*", f"deleted|list|{NUMBERS}|nan|infinite"),
    (r".*history\[0\]\.(act|judgement|peaks|why)", "deleted|None"),
    (r".*history\[0\]\.(judgement|peaks)|.*summary\.(peaks|base\..*)", "dict"),
    (r".*\.why", "text"),
    (r".*judgement\.\w+|.*soundness\.(before|slopes|count|path)", f"deleted|{NUMBERS}"),
    (r".*summary\.(lost|aside|peaks|events(\[0\])?)", "deleted"),
    (r".*summary\.events", "list"),
    # Of a controller that is not ours the kinds of values are known, and of an entry that is None at first nothing.
    (r".*(controller|state)\.(moved|total)", NUMBERS),
    (r".*(controller|attempt\.state)\.trial", "(?!deleted).*"),
]


def harmless(path: str, damage: str) -> bool:
    return any(re.fullmatch(paths, path) and re.fullmatch(damages, damage) for paths, damages in HARMLESS)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every container and leaf."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(entry, (*path, key))


def damaged(state: Any, path: tuple[Any, ...], damage: Any) -> Any:
    """Return a copy of ``state`` with one entry replaced; only the containers on the way are copied."""
    key, *rest = path
    copied = copy.copy(state)
    if rest:
        copied[key] = damaged(state[key], tuple(rest), damage)
    elif damage is DELETED:
        del copied[key]
    else:
        copied[key] = damage
    return copied


def spelled(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


def sequential(optimizer: Any) -> hk.HDETScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4), lr_scheduler.CosineAnnealingLR(optimizer, 36)]
    return hk.HDETScheduler(lr_scheduler.SequentialLR(optimizer, parts, [4]), total_steps=40, sync_every=4)


KINDS: dict[str, dict[str, Any]] = {
    "regression": {"total_steps": 40, "probe": lambda: 1.0},
    "overlap": {"auto_lr": False, "overlap_steps": 3},
    "compress and outer": {"auto_lr": False, "compress": "int8", "outer": hk.Outer()},
    "hypergradient": {"total_steps": 40, "auto_lr": hk.HypergradientController(), "ddp": True},
    "softmax": {"auto_lr": hk.SoftmaxController(warmup_steps=0)},
    "wrapped": {"make_scheduler": sequential},
    "begun anew": {"auto_lr": Scripted((4,), last=99), "make_optimizer": hk.FusedAdamW},
    "trial": {"auto_lr": Trying(last=99), "make_optimizer": hk.FusedAdamW, "total_steps": 20},
    "undo": {"auto_lr": Scripted(last=99), "make_optimizer": hk.FusedAdamW, "compress": "int8"},
}


def everything(trainer: Trainer) -> Any:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in trainer.optimizer.param_groups]
    parts = trainer.scheduler.state_dict(), trainer.optimizer.state_dict()["state"], groups, trainer.parameters()
    return copy.deepcopy(parts)


def _damage_all(rank: int, kind: str, every: int) -> dict[str, list[str]]:
    """Load a real state with every ``every``-th of all damages, and return what was not as promised."""
    trainer = Trainer(rank, **{"ddp": False, **KINDS[kind]}).train(9)
    # What is packed in a tuple is damaged in its parts.
    packed = trainer.scheduler.state_dict().items()
    state = {name: entry[0] if isinstance(entry, tuple) else entry for name, entry in packed}
    before = everything(trainer)
    found: dict[str, list[str]] = {"accepted": [], "unnamed": [], "raised": [], "changed": []}
    # The records of later syncs are like the first one.
    paths = [path for path in leaves(state) if not re.search(r"(history|points)\[[1-9]", spelled(path))]
    cases = [(path, name) for path in paths for name in DAMAGES]
    for number, (path, name) in enumerate(cases):
        if (number + number // len(DAMAGES)) % every:  # another damage at every leaf
            continue
        where = f"{spelled(path)} {name}"
        try:
            trainer.scheduler.load_state_dict(damaged(state, path, DAMAGES[name]))
        except ValueError as error:
            names = [*[str(key) for key in path if isinstance(key, str)][-3:], "the checkpoint was made with"]
            if not any(each in str(error) for each in names):
                found["unnamed"].append(f"{where}: {error}")
        except Exception as error:
            found["raised"].append(f"{where}: {error!r}")
        else:
            if not harmless(spelled(path), name):
                found["accepted"].append(where)
            trainer.scheduler.load_state_dict(state)
        if number % (100 * every) == 0 and not same(everything(trainer), before):
            found["changed"].append(where)
    if not same(everything(trainer), before):
        found["changed"].append("the last ones")
    trainer.train(3)
    return found


_CASES = Cases(
    2,
    _damage_all,
    {f"{kind}, some": (kind, 11) for kind in ("regression", "overlap")},
    {kind: (kind, 1 if kind == "trial" else 3) for kind in KINDS},
)


@pytest.mark.parametrize("case", _CASES.params())
def test_a_damaged_checkpoint_is_refused_by_name_and_changes_nothing(case: str) -> None:
    for found in _CASES[case]:
        assert found == {"accepted": [], "unnamed": [], "raised": [], "changed": []}
