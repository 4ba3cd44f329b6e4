"""The training losses since the last sync, summed on their own device, and the probe.

A controller that compares replicas by losses that were averaged over the processes before they came here learns
nothing, and would stay silent about it: :class:`EqualLosses` warns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet_kernels.checks import MOST_STEPS, check_positive, is_readable, is_several, spell
from hdet_kernels.tensors import wide_dtype

#: A number that may be NaN or infinite, as losses may.
AnyNumber = Annotated[float, None]

#: What to do where losses decide and there is none, for messages.
NONE_RECORDED = (
    "none was recorded: call scheduler.step(loss), or scheduler.record_loss(loss) before scheduler.step() where a "
    "framework calls it bare (in Lightning the callback HDET() does, in transformers HDETCallback() or HDETTrainer); "
    "or pass probe="
)

#: The loss of one replica, or the losses of several in one process.
Loss = float | Tensor | Sequence[float]


class LossWindow:
    """Sum and number of the losses recorded since the last sync. Recording never waits for the device.

    With several ``rows``, replicas that this process holds, every recorded loss and the sum are [rows].
    """

    def __init__(self, rows: int = 1) -> None:
        self.rows = rows
        self.sum: float | Tensor = 0.0
        self.count: float = 0
        self.ever = False

    def record(self, loss: Loss, divided_by: float = 1) -> None:
        """Add a loss; raise if it is not a real number, or not one for each replica.

        ``divided_by``: what it was divided by before. It counts as that part of a loss: the k micro-batches of a step,
        each divided by k, are one.
        """
        self.add(checked_loss(loss, "the loss", self.rows), checked_divisor(divided_by))

    def add(self, loss: float | Tensor, divisor: float = 1) -> None:
        """Add a loss that :func:`checked_loss` returned."""
        if not isinstance(loss, Tensor):
            self.sum += loss
        elif isinstance(self.sum, Tensor) and self.sum.device == loss.device:
            self.sum.add_(loss)
        else:
            # A sum that is made in inference mode could not be added to outside of it.
            with torch.inference_mode(False):
                before = self.sum.to(loss.device) if isinstance(self.sum, Tensor) else self.sum
                self.sum = loss.to(wide_dtype(loss.device), copy=True).add_(before)
        self.count += 1 if divisor == 1 else 1 / divisor
        self.ever = True

    def clear(self) -> None:
        if isinstance(self.sum, Tensor):
            self.sum.zero_()
        else:
            self.sum = 0.0
        self.count = 0

    def mark(self) -> tuple[float | Tensor, float, bool]:
        """Return a copy of the current sums, to which :meth:`reset` goes back."""
        with torch.inference_mode(False):
            return self.sum.clone() if isinstance(self.sum, Tensor) else self.sum, self.count, self.ever

    def reset(self, mark: tuple[float | Tensor, float, bool]) -> None:
        """Go back to the sums that :meth:`mark` returned."""
        saved, self.count, self.ever = mark
        with torch.inference_mode(False):
            self.sum = saved.clone() if isinstance(saved, Tensor) else saved

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as plain numbers. Waits for the device."""
        total = self.sum.tolist() if isinstance(self.sum, Tensor) else self.sum
        return {"sum": total, "count": self.count, "ever": self.ever}

    @staticmethod
    def emptied(state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "sum": 0.0, "count": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.ever = state["count"], state["ever"]
        # An empty window fits any number of replicas.
        total = state["sum"] if self.count else 0.0
        self.sum = torch.tensor(total, dtype=torch.float64, device="cpu") if isinstance(total, list) else total


def checked_loss(value: object, what: str, rows: int = 1) -> float | Tensor:
    """Return a loss as a float or a detached scalar tensor; for several replicas as a detached tensor [rows].

    Raises TypeError or ValueError, which names it as ``what``, if it is not a real number for each replica.
    """
    if rows > 1:
        return _of_several(value, what, rows)
    if isinstance(value, Tensor):
        _check_values(value, what)
        if value.numel() != 1:
            raise ValueError(f"{what} must be a scalar, got {spell(value)}: reduce it first, as in .mean()")
        return value.detach() if value.dim() == 0 else value.detach().reshape(())
    given = value
    if isinstance(value, np.generic | np.ndarray) and not isinstance(value, np.ma.MaskedArray) and value.ndim == 0:
        value = value.item()  # of numpy alone, flags, text and complex numbers would be made floats
    if value is None or isinstance(value, bool | str | bytes | bytearray | np.ndarray):
        raise TypeError(f"{what} must be a number or a scalar tensor, got {spell(given)}")
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError as error:
        raise ValueError(f"{what} must be within the range of floats, got {spell(value)}") from error
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} must be a number or a scalar tensor, got {spell(given)}") from error


def checked_divisor(divided_by: float) -> float:
    """Return the number that a loss was divided by; raise unless it is positive."""
    if type(divided_by) is int and 0 < divided_by <= MOST_STEPS:
        return divided_by  # most are, and every step of a run is checked
    remedy = "pass the number of micro-batches that the loss was divided by"
    return check_positive("divided_by", divided_by, remedy=remedy)


def run_probe(probe: Callable[[], Loss], rows: int) -> tuple[float | Tensor | None, Exception | None]:
    """Return the probe's loss without gradients, or its exception: the other replicas must learn of a failed probe."""
    try:
        with torch.no_grad():
            return checked_loss(probe(), "what probe() returns", rows), None
    except Exception as error:
        return None, error


def _of_several(value: object, what: str, rows: int) -> Tensor:
    advice = f"pass one for each of the {rows} replicas, as stack.backward() returns them"
    if not isinstance(value, Tensor):
        if not is_several(value):
            raise TypeError(f"{what} of a stack must be [{rows}] numbers, got {spell(value)}: {advice}")
        try:
            value = torch.as_tensor(value, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise TypeError(f"{what} of a stack must be [{rows}] numbers, got {spell(value)}: {advice}") from error
    _check_values(value, what)
    if tuple(value.shape) != (rows,):
        raise ValueError(f"{what} of a stack must have shape [{rows}], got {list(value.shape)}: {advice}")
    return value.detach()


def _check_values(loss: Tensor, what: str) -> None:
    """Raise unless a tensor has real values that can be added to others."""
    if loss.is_complex() or loss.dtype is torch.bool:
        raise TypeError(f"{what} must be real, got {loss.dtype}")
    if not is_readable(loss):
        raise ValueError(f"{what} must be a dense tensor with values, got {spell(loss)}")


log = logging.getLogger("hdet_kernels")

#: Syncs in a row at which losses are equal before it is said. One may be a coincidence of rounded losses.
SYNCS = 2


class EqualLosses:
    """Counts the syncs in a row at which all replicas had the same loss although their values differ."""

    def __init__(self) -> None:
        self._syncs = self._step = 0
        self._warned = False

    def check(self, step: int, losses: NDArray[np.float64], values: NDArray[np.float64], what: str) -> None:
        """Warn once if the finite ``losses`` [N] were equal at two syncs in a row, and ``values`` [J, N] were not."""
        finite = losses[np.isfinite(losses)]
        # After a single step the losses are those of the average, from which all replicas began.
        long = step - self._step > 1
        self._step = step
        if len(finite) < 2 or not long or not (values != values[:, :1]).any():
            return
        if (finite != finite[0]).any():
            self._syncs = 0
            return
        self._syncs += 1
        if self._syncs >= SYNCS and not self._warned:
            self._warned = True
            log.warning(
                "step %d: %s of all %d replicas are equal to the last bit (%.6g), at %d syncs in a row, although the "
                "replicas train with different values: the loss was averaged over the processes before it was recorded "
                "(as by Lightning's sync_dist=True), and nothing can be learned from it. Record the loss of this "
                "process, before it is reduced",
                *(step, what, len(finite), finite[0], SYNCS),
            )
