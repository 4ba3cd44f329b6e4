"""The training losses of this replica since the last sync, summed on their own device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .buckets import wide_dtype


class LossWindow:
    """Sum and number of the losses recorded since the last sync. Recording never waits for the device."""

    def __init__(self) -> None:
        self.sum: float | Tensor = 0.0
        self.count = 0
        self.ever = False

    def record(self, loss: float | Tensor) -> None:
        if isinstance(loss, Tensor):
            self._add(loss)
        else:
            self.sum += _number(loss)
        self.count += 1
        self.ever = True

    def _add(self, loss: Tensor) -> None:
        if loss.numel() != 1:
            raise ValueError(
                f"the loss must be a scalar, got a tensor of shape {tuple(loss.shape)}; reduce it first: loss.mean()"
            )
        if loss.is_complex():
            raise TypeError(f"the loss must be real, got {loss.dtype}")
        loss = loss.detach()
        if isinstance(self.sum, Tensor) and self.sum.device == loss.device:
            self.sum.add_(loss if loss.dim() == 0 else loss.reshape(()))
        else:
            self.sum = loss.reshape(()).to(wide_dtype(loss.device), copy=True).add_(float(self.sum))

    def clear(self) -> None:
        if isinstance(self.sum, Tensor):
            self.sum.zero_()
        else:
            self.sum = 0.0
        self.count = 0

    def mark(self) -> tuple[float | Tensor, int, bool]:
        """What :meth:`reset` takes to come back to this moment."""
        return self.sum.clone() if isinstance(self.sum, Tensor) else self.sum, self.count, self.ever

    def reset(self, mark: tuple[float | Tensor, int, bool]) -> None:
        saved, self.count, self.ever = mark
        self.sum = saved.clone() if isinstance(saved, Tensor) else saved

    def state_dict(self) -> dict[str, Any]:
        return {"sum": float(self.sum), "count": self.count, "ever": self.ever}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum, self.count, self.ever = state["sum"], state["count"], state["ever"]


def _number(loss: object) -> float:
    if isinstance(loss, bool | str | bytes):
        raise TypeError(f"the loss must be a number or a scalar tensor, got {loss!r}")
    try:
        return float(loss)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise TypeError(f"the loss must be a number or a scalar tensor, got {type(loss).__name__}") from error
