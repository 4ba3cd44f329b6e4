"""The hooks of an optimizer step at the price of looking whether there are any."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer


def light_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """What ``Optimizer`` would wrap ``step`` in by itself, left out as long as nothing is there for it to do.

    torch's wrapper runs the registered hooks and marks the step for the profiler, and costs a fifth of a fused step's
    host time in doing neither.
    """
    whole = Optimizer.profile_hook_step(step)

    @wraps(step)
    def wrapper(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        own = type(self).step
        if own is not wrapper and _has_hooks(own):  # of a subclass that calls this one: they run there
            return step(self, *args, **kwargs)
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
            or profiler._is_profiler_enabled
        ):
            return whole(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    return _marked(wrapper)


def hook_step(kind: type[Optimizer]) -> None:
    """Give the step of a class its hooks, if it has none yet: what ``Optimizer`` does, but for a step that only copied
    the mark of another one (``functools.wraps``)."""
    if not _has_hooks(kind.step):
        kind.step = _marked(Optimizer.profile_hook_step(kind.step))  # type: ignore[method-assign]


def _marked(step: Callable[..., Any]) -> Callable[..., Any]:
    step.hooked = True  # type: ignore[attr-defined]  # so torch does not wrap it once more
    step.hooked_as = step  # type: ignore[attr-defined]
    return step


def _has_hooks(step: Callable[..., Any]) -> bool:
    return getattr(step, "hooked_as", None) is step
