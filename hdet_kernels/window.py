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
        loss = scalar(loss, "the loss")
        if not isinstance(loss, Tensor):
            self.sum += loss
        elif isinstance(self.sum, Tensor) and self.sum.device == loss.device:
            self.sum.add_(loss)
        else:
            self.sum = loss.to(wide_dtype(loss.device), copy=True).add_(float(self.sum))
        self.count += 1
        self.ever = True

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


def scalar(value: object, what: str) -> float | Tensor:
    """``value`` as a float, or as a detached tensor of no dimensions; raises unless it is one real number."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{what} must be a scalar, got a tensor of shape {tuple(value.shape)}; reduce it first, as in .mean()"
            )
        if value.is_complex():
            raise TypeError(f"{what} must be real, got {value.dtype}")
        return value.detach() if value.dim() == 0 else value.detach().reshape(())
    if value is None or isinstance(value, bool | str | bytes):
        raise TypeError(f"{what} must be a number or a scalar tensor, got {value!r}")
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} must be a number or a scalar tensor, got {type(value).__name__}") from error
