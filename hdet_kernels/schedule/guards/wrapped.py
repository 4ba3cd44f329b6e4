"""Find the optimizer inside wrappers, such as the ``AcceleratedOptimizer`` of Accelerate.

A wrapper holds another optimizer as its attribute ``optimizer`` and hands steps on to it. Only the innermost optimizer
runs the hooks of a step, has the state, and is one of this package's classes if any of them is.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from hdet_kernels.checks import check_kind


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the innermost optimizer of a chain of wrappers; an optimizer that wraps none is returned itself.

    A wrapper has methods ``step`` and ``zero_grad`` and an attribute ``optimizer``. It need not be a
    ``torch.optim.Optimizer``. One that has parameter groups other than those of what it wraps is an optimizer of its
    own.

    Raises:
        TypeError: there is no ``torch.optim.Optimizer`` in it.
    """
    found, current, seen = None, optimizer, set()
    while id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, Optimizer):
            found = current
        inner = getattr(current, "optimizer", None) if _steps(current) else None
        if inner is None or not _same_groups(current, inner):
            break
        current = inner
    if found is None:
        remedy = "pass the optimizer, or a wrapper that has it as its attribute optimizer"
        check_kind("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer", remedy=remedy)
    assert found is not None
    return found


def outermost(optimizer: Any) -> Optimizer:
    """Return the optimizer that a torch scheduler keeps: the given one, or the innermost if torch would refuse it."""
    return optimizer if isinstance(optimizer, Optimizer) else unwrapped(optimizer)


def _steps(candidate: object) -> bool:
    """Return whether an object can be stepped as an optimizer; a scheduler or a trainer has an ``optimizer`` too."""
    called = callable(getattr(candidate, "step", None)) and callable(getattr(candidate, "zero_grad", None))
    return called and not isinstance(candidate, type)


def _same_groups(wrapper: object, inner: object) -> bool:
    outside, inside = getattr(wrapper, "param_groups", None), getattr(inner, "param_groups", None)
    if outside is None or inside is None:
        return True
    return len(outside) == len(inside) and all(one is other for one, other in zip(outside, inside, strict=True))
