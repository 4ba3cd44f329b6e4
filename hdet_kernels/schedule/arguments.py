"""The keywords that both HDET schedulers have, and the checks of all arguments before anything is built.

What depends on several of them, on the optimizer's parameters or on the replicas is checked in ``build.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

from torch import Tensor
from torch.optim import Optimizer

from hdet_kernels.checks import (
    check_callable,
    check_choice,
    check_flag,
    check_iterable,
    check_kind,
    check_number,
    check_positive,
    check_share,
    check_steps,
    check_whole,
    each,
    is_real,
    is_several,
    keep_plain,
    spell,
    unexpected_keyword,
)
from hdet_kernels.controller.protocol import Controller, check_controller
from hdet_kernels.controller.regression import RegressionController, checked_trust
from hdet_kernels.converge import Averaging
from hdet_kernels.ensemble import Ensemble, check_ensemble
from hdet_kernels.fanout.explore import Explore, TieGroups, checked_tie_groups
from hdet_kernels.fanout.multipliers import check_spread
from hdet_kernels.schedule.losses import Loss
from hdet_kernels.schedule.scout.rounds import ScoutSettings
from hdet_kernels.stack import ReplicaStack

GradientMode = Literal["auto", "shared", "local"]
Probe = Callable[[], Loss]

#: The arguments of torch's ``OneCycleLR`` after the optimizer.
_ONE_CYCLE = (
    *("max_lr", "total_steps", "epochs", "steps_per_epoch", "pct_start", "anneal_strategy", "cycle_momentum"),
    *("base_momentum", "max_momentum", "div_factor", "final_div_factor", "three_phase", "last_epoch"),
)

#: Keywords of the schedulers that are fields of :class:`hdet_kernels.Averaging` now, and the fields.
_IN_AVERAGING = {
    **{name: name for name in ("compress", "overlap_steps", "backup", "bucket_bytes", "outer", "merge")},
    "average_state": "state",
    "average_buffers": "buffers",
}


class HasBuffers(Protocol):
    """A model, as far as averaging its buffers needs it."""

    def buffers(self) -> Iterable[Tensor]: ...


@dataclass(frozen=True)
class Options:
    """The keywords that both schedulers have, checked one by one. :class:`.HDETOneCycleLR` documents each.

    Raises:
        TypeError, ValueError: for one that makes no sense by itself.
    """

    spread: float = 0.3
    sync_every: int | None = None
    auto_lr: bool | Controller = True
    trust: float | None = 3.0
    probe: Probe | None = None
    explore: Iterable[Explore] = ()
    tie_groups: TieGroups = "auto"
    gradients: GradientMode = "auto"
    ensemble: Ensemble | None = None
    averaging: Averaging | None = None
    model: HasBuffers | None = None
    seed: int = 0
    history_file: str | os.PathLike[str] | None = None
    scout: ScoutSettings | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.auto_lr, bool):
            check_controller(self.auto_lr)
        trust = checked_trust(self.trust)
        if self.auto_lr is not True and trust != Options.trust:
            raise ValueError(
                f"trust={self.trust} is for auto_lr=True, got auto_lr={spell(self.auto_lr)}: "
                + ("pass auto_lr=RegressionController(trust=…) instead" if self.auto_lr else "leave trust= out")
            )
        if self.probe is not None:
            check_callable("probe", self.probe, "probe()", takes=0, remedy="it takes no arguments and returns a loss")
        check_choice("gradients", self.gradients, ("auto", "shared", "local"))
        if isinstance(self.ensemble, ReplicaStack):
            raise TypeError(f"ensemble is {self.ensemble!r} itself: pass ensemble=stack.ensemble")
        if self.ensemble is not None:
            check_ensemble("ensemble", self.ensemble)
        if self.averaging is not None:
            remedy = "pass for example hk.Averaging(compress='bf16')"
            check_kind("averaging", self.averaging, Averaging, "a hdet_kernels.Averaging", remedy=remedy)
        model = self.model
        if model is not None and (isinstance(model, type) or not callable(getattr(model, "buffers", None))):
            raise TypeError(
                f"model must be a torch.nn.Module, whose buffers are averaged, got {spell(model)}: leave model= out if "
                "it has no buffers"
            )
        if self.scout is not None:
            remedy = "pass hdet_kernels.ScoutSettings(…)"
            check_kind("scout", self.scout, ScoutSettings, "a hdet_kernels.ScoutSettings", remedy=remedy)
        keep_plain(
            self,
            spread=check_spread(self.spread, "linear"),
            sync_every=None if self.sync_every is None else check_steps("sync_every", self.sync_every),
            trust=trust,
            explore=_explored(self.explore),
            tie_groups=checked_tie_groups(self.tie_groups),
            seed=check_whole("seed", self.seed),
        )

    @staticmethod
    def among(given: Mapping[str, Any]) -> Options:
        """Return the options among the arguments of a scheduler, by name."""
        return Options(**{field.name: given[field.name] for field in fields(Options)})

    @property
    def average(self) -> Averaging:
        return Averaging() if self.averaging is None else self.averaging

    def explored(self, *, cycle_momentum: bool) -> tuple[Explore, ...]:
        """Return ``explore=``; raise for a momentum that the schedule sets itself."""
        several = tuple(self.explore)
        for explore in several if cycle_momentum else ():
            if explore.apply is None and explore.name in ("momentum", "betas[0]"):
                raise ValueError(
                    f"{explore.name!r} cannot be explored while the schedule sets it at every step: pass "
                    "cycle_momentum=False"
                )
        return several


def refuse_unknown(given: Mapping[str, object], where: str) -> None:
    """Raise TypeError for keywords that the schedulers do not have, and say which was probably meant."""
    known = [field.name for field in fields(Options)]
    for name in given:
        if name in known:
            continue
        if name in _IN_AVERAGING:
            hint = f"pass averaging=hk.Averaging({_IN_AVERAGING[name]}=…)"
        elif name in [field.name for field in fields(RegressionController)]:
            hint = f"pass auto_lr=hk.RegressionController({name}=…)"
        else:
            hint = ""
        raise unexpected_keyword(where, name, known, hint)


def one_cycle_arguments(optimizer: Optimizer, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of torch's ``OneCycleLR`` as plain numbers; raise for those that torch takes or trips over.

    ``given`` are the arguments of a scheduler by name, ``optimizer`` its innermost one. Learning rates and momenta that
    are tensors stay tensors: torch computes in their precision. ``max_lr`` stays None.
    """
    check_kind("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    count, max_lr = len(optimizer.param_groups), given["max_lr"]
    if isinstance(max_lr, Sequence) and any(rate is None for rate in max_lr):
        raise TypeError(
            f"max_lr must be a number for each parameter group, or None for all of them, got {spell(max_lr)}: with "
            "None the groups keep the ratios of their learning rates in the optimizer"
        )
    lengths = {name: given[name] for name in ("total_steps", "epochs", "steps_per_epoch")}
    checked: dict[str, Any] = {
        **{name: given[name] for name in _ONE_CYCLE},
        "max_lr": None if max_lr is None else _per_group("max_lr", max_lr, count, at_least=0),
        **{name: None if value is None else check_steps(name, value) for name, value in lengths.items()},
        "pct_start": check_share("pct_start", given["pct_start"]),
        "last_epoch": check_whole("last_epoch", given["last_epoch"], at_least=-1, remedy="-1 is a new run"),
    }
    for name in ("cycle_momentum", "three_phase"):
        value = given[name]
        checked[name] = bool(value) if type(value) is int and value in (0, 1) else check_flag(name, value)
    for name in ("div_factor", "final_div_factor"):
        checked[name] = check_positive(name, _scalar(given[name]))
    check_choice("anneal_strategy", given["anneal_strategy"], ("cos", "linear"))
    for name in ("base_momentum", "max_momentum") if checked["cycle_momentum"] else ():
        checked[name] = _per_group(name, given[name], count, at_least=0, below=1)
    _check_length(checked)
    _check_resumed(optimizer, checked["last_epoch"])
    if max_lr is None and checked["last_epoch"] != -1:
        raise ValueError(
            f"max_lr=None begins a run, got last_epoch={checked['last_epoch']}: leave last_epoch= out and resume by "
            "load_state_dict()"
        )
    return checked


def check_scout_used(scouts: bool, scout: object) -> None:
    """Raise ValueError if constants of the scouting phase are given for a run without one."""
    if scout is not None and not scouts:
        raise ValueError(f"scout={spell(scout)} is for HDETOneCycleLR with max_lr=None: leave it out")


def run_length(arguments: dict[str, Any]) -> int:
    """Return the number of steps that checked arguments of ``OneCycleLR`` describe."""
    if arguments["total_steps"] is not None:
        return int(arguments["total_steps"])
    return int(arguments["epochs"] * arguments["steps_per_epoch"])


def can_divide(pct_start: float, total_steps: int) -> bool:
    """Return whether ``OneCycleLR`` can be built for so many steps: it cannot divide a warm-up of one step."""
    return float(pct_start * total_steps) - 1 != 0


def _per_group(name: str, value: object, count: int, **bounds: Any) -> list[float | Tensor]:
    """Return one number for each parameter group, of one for all or of a list of as many."""
    entries = list(map(_scalar, value)) if is_several(value) else [_scalar(value)] * count
    given = entries if is_several(value) else _scalar(value)
    numbers = each(check_number, name, given, count, "optimizer's parameter groups", **bounds)
    return [entry if isinstance(entry, Tensor) else number for entry, number in zip(entries, numbers, strict=True)]


def _scalar(value: object) -> object:
    """Return a tensor of one element, which torch takes for a number, without dimensions; all else as it is."""
    return value.reshape(()) if isinstance(value, Tensor) and is_real(value) and value.numel() == 1 else value


def _check_length(arguments: dict[str, Any]) -> None:
    epochs, steps_per_epoch = arguments["epochs"], arguments["steps_per_epoch"]
    total_steps = arguments["total_steps"]
    if total_steps is None:
        if epochs is None or steps_per_epoch is None:
            raise ValueError(
                f"the length of the run is not known, got total_steps=None, epochs={epochs}, steps_per_epoch="
                f"{steps_per_epoch}: pass total_steps=, or both epochs= and steps_per_epoch="
            )
        total_steps = check_steps("epochs * steps_per_epoch", epochs * steps_per_epoch)
    if arguments["max_lr"] is not None and not can_divide(arguments["pct_start"], total_steps):
        raise ValueError(
            f"pct_start={arguments['pct_start']} of total_steps={total_steps} is a warm-up of one step, from its first "
            "step to its first step, which OneCycleLR cannot divide: pass another pct_start, or 0.0 for no warm-up"
        )


def _check_resumed(optimizer: Optimizer, last_epoch: int) -> None:
    """Raise KeyError, as torch does, if a schedule is to go on that the optimizer's groups know nothing of."""
    for index, group in enumerate(optimizer.param_groups if last_epoch != -1 else ()):
        missing = [name for name in ("initial_lr", "max_lr", "min_lr") if name not in group]
        if missing:
            raise KeyError(
                f"last_epoch={last_epoch} goes on with a schedule, but parameter group {index} has no "
                f"{', '.join(missing)}: load the optimizer's state_dict first, or leave last_epoch= out"
            )


def _explored(explore: object) -> tuple[Explore, ...]:
    if isinstance(explore, Explore):
        raise TypeError(f"explore= takes several: pass [{explore!r}]")
    expected, remedy = "a list of hdet_kernels.Explore objects", "pass for example [hk.Explore('weight_decay')]"
    check_iterable("explore", explore, expected, remedy=remedy)
    if isinstance(explore, Set):
        raise TypeError(f"explore must be {expected}, got {spell(explore)}, which has no order: {remedy}")
    several: tuple[Any, ...] = tuple(explore)  # type: ignore[arg-type]  # it can be iterated
    for index, entry in enumerate(several):
        check_kind(f"explore[{index}]", entry, Explore, "a hdet_kernels.Explore", remedy=remedy)
    return several


def check_no_epoch(loss: object) -> None:
    """Raise TypeError for a whole number in the place of the loss: torch's schedulers take an epoch there."""
    if isinstance(loss, int) and not isinstance(loss, bool):
        raise TypeError(
            f"step({loss}) looks like torch's step(epoch), but takes the loss of this step: call step(loss), or step() "
            f"without a loss; where the loss is a whole number, step(float(loss))"
        )
