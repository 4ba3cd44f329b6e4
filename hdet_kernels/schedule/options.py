"""The keywords that all HDET schedulers share, each written once: name, type and default."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, Protocol, TypedDict, TypeVar, cast, get_type_hints

from torch import Tensor

from hdet_kernels.controller.protocol import Controller
from hdet_kernels.converge import AverageState, Format, Merge, Outer
from hdet_kernels.ensemble import Ensemble
from hdet_kernels.fanout.explore import Explore
from hdet_kernels.fanout.ties import TieGroups
from hdet_kernels.schedule.loss_window import Loss
from hdet_kernels.scout.settings import ScoutSettings

GradientMode = Literal["auto", "shared", "local"]
Probe = Callable[[], Loss]
Init = TypeVar("Init", bound=Callable[..., None])


class HasBuffers(Protocol):
    """A model, as far as averaging its buffers needs it."""

    def buffers(self) -> Iterable[Tensor]: ...


class HDETOptions(TypedDict, total=False):
    """Keywords of the schedulers. ``Annotated[type, default]``; :class:`.HDETOneCycleLR` documents each."""

    spread: Annotated[float, 0.3]
    sync_every: Annotated[int | None, None]
    auto_lr: Annotated[bool | Controller, True]
    trust: Annotated[float | None, 3.0]
    probe: Annotated[Probe | None, None]
    explore: Annotated[Iterable[Explore], ()]
    tie_groups: Annotated[TieGroups, "auto"]
    gradients: Annotated[GradientMode, "auto"]
    ensemble: Annotated[Ensemble | None, None]
    average_state: Annotated[AverageState, "auto"]
    average_buffers: Annotated[bool, True]
    model: Annotated[HasBuffers | None, None]
    bucket_bytes: Annotated[int | None, None]
    compress: Annotated[Format | None, None]
    overlap_steps: Annotated[int, 0]
    backup: Annotated[bool, True]
    outer: Annotated[Outer | None, None]
    merge: Annotated[Merge, "mean"]
    seed: Annotated[int, 0]
    history_file: Annotated[str | os.PathLike[str] | None, None]
    scout: Annotated[ScoutSettings | None, None]


_HINTS = get_type_hints(HDETOptions, include_extras=True)
DEFAULTS: dict[str, Any] = {name: hint.__metadata__[0] for name, hint in _HINTS.items()}


def with_defaults(given: HDETOptions, scheduler: str) -> HDETOptions:
    """Return the options with defaults for those that were not given.

    Raises:
        TypeError: for a keyword that ``scheduler`` does not have, with the one that was probably meant.
    """
    for name in given:
        if name not in DEFAULTS:
            close = difflib.get_close_matches(name, DEFAULTS, 1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; it takes {', '.join(DEFAULTS)}"
            raise TypeError(f"{scheduler}() got an unexpected keyword argument {name!r}{hint}")
    return cast(HDETOptions, {**DEFAULTS, **given})


def shows_options(init: Init) -> Init:
    """Decorate an ``__init__`` with ``**options`` so that ``help()`` and ``inspect`` show every keyword."""
    signature = inspect.signature(init)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(name, keyword, default=DEFAULTS[name], annotation=hint.__origin__)
        for name, hint in _HINTS.items()
    ]
    init.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return init


def explored(options: HDETOptions, *, cycle_momentum: bool) -> Sequence[Explore]:
    """Return ``explore=`` as a tuple; raise for a momentum that the schedule sets itself."""
    several = tuple(options["explore"])
    for each in several:
        scheduled = each.apply is None and each.name in ("momentum", "betas[0]")
        if cycle_momentum and scheduled:
            raise ValueError(
                f"{each.name!r} cannot be explored while the schedule sets it at every step: pass cycle_momentum=False"
            )
    return several
