"""Converge: the mean of all replicas, bucket by bucket.

First every replica shows one control row: step, loss, layout, whether its numbers are finite. Replicas that disagree
get an error that names them instead of a hang or a wrong mean; a replica that is not finite is left out and receives
the mean of the others. Only then does anything move, in ⌈bytes / bucket_bytes⌉ collectives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .buckets import BUCKET_BYTES, Buckets, checked_bucket_bytes, cut, flat_view, layout_hash, unique, wide_dtype
from .ensemble import Ensemble

AverageState = Literal["auto"] | bool


@dataclass(frozen=True)
class Report:
    """What a replica says of itself at a sync. Tensors stay on their device until the control row is made.

    step: finished steps. loss_sum, loss_count: the window of training losses. probe: its loss on the probe batch.
    gradients: a number that is equal on all replicas exactly if their gradients were. config: a hash of the settings.
    base: the base learning rate of the first group; bases: a hash of all base values. failed: its probe raised.
    """

    step: int
    loss_sum: float | Tensor = 0.0
    loss_count: int = 0
    probe: float | Tensor | None = None
    gradients: float | Tensor | None = None
    config: int = 0
    base: float = 0.0
    bases: int = 0
    failed: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a converge found and did. Arrays have one entry a replica; NaN is a loss that was not given.

    shared: whether all replicas have the same gradients (None: not known).
    bytes: payload of the collectives as this replica sent it, control row included.
    """

    losses: NDArray[np.float64]
    probes: NDArray[np.float64]
    healthy: NDArray[np.bool_]
    shared: bool | None
    bytes: int
    collectives: int
    seconds: float


#: The control row, in fp64; hashes have 48 bits.
_COLUMNS = (
    *("config", "step", "base", "bases", "failed"),
    *("layout", "tensors", "elements", "state"),
    *("loss_sum", "loss_count", "probe", "gradients"),
    *("checksum", "rest"),
)


class Converger:
    """Averages parameters over an ensemble, and optimizer state and buffers where asked.

    Args:
        params: a :class:`Buckets` (averaged in place, in the parameters' own memory) or loose parameters (packed into
            a staging buffer of at most ``bucket_bytes``, averaged there and unpacked).
        ensemble: the replicas.
        state: returns the optimizer state that belongs with the parameters, by name, as it is at that moment.
        buffers: returns the floating-point buffers that are averaged with the parameters, as they are at that moment.
        bucket_bytes: what one collective carries at most. Default: that of the ``Buckets``, or 512 MiB.
    """

    def __init__(
        self,
        params: Buckets | Iterable[Tensor],
        ensemble: Ensemble,
        *,
        state: Callable[[], Mapping[str, Tensor]] = dict,
        buffers: Callable[[], Sequence[Tensor]] = tuple,
        bucket_bytes: int | None = None,
    ) -> None:
        self.buckets = params if isinstance(params, Buckets) else None
        given = params.params if isinstance(params, Buckets) else unique(params)
        # Integers (quantised frozen weights) have no mean and do not diverge.
        self.params = tuple(param for param in given if param.is_floating_point() or param.is_complex())
        if not self.params:
            raise ValueError("there are no parameters to average: the optimizer's parameter groups are empty")
        for index, param in enumerate(self.params):
            if hasattr(param, "device_mesh"):
                raise TypeError(f"parameter {index} is a distributed tensor; sharded parameters cannot be averaged yet")
        self.buffers = buffers
        for tensor in self.covered():
            flat_view(tensor)  # refuses what has no memory order of its own, now and not after the first T steps
        self.state = state
        self.ensemble = ensemble
        if bucket_bytes is None:
            bucket_bytes = self.buckets.bucket_bytes if self.buckets else BUCKET_BYTES
        self.bucket_bytes = checked_bucket_bytes(bucket_bytes)

    def converge(
        self,
        report: Report,
        *,
        average_state: AverageState = "auto",
        include_state: bool = True,
        known_shared: bool | None = None,
        needs_shared: bool = False,
        needs_loss: bool = False,
        skip_if_equal: bool = False,
    ) -> Outcome:
        """Show the control rows, check them, then average. Collective: every replica must call it.

        average_state: True, False, or ``"auto"``: unless the gradients are shared. State is also averaged when a
            replica is left out, so that the healed one gets sound moments; never with ``include_state=False``.
        known_shared: whether gradients are shared, if the replicas do not all show theirs this time. Where nothing is
            known the state is averaged, which is right in both cases and merely costs more.
        needs_shared: local gradients are an error.
        needs_loss: a replica without any recorded loss is an error.
        skip_if_equal: leave parameters alone that are equal on all replicas (plain data parallel stays bit for bit).

        Raises RuntimeError on every replica, with nothing overwritten, if they disagree or none is finite.
        """
        start = time.perf_counter()
        if self.buckets is not None:
            self.buckets.rehome()
            self.buckets.refresh_masters()
        state = dict(self.state()) if include_state else {}
        buffers = unique(self.buffers())
        row = self._row(report, state, buffers)
        rows = dict(zip(_COLUMNS, self.ensemble.gather(row).numpy().T, strict=True))
        sent, collectives = (row.nbytes, 1) if self.ensemble.size > 1 else (0, 0)

        _check_agreement(rows, needs_loss)
        with np.errstate(invalid="ignore", divide="ignore"):
            losses = rows["loss_sum"] / rows["loss_count"]
        healthy = _healthy(rows, losses, report.step)
        shared = _shared(rows["gradients"])
        shared = known_shared if shared is None else shared
        if needs_shared and shared is False:
            raise RuntimeError(
                "the hypergradient controller needs gradients that are averaged over the replicas at every step, but "
                "they differ: wrap the model in DistributedDataParallel, or use the regression controller"
            )
        excluded = not healthy.all()
        # From the gather on, every decision is made from its rows alone: what one replica knows of itself would send
        # the replicas into different collectives.
        wanted = excluded or (not shared if average_state == "auto" else average_state)
        with_state = bool(wanted and rows["state"].any())
        if with_state:
            _agree(rows, "state", "the optimizer state that there is", _UNEVEN_STATE)
        if skip_if_equal and not excluded and (rows["checksum"] == rows["checksum"][0]).all():
            regions = [_flat(buffers)]
        else:
            regions = self._regions([*buffers, *(state.values() if with_state else ())])
        more = self._average(regions, healthy)
        sent, collectives = sent + more[0], collectives + more[1]
        return Outcome(losses, rows["probe"], healthy, shared, sent, collectives, time.perf_counter() - start)

    def covered(self) -> list[Tensor]:
        """The parameters (and their masters) and buffers that are averaged."""
        masters = [master for master in self.buckets.masters if master is not None] if self.buckets else []
        return [*self.params, *masters, *unique(self.buffers())]

    def _regions(self, others: Sequence[Tensor]) -> list[list[Tensor]]:
        """1-D tensors to be averaged; those of one region may share a bucket. Homed parameters are regions of their
        own: alone in a bucket they are averaged in place."""
        loose = others if self.buckets else [*self.params, *others]
        homed = [_flat([flat]) for flat in self.buckets.full] if self.buckets else []
        return [*homed, _flat(loose)]

    def _average(self, regions: list[list[Tensor]], healthy: NDArray[np.bool_]) -> tuple[int, int]:
        """Average every region over the healthy replicas; returns bytes and collectives."""
        if self.ensemble.size == 1:
            return 0, 0
        included, include_me = int(healthy.sum()), bool(healthy[self.ensemble.replica])
        sent = collectives = 0
        for region in regions:
            for bucket in cut(region, self.bucket_bytes):
                pieces = [region[p.index][p.start : p.stop] for p in bucket.pieces]
                in_place = len(pieces) == 1 and pieces[0].dtype == bucket.dtype
                travelling = pieces[0] if in_place else torch.cat([piece.to(bucket.dtype) for piece in pieces])
                self.ensemble.mean_(travelling, included, include_me)
                if not in_place:
                    torch._foreach_copy_(pieces, list(travelling.split([piece.numel() for piece in pieces])))
                sent, collectives = sent + bucket.nbytes, collectives + 1
        if self.buckets is not None:
            self.buckets.round_masters()
        devices = {tensor.device for region in regions for tensor in region if tensor.is_cuda}
        for device in devices:
            torch.cuda.current_stream(device).synchronize()  # a failed collective raises here, not steps later
        return sent, collectives

    def _row(self, report: Report, state: Mapping[str, Tensor], buffers: Sequence[Tensor]) -> Tensor:
        homed = self.buckets.full if self.buckets else self.params
        device = self.params[0].device
        nan = math.nan
        scalars = [
            report.loss_sum,
            nan if report.probe is None else report.probe,
            nan if report.gradients is None else report.gradients,
            checksum(homed, device),
            checksum([*buffers, *state.values()], device),
        ]
        # One transfer from the device for all of them.
        wide = wide_dtype(device)
        on_device = torch.stack([torch.as_tensor(s).detach().to(device, wide).reshape(()) for s in scalars])
        loss_sum, probe, gradients, check, rest = on_device.tolist()
        row = {
            "config": report.config,
            "step": report.step,
            "base": report.base,
            "bases": report.bases,
            "failed": report.failed,
            "layout": layout_hash([*self.params, *buffers]),
            "tensors": len(self.params),
            "elements": sum(param.numel() for param in self.params),
            "state": layout_hash(state.values(), state.keys()) if state else 0,
            "loss_sum": loss_sum,
            "loss_count": report.loss_count,
            "probe": probe if report.probe is None or math.isfinite(probe) else math.inf,
            "gradients": gradients,
            "checksum": check,
            "rest": rest,
        }
        return torch.tensor([row[name] for name in _COLUMNS], dtype=torch.float64)


_UNEVEN_STATE = (
    "a parameter had its first gradient on some replicas only, or a step was skipped on some; pass "
    "average_state=False, or use an optimizer of hdet_kernels, which has state for all parameters"
)


def _flat(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [flat_view(tensor) for tensor in tensors if tensor.numel()]


def checksum(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """A number that is finite exactly if all elements are, and differs, but for luck, where the elements do: the
    tensors' norms, in fp64, weighted by their places."""
    wide = wide_dtype(device)
    norms = [torch.linalg.vector_norm(flat, dtype=wide).to(device) for flat in _flat(tensors)]
    if not norms:
        return torch.zeros((), dtype=wide, device=device)
    return torch.stack(norms) @ torch.arange(1, len(norms) + 1, dtype=wide, device=device)


def _check_agreement(rows: dict[str, NDArray[np.float64]], needs_loss: bool) -> None:
    same_model = "all replicas must build the same model and optimizer"
    _agree(rows, "layout", "the layout of parameters and buffers", same_model, ("tensors", "elements"))
    _agree(rows, "config", "the settings", "all replicas must build the scheduler with the same arguments")
    _agree(rows, "step", "the step", "a replica stepped more often, or resumed from another checkpoint")
    if rows["failed"].any():
        raise RuntimeError(f"probe() raised on {ranks(rows['failed'] > 0)}. Nothing was averaged.")
    same_schedule = "all replicas must be given the same learning rates, schedule and base values"
    _agree(rows, "bases", "the base values", same_schedule, ("base",))
    if needs_loss and not (rows["loss_count"] > 0).all():
        raise RuntimeError(
            f"no loss was recorded since the last sync on {ranks(rows['loss_count'] == 0)}: call "
            "scheduler.step(loss), or scheduler.record_loss(loss) before scheduler.step()"
        )


def _agree(
    rows: dict[str, NDArray[np.float64]], column: str, what: str, hint: str, shown: tuple[str, ...] = ()
) -> None:
    values = rows[column]
    if (values == values[0]).all():
        return
    groups = []
    for value in dict.fromkeys(values.tolist()):
        who = values == value
        first = int(np.flatnonzero(who)[0])
        label = ", ".join(f"{rows[name][first]:.10g} {name}" for name in shown) or f"{column} {int(value)}"
        groups.append(f"{ranks(who)}: {label}")
    raise RuntimeError(f"the replicas disagree on {what} ({'; '.join(groups)}): {hint}. Nothing was averaged.")


def _healthy(rows: dict[str, NDArray[np.float64]], losses: NDArray[np.float64], step: int) -> NDArray[np.bool_]:
    numbers = np.isfinite(rows["checksum"]) & np.isfinite(rows["rest"])
    loss = (np.isfinite(losses) | (rows["loss_count"] == 0)) & ~np.isinf(rows["probe"])
    healthy: NDArray[np.bool_] = numbers & loss
    if not healthy.any():
        found = [f"parameters, state or buffers on {ranks(~numbers)}"] if not numbers.all() else []
        found += [f"the loss on {ranks(~loss)}"] if not loss.all() else []
        raise RuntimeError(
            f"no replica is sound at step {step}; not finite: {', '.join(found)}. Nothing was overwritten: "
            "resume from the last checkpoint with a lower learning rate, or look for the batch that did it"
        )
    return healthy


def _shared(gradients: NDArray[np.float64]) -> bool | None:
    if len(gradients) == 1:
        return True
    return None if np.isnan(gradients).any() else bool((gradients == gradients[0]).all())


def ranks(who: NDArray[np.bool_]) -> str:
    """«rank 2», «ranks 0, 1, 3»."""
    numbers = np.flatnonzero(who).tolist()
    return f"rank{'s' if len(numbers) != 1 else ''} {', '.join(map(str, numbers))}"
