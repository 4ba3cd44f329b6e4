"""Flat names for the numbers of a sync, as loggers take them: ``hdet/base/lr``, ``hdet/replica0/loss``, …

A number that is not known or not finite has no entry. Names have letters, digits and ``_ . - /`` only, which every
logger accepts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

Numbers = Mapping[str, float | None]


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Return how hyperparameters are called in metrics: ``lr`` for ``lr/0`` where no other group has an ``lr/…``."""
    stems = [name.rpartition("/")[0] or name for name in names]
    short = [stem if stems.count(stem) == 1 else name for name, stem in zip(names, stems, strict=True)]
    return {name: re.sub(r"[^\w./-]+", "_", each).strip("_") for name, each in zip(names, short, strict=True)}


def value_metrics(
    base: Mapping[str, float], values: Mapping[str, Sequence[float]], *, replicas: bool
) -> dict[str, float | None]:
    """Return base values and, if asked for, those of every replica."""
    short = short_names(list(base))
    found: dict[str, float | None] = {f"base/{short[name]}": value for name, value in base.items()}
    if replicas:
        found |= {f"replica{r}/{short[name]}": v for name, each in values.items() for r, v in enumerate(each)}
    return found


def loss_metrics(what: str, losses: Sequence[float | None] | None, *, replicas: bool) -> dict[str, float | None]:
    """Return the mean of the finite losses and, if asked for, that of every replica."""
    if losses is None:
        return {}
    finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    found: dict[str, float | None] = {what: math.fsum(loss / len(finite) for loss in finite) if finite else None}
    if replicas:
        found |= {f"replica{replica}/{what}": loss for replica, loss in enumerate(losses)}
    return found


def flat(entries: Numbers) -> dict[str, float]:
    """Return the entries that are finite numbers, as floats, with the package's prefix."""
    known = ((name, value) for name, value in entries.items() if value is not None)
    return {f"hdet/{name}": float(value) for name, value in known if math.isfinite(value)}
