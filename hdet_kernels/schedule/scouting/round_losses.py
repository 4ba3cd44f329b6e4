"""The training losses of one scouting round: those before its first step, and those of its last steps."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hdet_kernels.schedule.loss_window import Loss, LossWindow, checked_divisor, checked_loss
from hdet_kernels.tensors import wide_dtype

#: The sums that are kept.
_SUMS = ("first", "tail", "squares")


class RoundLosses:
    """Sums of the losses of a round. Recording never waits for the device.

    Args:
        rows: replicas that this process holds.

    Attributes:
        first: those of the first step, which is made from the parameters that the run begins with.
        tail: those of the last steps, which are compared.
        squares: the squares of these, which tell their noise.
        ever: whether a loss was ever recorded.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.first, self.tail, self.squares = (LossWindow(rows) for _ in _SUMS)
        self.ever = False

    def record(self, loss: Loss, step: int, tail_from: int, divided_by: float = 1) -> None:
        """Add a loss of a round.

        Args:
            loss: of this replica, or one for each of several.
            step: steps of the round that are finished.
            tail_from: number of the step with which the last steps begin.
            divided_by: what the loss was divided by before.
        """
        value = checked_loss(loss, "the loss", self.rows)
        if (divisor := checked_divisor(divided_by)) != 1:
            value = (value.to(wide_dtype(value.device)) if isinstance(value, Tensor) else value) * divisor
        self.ever = True
        if step == 0:
            self.first.record(value)
        if step >= tail_from:
            wide = value.to(wide_dtype(value.device)) if isinstance(value, Tensor) else value
            self.tail.record(wide)
            self.squares.record(wide * wide)

    def clear(self) -> None:
        """Forget the losses, but not that there ever was one."""
        for window in self._windows():
            window.clear()

    def mark(self) -> tuple[Any, ...]:
        """Return a copy of the sums, to which :meth:`reset` goes back."""
        return self.ever, *(window.mark() for window in self._windows())

    def reset(self, mark: tuple[Any, ...]) -> None:
        """Go back to the sums that :meth:`mark` returned."""
        self.ever = mark[0]
        for window, sums in zip(self._windows(), mark[1:], strict=True):
            window.reset(sums)

    def state_dict(self) -> dict[str, Any]:
        return {"ever": self.ever, **{name: getattr(self, name).state_dict() for name in _SUMS}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ever = state["ever"]
        for name in _SUMS:
            getattr(self, name).load_state_dict(state[name])

    def _windows(self) -> tuple[LossWindow, ...]:
        return self.first, self.tail, self.squares
