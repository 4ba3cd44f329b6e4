"""gradients="fixed": permanent gradients in one flat buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from hdet_kernels.ops.chunks import Gradients
from hdet_kernels.optim.home import Home

#: Parameters that are looked at in one step, where looking at all of them would cost too much.
GLANCE = 4


class FixedGradients:
    """Permanent gradients of the parameters of one home.

    Parameters keep their ``grad``, and autograd adds into it. Looking at all of them would cost what this is to save,
    so every step looks at the next few that are trained and the next few that are frozen. What happened to the whole
    model (moved, frozen, gradients replaced as by ``model.zero_grad()``) is noticed at once and put right. What
    happened to a part of it may be noticed late, when it is too late to put right: then that is an error.
    """

    def __init__(self, home: Home) -> None:
        self.home = home
        self.flat = torch.zeros_like(home.flat)
        self._views = [home.view(self.flat, index) for index in range(len(home.residents))]
        self._trained = _Round()
        self._frozen = _Round()
        self.attach()

    @torch.no_grad()
    def attach(self) -> bool:
        """Make the views the parameters' gradients, with the values these have now; returns whether one had been
        replaced by another tensor."""
        replaced = False
        trained: list[tuple[Tensor, Tensor | None, int]] = []
        frozen: list[tuple[Tensor, Tensor | None, int]] = []
        stepped: list[Tensor | None] = []
        for tied, view in zip(self.home.residents, self._views, strict=True):
            grads = [param.grad for param in tied if param.grad is not None]
            others = [grad for grad in grads if grad is not view]
            if len(others) == len(grads):
                view.zero_()
            for other in others:
                view.add_(other)
            replaced |= bool(others)
            for param in tied:
                param.grad = view if param.requires_grad else None
                (trained if param.requires_grad else frozen).append((param, param.grad, param.data_ptr()))
            stepped.append(view if any(param.requires_grad for param in tied) else None)
        self._trained, self._frozen = _Round(trained), _Round(frozen)
        self._gradients = self.home.chunks.match(stepped)
        return replaced

    def gradients(self) -> Gradients:
        return self._gradients

    def disturbed(self) -> bool:
        """Whether one of the parameters looked at this time has moved, or has not its gradient any more."""
        return self._trained.disturbed() or self._frozen.disturbed()

    def check_whole(self) -> None:
        """Raise if a part of the trained parameters, and not all, has other gradients than these: nobody knows since
        when, and what their gradients have added up to."""
        changed = self._trained.changed() + self._frozen.changed()
        if not changed or len(self._trained.changed()) == len(self._trained.known):
            return
        shapes = ", ".join(str(tuple(param.shape)) for param in changed[:3])
        raise RuntimeError(
            f'gradients="fixed", but {len(changed)} of {len(self._trained.known) + len(self._frozen.known)} parameters '
            f"(of shape {shapes}{', …' if len(changed) > 3 else ''}) were frozen, unfrozen, or had their grad replaced "
            "since it was fixed, and steps may have missed it. Call optimizer.attach_gradients() right after such a "
            "change, clear gradients by optimizer.zero_grad(), or leave gradients= out"
        )


class _Round:
    """Parameters with the gradient and the address that they should have, looked at a few at a time."""

    def __init__(self, known: list[tuple[Tensor, Tensor | None, int]] | None = None) -> None:
        self.known = known or []
        self._next = 0

    def disturbed(self) -> bool:
        start = self._next
        self._next = start + GLANCE if start + GLANCE < len(self.known) else 0
        return any(
            param.grad is not grad or param.requires_grad is (grad is None) or param.data_ptr() != address
            for param, grad, address in self.known[start : start + GLANCE]
        )

    def changed(self) -> list[Tensor]:
        """Those that have another gradient, or are no longer trained or frozen as they were."""
        return [
            param for param, grad, _ in self.known if param.grad is not grad or param.requires_grad is (grad is None)
        ]
