"""gradients="fixed": permanent gradients in one flat buffer."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hdet_kernels.ops.chunks import MatchedGradients
from hdet_kernels.optim.flat_group import Home
from hdet_kernels.optim.spot_check import Glance


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
        self.attach()

    @torch.no_grad()
    def attach(self) -> bool:
        """Make views of the flat buffer the parameters' gradients, with the values these have now; returns whether one
        had been replaced by another tensor."""
        replaced = False
        trained: list[_Known] = []
        frozen: list[_Known] = []
        stepped: list[Tensor | None] = []
        for index, tied in enumerate(self.home.residents):
            view = self.home.view(self.flat, index)
            # By its memory: a view may have been given other memory, and another tensor may be on ours.
            grads = [param.grad for param in tied if param.grad is not None]
            others = [grad for grad in grads if grad.is_sparse or grad.data_ptr() != view.data_ptr()]
            if len(others) == len(grads):
                view.zero_()
            for other in others:
                view.add_(other)
            replaced |= bool(others)
            for param in tied:
                param.grad = view if param.requires_grad else None
                (trained if param.requires_grad else frozen).append(_Known(param))
            stepped.append(view if any(param.requires_grad for param in tied) else None)
        self._trained, self._frozen = Glance(trained), Glance(frozen)
        self._gradients = replace(self.home.chunks.match(stepped), permanent=True)
        return replaced

    def gradients(self) -> MatchedGradients:
        return self._gradients

    def disturbed(self) -> bool:
        """Whether one of the parameters looked at this time is not as it was."""
        return any(known.changed() for known in (*self._trained.few(), *self._frozen.few()))

    def check_whole(self) -> None:
        """Raise if a part of the parameters, and not all that are trained, is not as it was: nobody knows since when,
        and what their gradients have added up to."""
        known = [*self._trained.items, *self._frozen.items]
        changed = [each for each in known if each.changed()]
        if not changed or all(each.changed() for each in self._trained.items or known):
            return
        shapes = ", ".join(str(tuple(each.param.shape)) for each in changed[:3])
        raise RuntimeError(
            f'gradients="fixed", but {len(changed)} of {len(known)} parameters (of shape {shapes}'
            f"{', …' if len(changed) > 3 else ''}) were moved, frozen, unfrozen, or had their grad replaced since it "
            "was fixed, and steps may have missed it. Call optimizer.attach_gradients() right after such a change, "
            "clear gradients by optimizer.zero_grad(), or leave gradients= out"
        )


class _Known:
    """A parameter, and how it was when its gradient was attached."""

    def __init__(self, param: Tensor) -> None:
        self.param, self.grad, self.trains = param, param.grad, param.requires_grad
        self.address = param.data_ptr()
        self.grad_address = 0 if self.grad is None else self.grad.data_ptr()

    def changed(self) -> bool:
        param, grad = self.param, self.grad
        return (
            param.grad is not grad
            or param.requires_grad is not self.trains
            or param.data_ptr() != self.address
            or (grad is not None and grad.data_ptr() != self.grad_address)
        )
