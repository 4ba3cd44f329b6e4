"""The control row: what every replica shows of itself before anything is averaged, and what all conclude from it.

From the gather of these rows on, every decision is made from them alone: what one process knows of itself would send
the processes into different collectives.
"""

from __future__ import annotations

import hashlib
import json
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.ensemble import Ensemble
from hdet_kernels.tensors import wide_dtype

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

#: A row, in fp64; hashes have 48 bits, which survive that.
COLUMNS = (
    *("rank", "settings", "step", "bases", "failed", "layout", "state", "counts", "integers"),
    *("loss_sum", "loss_count", "probe", "gradients", "checksum", "rest", "consensus", "outer"),
)


@dataclass(frozen=True)
class Report:
    """What a process says of its replica at a sync. Tensors stay on their device until the control row is made.

    step: finished steps. loss_sum, loss_count: the window of training losses. probe: the loss on the probe batch.
        Where a process holds several replicas, sums and probes have one entry for each.
    gradients: a number that is equal on all replicas exactly if their gradients were.
    settings, bases: plain values that must be equal on all replicas, by name: how the run was set up, and the base
        values now. failed: the probe raised.
    """

    step: int
    loss_sum: float | Tensor = 0.0
    loss_count: int = 0
    probe: float | Tensor | None = None
    gradients: float | Tensor | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    bases: Mapping[str, Any] = field(default_factory=dict)
    failed: bool = False


@dataclass(frozen=True)
class Numbers:
    """What is known of the tensors of a replica, beside its report.

    layout, state: hashes of what parameters and buffers are, and of what the optimizer state is (0: there is none).
    counts, integers: hashes of the values of step counts and of integer buffers. checksum, rest: [rows] checksums of
    the parameters, and of buffers and state; consensus: that of the last one, if it is remembered; outer: of what the
    outer step starts from.
    describe: says what ``"layout"`` and ``"state"`` are, by name.
    """

    layout: int
    state: int
    counts: int
    integers: Tensor
    checksum: Tensor
    rest: Tensor
    consensus: Tensor | float
    outer: Tensor | float
    describe: Callable[[str], Mapping[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """What all replicas conclude; arrays have one entry a replica, ``ranks`` [replicas, parts].

    shared: whether their gradients are the same (None: not shown). equal: whether their parameters are.
    has_state: whether one of them has optimizer state; same_state, same_counts, same_integers: whether the layout of
    that state, the step counts, the integer buffers and the last consensus agree; same_outer: whether they know one
    place that the outer step starts from.
    """

    losses: Floats
    probes: Floats
    healthy: Flags
    ranks: Floats
    shared: bool | None
    equal: bool
    has_state: bool
    same_state: bool
    same_counts: bool
    same_integers: bool
    same_consensus: bool
    same_outer: bool


def meet(ensemble: Ensemble, report: Report, numbers: Numbers, *, needs_loss: bool) -> Verdict:
    """Show the control rows and draw the conclusions. Raises the same RuntimeError on every process, if the replicas
    disagree or none is sound."""
    row = _rows(ensemble, report, numbers)
    gathered = ensemble.gather(row).numpy()
    rows = {name: gathered[..., column] for column, name in enumerate(COLUMNS)}

    def agree(column: str, said: Mapping[str, Any], what: str, hint: str) -> None:
        if not _same(rows[column]):
            raise disagreement(ensemble, said, what, hint, rows["rank"])

    same_model = "all replicas must build the same model and optimizer"
    same_arguments = "all replicas must build the scheduler with the same arguments"
    if not _same(rows["layout"]):
        layout = numbers.describe("layout")
        raise disagreement(ensemble, layout, "the layout of parameters and buffers", same_model, rows["rank"])
    agree("settings", report.settings, "the settings", same_arguments)
    agree("step", {"step": report.step}, "the step", "a replica stepped more often, or resumed from another checkpoint")
    if rows["failed"].any():
        raise RuntimeError(f"probe() raised on {ranks(rows['failed'] > 0, rows['rank'])}. Nothing was averaged.")
    same_values = "all replicas must be given the same learning rates, schedule and base values"
    agree("bases", report.bases, "the base values", same_values)
    if needs_loss and not (rows["loss_count"] > 0).all():
        raise RuntimeError(
            f"no loss was recorded since the last sync on {ranks(rows['loss_count'] == 0, rows['rank'])}: call "
            "scheduler.step(loss), or scheduler.record_loss(loss) before scheduler.step()"
        )
    return _conclude(rows, report.step)


def check_alike(ensemble: Ensemble, said: Mapping[str, Any], what: str, hint: str) -> None:
    """Raise the same RuntimeError in every process unless all have ``said`` the same, by name. Collective."""
    row = torch.tensor([[ensemble.rank, short_hash(said)]], dtype=torch.float64, device="cpu")
    shown = ensemble.gather(row).numpy()
    if not _same(shown[..., 1]):
        raise disagreement(ensemble, said, what, hint, shown[..., 0])


def row_bytes(ensemble: Ensemble) -> int:
    """The bytes of the control rows of a process."""
    return 8 * len(COLUMNS) * ensemble.rows


def disagreement(ensemble: Ensemble, said: Mapping[str, Any], what: str, hint: str, numbers: Floats) -> RuntimeError:
    """The error of replicas that know by now that they disagree on ``what``, and meet once more to tell: each has
    ``said`` something, by name, and the first names under which they differ are shown. ``numbers``: the ranks."""
    texts = _texts(ensemble, said)
    keys = list(dict.fromkeys(key for text in texts for key in text))
    differing = [key for key in keys if len({_spell(text.get(key)) for text in texts}) > 1][:3]
    labels = [", ".join(f"{key} {_spell(text.get(key))}" for key in differing) for text in texts]
    groups = []
    for label in dict.fromkeys(labels):
        who = np.array([other == label for other in labels]).reshape(numbers.shape)
        groups.append(f"{ranks(who, numbers)}: {textwrap.shorten(label, 300)}")
    return RuntimeError(f"the replicas disagree on {what} ({'; '.join(groups)}): {hint}. Nothing was averaged.")


def ranks(who: Flags, numbers: Floats) -> str:
    """«rank 2», «ranks 0, 1, 3». ``who`` of [replicas] or [replicas, parts] with these ``numbers``."""
    chosen = who if who.ndim == 2 else np.broadcast_to(who[:, None], numbers.shape)
    names = [f"{number:.0f}" for number in numbers[chosen]]
    return f"rank{'s' if len(names) != 1 else ''} {', '.join(names)}"


def short_hash(value: Any) -> int:
    """48 bits of plain values, the same in every process."""
    text = json.dumps(value, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def _rows(ensemble: Ensemble, report: Report, numbers: Numbers) -> Tensor:
    """[rows, columns]; one transfer from the device for all numbers that are there."""
    count = ensemble.rows
    device = numbers.checksum.device
    missing = math.nan
    measured = {
        "loss_sum": report.loss_sum,
        "probe": missing if report.probe is None else report.probe,
        "gradients": missing if report.gradients is None else report.gradients,
        "checksum": numbers.checksum,
        "rest": numbers.rest,
        "consensus": numbers.consensus,
        "outer": numbers.outer,
        "integers": numbers.integers,
    }
    wide = wide_dtype(device)  # of floats too: losses that are close are compared
    tensors = [v if isinstance(v, Tensor) else torch.tensor(v, dtype=wide, device=device) for v in measured.values()]
    on_device = torch.stack([v.detach().to(device, wide).expand(count) for v in tensors])
    known = {
        "settings": short_hash(report.settings),
        "step": report.step,
        "bases": short_hash(report.bases),
        "failed": report.failed,
        "layout": numbers.layout,
        "state": numbers.state,
        "counts": numbers.counts,
        "loss_count": report.loss_count,
    }
    values = dict(zip(measured, on_device.double().cpu(), strict=True))
    if report.probe is not None:
        values["probe"] = torch.where(values["probe"].isfinite(), values["probe"], math.inf)
    values |= {
        name: torch.full((count,), float(value), dtype=torch.float64, device="cpu") for name, value in known.items()
    }
    # Several replicas of one process are known by their own numbers.
    first = ensemble.rank if count == 1 else ensemble.replica
    values["rank"] = torch.arange(first, first + count, dtype=torch.float64, device="cpu")
    return torch.stack([values[name] for name in COLUMNS], dim=1)


def _conclude(rows: Mapping[str, Floats], step: int) -> Verdict:
    with np.errstate(invalid="ignore", divide="ignore"):
        losses = rows["loss_sum"].sum(axis=1) / rows["loss_count"].sum(axis=1)
    probes = rows["probe"].mean(axis=1)
    numbers: Flags = np.atleast_1d(np.isfinite(rows["checksum"] + rows["rest"]).all(axis=1))
    recorded = rows["loss_count"].sum(axis=1) > 0
    loss: Flags = (np.isfinite(losses) | ~recorded) & ~np.isinf(probes)
    healthy: Flags = numbers & loss
    if not healthy.any():
        found = [f"parameters, state or buffers on {ranks(~numbers, rows['rank'])}"] if not numbers.all() else []
        found += [f"the loss on {ranks(~loss, rows['rank'])}"] if not loss.all() else []
        raise RuntimeError(
            f"no replica is sound at step {step}; not finite: {', '.join(found)}. Nothing was overwritten: "
            "resume from the last checkpoint with a lower learning rate, or look for the batch that did it"
        )
    gradients = rows["gradients"]
    shown = not np.isnan(gradients).any()
    shared = True if len(healthy) == 1 else _same(gradients) if shown else None
    return Verdict(
        losses,
        probes,
        healthy,
        rows["rank"],
        shared,
        equal=_same(rows["checksum"]),
        has_state=bool(rows["state"].any()),
        same_state=_same(rows["state"]),
        same_counts=_same(rows["counts"]),
        same_integers=_same(rows["integers"]),
        same_consensus=_same(rows["consensus"]),
        same_outer=bool(np.isfinite(rows["outer"]).all()) and _same(rows["outer"]),
    )


def _same(column: Floats) -> bool:
    """Whether all replicas show the same: [replicas, parts], each part for itself."""
    return bool((column == column[:1]).all())


def _texts(ensemble: Ensemble, described: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What every process has to say."""
    text = torch.frombuffer(bytearray(json.dumps(described, default=str).encode()), dtype=torch.uint8)
    own = torch.full((ensemble.rows, 1), float(len(text)), dtype=torch.float64, device="cpu")
    lengths = ensemble.gather(own)
    padded = torch.zeros(ensemble.rows, int(lengths.max()), dtype=torch.uint8, device="cpu")
    padded[:, : len(text)] = text
    rows = ensemble.gather(padded).reshape(lengths.numel(), -1).tolist()
    cut = [bytes(row[: int(length)]) for row, length in zip(rows, lengths.reshape(-1).tolist(), strict=True)]
    return [json.loads(row) for row in cut]


def _spell(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)
