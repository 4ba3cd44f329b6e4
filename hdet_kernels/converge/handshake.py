"""The handshake: every replica sends one row of numbers about itself before anything is averaged.

All later decisions are made from the gathered rows alone. A decision from something that only one process knows would
send the processes into different collectives, where they would wait for each other until the timeout.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hdet_kernels.converge.agreement import Agreement, Floats, conclude, left_out, name_ranks, none_sound, same
from hdet_kernels.converge.attendance import Gathers
from hdet_kernels.converge.summary import TensorSummary
from hdet_kernels.converge.transport import Cost, gather_cost
from hdet_kernels.ensemble import Ensemble
from hdet_kernels.tensors import wide_dtype

log = logging.getLogger("hdet_kernels")

# The columns of a handshake row. A row is fp64, in which the hashes, of 48 bits, are exact.
COLUMNS = (
    *("rank", "settings", "step", "bases", "failed", "layout", "state", "counts", "integers"),
    *("loss_sum", "loss_count", "probe", "gradients", "checksum", "rest", "nonfinite", "masks", "consensus", "outer"),
    *("kept", "stepped", "moments", "coded"),
)


@dataclass(frozen=True)
class Report:
    """The report of a process on its replicas at a sync, apart from their tensors.

    Tensors stay on their device until the handshake row is built. Where a process holds several replicas,
    ``loss_sum`` and ``probe`` have one entry for each.

    Attributes:
        step: number of finished steps.
        loss_sum, loss_count: sum and number of the training losses since the last sync.
        probe: loss on the probe batch, if there is a probe.
        gradients: a fingerprint that is equal on all replicas exactly if their gradients were.
        settings: plain values that must be equal on all replicas, by name: the configuration of the run.
        bases: the same for the current base values.
        failed: whether the probe raised.
        kept: step of the earlier state that this process can return to; None if it keeps none.
        stepped: optimizer steps since the last sync; None if not all of them are seen.
    """

    step: int
    loss_sum: float | Tensor = 0.0
    loss_count: float = 0
    probe: float | Tensor | None = None
    gradients: float | Tensor | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    bases: Mapping[str, Any] = field(default_factory=dict)
    failed: bool = False
    kept: int | None = None
    stepped: int | None = None


def exchange_reports(ensemble: Gathers, report: Report, summary: TensorSummary, *, needs_loss: bool) -> Agreement:
    """Gather the handshake rows of all replicas and draw the conclusions. Collective.

    Raises:
        RuntimeError: the same one on every process, if the replicas disagree or none is healthy.
    """
    gathered = ensemble.gather(_handshake_rows(ensemble, report, summary)).numpy()
    columns = {name: gathered[..., index] for index, name in enumerate(COLUMNS)}

    def check_same(column: str, values: Mapping[str, Any], what: str, hint: str) -> None:
        if not same(columns[column]):
            raise disagreement(ensemble, values, what, hint, columns["rank"])

    if not same(columns["layout"]):  # described only then: there may be very many tensors
        hint = "all replicas must build the same model and optimizer"
        what = "the layout of parameters and buffers"
        raise disagreement(ensemble, summary.describe("layout"), what, hint, columns["rank"])
    same_arguments = "all replicas must build the scheduler with the same arguments"
    check_same("settings", report.settings, "the settings", same_arguments)
    same_step = "a replica stepped more often, or resumed from another checkpoint"
    check_same("step", {"step": report.step}, "the step", same_step)
    if (steps_differ := left_out(columns)) == "maybe" and ensemble.rank == 0:
        log.warning(
            "step %d: the ranks made %s optimizer steps since the last sync: either a GradScaler found an overflow on "
            "some of them, or one called scheduler.step() without optimizer.step()",
            *(report.step, columns["stepped"].astype(int).flatten().tolist()),
        )
    if steps_differ == "yes":
        steps = {"optimizer steps": report.stepped, "losses": report.loss_count}
        once = "call scheduler.step() once after each optimizer.step(), on every rank"
        raise disagreement(ensemble, steps, "the steps since the last sync", once, columns["rank"])
    if columns["failed"].any():
        raise RuntimeError(
            f"probe() raised on {name_ranks(columns['failed'] > 0, columns['rank'])}. Nothing was averaged."
        )
    same_values = "all replicas must be given the same learning rates, schedule and base values"
    check_same("bases", report.bases, "the base values", same_values)
    if needs_loss and not (columns["loss_count"] > 0).all():
        raise RuntimeError(
            f"no loss was recorded since the last sync on {name_ranks(columns['loss_count'] == 0, columns['rank'])}: "
            "call scheduler.step(loss), or scheduler.record_loss(loss) before scheduler.step()"
        )
    agreement = conclude(columns)
    if not agreement.healthy.any():
        texts = _gather_texts(ensemble, summary.describe("finite"))
        names = [text[str(place // ensemble.parts % ensemble.rows)] for place, text in enumerate(texts)]
        raise none_sound(columns, names, report.step)
    return agreement


def check_same_everywhere(ensemble: Gathers, values: Mapping[str, Any], what: str, hint: str) -> None:
    """Raise the same RuntimeError on every process unless all passed the same ``values``. Collective.

    Args:
        ensemble: the replicas.
        values: plain values by name. The message shows those that differ.
        what: what the values are, for the message.
        hint: what to do, for the message.
    """
    own = torch.tensor([[ensemble.rank, short_hash(values)]], dtype=torch.float64, device="cpu")
    gathered = ensemble.gather(own.repeat(ensemble.rows, 1)).numpy()
    if not same(gathered[..., 1]):
        raise disagreement(ensemble, values, what, hint, gathered[..., 0])


def handshake_cost(ensemble: Ensemble) -> Cost:
    """Return the cost of the handshake alone, in this process."""
    return gather_cost(ensemble, len(COLUMNS))


def disagreement(ensemble: Gathers, values: Mapping[str, Any], what: str, hint: str, ranks: Floats) -> RuntimeError:
    """Return the error for replicas that disagree. Collective: every process sends its ``values`` to all others.

    Args:
        ensemble: the replicas.
        values: plain values by name. The message shows the first three names whose values differ.
        what: what the values are, for the message.
        hint: what to do, for the message.
        ranks: [replicas, parts] the global ranks.
    """
    texts = _gather_texts(ensemble, values)
    distinct = {id(text): text for text in texts}
    keys = list(dict.fromkeys(key for text in distinct.values() for key in text))
    differing = [key for key in keys if len({_spell(text.get(key)) for text in distinct.values()}) > 1][:3]
    spelled = {
        which: ", ".join(f"{key} {_spell(text.get(key))}" for key in differing) for which, text in distinct.items()
    }
    labels = [spelled[id(text)] for text in texts]
    groups = []
    for label in dict.fromkeys(labels):
        who = np.array([other == label for other in labels]).reshape(ranks.shape)
        groups.append(f"{name_ranks(who, ranks)}: {textwrap.shorten(label, 300)}")
    return RuntimeError(f"the replicas disagree on {what} ({'; '.join(groups)}): {hint}. Nothing was averaged.")


def short_hash(value: Any) -> int:
    """Return a 48-bit hash of plain values, the same in every process."""
    text = json.dumps(value, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def _handshake_rows(ensemble: Gathers, report: Report, summary: TensorSummary) -> Tensor:
    """Return [rows, columns] on the CPU, with a single transfer for all numbers that are on the device."""
    device, count = summary.checksum.device, ensemble.rows
    missing = math.nan
    measured = {
        "loss_sum": report.loss_sum,
        "probe": missing if report.probe is None else report.probe,
        "gradients": missing if report.gradients is None else report.gradients,
        "checksum": summary.checksum,
        "rest": summary.rest,
        "moments": summary.moments,
        "coded": summary.coded,
        "consensus": summary.consensus,
        "outer": summary.outer,
        "integers": summary.integers,
        "nonfinite": summary.nonfinite,
    }
    wide = wide_dtype(device)
    on_device = {name: value for name, value in measured.items() if isinstance(value, Tensor)}
    stacked = torch.stack([value.detach().to(device, wide).expand(count) for value in on_device.values()])
    values = {**measured, **dict(zip(on_device, stacked.double().cpu().numpy(), strict=True))}
    if report.probe is not None:
        values["probe"] = np.where(np.isfinite(values["probe"]), values["probe"], math.inf)
    values |= {
        "rank": ensemble.rank,
        "settings": short_hash(report.settings),
        "step": report.step,
        "bases": short_hash(report.bases),
        "failed": report.failed,
        "layout": summary.layout,
        "state": summary.state,
        "counts": summary.counts,
        "masks": summary.masks,
        "loss_count": report.loss_count,
        "kept": -1 if report.kept is None else report.kept,
        "stepped": missing if report.stepped is None else report.stepped,
    }
    rows = np.empty((count, len(COLUMNS)))
    for index, name in enumerate(COLUMNS):
        rows[:, index] = values[name]
    return torch.from_numpy(rows)


def _gather_texts(ensemble: Gathers, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the ``values`` of every process. Collective. Equal ones are one object: there may be thousands."""
    text = torch.frombuffer(bytearray(json.dumps(values, default=str).encode()), dtype=torch.uint8)
    own = torch.full((ensemble.rows, 1), float(len(text)), dtype=torch.float64, device="cpu")
    lengths = ensemble.gather(own)
    padded = torch.zeros(ensemble.rows, int(lengths.max()), dtype=torch.uint8, device="cpu")
    padded[:, : len(text)] = text
    gathered = ensemble.gather(padded).reshape(lengths.numel(), -1).numpy()
    sizes = lengths.reshape(-1).int().tolist()
    texts = [line[:size].tobytes() for line, size in zip(gathered, sizes, strict=True)]
    read = {text: json.loads(text) for text in dict.fromkeys(texts)}
    return [read[text] for text in texts]


def _spell(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)
